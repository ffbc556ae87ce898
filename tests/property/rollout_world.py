"""A model of API server, controllers, scheduler, kubelet, engines and judge, around the operator's real reconciler.

Only what is outside of the operator is a model; plan, executor and status writer are the real ones. Every request of
the operator can fail, be lost, or be its last one; its cache can be as old as one likes.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from math import ceil
from typing import Any, TypeVar

from sm70_operator.act.apply import Executor
from sm70_operator.act.client import ApiError, ApiServer, Raw
from sm70_operator.act.events import EventRecorder
from sm70_operator.act.status_writer import StatusWriter
from sm70_operator.api import names
from sm70_operator.api.qualification import parse_evidence
from sm70_operator.observe.facts import parse_node, parse_object, parse_pod
from sm70_operator.observe.proof import parse_job
from sm70_operator.observe.revisions import parse_revision
from sm70_operator.observe.snapshot import CountWindow, EngineAnswer, Key, Resource, StoredResource
from sm70_operator.observe.store import Store
from sm70_operator.runtime.metrics import Metrics
from sm70_operator.runtime.poller import Poller
from sm70_operator.runtime.reconciler import Reconciler, RetryError
from sm70_operator.settings import Settings
from sm70_profiles.qualification import Gate, QualificationReport, SuiteReference, Verdict
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.report import PathState
from sm70_profiles.termination import Termination, TerminationKind
from unit.operator import builders

T = TypeVar("T")
KEY = builders.KEY
CUSTOM = names.KIND
IMAGE_ID = f"registry.test/engine-cpu@sha256:{'a' * 64}"
GPU = "nvidia.com/gpu"
VARIABLE = "BEHAVIOUR"
"""A variable of the engine that says how it behaves; so each behaviour is a revision."""
SETTINGS = Settings(engine_image_cpu=builders.IMAGE, judge_image="registry.test/operator:1", resync_seconds=600)
ROUNDS = 250
REST = 5
"""Rounds in a row in which nothing happens; in them deadlines and bake times pass."""
MOST_SKEW = timedelta(minutes=5)


class Behaviour(StrEnum):
    GOOD = "Good"
    OTHER = "Other"
    """Good too, and another revision."""
    SLOW = "Slow"
    """Ends once by accident, then serves."""
    DISABLED = "Disabled"
    CRASHING = "Crashing"
    HANGING = "Hanging"
    WRONG = "Wrong"
    """Its answers fail the judge."""
    NOISY = "Noisy"
    """The judge can never decide."""
    FALLING_BACK = "FallingBack"
    UNREADABLE = "Unreadable"
    """The preflight finds that it cannot start."""


SOUND = frozenset({Behaviour.GOOD, Behaviour.OTHER, Behaviour.SLOW})


class Fault(StrEnum):
    """What may become of one request."""

    REFUSED = "Refused"
    """Not done; the answer is an error."""
    LOST = "Lost"
    """Done; the answer is lost."""
    CONFLICT = "Conflict"
    """Not done, because somebody else was faster."""
    KILLED_BEFORE = "KilledBefore"
    KILLED_AFTER = "KilledAfter"


class KilledError(BaseException):
    """The operator's process ends at this request."""


def play(coroutine: Any) -> Any:
    """The result of a coroutine that never really waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the operator waits for something that the model does not know")


Objects = dict[tuple[str, str], Raw]


@dataclass
class Etcd:
    """Objects by kind and name. A stored one is never changed in place: a copy of the dictionary is a snapshot."""

    clock: Callable[[], datetime]
    objects: Objects = field(default_factory=dict)
    serial: int = 0
    watch: Callable[[str, Raw | None, Raw], None] = lambda kind, before, after: None
    """Told of every write, before and after."""

    def put(self, kind: str, raw: Raw) -> Raw:
        name = raw["metadata"]["name"]
        before = self.objects.get((kind, name))
        self.serial += 1
        metadata = {"namespace": KEY.namespace, **raw["metadata"], "resourceVersion": str(self.serial)}
        if before is None:
            metadata.setdefault("uid", f"uid-{self.serial}")
            metadata.setdefault("creationTimestamp", self.clock().isoformat())
        generation = 1 if before is None else before["metadata"].get("generation", 1)
        changed = before is not None and before.get("spec") != raw.get("spec")
        metadata["generation"] = generation + (1 if changed else 0)
        after = {**raw, "metadata": metadata}
        self.objects[kind, name] = after
        self.watch(kind, before, after)
        return after

    def change(self, kind: str, name: str, **members: Any) -> None:
        """New members of an object that exists."""
        found = self.objects[kind, name]
        self.put(kind, {**copy.deepcopy(found), **members})

    def remove(self, kind: str, name: str) -> None:
        self.objects.pop((kind, name), None)

    def of(self, kind: str) -> list[Raw]:
        return [raw for (found, _), raw in sorted(self.objects.items()) if found == kind]


def merged(old: Any, new: Any) -> Any:
    """A JSON merge patch."""
    if not isinstance(new, Mapping):
        return new
    found = dict(old) if isinstance(old, Mapping) else {}
    for key, value in new.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merged(found.get(key), value)
    return found


class ModelApi(ApiServer):
    """The API server as the operator meets it. `fault` decides about the request of this number."""

    def __init__(self, etcd: Etcd) -> None:
        self.etcd = etcd
        self.requests = 0
        self.fault: Callable[[int], Fault | None] = lambda number: None
        self.observe = lambda verb, kind, code: None

    def _do(self, change: Callable[[], T]) -> T:
        fault = self.fault(self.requests)
        self.requests += 1
        if fault is Fault.KILLED_BEFORE:
            raise KilledError
        if fault is Fault.REFUSED:
            raise ApiError(500, "simulated: internal error")
        if fault is Fault.CONFLICT:
            raise ApiError(409, "simulated: the object has been modified")
        done = change()
        if fault is Fault.KILLED_AFTER:
            raise KilledError
        if fault is Fault.LOST:
            raise ApiError(0, "simulated: no answer")
        return done

    async def get(self, kind: str, namespace: str, name: str) -> Raw | None:
        return self._do(lambda: copy.deepcopy(self.etcd.objects.get((kind, name))))

    async def list(self, kind: str, namespace: str, **selectors: str) -> list[Raw]:
        return self._do(lambda: copy.deepcopy(self.etcd.of(kind)))

    async def create(self, kind: str, namespace: str, body: Raw) -> Raw:
        return self._do(lambda: body)  # events only, which nobody reads

    async def apply(self, kind: str, namespace: str, name: str, body: Raw, manager: str, subresource: str = "") -> Raw:
        return self._do(lambda: self._apply(kind, name, body, subresource))

    def _apply(self, kind: str, name: str, body: Raw, subresource: str) -> Raw:
        found = self.etcd.objects.get((kind, name))
        wanted = body["metadata"]
        if found is None and (subresource or "resourceVersion" in wanted):
            raise ApiError(404, "not found")
        if found is not None:
            self._compare(found, wanted)
            if "deletionTimestamp" in found["metadata"] and not subresource:
                raise ApiError(409, "the object is being deleted")
        if subresource:
            assert found is not None
            return self.etcd.put(kind, {**copy.deepcopy(found), "status": body["status"]})
        service = self.etcd.objects.get((CUSTOM, KEY.name))
        if service is None or "deletionTimestamp" in service["metadata"]:
            raise AssertionError(f"{kind} {name} was made while the service is being deleted")
        fresh = copy.deepcopy(body)
        if found is not None:
            fresh["metadata"] = {**found["metadata"], **wanted}
            fresh["status"] = found.get("status", {})
        return self.etcd.put(kind, fresh)

    async def merge(self, kind: str, namespace: str, name: str, body: Raw, manager: str) -> Raw:
        return self._do(lambda: self._merge(kind, name, body))

    def _merge(self, kind: str, name: str, body: Raw) -> Raw:
        found = self.etcd.objects.get((kind, name))
        if found is None:
            raise ApiError(404, "not found")
        self._compare(found, body.get("metadata", {}))
        return self.etcd.put(kind, merged(copy.deepcopy(found), copy.deepcopy(body)))

    async def delete(self, kind: str, namespace: str, name: str, uid: str, version: str) -> None:
        self._do(lambda: self._delete(kind, name, uid, version))

    def _delete(self, kind: str, name: str, uid: str, version: str) -> None:
        found = self.etcd.objects.get((kind, name))
        if found is None:
            raise ApiError(404, "not found")
        self._compare(found, {"uid": uid, "resourceVersion": version})
        self.etcd.remove(kind, name)

    @staticmethod
    def _compare(found: Raw, wanted: Mapping[str, Any]) -> None:
        for member in ("uid", "resourceVersion"):
            if wanted.get(member) and wanted[member] != found["metadata"][member]:
                raise ApiError(409, f"another {member}")


class ModelPoller(Poller):
    """The last word of every engine, from the model."""

    def __init__(self, answers: Callable[[], Mapping[str, EngineAnswer]]) -> None:
        self._answers_now = answers

    def follow(self, key: Key, pods: Any) -> bool:
        return True

    def answers(self, key: Key) -> Mapping[str, EngineAnswer]:
        return self._answers_now()

    def forget(self, key: Key) -> None:
        pass


@dataclass
class World:
    """One service in one cluster with `sets` GPU sets."""

    spec: Raw
    sets: int = 1
    now: datetime = builders.NOW
    skew: timedelta = timedelta()
    """By how much the operator's clock is ahead of everybody else's."""
    patience: int = 0
    """More rounds of rest: a deadline that counts from a time that is still to come ends later."""

    def __post_init__(self) -> None:
        self.etcd = Etcd(lambda: self.now)
        self.api = ModelApi(self.etcd)
        self.told: dict[str, int] = {}
        """The replicas that each Deployment's ReplicaSet was told last."""
        self.accidents: set[str] = set()
        """Revisions whose first accident has happened."""
        self.degraded: set[str] = set()
        """Pods of which an expected path went off while they ran."""
        self.promotions: list[tuple[str, Objects]] = []
        """Revisions that got the traffic, with the world at that moment."""
        self._parsed: dict[tuple[str, str, str], Any] = {}
        self.etcd.watch = self._watch
        self.restart()
        self.create()

    def resumed(self) -> World:
        """Another world that goes on from here, with a new process of the operator."""
        twin = World(self.spec, self.sets, self.now, self.skew, self.patience)
        twin.etcd.objects, twin.etcd.serial = dict(self.etcd.objects), self.etcd.serial
        twin.told, twin.accidents, twin.degraded = dict(self.told), set(self.accidents), set(self.degraded)
        twin.promotions = list(self.promotions)
        twin._parsed = dict(self._parsed)  # what is parsed later is another object under the same version
        return twin

    # The user

    def create(self) -> None:
        self.etcd.put(CUSTOM, {"metadata": {"name": KEY.name}, "spec": copy.deepcopy(self.spec), "status": {}})

    def edit(self, **spec: Any) -> None:
        found = self.etcd.objects[CUSTOM, KEY.name]
        self.etcd.change(CUSTOM, KEY.name, spec={**copy.deepcopy(found["spec"]), **spec})

    def behave(self, behaviour: Behaviour) -> None:
        self.edit(env=[{"name": VARIABLE, "value": str(behaviour)}])

    def lose_status(self) -> None:
        self.etcd.change(CUSTOM, KEY.name, status={})

    # The operator

    def set_clock(self, skew: timedelta) -> None:
        """The operator's clock, which others do not share; again and again, by `MOST_SKEW` at most."""
        self.skew, self.patience = skew, ceil(2 * MOST_SKEW / timedelta(seconds=40))

    def restart(self) -> None:
        """A new process, which remembers nothing."""
        self._seen: Objects = self.etcd.objects
        self.reconciler = Reconciler(
            api=self.api,
            executor=Executor(self.api, lambda: True),
            status_writer=StatusWriter(self.api),
            events=EventRecorder(self.api, "model", lambda: True),
            poller=ModelPoller(self.answers),
            store=lambda: self._store(self._seen),
            settings=SETTINGS,
            metrics=METRICS,
            may_act=lambda: True,
            clock=lambda: self.now + self.skew,
        )

    def look(self, seen: Objects | None = None) -> bool:
        """One look at the world, or at an older one. True if it changed anything."""
        self._seen = dict(self.etcd.objects) if seen is None else seen
        before = self.etcd.serial
        objects = set(self.etcd.objects)
        try:
            play(self.reconciler.reconcile(KEY))
        except (RetryError, ApiError):
            pass
        except KilledError:
            self.restart()
        return self.etcd.serial != before or set(self.etcd.objects) != objects

    def _store(self, objects: Objects) -> Store:
        custom = objects.get((CUSTOM, KEY.name))
        of: dict[str, list[Any]] = {}
        for (kind, _), raw in objects.items():
            if kind in _PARSERS:
                of.setdefault(kind, []).append(self._parse(kind, raw))
        nodes = [self._node(number) for number in range(self.sets)]
        return Store(
            resources={} if custom is None else {KEY: [StoredResource.of(Resource.parse(custom))]},
            deployments={KEY: of.get("Deployment", [])},
            pods={KEY: of.get("Pod", [])},
            services={KEY: of.get("Service", [])},
            claims={},
            nodes={node.name: [node] for node in nodes},
            revisions={KEY: of.get("ControllerRevision", [])},
            jobs={KEY: of.get("Job", [])},
            evidence={KEY.namespace: [one for one in of.get(names.QUALIFICATION_KIND, []) if one is not None]},
        )

    def _parse(self, kind: str, raw: Raw) -> Any:
        key = (kind, raw["metadata"]["name"], raw["metadata"]["resourceVersion"])
        if key not in self._parsed:
            self._parsed[key] = _PARSERS[kind](raw)
        return self._parsed[key]

    def _node(self, number: int) -> Any:
        raw = {
            "metadata": {
                "name": f"node-{number}",
                "labels": {names.GPU_PRODUCT_LABEL: "Tesla-V100-SXM2-16GB", names.GPU_MEMORY_LABEL: "16384"},
            },
            "status": {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {GPU: "1"}},
        }
        return parse_node(raw)

    # The controllers

    def controllers(self) -> bool:
        """Each once, nobody late. True if anything changed."""
        before = self.etcd.serial
        objects = set(self.etcd.objects)
        self.deployment_controller()
        self.replicaset_controller()
        self.deployment_controller()
        self.collector()
        self.scheduler()
        return self.etcd.serial != before or set(self.etcd.objects) != objects

    def deployment_controller(self) -> None:
        for one in self.etcd.of("Deployment"):
            name = one["metadata"]["name"]
            self.told[name] = one["spec"]["replicas"]
            live = len(self._live(name))
            status = {"observedGeneration": one["metadata"]["generation"]} | ({"replicas": live} if live else {})
            if one.get("status") != status:
                self.etcd.change("Deployment", name, status=status)

    def replicaset_controller(self) -> None:
        deployments = {one["metadata"]["name"]: one for one in self.etcd.of("Deployment")}
        for name in set(self.told) - set(deployments):
            del self.told[name]
        for pod in self.etcd.of("Pod"):
            owner = pod["metadata"].get("of", "")
            if owner and owner not in deployments:
                self._end(pod)
        for name, wanted in self.told.items():
            live = self._live(name)
            for pod in live[wanted:]:
                self._end(pod)
            for _ in range(wanted - len(live)):
                self._make(deployments[name])

    def _make(self, deployment: Raw) -> None:
        template = deployment["spec"]["template"]
        name = f"{deployment['metadata']['name']}-{self.etcd.serial}"
        metadata = {"name": name, "labels": template["metadata"]["labels"], "of": deployment["metadata"]["name"]}
        self.etcd.put("Pod", {"metadata": metadata, "spec": template["spec"], "status": {"phase": "Pending"}})

    def _live(self, deployment: str) -> list[Raw]:
        pods = [pod for pod in self.etcd.of("Pod") if pod["metadata"].get("of") == deployment]
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def _end(self, pod: Raw) -> None:
        name = pod["metadata"]["name"]
        if not pod["spec"].get("nodeName"):
            self.etcd.remove("Pod", name)
        elif "deletionTimestamp" not in pod["metadata"]:
            self.etcd.change("Pod", name, metadata={**pod["metadata"], "deletionTimestamp": self.now.isoformat()})

    def collector(self) -> None:
        """What belongs to a service that is gone, goes."""
        custom = self.etcd.objects.get((CUSTOM, KEY.name))
        if custom is not None and "deletionTimestamp" in custom["metadata"]:
            self.etcd.remove(CUSTOM, KEY.name)
            custom = None
        uid = custom["metadata"]["uid"] if custom is not None else ""
        for (kind, name), raw in list(self.etcd.objects.items()):
            owners = [one["uid"] for one in raw["metadata"].get("ownerReferences") or ()]
            if owners and uid not in owners:
                self.etcd.remove(kind, name)

    def scheduler(self) -> None:
        engines = [pod for pod in self.etcd.of("Pod") if self._is_engine(pod)]
        taken = {pod["spec"]["nodeName"] for pod in engines if pod["spec"].get("nodeName")}
        free = [node for node in (f"node-{number}" for number in range(self.sets)) if node not in taken]
        for pod in engines:
            name = pod["metadata"]["name"]
            if pod["spec"].get("nodeName") or "deletionTimestamp" in pod["metadata"]:
                continue
            if free:
                conditions = [{"type": "PodScheduled", "status": "True"}]
                status = {"phase": "Pending", "conditions": conditions}
                self.etcd.change("Pod", name, spec={**pod["spec"], "nodeName": free.pop(0)}, status=status)
            elif not pod["status"].get("conditions"):
                text = f"0/{self.sets} nodes are available: {self.sets} Insufficient {GPU}."
                condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text}
                self.etcd.change("Pod", name, status={"phase": "Pending", "conditions": [condition]})

    # The kubelet and the engines

    def kubelet(self, choose: Callable[[list[str]], str] = min) -> bool:
        """One pod or Job makes one step. False if none has one to make."""
        restless = [pod["metadata"]["name"] for pod in self.etcd.of("Pod") if self._restless(pod)]
        restless += [f"job/{job['metadata']['name']}" for job in self.etcd.of("Job") if not _ended(job)]
        if not restless:
            return False
        name = choose(sorted(restless))
        if name.startswith("job/"):
            self._finish(name.removeprefix("job/"))
        else:
            self._step(self.etcd.objects["Pod", name])
        return True

    def _is_engine(self, pod: Raw) -> bool:
        return bool(pod["metadata"].get("of"))

    def _restless(self, pod: Raw) -> bool:
        if not self._is_engine(pod):
            return False
        if "deletionTimestamp" in pod["metadata"]:
            return True
        statuses = pod["status"].get("containerStatuses")
        if not pod["spec"].get("nodeName"):
            return False
        if not statuses:
            return True
        started, behaviour = statuses[0]["started"], self.behaviour(pod)
        if started:
            return bool(statuses[0]["ready"] and not self._ready(pod))
        if behaviour is Behaviour.CRASHING:
            return bool(statuses[0]["restartCount"] < 3)
        return behaviour is not Behaviour.HANGING

    def _step(self, pod: Raw) -> None:
        name, behaviour = pod["metadata"]["name"], self.behaviour(pod)
        statuses = pod["status"].get("containerStatuses")
        if "deletionTimestamp" in pod["metadata"]:
            self.etcd.remove("Pod", name)
        elif not statuses:
            self._show(pod, started=False, ready=False)
        elif behaviour is Behaviour.CRASHING:
            self._show(pod, started=False, ready=False, restarts=statuses[0]["restartCount"] + 1, died=True)
        elif behaviour is Behaviour.SLOW and _revision(pod) not in self.accidents:
            self.accidents.add(_revision(pod))
            self._show(pod, started=False, ready=False, restarts=1, died=True)
        else:
            self._show(pod, started=True, ready=self._ready(pod), restarts=statuses[0]["restartCount"])

    def _show(self, pod: Raw, started: bool, ready: bool, restarts: int = 0, died: bool = False) -> None:
        ready_condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": self.now.isoformat()}
        state: Raw = {"running": {}}
        last: Raw = {}
        if died:
            state = {"waiting": {"reason": "CrashLoopBackOff"}}
            last = {"terminated": {"exitCode": 1, "reason": "Error", "message": "", "finishedAt": self.now.isoformat()}}
        container = {
            "name": names.CONTAINER,
            "containerID": f"c://{pod['metadata']['name']}/{restarts}",
            "imageID": IMAGE_ID,
            "restartCount": restarts,
            "started": started,
            "ready": ready,
            "state": state,
            "lastState": last,
        }
        status = {
            "phase": "Running",
            "podIP": "10.0.0.7",
            "conditions": [{"type": "PodScheduled", "status": "True"}, ready_condition],
            "containerStatuses": [container],
        }
        self.etcd.change("Pod", pod["metadata"]["name"], status=status)

    def _ready(self, pod: Raw) -> bool:
        """The readiness probe, by the engine's own copy of the policy."""
        policy = json.loads(_variables(pod)["SM70_SERVE_REQUEST"])["acceleration"]
        return self._accelerated(pod) or policy.get("policy") == "Report" or bool(policy.get("allowDisabled"))

    def _accelerated(self, pod: Raw) -> bool:
        return self.behaviour(pod) is not Behaviour.DISABLED and pod["metadata"]["name"] not in self.degraded

    def behaviour(self, pod: Raw) -> Behaviour:
        return Behaviour(_variables(pod).get(VARIABLE, str(Behaviour.GOOD)))

    def behaviour_of(self, revision: str, objects: Objects | None = None) -> Behaviour | None:
        """By what its Deployment renders."""
        found = (objects or self.etcd.objects).get(("Deployment", names.deployment_name(KEY.name, revision)))
        return None if found is None else self.behaviour({"spec": found["spec"]["template"]["spec"]})

    def answers(self) -> dict[str, EngineAnswer]:
        found = {}
        for pod in self.etcd.of("Pod"):
            statuses = pod["status"].get("containerStatuses")
            if not self._is_engine(pod) or not statuses or not statuses[0]["started"]:
                continue
            report = DISABLED_REPORT if not self._accelerated(pod) else GOOD_REPORT
            window = None
            if self.behaviour(pod) is Behaviour.FALLING_BACK and self.selected() == _revision(pod):
                window = CountWindow(seconds=60, dispatches=100, fallbacks=50)
            found[pod["metadata"]["uid"]] = EngineAnswer(report=report, window=window)
        return found

    def _finish(self, name: str) -> None:
        """A Job's pod says its last words, and the Job ends."""
        job = self.etcd.objects["Job", name]
        labels = job["metadata"]["labels"]
        revision = labels[names.FOR_REVISION_LABEL]
        if labels[names.COMPONENT_LABEL] == names.PREFLIGHT_COMPONENT:
            behaviour = self.behaviour({"spec": job["spec"]["template"]["spec"]})
            message = _preflight_words(behaviour)
        else:
            found = self.behaviour_of(revision)
            message = b"" if found is None else _verdict_words(found)
        terminated = {"exitCode": 0, "reason": "Completed", "message": message.decode()}
        pod = {
            "metadata": {"name": f"{name}-x", "labels": job["spec"]["template"]["metadata"]["labels"]},
            "spec": {"containers": [{"name": names.JOB_CONTAINER}]},
            "status": {
                "phase": "Succeeded",
                "containerStatuses": [{"name": names.JOB_CONTAINER, "state": {"terminated": terminated}}],
            },
        }
        pod["metadata"]["ownerReferences"] = job["metadata"]["ownerReferences"]
        self.etcd.put("Pod", pod)
        condition = {"type": "Complete", "status": "True", "lastTransitionTime": self.now.isoformat()}
        self.etcd.change("Job", name, status={"conditions": [condition]})

    # What is to be seen

    @property
    def status(self) -> Raw:
        found: Raw = self.etcd.objects[CUSTOM, KEY.name].get("status") or {}
        return found

    def condition(self, kind: str) -> Raw:
        found: Raw = next(one for one in self.status["conditions"] if one["type"] == kind)
        return found

    def selected(self) -> str:
        """The revision that has the public traffic."""
        return _selected(self.etcd.objects)

    def holding(self) -> set[str]:
        """Revisions of which engines exist on nodes."""
        pods = [pod for pod in self.etcd.of("Pod") if self._is_engine(pod) and pod["spec"].get("nodeName")]
        return {_revision(pod) for pod in pods}

    def serving(self) -> set[str]:
        """Behaviours that public traffic reaches now."""
        return {
            str(self.behaviour(pod))
            for pod in self.etcd.of("Pod")
            if self._is_engine(pod) and _revision(pod) == self.selected() and _is_ready(pod)
        }

    def _watch(self, kind: str, before: Raw | None, after: Raw) -> None:
        if kind != "Service" or after["metadata"]["name"] != KEY.name:
            return
        revision = _selected({("Service", KEY.name): after})
        earlier = "" if before is None else _selected({("Service", KEY.name): before})
        if revision and revision != earlier:
            self.promotions.append((revision, dict(self.etcd.objects)))

    def settle(
        self, steps: Callable[[], None] = lambda: None, seen: Callable[[], Objects | None] = lambda: None
    ) -> int:
        """Everybody does what there is to do, and time passes, until nothing happens any more. Returns the rounds.

        `seen`: what the operator's cache holds at a look; None: the present.
        """
        quiet = 0
        for number in range(ROUNDS):
            moved = self.look(seen())
            moved = self.controllers() or moved
            moved = self.kubelet() or moved
            steps()
            quiet = 0 if moved else quiet + 1
            # Deadlines and bake times pass only when nothing else happens.
            self.now += timedelta(seconds=1 if moved else 40)
            if quiet == REST + self.patience:
                return number
        raise AssertionError(f"no rest within {ROUNDS} rounds: {self.status.get('conditions')}")


METRICS = Metrics()
GOOD_REPORT = builders.report()
DISABLED_REPORT = builders.with_path("reference_gdn", PathState.DISABLED, "operator_missing:gdn")
_PARSERS: dict[str, Callable[[Raw], Any]] = {
    "Deployment": parse_object,
    "Service": parse_object,
    "Pod": parse_pod,
    "ControllerRevision": parse_revision,
    "Job": parse_job,
    names.QUALIFICATION_KIND: parse_evidence,
}


def _selected(objects: Objects) -> str:
    service = objects.get(("Service", KEY.name))
    revision = str((service or {}).get("spec", {}).get("selector", {}).get(names.REVISION_LABEL, ""))
    return "" if revision == names.NO_REVISION else revision


def _revision(raw: Raw) -> str:
    return str(raw["metadata"]["labels"].get(names.REVISION_LABEL, ""))


def _is_ready(pod: Raw) -> bool:
    statuses = pod["status"].get("containerStatuses") or [{}]
    return bool(statuses[0].get("ready")) and "deletionTimestamp" not in pod["metadata"]


def _variables(pod: Raw) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in pod["spec"]["containers"][0].get("env") or ()}


def _ended(job: Raw) -> bool:
    return bool((job.get("status") or {}).get("conditions"))


def _preflight_words(behaviour: Behaviour) -> bytes:
    bad = behaviour is Behaviour.UNREADABLE
    reason = TerminationReason.PATH_NOT_FOUND if bad else TerminationReason.PASSED
    return Termination(kind=TerminationKind.PREFLIGHT, reason=reason, message="simulated").encode()


def _verdict_words(behaviour: Behaviour) -> bytes:
    verdict = {Behaviour.WRONG: Verdict.FAILED, Behaviour.NOISY: Verdict.INCONCLUSIVE}.get(behaviour, Verdict.PASSED)
    gate = Gate(name="model", verdict=verdict, measured="0", threshold="0", samples=1)
    return QualificationReport(
        schema_version=1,
        suite=SuiteReference(name="smoke", version=1, digest="0" * 64),
        tool_version="1",
        started_at="2026-11-30T12:00:00Z",
        finished_at="2026-11-30T12:01:00Z",
        verdict=verdict,
        gates=(gate,),
        raw_digest="0" * 64,
    ).encode()
