"""Builds the acceleration report from the session, the process and the counters."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from sm70_engine.acceleration.capacity import capacity_of
from sm70_engine.acceleration.device import cpu_device, nvml_device
from sm70_engine.acceleration.startup import read_startup
from sm70_engine.acceleration.strict import waiting_paths
from sm70_engine.acceleration.versions import version_of
from sm70_engine.session import Session, SessionFolder
from sm70_profiles.flags import speculates
from sm70_profiles.profile import EngineFlavour
from sm70_profiles.report import (
    AccelerationReport,
    CompileCacheReport,
    DeviceFacts,
    EffectiveConfiguration,
    EngineFacts,
    FallbackCount,
    PathReport,
    PathState,
    ProfileFacts,
    RouteCount,
)
from sm70_profiles.resolver import Origin
from sm70_profiles.routes import ROUTES, Stage
from sm70_profiles.rules import Capabilities, judge_paths, settled_values, summarize
from sm70_profiles.spec import Acceleration, AccelerationPolicy, Overrides

IMAGE_ENVIRONMENT = "SM70_ENGINE_IMAGE"


def cache_directory(environment: Mapping[str, str]) -> Path:
    """Where vLLM keeps what it compiled."""
    if root := environment.get("VLLM_CACHE_ROOT"):
        return Path(root)
    home = environment.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path(environment.get("HOME", "/")) / ".cache") / "vllm"


def _engine(environment: Mapping[str, str], cuda: str | None) -> EngineFacts:
    return EngineFacts(
        build=version_of("sm70") or "unknown",
        vllm=version_of("vllm") or "unknown",
        torch=version_of("torch") or "unknown",
        cuda=cuda,
        image=environment.get(IMAGE_ENVIRONMENT),
    )


def _device(flavour: EngineFlavour, environment: Mapping[str, str]) -> DeviceFacts:
    return (nvml_device() if flavour is EngineFlavour.SM70 else None) or cpu_device(environment)


def _compile_cache(
    session: Session, folder: SessionFolder | None, environment: Mapping[str, str]
) -> CompileCacheReport:
    """What the cache did for this start; while it is not over, what is known so far."""
    finished = folder.cache() if folder is not None else None
    report = finished or session.cache.warming()
    if not report.enabled:
        return report.model_copy(update={"directory": str(cache_directory(environment))})
    return report if finished is not None else report.model_copy(update={"files_added": session.cache.files_added()})


def build_report(
    session: Session,
    settings: Overrides,
    capabilities: Capabilities,
    counts: tuple[RouteCount, ...],
    environment: Mapping[str, str],
    worker_facts: Mapping[str, str | int | None] | None = None,
    cuda: str | None = None,
    folder: SessionFolder | None = None,
    fallbacks: tuple[FallbackCount, ...] = (),
) -> AccelerationReport:
    """The report of now. `settings` are those that the paths are judged by."""
    profile = session.request.profile
    paths = judge_paths(profile, settings, capabilities)
    stages = set(Stage) if speculates(settings) else {Stage.PREFILL, Stage.DECODE}
    possible = {path.name for path in paths if path.state is not PathState.NOT_APPLICABLE}
    return AccelerationReport(
        engine=_engine(environment, cuda),
        profile=ProfileFacts(name=profile.name, hash=session.profile_hash),
        device=_device(session.flavour, environment),
        effective=EffectiveConfiguration(argv=session.argv, env_hash=session.env_hash, switches=_switches(session)),
        paths=paths,
        expected_acceleration=profile.expected_acceleration,
        summary=summarize(paths),
        compile_cache=_compile_cache(session, folder, environment),
        # A route that may run and did not is shown with zero; one that cannot run here only if it ran after all.
        routes=tuple(
            row
            for row in counts
            if row.dispatches
            or row.captures
            or (ROUTES[row.route].path in possible and row.stage in ROUTES[row.route].stages and row.stage in stages)
        ),
        fallbacks=tuple(row for row in fallbacks if _may_fall_back(row, session.flavour)),
        worker_facts=dict(worker_facts or {}),
        settled=settled_values(settings, worker_facts or {}),
        capacity=capacity_of(worker_facts or {}),
        startup=read_startup(folder.startup) if folder is not None else None,
        checkpoints=session.checkpoints,
        observed_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def _may_fall_back(row: FallbackCount, flavour: EngineFlavour) -> bool:
    """Whether the row is shown with zero too: a rule that watches a series must see its first dispatch as a change."""
    of_cpu = row.route.endswith("_reference")
    usual = row.stage in ROUTES[row.route].stages and of_cpu == (flavour is EngineFlavour.CPU)
    return usual or row.dispatches > 0 or row.captures > 0


def _switches(session: Session) -> dict[str, str]:
    overrides = session.request.overrides.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {f"{Origin.OVERRIDE}.{name}": str(value)[:128] for name, value in overrides.items()}


def blocking_path(paths: tuple[PathReport, ...], policy: Acceleration) -> PathReport | None:
    """The first expected path that keeps the server from being ready; None when none does.

    Under `Report` none does. An expected path that is not applicable counts as not enabled.
    """
    if policy.policy is AccelerationPolicy.REPORT:
        return None
    return next(iter(waiting_paths(paths, policy.allow_disabled)), None)


def readable(report: AccelerationReport) -> str:
    """The report's paths for a person who reads the log."""
    lines = [f"acceleration {report.summary} enabled, profile {report.profile.name}, device {report.device.name}"]
    for path in report.paths:
        mark = "expected" if path.expected else ""
        why = f"{path.reason}: {path.message}" if path.reason else ""
        lines.append(f"  {path.name:<32} {path.state:<14} {mark:<9} {why}".rstrip())
    return "\n".join(lines)
