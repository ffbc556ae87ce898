"""The resolver: profile + overrides + facts -> the server's command line, or every reason why there is none.

Pure and deterministic: the operator calls it at admission, the engine in the pod and the CLI on a laptop, and all three
get the same words. The steps are `merge`, `ADJUSTMENTS`, `CHECKS`, rendering, `judge_paths` and the memory model; this
module only puts them in order and writes down who decided each value.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from sm70_profiles import advice, checks
from sm70_profiles.adjustments import ADJUSTMENTS
from sm70_profiles.base import AbsolutePath, Document, ProfileName, Token, quantity_bytes, shown
from sm70_profiles.engines import engine_table
from sm70_profiles.facts import EngineFacts, Facts, GpuFacts, HostFacts, ModelFacts
from sm70_profiles.flags import (
    FLAGS,
    OWNED_ELSEWHERE,
    OWNED_FLAGS,
    SERVER_ENVIRONMENT,
    DraftChoice,
    Flag,
    path_of,
    render,
)
from sm70_profiles.identity import CompileCacheIdentity, digest, driver_branch, stable_arguments
from sm70_profiles.memory import MemoryBudget, Pool, budget, gpu_models, pool
from sm70_profiles.plan import Plan
from sm70_profiles.profile import EngineFlavour, Profile, Resources
from sm70_profiles.reasons import Notice, Refusal
from sm70_profiles.report import PathReport, SettledValue
from sm70_profiles.rules import Capabilities, judge_paths
from sm70_profiles.settings import StateDtype, merge, mergeable
from sm70_profiles.spec import SHA256, Acceleration, GpuRequest, Interconnect, Overrides

__all__ = [
    "FLAGS",
    "OWNED_ELSEWHERE",
    "OWNED_FLAGS",
    "SERVER_ENVIRONMENT",
    "Argument",
    "EngineFacts",
    "Facts",
    "Flag",
    "GpuFacts",
    "HostFacts",
    "ModelFacts",
    "Origin",
    "Provenance",
    "Resolution",
    "ResolvedGpus",
    "ServeRequest",
    "resolve",
]

Argument = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
VariableName = Annotated[str, StringConstraints(max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
VariableValue = Annotated[str, StringConstraints(max_length=4096)]

SERVING_ONLY = frozenset(
    {
        "tools",
        "reasoning_parser",
        "request_metrics",
        "sse_keep_alive_seconds",
        "api_server_count",
        "prompt_tokens_details",
        "trust_remote_code",
        "thinking",
        "sampling",
        "acknowledge",
    }
)
"""Settings that change what is answered or reported, and nothing that is compiled."""


class Origin(StrEnum):
    """Who decided a value."""

    PROFILE = "profile"
    OVERRIDE = "override"
    ADJUSTMENT = "adjustment"
    DEFAULT = "default"


class Provenance(Document):
    """Where one final value came from."""

    field: str
    value: str
    origin: Origin
    because: str = ""


class ServeRequest(Document):
    """Everything that decides how one pod serves; the operator hands it to the pod as JSON in `SM70_SERVE_REQUEST`.

    `profile` is the whole document, so that the pod needs neither the API server nor the same catalogue.
    """

    schema_version: Literal[1] = 1
    profile: Profile
    model_path: AbsolutePath
    draft_path: AbsolutePath | None = None
    draft_sha256: dict[Annotated[str, StringConstraints(max_length=128)], SHA256] | None = Field(
        default=None, max_length=64, description="Expected SHA-256 of the draft's files, beyond the profile's."
    )
    served_name: Token
    overrides: Overrides = Overrides()
    extra_args: tuple[Argument, ...] = Field(default=(), max_length=64)
    environment: dict[VariableName, VariableValue] | None = Field(
        default=None, max_length=64, description="Variables that the user sets; they are judged, never passed on."
    )
    gpus: GpuRequest = GpuRequest()
    acceleration: Acceleration = Acceleration()
    drain_timeout_seconds: int = Field(default=30, ge=0, le=3600)
    host: Token = "0.0.0.0"  # noqa: S104  # a server in a pod; who may reach it is the network policy's matter
    port: int = Field(default=8000, ge=1, le=65535)


class ResolvedGpus(Document):
    """The GPU request of one replica, complete."""

    count: int
    products: tuple[str, ...]
    min_memory: str | None = None
    interconnect: Interconnect
    resource_name: str


class Resolution(Document):
    """The answer. With refusals, `argv` is what would have been run and must not be."""

    profile: ProfileName
    profile_hash: str
    flavour: EngineFlavour
    argv: tuple[str, ...]
    env: dict[str, str]
    settings: Overrides
    paths: tuple[PathReport, ...]
    expected_acceleration: tuple[str, ...]
    gpus: ResolvedGpus
    resources: Resources
    warnings: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...]
    provenance: tuple[Provenance, ...]
    notices: tuple[Notice, ...] = ()
    settled: tuple[SettledValue, ...] = ()
    pool: Pool | None = None
    memory: MemoryBudget | None = None
    cache: CompileCacheIdentity | None = None

    @property
    def hash(self) -> str:
        """Names how the server computes and answers: not where it listens, its name, its logs or its weights' place."""
        return digest(
            {
                "profile": self.profile_hash,
                "flavour": self.flavour,
                "settings": self.settings,
                "argv": stable_arguments(self.argv[1:]),
                "env": self.env,
                "gpus": self.gpus,
            }
        )


def resolve(request: ServeRequest, facts: Facts | None = None) -> Resolution:
    """What to run for this request. Never raises: mistakes are in `refusals`, all of them."""
    facts = facts or Facts()
    profile = request.profile
    flavour = (facts.engine.flavour if facts.engine else None) or profile.engine.flavour
    base, variants = _recipe(profile, request.overrides)
    plan = Plan(request, facts, engine_table(flavour), merge(base, request.overrides))
    for adjust in ADJUSTMENTS:
        adjust(plan)
    refusals = [refusal for check in checks.CHECKS for refusal in check(plan)]
    rendered = render(plan.settings, _draft(plan), plan.table)
    gpus = _gpus(profile, request)
    memory, cache_pool = _memory(plan, gpus)
    for advise in advice.ADVICE:
        advise(plan, cache_pool)
    advice.missing_features(plan, rendered)
    advice.memory(plan, memory)
    refusals += checks.missing_features(plan, rendered)
    refusals += checks.memory_fits(memory)
    refusals += checks.pool_holds_a_request(plan, cache_pool)
    return Resolution(
        profile=profile.name,
        profile_hash=digest(profile),
        flavour=flavour,
        argv=_argv(request, rendered.arguments),
        env=_environment(plan, rendered.environment),
        settings=plan.settings,
        paths=judge_paths(profile, plan.settings, _capabilities(plan)),
        expected_acceleration=profile.expected_acceleration,
        gpus=gpus,
        resources=profile.resources,
        warnings=tuple(map(str, plan.notices)),
        refusals=tuple(sorted(refusals, key=lambda refusal: (refusal.field, refusal.code, refusal.found))),
        provenance=tuple(_provenance(plan, variants)),
        notices=tuple(plan.notices),
        settled=_settled(plan, cache_pool),
        pool=cache_pool,
        memory=memory,
        cache=_cache_identity(plan, rendered.environment),
    )


def _recipe(profile: Profile, overrides: Overrides) -> tuple[Overrides, frozenset[str]]:
    """The profile's settings for this draft length, and the settings that a variant decided."""
    settings = profile.settings
    asked = merge(settings, overrides).speculation
    tokens = (asked.tokens if asked else None) or profile.draft.tokens or 0
    decided: set[str] = set()
    for variant in profile.variants:
        if tokens > variant.draft_tokens_above:
            settings = merge(settings, variant.settings)
            decided |= {path for path, _ in leaves(variant.settings)}
    return settings, frozenset(decided)


def leaves(section: Document, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is set, by its dotted path of attributes."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if value is None:
            continue
        if mergeable(value):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _provenance(plan: Plan, variants: frozenset[str]) -> Iterator[Provenance]:
    for setting, value in leaves(plan.settings):
        because = plan.adjusted.get(setting) or next(
            (why for path, why in plan.adjusted.items() if setting.startswith(f"{path}.")), ""
        )
        if because:
            origin = Origin.ADJUSTMENT
        elif plan.explicit(setting) is not None:
            origin = Origin.OVERRIDE
        else:
            origin = Origin.PROFILE
            because = "for this many draft tokens" if setting in variants else ""
        yield Provenance(field=path_of(setting), value=shown(value), origin=origin, because=because)


def _draft(plan: Plan) -> DraftChoice:
    if not plan.drafts_with_model:
        return DraftChoice()
    if plan.request.draft_path is not None:
        return DraftChoice(path=plan.request.draft_path)
    checkpoint = plan.profile.draft.checkpoint
    hub = checkpoint.hugging_face if checkpoint else None
    return DraftChoice(repo=hub.repo, revision=hub.revision) if hub else DraftChoice()


def _argv(request: ServeRequest, arguments: tuple[str, ...]) -> tuple[str, ...]:
    head = [request.model_path, "--served-model-name", request.served_name]
    head += ["--host", request.host, "--port", str(request.port)]
    if request.drain_timeout_seconds:
        head += ["--shutdown-timeout", str(request.drain_timeout_seconds)]
    return (*head, *arguments, *request.extra_args)


def _environment(plan: Plan, variables: dict[str, str]) -> dict[str, str]:
    environment = {**SERVER_ENVIRONMENT, **variables}
    if _draft(plan).repo is not None:
        # The pinned draft has to be fetched once.
        del environment["HF_HUB_OFFLINE"]
    return dict(sorted(environment.items()))


def _gpus(profile: Profile, request: ServeRequest) -> ResolvedGpus:
    hardware, wanted = profile.hardware, request.gpus
    return ResolvedGpus(
        count=hardware.count if wanted.count is None else wanted.count,
        products=wanted.products if wanted.products is not None else hardware.products,
        min_memory=wanted.min_memory or hardware.min_memory,
        interconnect=wanted.interconnect or hardware.interconnect,
        resource_name=wanted.resource_name,
    )


def _capabilities(plan: Plan) -> Capabilities:
    return Capabilities(
        flavour=plan.table.flavour,
        gpu=plan.gpu,
        model=plan.facts.model,
        draft=plan.facts.draft,
        environment=plan.request.environment or {},
    )


def _memory(plan: Plan, gpus: ResolvedGpus) -> tuple[MemoryBudget | None, Pool | None]:
    """The budget of the smallest GPU that the request admits, and the pool that the engine will have on it."""
    model, draft = plan.model, plan.draft
    rule, state = plan.profile.kv_groups or plan.table.kv_groups, StateDtype.FLOAT32
    if plan.table.flavour is EngineFlavour.SM70:
        gpu = _smallest(plan, gpus)
        if gpu is None:
            return None, None
        found = budget(gpu[0], gpu[1], plan.settings, model, draft, rule, plan.table.kv_groups)
        return found, (found.engine_pool or found.pool) if found else None
    # Elsewhere only a pool that is fixed in bytes is predicted, and only for the formats whose layout was measured.
    fixed = plan.settings.kv_cache_memory_bytes
    measured = plan.single_gpu and plan.drafts_with_model and not plan.kvarn and plan.ranks == 1
    if not fixed or fixed == "0" or not measured:
        return None, None
    return None, pool(plan.settings, model, draft, plan.table.kv_groups, quantity_bytes(fixed), state)


def _smallest(plan: Plan, gpus: ResolvedGpus) -> tuple[str, int] | None:
    if plan.gpu.memory_mib is not None:
        return plan.gpu.product or "the GPU at hand", plan.gpu.memory_mib
    known = gpu_models()
    sizes = [(known[name].memory_mib, name) for name in gpus.products if name in known]
    if not sizes or len(sizes) < len(gpus.products):
        return None
    memory, name = min(sizes)
    return name, memory


def _settled(plan: Plan, cache_pool: Pool | None) -> tuple[SettledValue, ...]:
    asked = plan.settings.block_size
    if cache_pool is None or asked is None or cache_pool.block_size <= asked:
        return ()
    message = "the page must cover a recurrent state; rules judge the value that was asked for"
    row = SettledValue(
        field="block_size", requested=str(asked), settled=str(cache_pool.block_size), view="prediction", message=message
    )
    return (row,)


def _cache_identity(plan: Plan, variables: dict[str, str]) -> CompileCacheIdentity:
    compiled = plan.settings.model_copy(update=dict.fromkeys(SERVING_ONLY))
    shape = plan.facts.model or plan.profile.model_shape
    gpu, engine = plan.gpu, plan.engine
    return CompileCacheIdentity(
        engine_build=engine.build,
        torch=engine.torch,
        cuda=engine.cuda,
        driver_branch=driver_branch(gpu.driver) if gpu.driver else None,
        gpu_product=gpu.product,
        tensor_parallel_size=plan.settings.tensor_parallel_size or 1,
        pipeline_parallel_size=plan.settings.pipeline_parallel_size or 1,
        model_shape=digest(shape) if shape else None,
        configuration=digest(
            {"settings": compiled, "env": variables, "arguments": stable_arguments(plan.request.extra_args)}
        ),
    )
