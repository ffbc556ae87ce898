"""The resolver: profile + overrides + facts -> the server's command line, or every reason why there is none.

Pure and deterministic: the operator calls it at admission, the engine in the pod and the CLI on a laptop, and all three
get the same words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from sm70_profiles.base import AbsolutePath, Document, ProfileName, Token, quantity_bytes
from sm70_profiles.identity import canonical_json, digest
from sm70_profiles.profile import EngineFlavour, Profile, Resources
from sm70_profiles.reasons import Refusal, RefusalCode
from sm70_profiles.report import PathReport
from sm70_profiles.rules import Capabilities, judge_paths
from sm70_profiles.spec import Acceleration, GpuRequest, Interconnect, Overrides, Speculation, SpeculationMethod

Argument = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


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
    served_name: Token
    overrides: Overrides = Overrides()
    extra_args: tuple[Argument, ...] = Field(default=(), max_length=64)
    gpus: GpuRequest = GpuRequest()
    acceleration: Acceleration = Acceleration()
    drain_timeout_seconds: int = Field(default=30, ge=0, le=3600)
    host: Token = "0.0.0.0"  # noqa: S104  # a server in a pod; who may reach it is the network policy's matter
    port: int = Field(default=8000, ge=1, le=65535)


class ModelFacts(Document):
    """What a checkpoint's config.json says; None is unknown."""

    architectures: tuple[str, ...] = ()
    quantization: str | None = None
    vocabulary: int | None = None
    hidden_size: int | None = None
    layers: int | None = None


class Facts(Document):
    """What is known of the world. Every member may be unknown (None), and unknown never refuses."""

    model: ModelFacts | None = None
    draft: ModelFacts | None = None
    gpu_products: tuple[str, ...] | None = None


class ResolvedGpus(Document):
    """The GPU request of one replica, complete."""

    count: int
    products: tuple[str, ...]
    min_memory: str | None
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


@dataclass(frozen=True)
class Flag:
    """A vLLM option that a typed setting owns."""

    option: str
    setting: str
    arguments: Callable[[Any], tuple[str, ...]]
    aliases: tuple[str, ...] = ()


def _value(option: str, convert: Callable[[Any], str] = str) -> Callable[[Any], tuple[str, ...]]:
    return lambda value: (option, convert(value))


def _switch(on: str, off: str | None = None) -> Callable[[Any], tuple[str, ...]]:
    return lambda value: (on,) if value else (() if off is None else (off,))


def _percent(value: int) -> str:
    return f"{value // 100}.{value % 100:02d}"


FLAGS = (
    Flag("--dtype", "dtype", _value("--dtype")),
    Flag("--kv-cache-dtype", "kv_cache_dtype", _value("--kv-cache-dtype")),
    Flag("--max-model-len", "max_model_len", _value("--max-model-len")),
    Flag("--max-num-seqs", "max_num_seqs", _value("--max-num-seqs")),
    Flag("--max-num-batched-tokens", "max_num_batched_tokens", _value("--max-num-batched-tokens")),
    Flag("--gpu-memory-utilization", "gpu_memory_utilization_percent", _value("--gpu-memory-utilization", _percent)),
    Flag(
        "--kv-cache-memory-bytes",
        "kv_cache_memory_bytes",
        _value("--kv-cache-memory-bytes", lambda quantity: str(quantity_bytes(quantity))),
    ),
    Flag("--block-size", "block_size", _value("--block-size")),
    Flag("--mamba-block-size", "mamba_block_size", _value("--mamba-block-size")),
    Flag("--tensor-parallel-size", "tensor_parallel_size", _value("--tensor-parallel-size"), ("-tp",)),
    Flag("--pipeline-parallel-size", "pipeline_parallel_size", _value("--pipeline-parallel-size"), ("-pp",)),
    Flag("--enforce-eager", "enforce_eager", _switch("--enforce-eager"), ("--no-enforce-eager",)),
    Flag(
        "--enable-prefix-caching",
        "prefix_caching",
        _switch("--enable-prefix-caching", "--no-enable-prefix-caching"),
        ("--no-enable-prefix-caching",),
    ),
    Flag("--reasoning-parser", "reasoning_parser", _value("--reasoning-parser")),
)
SERVER_ENVIRONMENT = {"DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
"""Nothing leaves the pod: no usage statistics, and no look-up of a checkpoint that is already there."""
OWNED_ELSEWHERE = {
    "--model": "model",
    "--served-model-name": "model.servedName",
    "--speculative-config": "overrides.speculation",
    "--enable-auto-tool-choice": "overrides.tools.enabled",
    "--tool-call-parser": "overrides.tools.parser",
    "--host": "the operator",
    "--port": "the operator",
    "--shutdown-timeout": "the operator",
    "--api-key": "auth.apiKeySecretRef",
}
OWNED_FLAGS = {
    **{
        name: f"overrides.{Overrides.model_fields[flag.setting].alias}"
        for flag in FLAGS
        for name in (flag.option, *flag.aliases)
    },
    **OWNED_ELSEWHERE,
}
"""Every option that `extraArgs` must not hold, and the field that owns it."""


def resolve(request: ServeRequest, facts: Facts | None = None) -> Resolution:
    """What to run for this request. Never raises: mistakes are in `refusals`, all of them."""
    facts = facts or Facts()
    profile = request.profile
    settings, provenance = _merge(profile, request.overrides)
    refusals: list[Refusal] = []
    gpus = _gpus(profile, request, settings, refusals)
    _check_extra_args(request, refusals)
    _check_settings(profile, settings, refusals)
    _check_draft(profile, request, settings, facts, refusals)
    _check_model(profile, facts, refusals)
    return Resolution(
        profile=profile.name,
        profile_hash=digest(profile),
        flavour=profile.engine.flavour,
        argv=_argv(request, settings),
        env=dict(SERVER_ENVIRONMENT),
        settings=settings,
        paths=judge_paths(profile, settings, Capabilities(profile.engine.flavour)),
        expected_acceleration=profile.expected_acceleration,
        gpus=gpus,
        resources=profile.resources,
        refusals=tuple(sorted(refusals, key=lambda refusal: (refusal.field, refusal.code))),
        provenance=provenance,
    )


def _merge(profile: Profile, overrides: Overrides) -> tuple[Overrides, tuple[Provenance, ...]]:
    merged: dict[str, Any] = {}
    provenance = []
    for name, field in Overrides.model_fields.items():
        base, over = getattr(profile.settings, name), getattr(overrides, name)
        if isinstance(over, Document) and isinstance(base, Document):
            over = base.model_copy(update=over.model_dump(exclude_none=True))
        value = base if over is None else over
        if value is None:
            continue
        merged[name] = value
        origin = Origin.PROFILE if over is None else Origin.OVERRIDE
        text = value.model_dump_json(by_alias=True, exclude_none=True) if isinstance(value, Document) else str(value)
        provenance.append(Provenance(field=field.alias or name, value=text, origin=origin))
    return Overrides(**merged), tuple(provenance)


def _gpus(profile: Profile, request: ServeRequest, settings: Overrides, refusals: list[Refusal]) -> ResolvedGpus:
    hardware, wanted = profile.hardware, request.gpus
    ranks = (settings.tensor_parallel_size or 1) * (settings.pipeline_parallel_size or 1)
    count = hardware.count if wanted.count is None else wanted.count
    # The CPU engine computes nothing on its GPUs: it holds them so that scheduling and pinning are real, or holds none.
    admitted = {0, ranks} if profile.engine.flavour is EngineFlavour.CPU else {ranks}
    if count not in admitted:
        refusals.append(
            Refusal(
                code=RefusalCode.GPU_COUNT,
                field="gpus.count",
                must=f"must be tensorParallelSize x pipelineParallelSize = {ranks}",
                found=str(count),
                remedy=f"Set `gpus.count: {ranks}` or change the parallel sizes in `overrides`.",
            )
        )
    return ResolvedGpus(
        count=count,
        products=wanted.products if wanted.products is not None else hardware.products,
        min_memory=wanted.min_memory or hardware.min_memory,
        interconnect=wanted.interconnect or hardware.interconnect,
        resource_name=wanted.resource_name,
    )


def _check_extra_args(request: ServeRequest, refusals: list[Refusal]) -> None:
    for position, argument in enumerate(request.extra_args):
        option = argument.partition("=")[0]
        owner = OWNED_FLAGS.get(option) or OWNED_FLAGS.get(option.replace("_", "-"))
        if owner is not None:
            refusals.append(
                Refusal(
                    code=RefusalCode.OWNED_FLAG,
                    field=f"extraArgs[{position}]",
                    must="must not hold an option that a typed field owns",
                    found=f"`{option}`",
                    remedy=f"Use `{owner}` instead." if "." in owner or owner == "model" else f"It is set by {owner}.",
                )
            )


def _check_settings(profile: Profile, settings: Overrides, refusals: list[Refusal]) -> None:
    budget, seqs = settings.max_num_batched_tokens, settings.max_num_seqs
    if budget is not None and seqs is not None and budget < seqs:
        refusals.append(
            Refusal(
                code=RefusalCode.BUDGET,
                field="overrides.maxNumBatchedTokens",
                must=f"must be at least maxNumSeqs = {seqs}",
                found=str(budget),
                remedy="Raise `maxNumBatchedTokens` or lower `maxNumSeqs`.",
            )
        )
    if profile.engine.flavour is EngineFlavour.SM70 and settings.dtype == "bfloat16":
        refusals.append(
            Refusal(
                code=RefusalCode.DTYPE,
                field="overrides.dtype",
                must="must be half on compute capability 7.0, which has no bfloat16",
                found="bfloat16",
                remedy="Remove the override.",
            )
        )


def _speculates(settings: Overrides) -> Speculation | None:
    speculation = settings.speculation
    if speculation is None or speculation.method in (None, SpeculationMethod.NONE):
        return None
    return speculation


def _check_draft(
    profile: Profile, request: ServeRequest, settings: Overrides, facts: Facts, refusals: list[Refusal]
) -> None:
    speculation = _speculates(settings)
    needs_draft = speculation is not None and speculation.method is SpeculationMethod.DFLASH
    if needs_draft and request.draft_path is None:
        refusals.append(
            Refusal(
                code=RefusalCode.DRAFT_MISSING,
                field="draft",
                must="must name the draft model that speculation by dflash needs",
                found="none",
                remedy="Set `draft`, or turn speculation off with `overrides.speculation.method: None`.",
            )
        )
    if request.draft_path is not None and not needs_draft:
        refusals.append(
            Refusal(
                code=RefusalCode.DRAFT_UNUSED,
                field="draft",
                must="must be absent when nothing speculates with a draft model",
                found="a draft",
                remedy="Remove `draft`, or set `overrides.speculation.method: dflash`.",
            )
        )
    if speculation is not None and profile.engine.flavour is EngineFlavour.CPU and settings.prefix_caching:
        refusals.append(
            Refusal(
                code=RefusalCode.SPECULATION_WITH_PREFIX_CACHE,
                field="overrides.prefixCaching",
                must="must be false while the CPU engine speculates on a hybrid model",
                found="true",
                remedy="Set `overrides.prefixCaching: false`.",
            )
        )
    draft, model = facts.draft, facts.model
    if draft is None or not needs_draft:
        return
    wanted = profile.draft.architectures
    if wanted and draft.architectures and not set(draft.architectures) & set(wanted):
        refusals.append(_draft_mismatch("architecture", " or ".join(wanted), ", ".join(draft.architectures)))
    if model is not None:
        for what, ours, theirs in (
            ("vocabulary size", draft.vocabulary, model.vocabulary),
            ("hidden size", draft.hidden_size, model.hidden_size),
        ):
            if ours is not None and theirs is not None and ours != theirs:
                refusals.append(_draft_mismatch(what, f"{theirs}, the target model's", str(ours)))


def _draft_mismatch(what: str, must: str, found: str) -> Refusal:
    return Refusal(
        code=RefusalCode.DRAFT_INCOMPATIBLE,
        field="draft",
        must=f"must have {what} {must}",
        found=found,
        remedy="Use the draft that was made for this target model.",
    )


def _check_model(profile: Profile, facts: Facts, refusals: list[Refusal]) -> None:
    wanted, found = profile.model_architectures, facts.model.architectures if facts.model else ()
    if wanted and found and not set(found) & set(wanted):
        refusals.append(
            Refusal(
                code=RefusalCode.MODEL_INCOMPATIBLE,
                field="model",
                must=f"must have architecture {' or '.join(wanted)}, which profile `{profile.name}` is for",
                found=", ".join(found),
                remedy="Use another profile or another model.",
            )
        )


def _argv(request: ServeRequest, settings: Overrides) -> tuple[str, ...]:
    arguments = [request.model_path, "--served-model-name", request.served_name]
    arguments += ["--host", request.host, "--port", str(request.port)]
    arguments += ["--shutdown-timeout", str(request.drain_timeout_seconds)]
    for flag in FLAGS:
        value = getattr(settings, flag.setting)
        if value is not None:
            arguments += flag.arguments(value)
    if settings.tools is not None and settings.tools.enabled:
        arguments.append("--enable-auto-tool-choice")
        if settings.tools.parser is not None:
            arguments += ["--tool-call-parser", settings.tools.parser]
    speculation = _speculates(settings)
    if speculation is not None:
        config: dict[str, Any] = {"method": str(speculation.method)}
        if request.draft_path is not None:
            config["model"] = request.draft_path
        if speculation.tokens is not None:
            config["num_speculative_tokens"] = speculation.tokens
        arguments += ["--speculative-config", canonical_json(config)]
    return (*arguments, *request.extra_args)
