"""What to do: one set of GPUs, so the earlier revision stops, and only when its pods are gone the wanted one starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sm70_operator.observe.facts import ObjectFacts
from sm70_operator.observe.snapshot import Snapshot, replicas_of, revision_of, selected_revision
from sm70_operator.plan.drift import differs
from sm70_operator.plan.intent import Rejected, Target
from sm70_operator.plan.plan import Action, Apply, Delete, Event, EventType, Scale
from sm70_operator.render.cache import render_cache_claim
from sm70_operator.render.deployment import render_deployment
from sm70_operator.render.objects import Manifest, Owner
from sm70_operator.render.revision import quantity
from sm70_operator.render.service import render_service


@dataclass(frozen=True)
class Steps:
    """Actions of this round, and what the status has to know of the change under way."""

    actions: tuple[Action, ...]
    wanted: str | None
    """The revision that is to run: the target, or while the spec is rejected the one that has the traffic."""
    active: str | None
    """The revision that has the traffic at this moment."""
    stopping: tuple[str, ...]
    """Revisions that still run or end."""
    foreign: str = ""
    """An object of a needed name that is not ours."""

    def events(self) -> tuple[Event, ...]:
        """One event for each start and stop."""
        found = []
        for action in self.actions:
            if isinstance(action, Apply | Scale) and action.starts:
                found.append(Event(EventType.NORMAL, "RevisionStarted", "StartRevision", action.because))
            elif isinstance(action, Scale) and action.replicas == 0:
                found.append(Event(EventType.NORMAL, "RevisionStopped", "StopRevision", action.because))
        return tuple(found)


def owner_of(snapshot: Snapshot) -> Owner:
    """The owner of everything that is made for the service."""
    key = snapshot.resource.key
    return Owner(namespace=key.namespace, name=key.name, uid=snapshot.resource.uid)


def active_revision(snapshot: Snapshot) -> str | None:
    """The revision that has the traffic: the Service says so; without it, the one that runs."""
    if snapshot.service is not None and snapshot.service.owner == snapshot.resource.uid:
        return selected_revision(snapshot.service) or None
    running = [child for child in snapshot.own(snapshot.deployments) if replicas_of(child) and not child.deleting]
    return revision_of(running[0]) if len(running) == 1 else None


def next_steps(snapshot: Snapshot, intent: Target | Rejected) -> Steps:
    """What to do now. Doing it and asking again leads to a world in which nothing is left to do."""
    active = active_revision(snapshot)
    wanted = intent.name if isinstance(intent, Target) else active
    foreign = _foreign(snapshot)
    if foreign or wanted is None:
        return Steps((), wanted, active, (), foreign)
    earlier = _earlier(snapshot)
    stopping = tuple(sorted(_stopping(snapshot, wanted) | earlier))
    actions = [*_stop_others(snapshot, wanted)]
    if earlier:
        pass  # the garbage collector takes those away; nothing of the same name can be made before
    elif isinstance(intent, Target):
        actions += _run_target(snapshot, intent, may_start=not stopping)
    else:
        actions += _keep(snapshot, intent, wanted, may_start=not stopping)
    return Steps(tuple(actions), wanted, active, stopping)


def _foreign(snapshot: Snapshot) -> str:
    """Our labels on an object that nobody of our kind controls: we neither take it over nor delete it."""
    key = snapshot.resource.key
    for kind, child in (("Service", snapshot.service), ("PersistentVolumeClaim", snapshot.claim)):
        if child is not None and not child.owner:
            return f"A {kind} `{child.name}` exists in namespace `{key.namespace}` and does not belong to this service."
    return ""


def _stopping(snapshot: Snapshot, wanted: str) -> set[str]:
    """Revisions other than the wanted one of which anything may still hold GPUs."""
    held = {pod.revision for pod in snapshot.pods if pod.revision != wanted and not pod.ended}
    others = (child for child in snapshot.own(snapshot.deployments) if revision_of(child) != wanted)
    held |= {revision_of(child) for child in others if not _at_rest(child)}
    return held


def _earlier(snapshot: Snapshot) -> set[str]:
    """Revisions of a service of the same name that was deleted a moment ago, whose objects still exist."""
    children = [child for child in (snapshot.service, snapshot.claim, *snapshot.deployments) if child is not None]
    return {
        revision_of(child) or "of an earlier service"
        for child in children
        if child.owner not in ("", snapshot.resource.uid)
    }


def _at_rest(deployment: ObjectFacts) -> bool:
    """The Deployment asks for no pods, and its controller has seen that."""
    manifest = deployment.manifest
    status, metadata = manifest.get("status") or {}, manifest.get("metadata", {})
    seen = int(status.get("observedGeneration") or 0) >= int(metadata.get("generation") or 0)
    return replicas_of(deployment) == 0 and seen and not status.get("replicas")


def _stop_others(snapshot: Snapshot, wanted: str) -> Iterator[Action]:
    busy = {pod.revision for pod in snapshot.pods}
    for child in snapshot.own(snapshot.deployments):
        revision = revision_of(child)
        if revision == wanted or child.deleting:
            continue
        if replicas_of(child):
            yield Scale(child.name, child.uid, child.version, 0, f"Revision {revision} stops: the spec wants {wanted}.")
        elif _at_rest(child) and revision not in busy:
            yield Delete(child.name, child.uid, child.version, f"Revision {revision} has stopped.")


def _run_target(snapshot: Snapshot, target: Target, may_start: bool) -> Iterator[Action]:
    owner, replicas = owner_of(snapshot), target.spec.replicas
    present = _deployment(snapshot, target.name)
    runs = present is not None and replicas_of(present) > 0
    yield from _claim(snapshot, target)
    # The Service moves when the revision starts, not when it is ready: the earlier one is gone by then, and the new
    # pods become endpoints one by one as their readiness probe passes. A later move could only prolong the outage.
    moved = may_start or runs or snapshot.service is None
    selected = target.name if moved or snapshot.service is None else selected_revision(snapshot.service)
    yield from _apply(render_service(owner, selected), snapshot.service, f"Traffic goes to revision {selected}.")
    if may_start or runs:
        manifest = render_deployment(owner, target.name, target.revision, replicas)
        starts = bool(replicas) and not runs
        because = f"Revision {target.name} starts." if starts else f"Revision {target.name} is as the spec wants it."
        for action in _apply(manifest, present, because):
            yield replace(action, runs=target.name if replicas else "", starts=starts)


def _keep(snapshot: Snapshot, rejected: Rejected, active: str, may_start: bool) -> Iterator[Action]:
    """The spec is rejected: what has the traffic keeps it, with as many replicas as the spec says."""
    owner, present = owner_of(snapshot), _deployment(snapshot, active)
    if snapshot.service is None:
        yield from _apply(render_service(owner, active), None, f"Traffic goes to revision {active}.")
    if present is None or present.deleting or rejected.spec is None:
        return
    wanted, found = rejected.spec.replicas, replicas_of(present)
    if wanted != found and (found or may_start):
        because = f"Revision {active} goes on: the present spec is refused."
        runs = active if wanted else ""
        yield Scale(present.name, present.uid, present.version, wanted, because, runs, starts=bool(runs and not found))


def _deployment(snapshot: Snapshot, revision: str) -> ObjectFacts | None:
    own = snapshot.own(snapshot.deployments)
    return next((child for child in own if revision_of(child) == revision), None)


def _claim(snapshot: Snapshot, target: Target) -> Iterator[Action]:
    manifest = render_cache_claim(owner_of(snapshot), target.spec)
    if manifest is None:
        return
    found = snapshot.claim
    if found is None:
        yield Apply(manifest, "The compile cache needs a claim.", known=False)
        return
    # Of a claim that exists, only the size may grow; everything else is immutable and stays as it is.
    size = manifest["spec"]["resources"]["requests"]["storage"]
    present = ((found.manifest.get("spec") or {}).get("resources") or {}).get("requests", {}).get("storage", "0")
    if (quantity(size) or 0) > (quantity(str(present)) or 0) and not found.deleting:
        grown = {**found.manifest["spec"], "resources": {"requests": {"storage": size}}}
        kept = {key: grown[key] for key in ("accessModes", "storageClassName", "resources") if key in grown}
        yield Apply({**manifest, "spec": kept}, f"The compile cache grows to {size}.", known=True)


def _apply(manifest: Manifest, found: ObjectFacts | None, because: str) -> Iterator[Apply]:
    if found is not None and found.deleting:
        return
    if found is None or differs(manifest, found.manifest):
        yield Apply(manifest, because, known=found is not None)
