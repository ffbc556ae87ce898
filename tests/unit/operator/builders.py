"""Values for the operator's tests: a service, its pods and what their engines say."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from sm70_operator.api import names
from sm70_operator.api.conditions import Condition, ConditionType
from sm70_operator.observe.facts import parse_object, parse_pod
from sm70_operator.observe.revisions import Rejection, parse_revision
from sm70_operator.observe.snapshot import EngineAnswer, Key, Resource, Snapshot
from sm70_operator.plan.intent import Target, read_intent
from sm70_operator.plan.plan import Plan
from sm70_operator.plan.planner import plan
from sm70_operator.render.deployment import render_deployment
from sm70_operator.render.history import render_controller_revision
from sm70_operator.render.objects import Manifest, Owner
from sm70_operator.render.service import render_service
from sm70_operator.settings import Settings
from sm70_profiles.catalog import load_profile
from sm70_profiles.identity import digest
from sm70_profiles.report import AccelerationReport, CompileCacheReport, PathState, RouteCount, parse_report

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
UID = "11111111-1111-1111-1111-111111111111"
KEY = Key("serving", "tiny")
OWNER = Owner(KEY.namespace, KEY.name, UID)
IMAGE = "registry.test/engine-cpu:1"
PROFILE = "tiny_hybrid_reference"
SETTINGS = Settings(engine_image_cpu=IMAGE, judge_image="registry.test/operator:1", preflight=False)


def spec(**changes: Any) -> dict[str, Any]:
    """A spec that resolves; a change to None removes the member."""
    document: dict[str, Any] = {
        "profile": PROFILE,
        "model": {"persistentVolumeClaim": {"claimName": "models", "path": "tiny"}},
        "auth": {"allowAnonymous": True},
        "replicas": 1,
    }
    return {name: value for name, value in (document | changes).items() if value is not None}


def resource(document: dict[str, Any] | None = None, **changes: Any) -> Resource:
    fields: dict[str, Any] = {
        "key": KEY,
        "uid": UID,
        "generation": 1,
        "deleting": False,
        "spec": spec() if document is None else document,
        "status": {},
        "version": "1",
    }
    return Resource(**(fields | changes))


def target(document: dict[str, Any] | None = None) -> Target:
    """The revision that a spec resolves to."""
    intent = read_intent(Snapshot(resource(document)), SETTINGS)
    assert isinstance(intent, Target), intent
    return intent


def deployment(document: dict[str, Any] | None = None, replicas: int | None = None, **status: Any) -> Manifest:
    """The Deployment of a spec's revision as the API server would hold it, seen by its controller."""
    wanted = target(document)
    count = wanted.spec.replicas if replicas is None else replicas
    manifest = render_deployment(OWNER, wanted.name, wanted.revision, count)
    manifest["metadata"] |= {"uid": f"deployment-{wanted.name}", "generation": 1}
    return manifest | {"status": {"observedGeneration": 1, **({"replicas": count} if count else {}), **status}}


def service(revision: str | None, promoted_at: datetime | None = None) -> Manifest:
    manifest = render_service(OWNER, revision, "" if promoted_at is None else promoted_at.isoformat())
    manifest["metadata"] |= {"uid": "service", "resourceVersion": "7"}
    return manifest


def record(document: dict[str, Any] | None = None, number: int = 1, good: bool = True, **annotations: str) -> Manifest:
    """The ControllerRevision of a spec, proven unless said otherwise."""
    wanted = target(document)
    manifest = render_controller_revision(OWNER, wanted.name, wanted.revision, number, wanted.source)
    manifest["metadata"] |= {"uid": f"record-{wanted.name}", "resourceVersion": "5"}
    if good:
        manifest["metadata"]["annotations"][names.GOOD_ANNOTATION] = (NOW - timedelta(hours=1)).isoformat()
    manifest["metadata"]["annotations"] |= annotations
    return manifest


def rejected(document: dict[str, Any] | None = None, number: int = 2, spec: dict[str, Any] | None = None) -> Manifest:
    """The record of a revision that failed; `spec` is the one for which that holds, by default its own."""
    attempt = target(document if spec is None else spec).attempt
    words = Rejection("RouteDisabled", "`reference_gdn` is Disabled.", NOW - timedelta(minutes=5), attempt)
    return record(document, number, good=False, **{names.REJECTED_ANNOTATION: words.encode()})


def pod(revision: str, name: str = "pod-1", **status: Any) -> Manifest:
    """A raw pod of a revision, just created; `status` is the pod's, as Kubernetes writes it."""
    return {
        "metadata": {
            "name": name,
            "namespace": KEY.namespace,
            "uid": f"uid-{name}",
            "creationTimestamp": "2026-11-30T11:59:00Z",
            "labels": {**names.labels(KEY.name), **names.selector(KEY.name, revision)},
        },
        "spec": {
            "containers": [{"name": names.CONTAINER, "resources": {"limits": {"nvidia.com/gpu": "1", "memory": "6Gi"}}}]
        },
        "status": {"phase": "Pending", **status},
    }


def unscheduled(revision: str, message: str, name: str = "pod-1") -> Manifest:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return pod(revision, name, conditions=[condition])


def placed(revision: str, container: dict[str, Any], name: str = "pod-1", ready: bool = False) -> Manifest:
    """A pod on a node, with this status of its container."""
    raw = pod(
        revision,
        name,
        phase="Running",
        podIP="10.0.0.7",
        conditions=[
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": "2026-11-30T11:59:30Z"},
        ],
        containerStatuses=[
            {"name": names.CONTAINER, "containerID": "c://1", "restartCount": 0, "started": False, **container}
        ],
    )
    raw["spec"]["nodeName"] = "node-1"
    return raw


def serving(revision: str, name: str = "pod-1") -> Manifest:
    return placed(revision, {"started": True, "ready": True, "state": {"running": {}}}, name, ready=True)


def ended(code: int = 1, reason: str = "Error", message: str = "", waiting: str = "CrashLoopBackOff") -> dict[str, Any]:
    """A container that has ended and waits to be started again."""
    last = {"exitCode": code, "reason": reason, "message": message}
    return {"restartCount": 3, "state": {"waiting": {"reason": waiting}}, "lastState": {"terminated": last}}


def report(**changes: Any) -> AccelerationReport:
    """A report of the tiny profile with all its paths enabled."""
    profile = load_profile(PROFILE)
    document: dict[str, Any] = {
        "schemaVersion": 1,
        "engine": {"build": "0.1.0", "vllm": "0.32.0", "torch": "2.12.0"},
        "profile": {"name": PROFILE, "hash": digest(profile)},
        "device": {"name": "cpu", "count": 1, "uuids": ["GPU-1"], "uuidSource": "NVIDIA_VISIBLE_DEVICES"},
        "effective": {"argv": [], "envHash": "e"},
        "paths": [{"name": path, "expected": True, "state": "enabled"} for path in profile.expected_acceleration],
        "expectedAcceleration": list(profile.expected_acceleration),
        "summary": {"enabled": 3, "total": 3},
        "observedAt": "2026-11-30T11:59:59Z",
    }
    found = AccelerationReport.model_validate(document)
    found = found.model_copy(update=changes)
    return parse_report(found.model_dump_json(by_alias=True).encode())


def with_path(name: str, state: PathState, reason: str | None = None, message: str = "") -> AccelerationReport:
    """A report in which one expected path is in another state."""
    paths = tuple(
        path.model_copy(update={"state": state, "reason": reason, "message": message}) if path.name == name else path
        for path in report().paths
    )
    return report(paths=paths)


def with_routes(*routes: tuple[str, str, int, bool]) -> AccelerationReport:
    """A report with counters: route, stage, dispatches, fallback."""
    return report(
        routes=tuple(
            RouteCount.model_validate({"route": name, "stage": stage, "dispatches": count, "fallback": fallback})
            for name, stage, count, fallback in routes
        )
    )


def with_cache(enabled: bool = True, before: int | None = None, added: int | None = None) -> AccelerationReport:
    return report(compile_cache=CompileCacheReport(enabled=enabled, files_before=before, files_added=added))


def snapshot(
    deployments: list[Manifest] | None = None,
    pods: list[Manifest] | None = None,
    selected: str | None = None,
    records: list[Manifest] | None = None,
    answer: AccelerationReport | EngineAnswer | None = None,
    of: Resource | None = None,
    **more: Any,
) -> Snapshot:
    """A snapshot of raw objects; every pod gives the same answer. The operator sees no nodes unless some are given."""
    facts = tuple(parse_pod(one) for one in pods or [])
    said = EngineAnswer(report=answer) if isinstance(answer, AccelerationReport) else answer
    more = {"nodes_hidden": "nodes" not in more, **more}
    return Snapshot(
        resource=of or resource(),
        revisions=tuple(parse_revision(one) for one in records or []),
        deployments=tuple(parse_object(one) for one in deployments or []),
        pods=facts,
        service=None if selected is None else parse_object(service(selected)),
        answers={} if said is None else {one.uid: said for one in facts},
        **more,
    )


def running(document: dict[str, Any] | None = None, of: Resource | None = None, **more: Any) -> Snapshot:
    """A service whose one replica serves, and whose revision has proved good."""
    name = target(document).name
    more = {"answer": report(), "pods": [serving(name)], "records": [record(document)], **more}
    return snapshot([deployment(document)], selected=name, of=of or resource(document), **more)


def planned(world: Snapshot, seconds: float = 0) -> Plan:
    """The plan, so many seconds after NOW."""
    return plan(world, NOW + timedelta(seconds=seconds), SETTINGS)


def condition(found: Plan, kind: ConditionType) -> Condition:
    assert found.status is not None
    return next(one for one in found.status.conditions if one.type is kind)
