"""What a simulated engine says of itself: the real report of a real session, with faults laid over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from simulated_engine.behaviour import Behaviour, ReportFault
from sm70_engine.acceleration.report import blocking_path, build_report
from sm70_engine.acceleration.startup import enter
from sm70_engine.cache.key import complete
from sm70_engine.cache.use import CacheUse
from sm70_engine.serve.launch import Launch
from sm70_engine.session import Session, SessionFolder
from sm70_profiles.identity import CompileCacheIdentity
from sm70_profiles.profile import EngineFlavour
from sm70_profiles.report import AccelerationReport, FallbackCount, PathReport, PathState, RouteCount, StartupPhase
from sm70_profiles.routes import ROUTES, Stage
from sm70_profiles.rules import Capabilities, summarize

BUILD = "simulated"
"""What stands in the report where a real engine has its version."""
BLOCK, BLOCKS = 128, 512
"""Tokens of a page of the tiny model's cache, and how many pages there are."""
V100 = {"name": "Tesla V100-SXM2-16GB", "computeCapability": "7.0", "memoryBytes": 16 * 2**30, "driver": "570.00"}


def cache_identity(launch: Launch, environment: Mapping[str, str]) -> CompileCacheIdentity | None:
    """The identity of what it would compile; where nothing is installed, its versions are `simulated`."""
    found = launch.resolution.cache
    if found is None:
        return None
    identity = complete(found, launch.resolution.flavour, environment)
    return identity.model_copy(update=dict.fromkeys(identity.missing, BUILD))


@dataclass
class Reporter:
    """One server's word on itself. `behaviour` may be replaced while it runs."""

    launch: Launch
    session: Session
    folder: SessionFolder
    environment: Mapping[str, str]
    behaviour: Behaviour
    counts: dict[tuple[str, Stage], int] = field(default_factory=dict)

    def enter(self, phase: StartupPhase) -> None:
        enter(self.folder.startup, phase)

    def compile(self, cache: CacheUse) -> None:
        """A start without an entry in the cache adds files; then the cache is finished as a real start does."""
        if cache.work is not None and not cache.files_before:
            place = Path(cache.work) / "vllm" / "torch_compile_cache"
            place.mkdir(parents=True)
            for number in range(self.behaviour.cache_files):
                (place / f"simulated-{number}").write_text("compiled\n")
        self.folder.write_cache(cache.finish())

    def count(self, stages: Mapping[Stage, int]) -> None:
        """A request was served, with this many steps of each stage: every expected route is taken once a step."""
        for path in self.report().paths:
            route = ROUTES.get(path.route or "")
            if route is None or not path.expected or path.state is not PathState.ENABLED:
                continue
            for stage, steps in stages.items():
                if stage in route.stages:
                    self.counts[route.name, stage] = self.counts.get((route.name, stage), 0) + steps
        for name, dispatches in self.behaviour.fallbacks.items():
            key = (name, ROUTES[name].stages[0])
            self.counts[key] = self.counts.get(key, 0) + dispatches

    def executed(self) -> tuple[RouteCount, ...]:
        """The counters, as the last words hold them."""
        return tuple(
            RouteCount(route=name, stage=stage, dispatches=count, fallback=ROUTES[name].fallback)
            for (name, stage), count in sorted(self.counts.items())
        )

    def report(self) -> AccelerationReport:
        """The report of now."""
        capabilities = Capabilities(
            flavour=self.launch.resolution.flavour,
            model=self.launch.facts.model,
            draft=self.launch.facts.draft,
            environment=self.environment,
        )
        zeros = {(name, stage): 0 for name, route in ROUTES.items() for stage in route.stages}
        rows = tuple(
            RouteCount(route=name, stage=stage, dispatches=count, fallback=ROUTES[name].fallback)
            for (name, stage), count in (zeros | self.counts).items()
        )
        fallbacks = tuple(
            FallbackCount(route=row.route, stage=row.stage, reason=reason, dispatches=0 if index else row.dispatches)
            for row in rows
            for index, reason in enumerate(ROUTES[row.route].reasons)
        )
        found = build_report(
            self.session, self.session.settings, capabilities, rows, self.environment, self._facts(),
            folder=self.folder, fallbacks=fallbacks,
        )  # fmt: skip
        return self._overlaid(found)

    def blocking(self) -> PathReport | None:
        """The first path that keeps it from being ready."""
        return blocking_path(self.report().paths, self.launch.request.acceleration)

    def _overlaid(self, found: AccelerationReport) -> AccelerationReport:
        paths = tuple(map(self._path, found.paths))
        device = {**found.device.model_dump(mode="json", by_alias=True)}
        if self.launch.resolution.flavour is EngineFlavour.SM70:
            device |= V100
        other = self.behaviour.report is ReportFault.OTHER_PROFILE
        return found.model_copy(
            update={
                "engine": found.engine.model_copy(update=dict.fromkeys(("build", "vllm", "torch"), BUILD)),
                "profile": found.profile.model_copy(update={"hash": "0" * 64}) if other else found.profile,
                "device": type(found.device).model_validate(device | self.behaviour.device),
                "paths": paths,
                "summary": summarize(paths),
            }
        )

    def _path(self, path: PathReport) -> PathReport:
        if path.name in self.behaviour.disabled:
            reason = self.behaviour.disabled[path.name]
            return path.model_copy(
                update={"state": PathState.DISABLED, "reason": reason, "message": "simulated", "expected": True}
            )
        if path.expected:
            return path.model_copy(update={"state": PathState.ENABLED, "reason": None, "message": ""})
        return path

    def _facts(self) -> dict[str, str | int | None]:
        settings = self.session.settings
        longest = settings.max_model_len or 4096
        tokens = BLOCK * BLOCKS
        return {
            "rank": 0,
            "block_size": BLOCK,
            "blocks": BLOCKS,
            "kv_tokens": tokens,
            "max_model_len": longest,
            "residents": tokens // longest,
        }
