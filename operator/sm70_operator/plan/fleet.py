"""The revisions of a service as the world has them: which ask for pods, which have any, which has the traffic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sm70_operator.observe.facts import ObjectFacts, PodFacts
from sm70_operator.observe.revisions import Rejection, RevisionFacts
from sm70_operator.observe.snapshot import Snapshot, replicas_of, revision_of, selected_revision
from sm70_operator.render.objects import Owner
from sm70_operator.render.revision import Revision


@dataclass(frozen=True)
class Member:
    """One revision: its record, its Deployment and its pods, each of which may be missing."""

    name: str
    record: RevisionFacts | None = None
    deployment: ObjectFacts | None = None
    pods: tuple[PodFacts, ...] = ()
    """Those that have not ended for good; also those that are ending."""

    @property
    def asks(self) -> bool:
        """Its Deployment asks for pods."""
        return self.deployment is not None and replicas_of(self.deployment) > 0

    @property
    def at_rest(self) -> bool:
        """Nothing of it holds a GPU, and nothing of it will without our doing."""
        return not self.pods and (self.deployment is None or _controller_has_stopped(self.deployment))

    @property
    def live(self) -> tuple[PodFacts, ...]:
        """Pods that are to stay."""
        return tuple(pod for pod in self.pods if not pod.deleting)

    @property
    def document(self) -> Revision | None:
        """What it renders to its pods from; None where it is not recorded, or cannot be read by this version."""
        return None if self.record is None else self.record.document

    @property
    def rejection(self) -> Rejection | None:
        return None if self.record is None else self.record.rejection

    @property
    def can_run(self) -> bool:
        return (self.deployment is not None and not self.deployment.deleting) or self.document is not None


@dataclass(frozen=True)
class Fleet:
    """All revisions of a service by name. `active` has the public traffic; None: nobody has it."""

    members: Mapping[str, Member]
    active: str | None
    last_good: str | None
    earlier: tuple[str, ...]
    """Revisions of a service of the same name that was deleted a moment ago, whose objects still exist."""

    def __getitem__(self, name: str) -> Member:
        return self.members.get(name, Member(name))

    @property
    def busy(self) -> frozenset[str]:
        """Revisions that hold GPUs or may do so in a moment."""
        return frozenset(name for name, member in self.members.items() if not member.at_rest)


def base_of(fleet: Fleet) -> str | None:
    """The revision that serves without the target: the one with the traffic, or the last good one if that failed."""
    if fleet.active is not None and fleet[fleet.active].rejection is None and fleet[fleet.active].can_run:
        return fleet.active
    return fleet.last_good


def fallback_of(fleet: Fleet, name: str) -> str | None:
    """What may return when this revision fails."""
    base = base_of(fleet)
    if base is not None and base != name:
        return base
    return fleet.last_good if fleet.last_good != name else None


def owner_of(snapshot: Snapshot) -> Owner:
    """The owner of everything that is made for the service."""
    key = snapshot.resource.key
    return Owner(namespace=key.namespace, name=key.name, uid=snapshot.resource.uid)


def fleet_of(snapshot: Snapshot) -> Fleet:
    """The fleet that a snapshot shows."""
    records = {one.name: one for one in snapshot.revisions if _ours(one.object, snapshot) and not one.object.deleting}
    deployments = {revision_of(child): child for child in snapshot.own(snapshot.deployments)}
    pods: dict[str, list[PodFacts]] = {}
    for pod in snapshot.pods:
        if not pod.ended:
            pods.setdefault(pod.revision, []).append(pod)
    members = {
        name: Member(name, records.get(name), deployments.get(name), tuple(pods.get(name, ())))
        for name in sorted({*records, *deployments, *pods})
    }
    return Fleet(members, _active(snapshot, members), _last_good(members.values()), _earlier(snapshot))


def _ours(child: ObjectFacts, snapshot: Snapshot) -> bool:
    return child.owner == snapshot.resource.uid


def _active(snapshot: Snapshot, members: Mapping[str, Member]) -> str | None:
    """The Service says so. Where somebody has deleted it, the one revision that runs and is not rejected."""
    if snapshot.service is not None and _ours(snapshot.service, snapshot):
        return selected_revision(snapshot.service) or None
    proven = [one.name for one in members.values() if one.asks and one.record is not None and one.record.good_since]
    return proven[0] if len(proven) == 1 else None


def _last_good(members: Iterable[Member]) -> str | None:
    good = [
        (member.record.good_since, member.record.number, member.name)
        for member in members
        if member.record is not None
        and member.record.good_since is not None
        and member.rejection is None
        and member.can_run
    ]
    return max(good)[2] if good else None


def _earlier(snapshot: Snapshot) -> tuple[str, ...]:
    children = [child for child in (snapshot.service, snapshot.claim, *snapshot.deployments) if child is not None]
    children += [one.object for one in snapshot.revisions]
    found = {
        revision_of(child) or "of an earlier service"
        for child in children
        if child.owner not in ("", snapshot.resource.uid)
    }
    return tuple(sorted(found))


def _controller_has_stopped(deployment: ObjectFacts) -> bool:
    """The Deployment asks for no pods, and its controller has seen that."""
    manifest = deployment.manifest
    status, metadata = manifest.get("status") or {}, manifest.get("metadata", {})
    seen = int(status.get("observedGeneration") or 0) >= int(metadata.get("generation") or 0)
    return replicas_of(deployment) == 0 and seen and not status.get("replicas")
