"""What goes wrong ends in one condition with a reason, what was found and a next step; and Ready repeats it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest

from sm70_operator.api.conditions import MEANINGS, ConditionStatus, ConditionType, Reason
from sm70_operator.observe.facts import NodeFacts, PodFacts, parse_pod
from sm70_operator.observe.snapshot import CountWindow, EngineAnswer, NodeWords, Snapshot, UserDocument
from sm70_operator.plan.planner import plan
from sm70_operator.settings import Settings
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.report import PathState
from sm70_profiles.termination import Termination, TerminationKind
from unit.operator.builders import (
    NOW,
    SETTINGS,
    condition,
    deployment,
    ended,
    placed,
    planned,
    pod,
    record,
    report,
    resource,
    running,
    serving,
    snapshot,
    spec,
    target,
    unscheduled,
    with_cache,
    with_path,
    with_routes,
)

NAME = target().name
ENGINES_REMEDY = "Do this."
IMAGELESS = SETTINGS.model_copy(update={"engine_image_cpu": ""})
TAKEN = ("gdn_reference", "decode", 9, False)
GPU = "nvidia.com/gpu"
NODES = (
    NodeFacts("node-1", "Tesla-V100-SXM2-16GB", 16384, True, {GPU: 4}),
    NodeFacts("node-2", "Tesla-V100-SXM2-16GB", 16384, True, {GPU: 2}),
    NodeFacts("node-3"),
)
BACK_OFF = 'Back-off pulling image "a/b:1": ErrImagePull: a/b:1: read 10.0.0.1:45678->1.2.3.4:53'
INSUFFICIENT = "0/3 nodes are available: 2 Insufficient nvidia.com/gpu."


def last_words(reason: TerminationReason, message: str, remedy: str = "") -> str:
    return Termination(kind=TerminationKind.FAILURE, reason=reason, message=message, remedy=remedy).encode().decode()


def world(raw: dict[str, Any], document: dict[str, Any] | None = None, **more: Any) -> Snapshot:
    """A started revision with this one pod."""
    name = target(document).name
    return snapshot([deployment(document)], [raw], selected=name, of=resource(document), **more)


def held(node: str, amount: int) -> PodFacts:
    raw = placed("other", {"started": True})
    raw["metadata"] |= {"uid": "other", "namespace": "research"}
    raw["metadata"]["labels"]["inference.sm70.io/service"] = "qwen"
    raw["spec"]["nodeName"] = node
    raw["spec"]["containers"][0]["resources"]["limits"][GPU] = str(amount)
    return parse_pod(raw)


@dataclass(frozen=True)
class Situation:
    """A world and the condition that it must end in; each of `words` must stand in the message."""

    world: Snapshot
    type: ConditionType
    reason: Reason
    words: tuple[str, ...] = ()
    status: ConditionStatus = ConditionStatus.FALSE
    ready: Reason | None = None
    """The reason of Ready; the same one if not given."""
    settings: Settings = SETTINGS


EIGHT = spec(gpus={"count": 8}, overrides={"tensorParallelSize": 8})
FOUR = spec(gpus={"count": 4}, overrides={"tensorParallelSize": 4})
LARGE = spec(gpus={"products": ["Tesla-V100-SXM2-32GB"]})
DFLASH = spec(profile="tiny_hybrid_reference_dflash", draft={"persistentVolumeClaim": {"claimName": "models"}})
REPORTING = spec(acceleration={"policy": "Report"})
ALLOWING = spec(acceleration={"allowDisabled": [{"path": "reference_gdn", "because": "known"}]})

GPUS, MODEL, ENGINE = ConditionType.GPUS_ALLOCATED, ConditionType.MODEL_AVAILABLE, ConditionType.ENGINE_STARTED
ACCEPTED, ACCELERATION = ConditionType.ACCEPTED, ConditionType.ACCELERATION_COMPLETE
SITUATIONS = {
    "unknown profile": Situation(
        snapshot(of=resource(spec(profile="no_such"))),
        ACCEPTED,
        Reason.PROFILE_NOT_FOUND,
        ("no_such", "tiny_hybrid_reference"),
    ),
    "config map of the profile does not exist": Situation(
        snapshot(
            of=resource(spec(profile=None, profileRef={"configMap": {"name": "mine", "key": "p.yaml"}})),
            profile=UserDocument(missing="There is no ConfigMap `mine` in namespace `serving`"),
        ),
        ACCEPTED,
        Reason.PROFILE_NOT_FOUND,
        ("`mine`",),
    ),
    "config map holds no profile": Situation(
        snapshot(
            of=resource(spec(profile=None, profileRef={"configMap": {"name": "mine", "key": "p.yaml"}})),
            profile=UserDocument(text="schemaVersion: 1\nname: x\n"),
        ),
        ACCEPTED,
        Reason.PROFILE_INVALID,
        ("`title`", "`hardware`"),
    ),
    "several refusals, all of them told": Situation(
        snapshot(of=resource(spec(overrides={"maxNumSeqs": 64, "maxNumBatchedTokens": 8, "tensorParallelSize": 2}))),
        ACCEPTED,
        Reason.REFUSED,
        ("GPUCount", "`gpus.count`", "Budget", "`overrides.maxNumBatchedTokens`"),
    ),
    "no image for the engine": Situation(
        snapshot(of=resource(spec())),
        ACCEPTED,
        Reason.REFUSED,
        ("`engine.image`",),
        settings=SETTINGS.model_copy(update={"engine_image_cpu": ""}),
    ),
    "a variable that the operator sets": Situation(
        snapshot(of=resource(spec(env=[{"name": "HF_HUB_OFFLINE", "value": "0"}]))),
        ACCEPTED,
        Reason.REFUSED,
        ("`env[0].name`", "`HF_HUB_OFFLINE`"),
    ),
    "shared memory larger than the limit": Situation(
        snapshot(of=resource(spec(pod={"sharedMemory": "8Gi"}))), ACCEPTED, Reason.REFUSED, ("8Gi", "6Gi")
    ),
    "a field of a newer version": Situation(
        snapshot(of=resource(spec(teleport=True))), ACCEPTED, Reason.SCHEMA_UNSUPPORTED, ("`teleport`",)
    ),
    "more GPUs than any node has": Situation(
        world(unscheduled(target(EIGHT).name, INSUFFICIENT), EIGHT, nodes=NODES),
        GPUS,
        Reason.TOPOLOGY_UNSUITABLE,
        ("8 GPUs", "`node-1`", "has 4"),
    ),
    "GPUs that somebody holds": Situation(
        world(unscheduled(target(FOUR).name, INSUFFICIENT), FOUR, nodes=NODES, holders=(held("node-1", 3),)),
        GPUS,
        Reason.WAITING_FOR_GPU,
        ("needs 4 free GPUs", "`research/qwen` holds 3 on `node-1`"),
    ),
    "GPUs missing, nodes unseen": Situation(
        world(unscheduled(NAME, INSUFFICIENT)), GPUS, Reason.WAITING_FOR_GPU, ("Insufficient nvidia.com/gpu",)
    ),
    "no node of the product": Situation(
        world(unscheduled(target(LARGE).name, "0/3 nodes match node affinity"), LARGE, nodes=NODES),
        GPUS,
        Reason.GPU_MISMATCH,
        ("`Tesla-V100-SXM2-32GB`", "`Tesla-V100-SXM2-16GB`"),
    ),
    "no node for another reason": Situation(
        world(unscheduled(NAME, "0/3 nodes are available: 3 Insufficient memory."), nodes=NODES),
        GPUS,
        Reason.UNSCHEDULABLE,
        ("Insufficient memory",),
    ),
    "claim of the model missing": Situation(
        world(unscheduled(NAME, '0/3 nodes are available: persistentvolumeclaim "models" not found.')),
        MODEL,
        Reason.VOLUME_NOT_FOUND,
        ("`models`", "`serving`"),
    ),
    "path not in the volume": Situation(
        world(placed(NAME, ended(message=last_words(TerminationReason.PATH_NOT_FOUND, "no folder /models/target/x")))),
        MODEL,
        Reason.PATH_NOT_FOUND,
        ("/models/target/x", "`path`"),
    ),
    "path not readable": Situation(
        world(placed(NAME, ended(message=last_words(TerminationReason.PATH_UNREADABLE, "no right", "Do this.")))),
        MODEL,
        Reason.PATH_UNREADABLE,
        ("no right", ENGINES_REMEDY),
    ),
    "folder not on the node": Situation(
        world(
            placed(NAME, {"state": {"waiting": {"reason": "ContainerCreating"}}}),
            node_words={"uid-pod-1": NodeWords("FailedMount", 'hostPath type check failed: "/data/x"')},
        ),
        MODEL,
        Reason.PATH_NOT_FOUND,
        ("/data/x", "`node-1`"),
    ),
    "draft of another model": Situation(
        world(
            placed(
                target(DFLASH).name,
                ended(message=last_words(TerminationReason.DRAFT_INCOMPATIBLE, "vocabulary size 4, not 8")),
            ),
            DFLASH,
        ),
        MODEL,
        Reason.DRAFT_INCOMPATIBLE,
        ("vocabulary",),
    ),
    "image cannot be pulled": Situation(
        world(
            placed(
                NAME,
                {
                    "state": {
                        "waiting": {
                            "reason": "ImagePullBackOff",
                            "message": BACK_OFF,
                        }
                    }
                },
            )
        ),
        ENGINE,
        Reason.PULLING_IMAGE,
        ("a/b:1: read 10.0.0.1->1.2.3.4:53", "`engine.imagePullSecrets`"),
    ),
    "image being pulled": Situation(
        world(
            placed(NAME, {"state": {"waiting": {"reason": "ContainerCreating"}}}),
            node_words={"uid-pod-1": NodeWords("Pulling", "Pulling image")},
        ),
        ENGINE,
        Reason.PULLING_IMAGE,
        ("`node-1`",),
    ),
    "secret of the key missing": Situation(
        world(
            placed(
                NAME,
                {"state": {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "key" not found'}}},
            )
        ),
        ENGINE,
        Reason.CONTAINER_REFUSED,
        ('secret "key" not found',),
    ),
    "container being made": Situation(
        world(placed(NAME, {"state": {"waiting": {"reason": "ContainerCreating"}}})),
        ENGINE,
        Reason.CONTAINER_CREATING,
    ),
    "server loading": Situation(world(placed(NAME, {"state": {"running": {}}})), ENGINE, Reason.LOADING),
    "killed for its memory": Situation(
        world(placed(NAME, ended(137, "OOMKilled"))),
        ENGINE,
        Reason.OUT_OF_MEMORY,
        ("6Gi", "`pod.resources.limits.memory`"),
    ),
    "GPU memory": Situation(
        world(placed(NAME, ended(message=last_words(TerminationReason.OUT_OF_MEMORY, "CUDA out of memory")))),
        ENGINE,
        Reason.OUT_OF_MEMORY,
        ("CUDA out of memory",),
    ),
    "refused in the pod": Situation(
        world(placed(NAME, ended(message=last_words(TerminationReason.REFUSED, "ModelIncompatible: `model`")))),
        ENGINE,
        Reason.REFUSED,
        ("ModelIncompatible",),
    ),
    "crash loop with last words": Situation(
        world(placed(NAME, ended(message=last_words(TerminationReason.ENGINE_DIED, "worker 2 is gone")))),
        ENGINE,
        Reason.CRASH_LOOPING,
        ("exit code 1", "worker 2 is gone", "kubectl logs"),
    ),
    "crash loop without any": Situation(
        world(placed(NAME, ended(139, "Error", ""))), ENGINE, Reason.CRASH_LOOPING, ("exit code 139",)
    ),
    "pods not admitted": Situation(
        snapshot(
            [
                deployment()
                | {
                    "status": {
                        "observedGeneration": 1,
                        "conditions": [{"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: q"}],
                    }
                }
            ],
            selected=NAME,
        ),
        ENGINE,
        Reason.PODS_REFUSED,
        ("exceeded quota: q",),
    ),
    "expected path disabled": Situation(
        running(answer=with_path("reference_gdn", PathState.DISABLED, "operator_missing:gdn", "not registered")),
        ACCELERATION,
        Reason.ROUTE_DISABLED,
        ("`reference_gdn`", "operator_missing:gdn", "not registered"),
    ),
    "expected path not applicable": Situation(
        running(answer=with_path("reference_gdn", PathState.NOT_APPLICABLE, "not_applicable")),
        ACCELERATION,
        Reason.NOT_APPLICABLE,
        ("`reference_gdn`",),
    ),
    "disabled path allowed": Situation(
        running(ALLOWING, answer=with_path("reference_gdn", PathState.DISABLED, "x")),
        ACCELERATION,
        Reason.ALL_ENABLED,
        ("`reference_gdn`",),
        ConditionStatus.TRUE,
        ready=Reason.SERVING,
    ),
    "disabled path, only reported": Situation(
        running(REPORTING, answer=with_path("reference_gdn", PathState.DISABLED, "x")),
        ACCELERATION,
        Reason.ROUTE_DISABLED,
        ready=Reason.SERVING,
    ),
    "engine does not answer the operator": Situation(
        running(answer=EngineAnswer(error="no answer within 5 s")),
        ACCELERATION,
        Reason.REPORT_UNAVAILABLE,
        ("no answer within 5 s",),
        ConditionStatus.UNKNOWN,
    ),
    "engine of another profile": Situation(
        running(answer=report(profile=report().profile.model_copy(update={"hash": "0" * 64}))),
        ACCELERATION,
        Reason.REPORT_MISMATCH,
    ),
    "engine of another image": Situation(
        running(answer=report(engine=report().engine.model_copy(update={"image": "other/image:1"}))),
        ACCELERATION,
        Reason.REPORT_MISMATCH,
        ("other/image:1",),
    ),
    "readiness probe fails": Situation(
        running(pods=[placed(NAME, {"started": True, "state": {"running": {}}})]),
        ConditionType.READY,
        Reason.NOT_READY,
        ("`pod-1`",),
    ),
    "no traffic yet": Situation(
        running(), ConditionType.ROUTES_HEALTHY, Reason.NO_TRAFFIC, (), ConditionStatus.UNKNOWN, ready=Reason.SERVING
    ),
    "counters of a restarted server": Situation(
        running(answer=EngineAnswer(report=report(), window=CountWindow(0, 0, 0, resets=2))),
        ConditionType.ROUTES_HEALTHY,
        Reason.COUNTERS_RESET,
        ("2 times",),
        ConditionStatus.UNKNOWN,
        ready=Reason.SERVING,
    ),
    "accelerated routes taken after a restart": Situation(
        running(answer=EngineAnswer(report=with_routes(TAKEN), window=CountWindow(9, 9, 0, resets=1))),
        ConditionType.ROUTES_HEALTHY,
        Reason.ACCELERATED,
        ("since counters began anew",),
        ConditionStatus.TRUE,
        ready=Reason.SERVING,
    ),
    "fallback taken": Situation(
        running(
            answer=with_routes(("gdn_reference", "decode", 9, False), ("attention_e5m2_reference", "decode", 1, True))
        ),
        ConditionType.ROUTES_HEALTHY,
        Reason.FALLBACK_OBSERVED,
        ("`attention_e5m2_reference`",),
        ready=Reason.SERVING,
    ),
    "accelerated routes taken": Situation(
        running(answer=with_routes(TAKEN)),
        ConditionType.ROUTES_HEALTHY,
        Reason.ACCELERATED,
        (),
        ConditionStatus.TRUE,
        ready=Reason.SERVING,
    ),
    "cold cache": Situation(
        running(answer=with_cache(before=0, added=12)),
        ConditionType.CACHE_WARM,
        Reason.COLD,
        ("12",),
        ready=Reason.SERVING,
    ),
    "warm cache": Situation(
        running(answer=with_cache(before=12, added=0)),
        ConditionType.CACHE_WARM,
        Reason.HIT,
        (),
        ConditionStatus.TRUE,
        ready=Reason.SERVING,
    ),
    "engine that compiles nothing": Situation(
        running(answer=with_cache(enabled=False)),
        ConditionType.CACHE_WARM,
        Reason.NOT_APPLICABLE,
        (),
        ConditionStatus.UNKNOWN,
        ready=Reason.SERVING,
    ),
    "no qualification demanded": Situation(
        running(), ConditionType.QUALIFIED, Reason.NOT_REQUIRED, (), ConditionStatus.UNKNOWN, ready=Reason.SERVING
    ),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_situation(name: str) -> None:
    situation = SITUATIONS[name]
    found = plan(situation.world, NOW, situation.settings)
    one = condition(found, situation.type)
    assert (one.status, one.reason) == (situation.status, situation.reason), one.message
    for word in situation.words:
        assert word in one.message
    remedy = MEANINGS[one.reason].remedy
    if one.status is ConditionStatus.FALSE and name != "image being pulled":
        assert remedy in one.message or ENGINES_REMEDY in one.message, "what to do must be told"
    ready = condition(found, ConditionType.READY)
    assert ready.reason is (situation.ready or situation.reason), ready.message
    assert (ready.status is ConditionStatus.TRUE) == (ready.reason is Reason.SERVING)
    assert ready.message


def test_one_unexplained_end_is_not_a_crash_loop_yet() -> None:
    raw = placed(NAME, ended(1) | {"restartCount": 1, "state": {"running": {}}})
    assert condition(planned(world(raw)), ENGINE).reason is Reason.LOADING


def test_an_ordered_end_is_not_a_failure() -> None:
    words = Termination(kind=TerminationKind.SHUTDOWN, reason=TerminationReason.SHUTDOWN, message="bye").encode()
    raw = placed(NAME, ended(0, "Completed", words.decode()) | {"restartCount": 1, "state": {"running": {}}})
    assert condition(planned(world(raw)), ENGINE).reason is Reason.LOADING


def test_a_cause_stands_while_the_next_try_runs() -> None:
    tried = ended(message=last_words(TerminationReason.PATH_NOT_FOUND, "no folder")) | {"state": {"running": {}}}
    assert condition(planned(world(placed(NAME, tried))), MODEL).reason is Reason.PATH_NOT_FOUND


def test_foreign_text_is_stripped_and_bounded() -> None:
    raw = placed(NAME, ended(1, "Error", "\x1b[31mboom\x00" + "x" * 9000))
    message = condition(planned(world(raw)), ENGINE).message
    assert message.isprintable()
    assert len(message) < 1200


def test_one_bad_replica_of_two_is_what_is_told() -> None:
    document = spec(replicas=2)
    name = target(document).name
    pods = [serving(name, "a"), placed(name, ended(137, "OOMKilled"), "b")]
    found = planned(snapshot([deployment(document)], pods, selected=name, of=resource(document), answer=report()))
    assert condition(found, ENGINE).reason is Reason.OUT_OF_MEMORY
    assert found.status is not None
    assert (found.status.replicas, found.status.ready_replicas) == (2, 1)


def test_a_pod_too_few_is_no_success() -> None:
    document = spec(replicas=2)
    name = target(document).name
    found = planned(
        snapshot([deployment(document)], [serving(name)], selected=name, of=resource(document), answer=report())
    )
    assert condition(found, ConditionType.READY).status is not ConditionStatus.TRUE


def test_a_late_revision_is_reported_and_still_tried() -> None:
    document = spec(rollout={"progressDeadlineSeconds": 60})
    name = target(document).name
    loading = placed(name, {"state": {"running": {}}})
    first = record(document, good=False)
    late = snapshot([deployment(document)], [loading], selected=name, of=resource(document), records=[first])
    early = planned(late, seconds=0)
    assert condition(early, ConditionType.PROGRESSING).reason is Reason.STARTING
    assert early.wake_after_seconds is not None
    assert early.wake_after_seconds <= 31
    found = planned(late, seconds=31)
    assert condition(found, ConditionType.PROGRESSING).reason is Reason.DEADLINE_EXCEEDED
    assert found.actions == (), "there is nothing to return to"


def test_a_lost_replica_of_a_complete_revision_recovers() -> None:
    complete = deployment()
    complete["status"]["conditions"] = [{"type": "Progressing", "reason": "NewReplicaSetAvailable", "status": "True"}]
    found = planned(snapshot([complete], [pod(NAME)], selected=NAME))
    assert condition(found, ConditionType.PROGRESSING).reason is Reason.RECOVERING


def test_every_reason_is_explained() -> None:
    assert set(MEANINGS) == set(Reason)
    for reason, meaning in MEANINGS.items():
        assert meaning.conditions, reason
        assert re.fullmatch(r"[A-Z][A-Za-z]+", reason)
        assert meaning.text.endswith((".", "!")), reason
        assert not meaning.remedy or meaning.remedy.endswith((".", ")")), reason


def test_events_tell_of_changes_only() -> None:
    first = planned(running())
    assert [event.reason for event in first.events] == ["Serving"]
    status = first.status
    assert status is not None
    raw = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    again = planned(running(of=resource(status=raw)), seconds=5)
    assert again.events == ()
    lost = planned(replace(running(of=resource(status=raw)), pods=()), seconds=6)
    assert [(event.type, event.reason) for event in lost.events] == [("Warning", "Pending")]
