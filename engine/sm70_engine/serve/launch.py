"""Decides what is run: the resolution of the request, the command and its environment."""

from __future__ import annotations

import importlib.metadata as metadata
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sm70_engine.acceleration.report import cache_directory, count_files
from sm70_engine.serve.checkpoint import read_checkpoint
from sm70_engine.serve.failure import refused
from sm70_engine.session import Session
from sm70_profiles.identity import digest
from sm70_profiles.profile import EngineFlavour
from sm70_profiles.resolver import Facts, Resolution, ServeRequest, resolve

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

    def session(self, environment: Mapping[str, str]) -> Session:
        """The document for the server's processes; counts the files that the compile cache has now."""
        cache = cache_directory(environment)
        return Session(
            request=self.request,
            facts=self.facts,
            settings=self.resolution.settings,
            argv=self.resolution.argv,
            profile_hash=self.resolution.profile_hash,
            env_hash=digest(self.environment),
            cache_directory=str(cache),
            cache_files_before=count_files(cache),
        )


def our_plugins() -> tuple[str, ...]:
    """The names of all our entry points for vLLM, as installed."""
    points = (point for group in PLUGIN_GROUPS for point in metadata.entry_points(group=group))
    return tuple(sorted({point.name for point in points if point.value.startswith("sm70_engine.")}))


def plan_launch(request: ServeRequest, environment: Mapping[str, str]) -> Launch:
    """Reads the checkpoints and resolves. Raises ServeError with every refusal at once."""
    model = read_checkpoint(Path(request.model_path), "model")
    draft = None if request.draft_path is None else read_checkpoint(Path(request.draft_path), "draft")
    if request.environment is None:
        request = request.model_copy(update={"environment": _switches(environment)})
    facts = Facts(model=model, draft=draft)
    resolution = resolve(request, facts)
    if resolution.refusals:
        raise refused(resolution.refusals)
    return Launch(
        request=request,
        facts=facts,
        resolution=resolution,
        # The module rather than the console script: it has the guard that vLLM's spawned processes need.
        command=(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *resolution.argv),
        environment=_environment(resolution, environment),
    )


def _switches(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables by which users of the release turn paths off, so that the prediction knows what the engine will."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(SWITCH_PREFIXES) and name != "VLLM_API_KEY" and len(value) <= 64
    }


def _environment(resolution: Resolution, environment: Mapping[str, str]) -> dict[str, str]:
    result = dict(resolution.env)
    # vLLM loads endpoints only if they are named, and once it is set, nothing that is not named.
    users = [name for name in environment.get("VLLM_PLUGINS", "").split(",") if name]
    result["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*our_plugins(), *users]))
    settings = resolution.settings
    ranks = (settings.tensor_parallel_size or 1) * (settings.pipeline_parallel_size or 1)
    if resolution.flavour is EngineFlavour.CPU and ranks == 1:
        # One rank needs no process of its own: the worker then lives in the engine's, which halves the start.
        result["VLLM_ENABLE_V1_MULTIPROCESSING"] = environment.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    return result
