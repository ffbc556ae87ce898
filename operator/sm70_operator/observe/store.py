"""The cache: facts by the service that they belong to. Filled by kopf's indices, read when a snapshot is made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from sm70_operator.api import names
from sm70_operator.api.qualification import Evidence
from sm70_operator.observe.facts import NodeFacts, ObjectFacts, PodFacts
from sm70_operator.observe.proof import JobFacts
from sm70_operator.observe.revisions import RevisionFacts
from sm70_operator.observe.snapshot import Key, Resource, StoredResource


class Index(Protocol):
    """What the store needs of a kopf index: values by key, several for one key."""

    def __getitem__(self, key: Any, /) -> Iterable[Any]: ...

    def __contains__(self, key: object, /) -> bool: ...

    def __iter__(self) -> Iterator[Any]: ...


@dataclass(frozen=True)
class Store:
    """One consistent cache since one start of the watches. `nodes` None: they are not watched."""

    resources: Index
    deployments: Index
    pods: Index
    services: Index
    claims: Index
    nodes: Index | None
    revisions: Index
    jobs: Index
    evidence: Index
    """By namespace: whoever proved a key, it is proven."""

    def keys(self) -> list[Key]:
        """All services."""
        return sorted(self.resources)

    def resource(self, key: Key) -> Resource | None:
        found: list[StoredResource] = _of(self.resources, key)
        return found[0].read() if found else None

    def deployments_of(self, key: Key) -> tuple[ObjectFacts, ...]:
        found: list[ObjectFacts] = _of(self.deployments, key)
        return tuple(sorted(found, key=lambda child: child.name))

    def pods_of(self, key: Key) -> tuple[PodFacts, ...]:
        """The engines' pods."""
        found: list[PodFacts] = _of(self.pods, key)
        return tuple(sorted((pod for pod in found if pod.component == names.ENGINE_COMPONENT), key=_name))

    def job_pods_of(self, key: Key) -> tuple[PodFacts, ...]:
        found: list[PodFacts] = _of(self.pods, key)
        return tuple(sorted((pod for pod in found if pod.component != names.ENGINE_COMPONENT), key=_name))

    def revisions_of(self, key: Key) -> tuple[RevisionFacts, ...]:
        found: list[RevisionFacts] = _of(self.revisions, key)
        return tuple(sorted(found, key=lambda one: one.number))

    def jobs_of(self, key: Key) -> tuple[JobFacts, ...]:
        found: list[JobFacts] = _of(self.jobs, key)
        return tuple(sorted(found, key=lambda job: job.object.name))

    def evidence_of(self, key: Key) -> tuple[Evidence, ...]:
        """All evidence of the namespace."""
        found: list[Evidence] = _of(self.evidence, key.namespace)
        return tuple(sorted(found, key=lambda one: one.name))

    def service_of(self, key: Key) -> ObjectFacts | None:
        """The public Service: of the children with our label the one that has the service's own name."""
        found: list[ObjectFacts] = _of(self.services, key)
        return next((child for child in found if child.name == key.name), None)

    def candidate_of(self, key: Key) -> ObjectFacts | None:
        found: list[ObjectFacts] = _of(self.services, key)
        return next((child for child in found if child.name == names.candidate_name(key.name)), None)

    def claim_of(self, key: Key) -> ObjectFacts | None:
        found: list[ObjectFacts] = _of(self.claims, key)
        return next((child for child in found if child.name == names.compile_cache_name(key.name)), None)

    def all_nodes(self) -> tuple[NodeFacts, ...] | None:
        if self.nodes is None:
            return None
        return tuple(node for name in sorted(self.nodes) for node in self.nodes[name])

    def gpu_holders(self) -> tuple[PodFacts, ...]:
        """Pods of all services that have a node and GPUs."""
        every = (pod for key in self.pods for pod in self.pods[key])
        return tuple(pod for pod in every if pod.node and (pod.gpus or pod.claims))

    def pinned(self) -> dict[str, tuple[str, ...]]:
        """The uuids of every service that pins GPUs and wants a pod, by `namespace/name`."""
        return {str(key): one.pinned for key in self.resources for one in _of(self.resources, key) if one.pinned}

    def version_of(self, kind: str, key: Key, name: str) -> str | None:
        """The resourceVersion of one of the service's objects; empty: there is none. None: this kind is not watched."""
        match kind:
            case "Deployment":
                objects = self.deployments_of(key)
            case "Service":
                objects = tuple(_of(self.services, key))
            case "PersistentVolumeClaim":
                objects = tuple(_of(self.claims, key))
            case "ControllerRevision":
                objects = tuple(one.object for one in self.revisions_of(key))
            case "Job":
                objects = tuple(one.object for one in self.jobs_of(key))
            case names.QUALIFICATION_KIND:
                return next((one.version for one in self.evidence_of(key) if one.name == name), "")
            case _:
                return None
        return next((one.version for one in objects if one.name == name), "")


def _name(pod: PodFacts) -> str:
    return pod.name


def _of(index: Index, key: Any) -> list[Any]:
    return list(index[key]) if key in index else []
