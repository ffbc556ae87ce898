"""A model of API server, controllers and kubelet, just large enough to play a service's life in milliseconds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sm70_operator.act.status_writer import without_times
from sm70_operator.api import names
from sm70_operator.observe.facts import parse_object, parse_pod
from sm70_operator.observe.revisions import parse_revision
from sm70_operator.observe.snapshot import EngineAnswer, Resource, Snapshot
from sm70_operator.plan.plan import Action, Apply, Delete, Plan, Record, Scale
from sm70_operator.render.objects import Manifest
from unit.operator import builders


class StartedBesideAnotherError(AssertionError):
    """Two sets of GPUs would be in use."""


@dataclass
class World:
    """`limit` bounds how many of a plan's actions are done before the operator is killed."""

    resource: Resource = field(default_factory=builders.resource)
    deployments: dict[str, Manifest] = field(default_factory=dict)
    pods: dict[str, Manifest] = field(default_factory=dict)
    replicasets: dict[str, int] = field(default_factory=dict)
    """The replicas that each Deployment's ReplicaSet was told last."""
    service: Manifest | None = None
    candidate: Manifest | None = None
    claim: Manifest | None = None
    records: dict[str, Manifest] = field(default_factory=dict)
    writes: int = 0
    made: list[str] = field(default_factory=list)
    """Names of all objects that were ever made."""
    serial: int = 0

    def snapshot(self) -> Snapshot:
        """What a cache that is up to date would show."""
        pods = tuple(parse_pod(copy.deepcopy(pod)) for pod in self.pods.values())
        started = [pod for pod in pods if pod.container is not None and pod.container.started]
        return Snapshot(
            resource=self.resource,
            deployments=tuple(parse_object(copy.deepcopy(one)) for one in self.deployments.values()),
            pods=pods,
            service=None if self.service is None else parse_object(copy.deepcopy(self.service)),
            candidate=None if self.candidate is None else parse_object(copy.deepcopy(self.candidate)),
            revisions=tuple(parse_revision(copy.deepcopy(one)) for one in self.records.values()),
            nodes_hidden=True,
            claim=None if self.claim is None else parse_object(copy.deepcopy(self.claim)),
            answers={pod.uid: EngineAnswer(report=builders.report()) for pod in started},
        )

    def running(self) -> set[str]:
        """Revisions whose Deployments ask for pods."""
        return {_revision(one) for one in self.deployments.values() if one["spec"]["replicas"]}

    def holding(self) -> set[str]:
        """Revisions of which pods exist, whatever their state."""
        return {_pod_revision(pod) for pod in self.pods.values()}

    def act(self, plan: Plan, limit: int | None = None) -> None:
        """Does what the executor does with a plan, up to `limit` actions; then writes the status if that remains."""
        for action in plan.actions[:limit]:
            if isinstance(action, Apply | Scale) and action.runs and self._others({action.runs, *action.beside}):
                return  # the executor's fresh look: not yet
            if not self._as_seen(action):
                return  # the API server's: somebody changed it meanwhile
            self.writes += 1
            self._do(action)
        if limit is None or limit > len(plan.actions):
            self.write_status(plan)

    def write_status(self, plan: Plan) -> None:
        if plan.status is None:
            return
        wanted = plan.status.model_dump(mode="json", by_alias=True, exclude_none=True)
        if without_times(wanted) != without_times(self.resource.status):
            self.writes += 1
            self.edit(status=wanted)

    def edit(self, **changes: Any) -> None:
        """Changes the custom resource; a new spec is a new generation."""
        values = {name: getattr(self.resource, name) for name in Resource.__dataclass_fields__} | changes
        if "spec" in changes:
            values["generation"] = self.resource.generation + 1
        self.serial += 1
        self.resource = Resource(**values | {"version": str(self.serial)})

    def controllers(self) -> None:
        """Both controllers and the garbage collector, once each, nobody late."""
        self.deployment_controller()
        self.replicaset_controller()
        self.deployment_controller()

    def deployment_controller(self) -> None:
        """Passes the replicas on to the ReplicaSet and tells what is there."""
        for name, one in self.deployments.items():
            self.replicasets[name] = one["spec"]["replicas"]
            live = len(self._live(_revision(one)))
            status = {"observedGeneration": one["metadata"]["generation"]} | ({"replicas": live} if live else {})
            if one["status"] != status:
                one["status"] = status
                self._touch(one)

    def replicaset_controller(self) -> None:
        """Makes and ends pods by what it was told last; those without a Deployment are collected."""
        for name in set(self.replicasets) - set(self.deployments):
            del self.replicasets[name]
        for name, pod in list(self.pods.items()):
            if names.deployment_name(builders.KEY.name, _pod_revision(pod)) not in self.deployments:
                self._end(name, pod)
        for name, wanted in self.replicasets.items():
            revision = _revision(self.deployments[name])
            live = self._live(revision)
            for pod_name in live[wanted:]:
                self._end(pod_name, self.pods[pod_name])
            for _ in range(wanted - len(live)):
                self.serial += 1
                fresh = builders.pod(revision, f"pod-{self.serial}")
                self.pods[fresh["metadata"]["name"]] = fresh

    def _live(self, revision: str) -> list[str]:
        return [
            name
            for name, pod in self.pods.items()
            if _pod_revision(pod) == revision and "deletionTimestamp" not in pod["metadata"]
        ]

    def kubelet(self, choose: Callable[[list[str]], str] = min) -> bool:
        """One pod makes one step: it ends if it has to, else it serves. False if no pod has a step to make."""
        restless = sorted(
            name
            for name, pod in self.pods.items()
            if "deletionTimestamp" in pod["metadata"] or not pod["status"].get("containerStatuses")
        )
        if not restless:
            return False
        name = choose(restless)
        pod = self.pods[name]
        if "deletionTimestamp" in pod["metadata"]:
            del self.pods[name]
        else:
            self.pods[name] = builders.serving(_pod_revision(pod), name)
        return True

    def _as_seen(self, action: Action) -> bool:
        match action:
            case Apply(version=version):
                seen = self.service["metadata"]["resourceVersion"] if self.service is not None else ""
                return version in ("", seen)
            case Record(name=name):
                found = self.records.get(name)
            case Delete(kind="ControllerRevision", name=name):
                found = self.records.get(name)
            case Delete(kind="Service"):
                found = self.candidate
            case Scale(name=name) | Delete(name=name):
                found = self.deployments.get(name)
            case _:
                return True
        metadata = {} if found is None else found["metadata"]
        return (metadata.get("uid"), metadata.get("resourceVersion")) == (action.uid, action.version)

    def _touch(self, manifest: Manifest) -> None:
        self.serial += 1
        manifest["metadata"]["resourceVersion"] = str(self.serial)

    def _others(self, admitted: set[str]) -> bool:
        return bool((self.running() | self.holding()) - admitted)

    def _do(self, action: Action) -> None:
        match action:
            case Apply(manifest=manifest):
                self._apply(copy.deepcopy(manifest))
            case Scale(name=name, replicas=replicas):
                if name in self.deployments:
                    self.deployments[name]["spec"]["replicas"] = replicas
                    self.deployments[name]["metadata"]["generation"] += 1
                    self._touch(self.deployments[name])
            case Record(name=name, annotations=annotations):
                held = self.records[name]["metadata"].setdefault("annotations", {})
                held |= annotations
                self.records[name]["metadata"]["annotations"] = {k: v for k, v in held.items() if v is not None}
                self._touch(self.records[name])
            case Delete(kind="ControllerRevision", name=name):
                del self.records[name]
            case Delete(kind="Service"):
                self.candidate = None
            case Delete(name=name):
                gone = self.deployments.pop(name)
                assert gone["spec"]["replicas"] == 0, f"{name} was deleted while it was to run"
        if len(self.running()) > 1:
            raise StartedBesideAnotherError(f"{self.running()} after {action}")

    def _apply(self, manifest: Manifest) -> None:
        name, kind = manifest["metadata"]["name"], manifest["kind"]
        if self.resource.deleting:
            raise AssertionError(f"{kind} {name} was made while the service is being deleted")
        service = self.candidate if name == names.candidate_name(builders.KEY.name) else self.service
        record = self.records.get(name)
        found = {"Deployment": self.deployments.get(name), "Service": service, "ControllerRevision": record}
        known = found.get(kind, self.claim)
        self.serial += 1
        generation = (known["metadata"]["generation"] if known is not None else 0) + 1
        manifest["metadata"] |= {"uid": known["metadata"]["uid"] if known else f"uid-{self.serial}"}
        manifest["metadata"] |= {"generation": generation}
        self._touch(manifest)
        if known is None:
            self.made.append(name)
        if kind == "Deployment":
            manifest["status"] = (known or {}).get("status", {})
            self.deployments[name] = manifest
        elif kind == "ControllerRevision":
            self.records[name] = manifest
        elif kind == "Service" and name == names.candidate_name(builders.KEY.name):
            self.candidate = manifest
        elif kind == "Service":
            self.service = manifest
        else:
            self.claim = manifest

    def _end(self, name: str, pod: Manifest) -> None:
        if pod["status"].get("containerStatuses"):
            pod["metadata"]["deletionTimestamp"] = "2026-11-30T12:00:00Z"
        else:
            del self.pods[name]  # never started


def _pod_revision(pod: Manifest) -> str:
    return str(pod["metadata"]["labels"][names.REVISION_LABEL])


def _revision(manifest: Manifest) -> str:
    return str(manifest["metadata"]["labels"][names.REVISION_LABEL])
