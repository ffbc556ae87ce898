"""The snapshot: everything that the planner may know about one service, as one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from sm70_operator.api import names
from sm70_operator.api.qualification import Evidence
from sm70_operator.observe.facts import NodeFacts, ObjectFacts, PodFacts, Raw, packed, unpacked
from sm70_operator.observe.proof import JobFacts
from sm70_operator.observe.revisions import RevisionFacts
from sm70_profiles.report import AccelerationReport


@dataclass(frozen=True, order=True)
class Key:
    """The name of a service."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class Resource:
    """The custom resource as the API server has it; spec and status are not interpreted yet."""

    key: Key
    uid: str
    generation: int
    deleting: bool
    spec: Raw
    status: Raw
    version: str = ""
    """The resourceVersion, by which a cache that lags behind our own writes is recognised."""

    @classmethod
    def parse(cls, raw: Raw) -> Resource:
        metadata = raw["metadata"]
        return cls(
            key=Key(metadata["namespace"], metadata["name"]),
            uid=metadata.get("uid", ""),
            generation=int(metadata.get("generation") or 0),
            deleting="deletionTimestamp" in metadata,
            spec=raw.get("spec") or {},
            status=raw.get("status") or {},
            version=metadata.get("resourceVersion", ""),
        )


@dataclass(frozen=True)
class StoredResource:
    """A resource as the cache keeps it: packed, because only those that are looked at are read."""

    key: Key
    uid: str
    generation: int
    deleting: bool
    version: str
    pinned: tuple[str, ...]
    """The GPUs that it pins, if it wants a pod."""
    packed: bytes

    @classmethod
    def of(cls, resource: Resource) -> Self:
        return cls(
            key=resource.key,
            uid=resource.uid,
            generation=resource.generation,
            deleting=resource.deleting,
            version=resource.version,
            pinned=() if resource.deleting or resource.spec.get("replicas") == 0 else pinned_uuids(resource),
            packed=packed([resource.spec, resource.status]),
        )

    def read(self) -> Resource:
        spec, status = unpacked(self.packed)
        return Resource(self.key, self.uid, self.generation, self.deleting, spec, status, self.version)


def pinned_uuids(resource: Resource) -> tuple[str, ...]:
    """The uuids that a spec names; the spec is not interpreted yet."""
    uuids = (resource.spec.get("gpus") or {}).get("uuids")
    return tuple(one for one in uuids if isinstance(one, str)) if isinstance(uuids, list) else ()


@dataclass(frozen=True)
class CountWindow:
    """Dispatches of the newest stretch of time in which there were any."""

    seconds: int
    dispatches: int
    fallbacks: int
    resets: int = 0
    """How often the counters were seen to begin anew."""


@dataclass(frozen=True)
class EngineAnswer:
    """The last word of one pod: its report, or why there is none."""

    report: AccelerationReport | None = None
    error: str = ""
    phase: str = ""
    """A word of `api.types.StartupPhase` while the engine starts, where it tells."""
    progress: str = ""
    """How far a download is, for people."""
    done_bytes: int | None = None
    """What is there of a download."""
    window: CountWindow | None = None
    """What its counters did lately; None before they were read twice."""


@dataclass(frozen=True)
class UserDocument:
    """The ConfigMap entry that `profileRef` or `qualification.suiteRef` names: its text, or what is missing."""

    text: str | None = None
    missing: str = ""


@dataclass(frozen=True)
class NodeWords:
    """The newest event of a pod that the node is still preparing: the only place where a failing mount is told."""

    reason: str
    message: str


@dataclass(frozen=True)
class Snapshot:
    """Whoever plays the world in a test makes these; `answers` only of pods whose container has started.

    A revision's life in it: its ControllerRevision (`revisions`), its Deployment, its pods, their answers, the Jobs and
    evidence that judge it, and the public Service that selects it.
    """

    resource: Resource
    deployments: tuple[ObjectFacts, ...] = ()
    pods: tuple[PodFacts, ...] = ()
    """The engines' pods of every revision, also those that are ending; no pods of Jobs."""
    gone: PodFacts | None = None
    """The pod that went last, in its final state."""
    service: ObjectFacts | None = None
    """The public Service."""
    candidate: ObjectFacts | None = None
    """The Service of the revision under judgement."""
    revisions: tuple[RevisionFacts, ...] = ()
    jobs: tuple[JobFacts, ...] = ()
    job_pods: tuple[PodFacts, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    claim: ObjectFacts | None = None
    """The compile cache's claim, when the operator made it."""
    profile: UserDocument | None = None
    suite: UserDocument | None = None
    """The user's own suite, where the spec names one."""
    nodes: tuple[NodeFacts, ...] | None = None
    """None: the operator may not see nodes, or they were not asked for (`Plan.needs_nodes`)."""
    nodes_hidden: bool = False
    """The operator may not see nodes at all."""
    holders: tuple[PodFacts, ...] = ()
    """Pods of all services that hold GPUs."""
    pinned: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The GPUs that services pin, by `namespace/name`; empty where this service pins none."""
    answers: Mapping[str, EngineAnswer] = field(default_factory=dict)
    """By pod uid."""
    node_words: Mapping[str, NodeWords] = field(default_factory=dict)
    """By pod uid."""
    obstacle: str = ""
    """Why the API server refused the last action, in bounded printable text."""

    def own(self, children: tuple[ObjectFacts, ...]) -> tuple[ObjectFacts, ...]:
        """The children that this very object controls, not an earlier one of the same name."""
        return tuple(child for child in children if child.owner == self.resource.uid)


def replicas_of(deployment: ObjectFacts) -> int:
    """The replicas that a Deployment asks for."""
    value = deployment.manifest.get("spec", {}).get("replicas")
    return 1 if value is None else int(value)


def revision_of(child: ObjectFacts) -> str:
    """The revision that a child belongs to; empty for those that belong to none."""
    labels: Mapping[str, Any] = child.manifest.get("metadata", {}).get("labels") or {}
    return str(labels.get(names.REVISION_LABEL, ""))


def selected_revision(service: ObjectFacts) -> str:
    """The revision that a Service sends its traffic to; empty for none."""
    selector: Mapping[str, Any] = service.manifest.get("spec", {}).get("selector") or {}
    revision = str(selector.get(names.REVISION_LABEL, ""))
    return "" if revision == names.NO_REVISION else revision
