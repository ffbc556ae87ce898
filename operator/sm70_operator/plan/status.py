"""Puts the status together. What has not changed keeps its time, so that an idle service is never written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from pydantic import ValidationError

from sm70_operator.api import names
from sm70_operator.api.conditions import (
    MEANINGS,
    Condition,
    ConditionStatus,
    ConditionType,
    Finding,
    Reason,
    conditions,
)
from sm70_operator.api.types import (
    AccelerationStatus,
    CacheState,
    Capacity,
    CompileCacheStatus,
    Display,
    Effective,
    LastShutdown,
    Placement,
    QualificationStatus,
    RejectedRevision,
    Revisions,
    RolloutStatus,
    RoutesStatus,
    RouteStatus,
    Startup,
    Status,
)
from sm70_operator.observe.facts import PodFacts
from sm70_operator.observe.snapshot import EngineAnswer, Resource
from sm70_operator.plan.evidence import EvidenceView
from sm70_operator.plan.fleet import Fleet
from sm70_operator.plan.gates import merge_paths, merge_routes, merge_windows, reports_of, summarize_paths
from sm70_operator.plan.plan import Event, EventType
from sm70_profiles.report import AccelerationReport, UuidSource, printable
from sm70_profiles.termination import TerminationKind, parse_termination

MAX_PLACES = 64
MAX_REJECTED = 16
MAX_LAST_ROUTES = 32
_UNEVENTFUL = frozenset({Reason.PULLING_IMAGE, Reason.PENDING})
"""Reasons with a remedy that nevertheless are a normal step of a start."""


@dataclass(frozen=True)
class World:
    """What the status is made of, beside the findings."""

    resource: Resource
    revisions: Revisions
    rollout: RolloutStatus | None
    startup: Startup | None
    evidence: EvidenceView | None
    subject: str | None
    pods: Sequence[PodFacts]
    """The subject's, those that end not among them."""
    all_pods: Sequence[PodFacts]
    """Of every revision, also those that end."""
    answers: Mapping[str, EngineAnswer]
    url: str | None
    effective: Effective | None
    profile: str
    gpus: str
    routes_seconds: int


def read_status(resource: Resource) -> Status:
    """The status that is there; an empty one if it is lost or not ours to understand."""
    try:
        return Status.model_validate(resource.status)
    except ValidationError:
        return Status()


def build_status(world: World, findings: dict[ConditionType, Finding], earlier: Status, now: datetime) -> Status:
    """The whole status."""
    reports = reports_of(world.pods, world.answers)
    placement = _placement(world)
    cache = findings.get(ConditionType.CACHE_WARM, Finding.unknown()).reason
    return Status(
        observed_generation=world.resource.generation,
        replicas=len(world.pods),
        ready_replicas=sum(pod.ready for pod in world.pods),
        selector=_selector(world),
        url=world.url,
        revisions=world.revisions,
        rollout=world.rollout,
        startup=world.startup,
        qualification=_qualification(world.evidence),
        compile_cache=_compile_cache(reports),
        capacity=_capacity(reports),
        acceleration=_acceleration(reports, earlier.acceleration, now),
        routes=_routes(world, merge_routes(reports), earlier.routes, now),
        effective=world.effective,
        placement=placement,
        display=Display(
            profile=world.profile,
            gpus=world.gpus,
            nodes=",".join(dict.fromkeys(place.node for place in placement)),
            cache=str(cache) if cache in (Reason.HIT, Reason.COLD, Reason.UNWRITABLE) else "",
        ),
        conditions=conditions(findings, earlier.conditions, world.resource.generation, now),
    )


def _selector(world: World) -> str:
    if world.subject is None:
        return ""
    selector = names.selector(world.resource.key.name, world.subject)
    return ",".join(f"{key}={value}" for key, value in selector.items())


def _acceleration(
    reports: Sequence[AccelerationReport], earlier: AccelerationStatus | None, now: datetime
) -> AccelerationStatus | None:
    if not reports:
        return None
    paths = merge_paths(reports)
    found = AccelerationStatus(
        summary=summarize_paths(paths),
        schema_version=reports[0].schema_version,
        observed_time=now,
        paths=paths,
    )
    if earlier is not None and earlier.model_copy(update={"observed_time": now}) == found:
        return earlier
    return found


def _routes(
    world: World, items: tuple[RouteStatus, ...], earlier: RoutesStatus | None, now: datetime
) -> RoutesStatus | None:
    """The counters: at most once in `routes_seconds`, but at once for a new route or another revision."""
    window = merge_windows(world.pods, world.answers)
    last = _last_shutdown(world.all_pods, earlier.last_shutdown if earlier is not None else None)
    if last is None and not reports_of(world.pods, world.answers):
        return None
    found = RoutesStatus(
        revision=world.subject or "", observed_time=now, window=window, last_shutdown=last, items=items
    )
    if earlier is None or earlier.revision != found.revision or earlier.last_shutdown != last:
        return found
    if earlier.items == items:
        return earlier
    young = now - earlier.observed_time < timedelta(seconds=world.routes_seconds)
    return earlier if young and _taken(earlier.items) == _taken(items) else found


def _last_shutdown(pods: Sequence[PodFacts], earlier: LastShutdown | None) -> LastShutdown | None:
    """The last words of the container that last ended because it was asked to."""
    found = [earlier] if earlier is not None else []
    for pod in pods:
        end = pod.container.exit if pod.container is not None else None
        words = parse_termination(end.message) if end is not None else None
        if words is None or end is None or end.finished is None or words.kind is not TerminationKind.SHUTDOWN:
            continue
        items = tuple(
            RouteStatus(
                route=printable(one.route, 128),
                stage=one.stage,
                dispatches=min(one.dispatches, 2**53),
                fallback=one.fallback,
            )
            for one in words.routes
            if one.dispatches
        )
        unique = {(item.route, item.stage): item for item in items}
        found.append(
            LastShutdown(
                revision=pod.revision[:16],
                pod=pod.name,
                time=end.finished,
                message=printable(words.message, 1024),
                items=tuple(unique.values())[:MAX_LAST_ROUTES],
            )
        )
    return max(found, key=lambda one: (one.time, one.pod), default=None)


def _qualification(view: EvidenceView | None) -> QualificationStatus | None:
    if view is None or view.evidence is None:
        return None
    verdict = view.evidence.status.verdict
    return QualificationStatus(
        name=view.evidence.name,
        verdict=str(verdict) if verdict is not None else "Running",
        key=view.evidence.spec.key.key,
    )


def _compile_cache(reports: Sequence[AccelerationReport]) -> CompileCacheStatus | None:
    found = [one.compile_cache for one in reports if one.compile_cache is not None and one.compile_cache.state]
    states = {str(state) for state in CacheState}
    known = [one for one in found if str(one.state) in states]
    if not known:
        return None
    order = (CacheState.UNWRITABLE, CacheState.WARMING, CacheState.COLD, CacheState.WARM)
    worst = min(known, key=lambda one: order.index(CacheState(str(one.state))))
    return CompileCacheStatus(
        key=None if worst.key is None else printable(worst.key, 128),
        state=CacheState(str(worst.state)),
        files_added_at_last_start=worst.files_added_at_last_start,
    )


def _capacity(reports: Sequence[AccelerationReport]) -> Capacity | None:
    found = [one.capacity for one in reports if one.capacity is not None]
    if not found:
        return None
    least = min(found, key=lambda one: one.kv_tokens)
    return Capacity(
        kv_tokens=min(least.kv_tokens, 2**53),
        block_size=min(least.block_size, 2**31 - 1),
        residents_at_max_len=min(least.residents_at_max_len, 2**31 - 1),
    )


def revisions_of(fleet: Fleet, active: str | None, target: str | None) -> Revisions:
    """Which revision is what, when the plan is done: `active` is the one that has the traffic then."""
    rejected = [
        RejectedRevision(
            revision=member.name,
            reason=member.rejection.reason,
            message=member.rejection.message,
            time=member.rejection.time,
        )
        for member in fleet.members.values()
        if member.rejection is not None
    ]
    rejected.sort(key=lambda one: (one.time, one.revision), reverse=True)
    return Revisions(active=active, target=target, last_good=fleet.last_good, rejected=tuple(rejected[:MAX_REJECTED]))


def _taken(items: Sequence[RouteStatus]) -> set[tuple[str, str, bool]]:
    return {(item.route, str(item.stage), item.fallback) for item in items}


def _placement(world: World) -> tuple[Placement, ...]:
    places = []
    for pod in sorted(world.pods, key=lambda pod: pod.name):
        if not pod.node:
            continue
        report = world.answers.get(pod.uid, EngineAnswer()).report
        places.append(
            Placement(
                pod=pod.name,
                node=pod.node,
                gpu_uuids=() if report is None else tuple(printable(uuid, 128) for uuid in report.device.uuids),
                source=UuidSource.NONE if report is None else report.device.uuid_source,
            )
        )
    return tuple(places[:MAX_PLACES])


def transitions(earlier: Sequence[Condition], present: Sequence[Condition]) -> tuple[Event, ...]:
    """Events for what has changed: the service becomes or ceases to be ready, or something new is wrong."""
    before = {condition.type: condition for condition in earlier}
    events = []
    for condition in present:
        known = before.get(condition.type)
        if known is not None and (known.status, known.reason) == (condition.status, condition.reason):
            continue
        wrong = condition.status is ConditionStatus.FALSE and _is_problem(condition.reason)
        if condition.type is ConditionType.READY:
            was_ready = known is not None and known.status is ConditionStatus.TRUE
            if condition.status is ConditionStatus.TRUE and not was_ready:
                events.append(_event(EventType.NORMAL, condition))
            elif was_ready and condition.status is not ConditionStatus.TRUE:
                events.append(_event(EventType.WARNING, condition))
        elif wrong:
            events.append(_event(EventType.WARNING, condition))
    return tuple(events)


def _is_problem(reason: Reason) -> bool:
    return bool(MEANINGS[reason].remedy) and reason not in _UNEVENTFUL


def _event(kind: EventType, condition: Condition) -> Event:
    return Event(kind, str(condition.reason), f"{condition.type}Changed", condition.message or str(condition.reason))
