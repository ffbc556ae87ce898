"""Decides what is run: the resolution of the request, the command and its environment."""

from __future__ import annotations

import importlib.metadata as metadata
import shutil
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sm70_engine.acceleration.device import gpu_facts, nvml_device
from sm70_engine.acceleration.strict import StrictRefusal, StrictStartError, refuse_unless_complete, strict
from sm70_engine.cache.use import CacheUse, cache_home
from sm70_engine.plugin.settings import EngineSettings, SettingsError, read_settings
from sm70_engine.serve.checkpoint import read_checkpoint
from sm70_engine.serve.failure import ServeError, refused
from sm70_engine.serve.hub_draft import HubDraft, hub_draft
from sm70_engine.serve.pins import SkippableCheck, check_pins, draft_sums
from sm70_engine.serve.weights import weight_faults
from sm70_engine.session import Session
from sm70_profiles.facts import GpuFacts, HostFacts
from sm70_profiles.identity import digest
from sm70_profiles.profile import EngineFlavour
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.report import CheckpointReport
from sm70_profiles.resolver import Facts, Resolution, ServeRequest, resolve
from sm70_profiles.settings import DRAFT_MODEL_METHODS

SWITCH_PREFIXES = ("VLLM_", "TORCHINDUCTOR_")
PLUGIN_GROUPS = ("vllm.platform_plugins", "vllm.general_plugins", "vllm.endpoint_plugins")


@dataclass(frozen=True)
class Launch:
    """A server that may be started."""

    request: ServeRequest
    facts: Facts
    resolution: Resolution
    command: tuple[str, ...]
    environment: dict[str, str]
    """What is set in addition to the environment of `sm70-serve`, save for the session."""

    cache_home: Path
    """Where this user's caches lie."""
    strict: bool = False
    """Whether the server must end when an expected path is not enabled."""
    checkpoints: tuple[CheckpointReport, ...] = ()

    @property
    def downloads_draft(self) -> bool:
        """Whether the draft is fetched from a hub at the start."""
        speculation = self.resolution.settings.speculation
        drafts = speculation is not None and speculation.method in DRAFT_MODEL_METHODS
        return drafts and self.request.draft_path is None

    def session(self, cache: CacheUse | None = None) -> Session:
        """The document for the server's processes."""
        return Session(
            request=self.request,
            facts=self.facts,
            settings=self.resolution.settings,
            argv=self.resolution.argv,
            profile_hash=self.resolution.profile_hash,
            env_hash=digest(self.environment),
            strict=self.strict,
            cache=cache or CacheUse(enabled=False),
            checkpoints=self.checkpoints,
        )


def our_plugins() -> tuple[str, ...]:
    """The names of all our entry points for vLLM, as installed."""
    points = (point for group in PLUGIN_GROUPS for point in metadata.entry_points(group=group))
    return tuple(sorted({point.name for point in points if point.value.startswith("sm70_engine.")}))


def plan_launch(request: ServeRequest, environment: Mapping[str, str], *, strictly: bool = False) -> Launch:
    """Reads the checkpoints' heads and resolves. Raises ServeError with every refusal at once.

    strictly: refuse when an expected path will not be enabled.
    """
    model = read_checkpoint(Path(request.model_path), "model")
    draft = None if request.draft_path is None else read_checkpoint(Path(request.draft_path), "draft")
    _whole(request)
    facts = Facts(model=model, draft=draft, gpu=_gpu(request, environment), host=_host())
    launch = launch_of(request, facts, environment)
    if launch.resolution.refusals:
        raise refused(launch.resolution.refusals)
    if strictly:
        try:
            refuse_unless_complete(launch.resolution.paths, request.acceleration.allow_disabled)
        except StrictStartError as error:
            raise explained(error.refusal) from None
    return replace(launch, strict=strictly)


def verified(launch: Launch, environment: Mapping[str, str], skip: Collection[str] = ()) -> Launch:
    """The launch with its checkpoints compared with their pins. Raises ServeError with every mismatch at once.

    skip: names of checks to leave out (`pins.SkippableCheck`). Files with a known checksum are read in full; a draft
    from a hub is fetched for it.
    """
    fetch = SkippableCheck.DRAFT not in skip
    checkpoints, mismatches = check_pins(launch.request, skip, draft_of(launch, environment, fetch))
    if mismatches:
        errors = [error for _, error in mismatches]
        raise ServeError(errors[0].reason, "; ".join(error.message for error in errors), errors[0].remedy)
    return replace(launch, checkpoints=checkpoints)


def draft_of(launch: Launch, environment: Mapping[str, str], fetch: bool) -> HubDraft | None:
    """The draft that comes from a hub; None where there is none or it is a folder. Raises ServeError."""
    if not launch.downloads_draft:
        return None
    checkpoint = launch.request.profile.draft.checkpoint
    hub = checkpoint.hugging_face if checkpoint is not None else None
    return hub_draft(hub, draft_sums(launch.request), environment, fetch)


def explained(refusal: StrictRefusal) -> ServeError:
    """A refused strict start as the end that it is."""
    return ServeError(refusal.reason, refusal.message, refusal.remedy)


def _whole(request: ServeRequest) -> None:
    """Raises ServeError when weights are missing or cut short, unless the user loads them in another way."""
    if any(word.partition("=")[0] == "--load-format" for word in request.extra_args):
        return
    for what, folder in (("model", request.model_path), ("draft", request.draft_path)):
        faults = list(weight_faults(Path(folder))) if folder is not None else []
        if faults:
            message = f"the {what} is not a whole checkpoint: {'; '.join(faults[:8])}"
            raise ServeError(TerminationReason.MODEL_INVALID, message, f"Copy the {what} again.")


def _gpu(request: ServeRequest, environment: Mapping[str, str]) -> GpuFacts | None:
    """The GPUs that will compute. Nothing is known of those that the user told us to take for others."""
    if request.profile.engine.flavour is not EngineFlavour.SM70 or _settings(environment).pretend:
        return None
    device = nvml_device()
    return gpu_facts(device, pretend=False) if device is not None else None


def _host(shared_memory: Path = Path("/dev/shm")) -> HostFacts | None:  # noqa: S108  # where POSIX keeps it
    try:
        return HostFacts(shared_memory_bytes=shutil.disk_usage(shared_memory).total)
    except OSError:
        return None


def _settings(environment: Mapping[str, str]) -> EngineSettings:
    try:
        return read_settings(environment)
    except SettingsError as error:
        raise ServeError(TerminationReason.REFUSED, str(error), "Correct or unset the variable.") from None


def launch_of(request: ServeRequest, facts: Facts, environment: Mapping[str, str]) -> Launch:
    """What would be run for these facts, refused or not. Raises ServeError for a wrong variable of ours."""
    if request.environment is None:
        request = request.model_copy(update={"environment": _switches(environment)})
    resolution = resolve(request, facts)
    return Launch(
        request=request,
        facts=facts,
        resolution=resolution,
        # The module rather than the console script: it has the guard that vLLM's spawned processes need.
        command=(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *resolution.argv),
        environment=_environment(resolution, environment),
        cache_home=cache_home(environment),
    )


def strict_start(from_environment: bool, environment: Mapping[str, str]) -> bool:
    """Whether a strict start is asked for. A request from the environment is the operator's: it has a policy, and the
    report of a server that is not ready must stay readable."""
    return strict(environment) and not from_environment


def _switches(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables by which users of the release turn paths off, so that the prediction knows what the engine will."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(SWITCH_PREFIXES) and name != "VLLM_API_KEY" and len(value) <= 64
    }


def _environment(resolution: Resolution, environment: Mapping[str, str]) -> dict[str, str]:
    result = dict(resolution.env)
    ours = _settings(environment).environment()
    result |= {name: value for name, value in ours.items() if name not in environment}
    # vLLM loads endpoints only if they are named, and once it is set, nothing that is not named.
    users = [name for name in environment.get("VLLM_PLUGINS", "").split(",") if name]
    result["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*our_plugins(), *users]))
    settings = resolution.settings
    ranks = (settings.tensor_parallel_size or 1) * (settings.pipeline_parallel_size or 1)
    if resolution.flavour is EngineFlavour.CPU and ranks == 1:
        # One rank needs no process of its own: the worker then lives in the engine's, which halves the start.
        result["VLLM_ENABLE_V1_MULTIPROCESSING"] = environment.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    return result
