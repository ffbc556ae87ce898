"""What the engines say of themselves, judged: what is fast, what was really taken, whether the cache was hit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sm70_operator.api.conditions import ConditionType, Finding, Reason, with_remedy
from sm70_operator.api.types import PathState, PathStatus, RouteStatus, RouteWindow
from sm70_operator.observe.facts import PodFacts
from sm70_operator.observe.snapshot import EngineAnswer
from sm70_operator.plan.explain import worst
from sm70_profiles import report as engine
from sm70_profiles.report import AccelerationReport, printable
from sm70_profiles.spec import Acceleration

MAX_PATHS = 64
MAX_ROUTES = 128
_STATES = {
    engine.PathState.ENABLED: PathState.ENABLED,
    engine.PathState.DISABLED: PathState.DISABLED,
    engine.PathState.NOT_APPLICABLE: PathState.NOT_APPLICABLE,
}
_SILENT = Finding.unknown(message="No replica reports yet.")
_BADNESS = (PathState.DISABLED, PathState.UNKNOWN, PathState.NOT_APPLICABLE, PathState.ENABLED)


@dataclass(frozen=True)
class Expectation:
    """What the operator gave to the pods and wants to find in their reports; None where it is not known."""

    profile_hash: str | None
    image: str | None
    acceleration: Acceleration


def judge_reports(
    pods: Sequence[PodFacts], answers: Mapping[str, EngineAnswer], expectation: Expectation, replicas: int
) -> dict[ConditionType, Finding]:
    """Findings for `AccelerationComplete`, `RoutesHealthy` and `CacheWarm` over all serving pods."""
    serving = [pod for pod in pods if _serves(pod)]
    missing = None
    if len(serving) < max(replicas, 1):
        missing = Finding.unknown(message=f"{len(serving)} of {replicas} replicas can report.")
    reports = _reports(serving, answers)
    window = merge_windows(serving, answers)
    resets = 0 if window is None else window.resets
    return {
        ConditionType.ACCELERATION_COMPLETE: worst(
            serving, lambda pod: _acceleration(answers.get(pod.uid, EngineAnswer()), expectation), missing
        ),
        ConditionType.ROUTES_HEALTHY: _routes_finding(merge_routes(reports), resets) if reports else _SILENT,
        ConditionType.CACHE_WARM: worst(serving, lambda pod: _cache(answers.get(pod.uid, EngineAnswer())), missing),
    }


def _serves(pod: PodFacts) -> bool:
    return pod.container is not None and pod.container.started


def _reports(pods: Sequence[PodFacts], answers: Mapping[str, EngineAnswer]) -> list[AccelerationReport]:
    found = (answers.get(pod.uid, EngineAnswer()).report for pod in sorted(pods, key=lambda pod: pod.name))
    return [report for report in found if report is not None]


def reports_of(pods: Sequence[PodFacts], answers: Mapping[str, EngineAnswer]) -> list[AccelerationReport]:
    """The reports of the serving pods, in the order of their names."""
    return _reports([pod for pod in pods if _serves(pod)], answers)


def _acceleration(answer: EngineAnswer, expectation: Expectation) -> Finding:
    report = answer.report
    if report is None:
        why = answer.error or "the engine was not asked yet"
        found = f"The engine's report cannot be had: {printable(why, 500)}."
        return Finding.unknown(Reason.REPORT_UNAVAILABLE, with_remedy(Reason.REPORT_UNAVAILABLE, found))
    if mismatch := _mismatch(report, expectation):
        return Finding.false(Reason.REPORT_MISMATCH, with_remedy(Reason.REPORT_MISMATCH, mismatch))
    allowed = {one.path for one in expectation.acceleration.allow_disabled}
    expected = [path for path in report.paths if path.expected]
    absent = set(report.expected_acceleration) - {path.name for path in expected}
    off = [path for path in expected if path.state is not engine.PathState.ENABLED and path.name not in allowed]
    problems = [
        f"`{printable(path.name, 64)}` is {_STATES[path.state]}"
        f" ({printable(path.reason or 'no reason given', 128)}{_why(path)})"
        for path in off
    ]
    problems += [f"`{printable(name, 64)}` is not reported" for name in sorted(absent - allowed)]
    if problems:
        inapplicable = bool(off) and all(path.state is engine.PathState.NOT_APPLICABLE for path in off)
        reason = Reason.NOT_APPLICABLE if inapplicable and not absent - allowed else Reason.ROUTE_DISABLED
        return Finding.false(reason, with_remedy(reason, f"{'; '.join(problems[:8])}."))
    waived = sorted(allowed & {path.name for path in expected if path.state is not engine.PathState.ENABLED})
    note = f", without {', '.join(f'`{printable(name, 64)}`' for name in waived)} as allowed" if waived else ""
    return Finding.true(Reason.ALL_ENABLED, f"{report.summary} expected paths are enabled{note}.")


def _why(path: engine.PathReport) -> str:
    return f": {printable(path.message, 200)}" if path.message else ""


def _mismatch(report: AccelerationReport, expectation: Expectation) -> str | None:
    if expectation.profile_hash is not None and report.profile.hash != expectation.profile_hash:
        return (
            f"The engine serves profile `{printable(report.profile.name, 63)}`"
            f" {printable(report.profile.hash, 12)}, it was given {expectation.profile_hash[:12]}."
        )
    image = report.engine.image
    if image and expectation.image and image != expectation.image:
        return f"The engine runs image `{printable(image, 256)}`, it was given `{expectation.image}`."
    return None


def _cache(answer: EngineAnswer) -> Finding:
    cache = answer.report.compile_cache if answer.report is not None else None
    if cache is None:
        return Finding.unknown(message="The engine has said nothing about its compile cache.")
    if not cache.enabled:
        return Finding.unknown(Reason.NOT_APPLICABLE, printable(cache.message, 300) or "The engine compiles nothing.")
    state, why = cache.state, printable(cache.message, 300)
    before, added = cache.files_before or 0, cache.files_added_at_last_start
    added = (cache.files_added or 0) if added is None else added
    if state is engine.CacheState.OFF:
        return Finding.unknown(Reason.NOT_APPLICABLE, why or "Compiled code is not kept.")
    if state is engine.CacheState.WARMING:
        return Finding.unknown(message=f"The cache is being filled. {why}".strip())
    if state is engine.CacheState.UNWRITABLE:
        found = why or "What this start compiled could not be kept."
        return Finding.false(Reason.UNWRITABLE, with_remedy(Reason.UNWRITABLE, found))
    if state is engine.CacheState.WARM or (state is None and before and not added):
        return Finding.true(Reason.HIT, f"{before} files were there, none was added.")
    return Finding.false(Reason.COLD, f"{before} files were there, {added} were added at this start. {why}".strip())


def fallback_percent(pods: Sequence[PodFacts], answers: Mapping[str, EngineAnswer]) -> int | None:
    """Share of dispatches on fallback routes over all pods lately, rounded up; None without traffic."""
    windows = [answers[pod.uid].window for pod in pods if pod.uid in answers]
    total = sum(one.dispatches for one in windows if one is not None)
    fallbacks = sum(one.fallbacks for one in windows if one is not None)
    return -(-100 * fallbacks // total) if total else None


def merge_windows(pods: Sequence[PodFacts], answers: Mapping[str, EngineAnswer]) -> RouteWindow | None:
    """The pods' newest stretches of traffic as one."""
    windows = [one for pod in pods if pod.uid in answers and (one := answers[pod.uid].window) is not None]
    if not windows:
        return None
    return RouteWindow(
        seconds=max(one.seconds for one in windows),
        dispatches=min(2**53, sum(one.dispatches for one in windows)),
        fallback_percent=fallback_percent(pods, answers) or 0,
        resets=sum(one.resets for one in windows),
    )


def merge_paths(reports: Sequence[AccelerationReport]) -> tuple[PathStatus, ...]:
    """Every path once, in the first report's order, with its worst state over the pods."""
    merged: dict[str, PathStatus] = {}
    for report in reports:
        for path in report.paths:
            name = printable(path.name, 128)
            row = PathStatus(
                name=name,
                expected=path.expected,
                state=_STATES[path.state],
                reason=None if path.reason is None else printable(path.reason, 128),
                message=printable(path.message, 1024),
            )
            known = merged.get(name)
            if known is None or _BADNESS.index(row.state) < _BADNESS.index(known.state):
                merged[name] = row
    # Expected ones first if there are more than the status may hold.
    rows = list(merged.values())
    kept = sorted(rows, key=lambda row: not row.expected)[:MAX_PATHS]
    return tuple(row for row in rows if row in kept)


def summarize_paths(paths: Sequence[PathStatus]) -> str:
    """Enabled over expected, `11/11`."""
    expected = [path for path in paths if path.expected]
    return f"{sum(path.state is PathState.ENABLED for path in expected)}/{len(expected)}"


def merge_routes(reports: Sequence[AccelerationReport]) -> tuple[RouteStatus, ...]:
    """Dispatches by route and stage, summed over pods; routes that were not taken are left out."""
    sums: dict[tuple[str, str], RouteStatus] = {}
    for report in reports:
        for row in report.routes:
            if not row.dispatches:
                continue
            key = (printable(row.route, 128), str(row.stage))
            known = sums.get(key)
            sums[key] = RouteStatus(
                route=key[0],
                stage=row.stage,
                dispatches=min(2**53, row.dispatches + (known.dispatches if known else 0)),
                fallback=row.fallback or bool(known and known.fallback),
            )
    return tuple(sums[key] for key in sorted(sums))[:MAX_ROUTES]


def _routes_finding(routes: Sequence[RouteStatus], resets: int) -> Finding:
    fallbacks = sorted({route.route for route in routes if route.fallback})
    if fallbacks:
        found = f"Fallback routes were taken: {', '.join(f'`{name}`' for name in fallbacks)}."
        return Finding.false(Reason.FALLBACK_OBSERVED, with_remedy(Reason.FALLBACK_OBSERVED, found))
    if not routes and resets:
        found = f"Counters began anew {resets} times; what they held is lost, and nothing was dispatched since."
        return Finding.unknown(Reason.COUNTERS_RESET, with_remedy(Reason.COUNTERS_RESET, found))
    if not routes:
        return Finding.unknown(Reason.NO_TRAFFIC, "Nothing was dispatched since the server started.")
    since = " since counters began anew" if resets else ""
    return Finding.true(Reason.ACCELERATED, f"Accelerated routes were taken, and no fallback{since}.")
