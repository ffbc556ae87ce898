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
    Display,
    Effective,
    Placement,
    Revisions,
    RoutesStatus,
    RouteStatus,
    Status,
)
from sm70_operator.observe.facts import PodFacts
from sm70_operator.observe.snapshot import EngineAnswer, Resource
from sm70_operator.plan.gates import merge_paths, merge_routes, reports_of, summarize_paths
from sm70_operator.plan.plan import Event, EventType
from sm70_profiles.report import AccelerationReport, UuidSource, printable

MAX_PLACES = 64
_UNEVENTFUL = frozenset({Reason.PULLING_IMAGE, Reason.PENDING})
"""Reasons with a remedy that nevertheless are a normal step of a start."""


@dataclass(frozen=True)
class World:
    """What the status is made of, beside the findings."""

    resource: Resource
    revisions: Revisions
    subject: str | None
    pods: Sequence[PodFacts]
    """The subject's, those that end not among them."""
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
        acceleration=_acceleration(reports, earlier.acceleration, now),
        routes=_routes(world, merge_routes(reports), earlier.routes, now) if reports else None,
        effective=world.effective,
        placement=placement,
        display=Display(
            profile=world.profile,
            gpus=world.gpus,
            nodes=",".join(dict.fromkeys(place.node for place in placement)),
            cache=str(cache) if cache in (Reason.HIT, Reason.COLD) else "",
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
    found = RoutesStatus(revision=world.subject or "", observed_time=now, items=items)
    if earlier is None:
        return found
    same_routes = earlier.revision == found.revision and _taken(earlier.items) == _taken(items)
    young = now - earlier.observed_time < timedelta(seconds=world.routes_seconds)
    if earlier.items == items and same_routes:
        return earlier
    return earlier if same_routes and young else found


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
