"""The acceleration report and the counters of a simulated engine, from the resolver's own prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from simulated_engine.behaviour import Behaviour, ReportFault
from sm70_engine.acceleration.device import environment_uuids
from sm70_engine.acceleration.report import blocking_path, cache_directory, count_files
from sm70_profiles.identity import digest
from sm70_profiles.profile import EngineFlavour
from sm70_profiles.report import (
    AccelerationReport,
    CompileCacheReport,
    DeviceFacts,
    EffectiveConfiguration,
    EngineFacts,
    PathReport,
    PathState,
    ProfileFacts,
    RouteCount,
    UuidSource,
)
from sm70_profiles.resolver import Resolution, ServeRequest
from sm70_profiles.routes import ROUTES, Stage
from sm70_profiles.rules import summarize

BUILD = "simulated"
"""What stands in the report where a real engine has its version."""
V100_BYTES = 16 * 2**30


@dataclass
class Reporter:
    """One server's word on itself. `behaviour` may be replaced while it runs."""

    request: ServeRequest
    resolution: Resolution
    environment: Mapping[str, str]
    behaviour: Behaviour
    counts: dict[tuple[str, Stage], int] = field(default_factory=dict)
    files_before: int = 0

    @property
    def cache(self) -> Path:
        return cache_directory(self.environment)

    def fill_cache(self) -> None:
        """Adds what a first start compiles; a folder that cannot be written is said on the log."""
        self.files_before = count_files(self.cache)
        if self.files_before:
            return
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
            for number in range(self.behaviour.cache_files):
                (self.cache / f"simulated-{number}").write_text("compiled\n")
        except OSError as error:
            print(f"simulated engine: the compile cache cannot be written: {error}", flush=True)

    def count(self, stages: Mapping[Stage, int]) -> None:
        """A request was served, with this many steps of each stage: every expected route is taken once a step."""
        for path in self.paths():
            route = ROUTES.get(path.route or "")
            if route is None or not path.expected or path.state is not PathState.ENABLED:
                continue
            for stage, steps in stages.items():
                if stage in route.stages:
                    self.counts[route.name, stage] = self.counts.get((route.name, stage), 0) + steps
        for name, dispatches in self.behaviour.fallbacks.items():
            key = (name, ROUTES[name].stages[0])
            self.counts[key] = self.counts.get(key, 0) + dispatches

    def paths(self) -> tuple[PathReport, ...]:
        off = self.behaviour.disabled
        return tuple(
            path.model_copy(update={"state": PathState.DISABLED, "reason": off[path.name], "message": "simulated"})
            if path.name in off
            else path.model_copy(update={"state": PathState.ENABLED, "reason": None, "message": ""})
            if path.expected
            else path
            for path in self.resolution.paths
        )

    def routes(self) -> tuple[RouteCount, ...]:
        """Routes that ran, and with zero those that may run."""
        possible = {
            (path.route, stage)
            for path in self.paths()
            if path.route in ROUTES and path.state is not PathState.NOT_APPLICABLE
            for stage in ROUTES[path.route].stages
        }
        return tuple(
            RouteCount(route=name, stage=stage, dispatches=self.counts.get((name, stage), 0), fallback=route.fallback)
            for name, route in ROUTES.items()
            for stage in route.stages
            if (name, stage) in possible or (name, stage) in self.counts
        )

    def report(self) -> AccelerationReport:
        paths, profile = self.paths(), self.request.profile
        other = self.behaviour.report is ReportFault.OTHER_PROFILE
        return AccelerationReport(
            engine=EngineFacts(build=BUILD, vllm=BUILD, torch=BUILD, image=self.environment.get("SM70_ENGINE_IMAGE")),
            profile=ProfileFacts(name=profile.name, hash="0" * 64 if other else self.resolution.profile_hash),
            device=self._device(),
            effective=EffectiveConfiguration(argv=self.resolution.argv, env_hash=digest(self.resolution.env)),
            paths=paths,
            expected_acceleration=profile.expected_acceleration,
            summary=summarize(paths),
            compile_cache=self._cache(),
            routes=self.routes(),
            observed_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        )

    def blocking(self) -> PathReport | None:
        """The first path that keeps it from being ready."""
        return blocking_path(self.paths(), self.request.acceleration)

    def _cache(self) -> CompileCacheReport:
        enabled = self.behaviour.cache_files > 0
        return CompileCacheReport(
            enabled=enabled,
            directory=str(self.cache),
            files_before=self.files_before,
            files_added=max(0, count_files(self.cache) - self.files_before),
            message="" if enabled else "a simulated engine compiles nothing",
        )

    def _device(self) -> DeviceFacts:
        uuids = environment_uuids(self.environment)
        found = {
            "name": "CPU",
            "count": len(uuids),
            "uuids": uuids,
            "uuid_source": UuidSource.ENVIRONMENT if uuids else UuidSource.NONE,
        }
        if self.resolution.flavour is EngineFlavour.SM70:
            found |= {
                "name": "Tesla V100-SXM2-16GB",
                "compute_capability": "7.0",
                "memory_bytes": V100_BYTES,
                "driver": "570.00",
                "nvlink": True,
            }
        return DeviceFacts.model_validate(found | self.behaviour.device)
