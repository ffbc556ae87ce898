"""From a decision to actions: what is recorded, who gets the traffic, who stops, and who may start.

The order is the safety: a decision is recorded before anything follows from it; traffic moves before the revision that
it leaves stops; a revision starts only when nothing outside of those that are to run is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from sm70_operator.api import names
from sm70_operator.observe.facts import ObjectFacts
from sm70_operator.observe.revisions import Rejection
from sm70_operator.observe.snapshot import Snapshot, replicas_of, selected_revision
from sm70_operator.plan.drift import differs
from sm70_operator.plan.fleet import Fleet, Member, owner_of
from sm70_operator.plan.intent import Rejected, Target
from sm70_operator.plan.plan import Action, Apply, Delete, Event, EventType, Record, Scale
from sm70_operator.plan.rollout import Decision, Step
from sm70_operator.render import revision as revisions
from sm70_operator.render.cache import render_cache_claim
from sm70_operator.render.deployment import render_deployment
from sm70_operator.render.history import render_controller_revision
from sm70_operator.render.objects import Manifest
from sm70_operator.render.resource_claim import render_claim_template, uses_claims
from sm70_operator.render.revision import Revision, quantity
from sm70_operator.render.service import render_candidate_service, render_service


@dataclass(frozen=True)
class Steps:
    """Actions of this round, and what the status has to know of the change under way."""

    actions: tuple[Action, ...]
    stopping: tuple[str, ...] = ()
    """Revisions that still run or end although they are not to run."""
    foreign: str = ""
    """An object of a needed name that is not ours."""

    def events(self) -> tuple[Event, ...]:
        """One event for each start, stop, promotion and rejection."""
        return tuple(event for action in self.actions for event in _events(action))


def _events(action: Action) -> Iterator[Event]:
    match action:
        case Apply(promotes=promotes, because=because) if promotes:
            yield Event(EventType.NORMAL, "RevisionPromoted", "PromoteRevision", because)
        case Apply(starts=True, because=because) | Scale(starts=True, because=because):
            yield Event(EventType.NORMAL, "RevisionStarted", "StartRevision", because)
        case Scale(replicas=0, because=because):
            yield Event(EventType.NORMAL, "RevisionStopped", "StopRevision", because)
        case Record(annotations=annotations, because=because) if annotations.get(names.REJECTED_ANNOTATION):
            yield Event(EventType.WARNING, "RevisionRejected", "RejectRevision", because)
        case Record(annotations=annotations, because=because) if annotations.get(names.GOOD_ANNOTATION):
            yield Event(EventType.NORMAL, "RevisionGood", "KeepRevision", because)


def carry_out(snapshot: Snapshot, intent: Target | Rejected, fleet: Fleet, decision: Decision, now: datetime) -> Steps:
    """What to do now. Doing it and asking again leads to a world in which nothing is left to do."""
    foreign = _foreign(snapshot)
    if foreign:
        return Steps((), foreign=foreign)
    stopping = tuple(sorted({*(fleet.busy - set(decision.run)), *fleet.earlier}))
    if fleet.earlier:
        # The garbage collector takes those away; nothing of the same name can be made before.
        return Steps((), stopping)
    actions = [
        *_history(snapshot, intent, fleet),
        *_records(fleet, intent, decision, now),
        *_traffic(snapshot, intent, decision, now),
        *_stops(fleet, decision),
        *_candidate(snapshot, decision),
        *_starts(snapshot, intent, fleet, decision, may_start=not stopping),
        *_forget(snapshot, intent, fleet, decision),
        *_growth(snapshot, intent, decision),
    ]
    return Steps(tuple(actions), stopping)


def _foreign(snapshot: Snapshot) -> str:
    """Our labels on an object that nobody of our kind controls: we neither take it over nor delete it."""
    key = snapshot.resource.key
    services = (("Service", snapshot.service), ("Service", snapshot.candidate))
    for kind, child in (*services, ("PersistentVolumeClaim", snapshot.claim)):
        if child is not None and not child.owner:
            return f"A {kind} `{child.name}` exists in namespace `{key.namespace}` and does not belong to this service."
    return ""


def _history(snapshot: Snapshot, intent: Target | Rejected, fleet: Fleet) -> Iterator[Action]:
    """The target is recorded before anything is done for it."""
    if isinstance(intent, Rejected):
        return
    record = fleet[intent.name].record
    if record is None:
        number = max((one.number for one in snapshot.revisions), default=0) + 1
        manifest = render_controller_revision(owner_of(snapshot), intent.name, intent.revision, number, intent.source)
        yield Apply(manifest, f"Revision {intent.name} is recorded.", known=False)
    elif record.source != intent.source and intent.spec.rollout.rollback_to is None:
        # Another spelling of the same: from now on this one is known too, whatever a later version makes of it.
        yield _record(record.object, {names.SOURCE_ANNOTATION: intent.source}, "The spec was spelt anew.")


def _records(fleet: Fleet, intent: Target | Rejected, decision: Decision, now: datetime) -> Iterator[Action]:
    if isinstance(intent, Rejected):
        return
    for name, member in fleet.members.items():
        if member.record is None or (decision.reject is not None and decision.reject[0] == name):
            continue
        rejection = member.rejection
        if name == decision.traffic and name == intent.name and (rejection or decision.proven == name):
            changes: dict[str, str | None] = {names.REJECTED_ANNOTATION: None} if rejection is not None else {}
            if decision.proven == name:
                changes[names.GOOD_ANNOTATION] = now.isoformat()
            because = f"Revision {name} is good." if decision.proven == name else f"Revision {name} is tried again."
            yield _record(member.record.object, changes, because)
        elif rejection is not None and rejection.spec not in ("", intent.attempt):
            freed = Rejection(rejection.reason, rejection.message, rejection.time)
            because = f"Revision {name} may be tried again: the spec has changed."
            yield _record(member.record.object, {names.REJECTED_ANNOTATION: freed.encode()}, because)
    if decision.reject is not None:
        name, rejection = decision.reject
        record = fleet[name].record
        if record is not None:
            changes = {names.REJECTED_ANNOTATION: rejection.encode(), names.GOOD_ANNOTATION: None}
            yield _record(record.object, changes, decision.because)


def _record(found: ObjectFacts, annotations: dict[str, str | None], because: str) -> Record:
    return Record(found.name, found.uid, found.version, annotations, because)


def _traffic(snapshot: Snapshot, intent: Target | Rejected, decision: Decision, now: datetime) -> Iterator[Action]:
    """The Service selects who has the traffic, and says since when."""
    found = snapshot.service
    if found is None and decision.traffic is None and isinstance(intent, Rejected):
        return  # nothing is made for a spec that is not accepted
    selected = None if found is None else selected_revision(found) or None
    if found is not None and selected == decision.traffic:
        since = (found.manifest.get("metadata", {}).get("annotations") or {}).get(names.PROMOTED_ANNOTATION, "")
    else:
        since = now.isoformat()
    text = f"Traffic goes to revision {decision.traffic}." if decision.traffic else "No revision has the traffic yet."
    promotes = decision.traffic if decision.traffic is not None and selected != decision.traffic else ""
    manifest = render_service(owner_of(snapshot), decision.traffic, since)
    for action in _apply(manifest, found, text):
        # The decision rests on what was seen: it must not meet a newer one.
        version = found.version if promotes and found is not None else ""
        yield Apply(action.manifest, action.because, action.known, promotes=promotes or "", version=version)


def _stops(fleet: Fleet, decision: Decision) -> Iterator[Action]:
    for name, member in fleet.members.items():
        child = member.deployment
        if name not in decision.run and child is not None and member.asks and not child.deleting:
            wanted = " and ".join(decision.run) or "nothing"
            yield Scale(child.name, child.uid, child.version, 0, f"Revision {name} stops: {wanted} is to run.")


def _candidate(snapshot: Snapshot, decision: Decision) -> Iterator[Action]:
    found = snapshot.candidate
    if decision.candidate is not None:
        manifest = render_candidate_service(owner_of(snapshot), decision.candidate)
        yield from _apply(manifest, found, f"Revision {decision.candidate} is under judgement.")
    elif found is not None and not found.deleting and found.owner == snapshot.resource.uid:
        yield Delete(found.name, found.uid, found.version, "No revision is under judgement.", "Service")


def _starts(
    snapshot: Snapshot, intent: Target | Rejected, fleet: Fleet, decision: Decision, may_start: bool
) -> Iterator[Action]:
    if intent.spec is None and not decision.run:
        return
    for name in decision.run:
        member = fleet[name]
        beside = frozenset(decision.run) - {name}
        if isinstance(intent, Target) and name == intent.name:
            if may_start or member.asks:
                yield from _claim(snapshot, intent)
                yield from _run(snapshot, member, intent.revision, intent.spec.replicas, beside)
        elif (may_start or member.asks) and decision.step is not Step.IDLE:
            replicas = intent.spec.replicas if intent.spec is not None else None
            yield from _run(snapshot, member, member.document, replicas, beside)


def _run(
    snapshot: Snapshot, member: Member, document: Revision | None, replicas: int | None, beside: frozenset[str]
) -> Iterator[Action]:
    """Brings one revision to so many replicas; None: to as many as it has, or one."""
    found, name = member.deployment, member.name
    count = replicas if replicas is not None else (replicas_of(found) if member.asks and found is not None else 1)
    starts = bool(count) and not member.asks
    runs = name if count else ""
    because = f"Revision {name} starts." if starts else f"Revision {name} is to have {count} replicas."
    # A Deployment that another rendering made keeps its template: an upgrade of the operator restarts nobody's pods.
    present = document is not None and document.render_version == revisions.RENDER_VERSION
    if document is not None and (present or found is None):
        owner = owner_of(snapshot)
        template = render_claim_template(owner, name, document)
        if template is not None and starts:
            yield Apply(template, f"Revision {name} claims its GPUs.", known=False)
        manifest = render_deployment(owner, name, document, count)
        for action in _apply(manifest, found, because):
            yield Apply(action.manifest, action.because, action.known, runs, beside, starts)
    elif found is not None and not found.deleting and replicas_of(found) != count:
        # It can still be scaled, also when its record is lost.
        yield Scale(found.name, found.uid, found.version, count, because, runs, beside, starts)


def _forget(snapshot: Snapshot, intent: Target | Rejected, fleet: Fleet, decision: Decision) -> Iterator[Action]:
    """Stopped revisions beyond the history's limit, the oldest first; never one that may be needed."""
    if isinstance(intent, Rejected):
        return
    needed = {intent.name, fleet.active, fleet.last_good, decision.traffic, decision.candidate, *decision.run}
    stopped = [one for one in fleet.members.values() if one.name not in needed and one.at_rest]
    unrecorded = [one for one in stopped if one.record is None]
    recorded = sorted((one for one in stopped if one.record is not None), key=_number)
    surplus = recorded[: max(len(recorded) - intent.spec.rollout.revision_history_limit, 0)]
    for member in [*unrecorded, *surplus]:
        because = f"Revision {member.name} has stopped, and the history is long enough."
        child = member.deployment
        if child is not None:
            if not child.deleting:
                yield Delete(child.name, child.uid, child.version, because)
        elif member.record is not None:
            found = member.record.object
            if member.document is not None and uses_claims(member.document):
                template = names.claim_template_name(snapshot.resource.key.name, member.name)
                yield Delete(template, "", "", because, "ResourceClaimTemplate")
            yield Delete(found.name, found.uid, found.version, because, "ControllerRevision")


def _number(member: Member) -> int:
    return 0 if member.record is None else member.record.number


def _claim(snapshot: Snapshot, target: Target) -> Iterator[Action]:
    manifest = render_cache_claim(owner_of(snapshot), target.spec)
    if manifest is None:
        return
    if snapshot.claim is None:
        yield Apply(manifest, "The compile cache needs a claim.", known=False)


def _growth(snapshot: Snapshot, intent: Target | Rejected, decision: Decision) -> Iterator[Action]:
    """Of a claim that exists, only the size may grow; everything else is immutable and stays as it is.

    Last, and only when nothing else is under way: a storage class that refuses must not stand in the way of a start.
    """
    found = snapshot.claim
    if isinstance(intent, Rejected) or found is None or found.deleting or decision.step is not Step.SETTLED:
        return
    manifest = render_cache_claim(owner_of(snapshot), intent.spec)
    if manifest is None:
        return
    size = manifest["spec"]["resources"]["requests"]["storage"]
    present = ((found.manifest.get("spec") or {}).get("resources") or {}).get("requests", {}).get("storage", "0")
    if (quantity(size) or 0) > (quantity(str(present)) or 0):
        grown = {**found.manifest["spec"], "resources": {"requests": {"storage": size}}}
        kept = {key: grown[key] for key in ("accessModes", "storageClassName", "resources") if key in grown}
        yield Apply({**manifest, "spec": kept}, f"The compile cache grows to {size}.", known=True)


def _apply(manifest: Manifest, found: ObjectFacts | None, because: str) -> Iterator[Apply]:
    if found is not None and found.deleting:
        return
    if found is None or differs(manifest, found.manifest):
        yield Apply(manifest, because, known=found is not None)
