"""One set of GPUs: what the planner does, in which order, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace

from sm70_operator.api.conditions import ConditionStatus, ConditionType, Reason
from sm70_operator.observe.facts import parse_object
from sm70_operator.observe.snapshot import Snapshot
from sm70_operator.plan.plan import Apply, Delete, Record, Scale
from unit.operator.builders import (
    OWNER,
    condition,
    deployment,
    planned,
    pod,
    record,
    report,
    resource,
    running,
    service,
    serving,
    snapshot,
    spec,
    target,
)

EARLIER = spec(overrides={"maxNumSeqs": 4})
REFUSED = spec(overrides={"maxNumSeqs": 64, "maxNumBatchedTokens": 8})


RECORDS = [record(EARLIER), record(number=2, good=False)]


def begun(world: Snapshot) -> Snapshot:
    """The same world, after the change was told."""
    told = planned(world).status
    assert told is not None
    return replace(world, resource=replace(world.resource, status=told.model_dump(mode="json", by_alias=True)))


def kinds(actions: tuple[object, ...]) -> list[str]:
    """Actions in short: the kind that is applied, or what is scaled or deleted."""
    words = []
    for action in actions:
        match action:
            case Apply(manifest=manifest, starts=starts):
                words.append(f"apply {manifest['kind']}" + (" (start)" if starts else ""))
            case Scale(replicas=replicas, starts=starts):
                words.append(f"scale to {replicas}" + (" (start)" if starts else ""))
            case Delete():
                words.append("delete")
            case Record():
                words.append("record")
    return words


def test_a_new_service_gets_its_objects_and_every_condition() -> None:
    plan = planned(snapshot())
    assert kinds(plan.actions) == [
        "apply ControllerRevision",
        "apply Service",
        "apply Service",
        "apply Deployment (start)",
    ]
    public, candidate = (one.manifest for one in plan.actions[1:3] if isinstance(one, Apply))
    assert public["spec"]["selector"]["inference.sm70.io/revision"] == "none", "nothing is proven yet"
    assert candidate["spec"]["selector"]["inference.sm70.io/revision"] == target().name
    assert plan.status is not None
    assert [one.type for one in plan.status.conditions] == list(ConditionType)
    assert {one.observed_generation for one in plan.status.conditions} == {1}
    unknown = [one.type for one in plan.status.conditions if one.status is ConditionStatus.UNKNOWN]
    assert set(unknown) == set(ConditionType) - {ConditionType.ACCEPTED, ConditionType.PROGRESSING}


def test_the_compile_cache_claim_comes_first() -> None:
    plan = planned(snapshot(of=resource(spec(compileCache={"size": "2Gi"}))))
    words = kinds(plan.actions)
    assert words.index("apply PersistentVolumeClaim") < words.index("apply Deployment (start)")


def test_a_running_service_is_left_alone() -> None:
    plan = planned(running())
    assert plan.actions == ()
    assert condition(plan, ConditionType.READY).reason is Reason.SERVING


def test_nothing_is_done_while_the_service_is_being_deleted() -> None:
    plan = planned(replace(running(), resource=resource(deleting=True), service=None, deployments=()))
    assert (plan.actions, plan.status, plan.events) == ((), None, ())


def test_an_edit_stops_the_earlier_revision_first() -> None:
    plan = planned(begun(running(EARLIER, of=resource())))
    assert "scale to 0" in kinds(plan.actions)
    assert "apply Deployment (start)" not in kinds(plan.actions)
    assert condition(plan, ConditionType.PROGRESSING).reason is Reason.DRAINING


def test_what_is_going_to_be_done_is_told_first() -> None:
    plan = planned(running(EARLIER, of=resource()))
    assert kinds(plan.actions) == ["apply ControllerRevision"]
    told = condition(plan, ConditionType.PROGRESSING)
    assert told.reason is Reason.ANNOUNCED
    assert "InPlace" in told.message
    assert plan.status is not None
    assert plan.status.rollout is not None
    assert plan.wake_after_seconds == 0
    assert condition(plan, ConditionType.READY).reason is Reason.SERVING_EARLIER_SPEC


def test_the_new_revision_waits_for_the_last_pod_of_the_earlier_one() -> None:
    name = target(EARLIER).name
    going = serving(name)
    going["metadata"]["deletionTimestamp"] = "2026-11-30T12:00:00Z"
    world = snapshot([deployment(EARLIER, 0)], [going], selected=name, records=RECORDS)
    plan = planned(world)
    assert kinds(plan.actions) == ["apply Service"], "only the candidate's"
    assert "`pod-1` on node `node-1` ends" in condition(plan, ConditionType.PROGRESSING).message


def test_the_new_revision_waits_until_the_controller_has_seen_the_stop() -> None:
    unseen = deployment(EARLIER, 0) | {"status": {"observedGeneration": 0, "replicas": 1}}
    world = snapshot([unseen], selected=target(EARLIER).name, records=RECORDS)
    assert kinds(planned(world).actions) == ["apply Service"], "only the candidate's"


def test_then_it_starts_and_the_traffic_waits_for_its_proof() -> None:
    plan = planned(snapshot([deployment(EARLIER, 0)], selected=target(EARLIER).name, records=RECORDS))
    assert kinds(plan.actions) == ["apply Service", "apply Deployment (start)"]
    (candidate, _) = (one.manifest for one in plan.actions if isinstance(one, Apply))
    assert candidate["metadata"]["name"] == "tiny-candidate"


def test_a_refused_edit_leaves_the_earlier_revision_serving() -> None:
    world = running(of=resource(REFUSED, generation=2))
    plan = planned(world)
    assert plan.actions == ()
    assert condition(plan, ConditionType.ACCEPTED).reason is Reason.REFUSED
    ready = condition(plan, ConditionType.READY)
    assert (ready.status, ready.reason) == (ConditionStatus.TRUE, Reason.SERVING_EARLIER_SPEC)
    assert ready.observed_generation == 2
    assert plan.status is not None
    assert (plan.status.revisions.active, plan.status.revisions.target) == (target().name, None)
    assert plan.status.effective is not None
    assert plan.status.effective.args == target().resolution.argv


def test_a_refused_edit_of_a_revision_that_does_not_serve_is_what_is_told_first() -> None:
    world = snapshot([deployment()], [pod(target().name)], selected=target().name, of=resource(REFUSED))
    ready = condition(planned(world), ConditionType.READY)
    assert (ready.status, ready.reason) == (ConditionStatus.FALSE, Reason.REFUSED)
    assert "does not serve either" in ready.message


def test_a_refused_edit_still_scales_what_serves() -> None:
    world = running(of=resource(REFUSED | {"replicas": 3}))
    assert kinds(planned(world).actions) == ["apply Deployment"]


def test_a_refused_edit_amid_a_change_brings_the_stopped_revision_back() -> None:
    world = snapshot([deployment(replicas=0)], selected=target().name, of=resource(REFUSED))
    assert kinds(planned(world).actions) == ["scale to 1 (start)"]


def test_a_hand_that_scales_a_deployment_is_corrected() -> None:
    assert kinds(planned(replace(running(), deployments=(parse_object(deployment(replicas=5)),))).actions) == [
        "apply Deployment"
    ]


def test_a_changed_template_is_put_right_without_a_restart_of_its_own() -> None:
    manifest = deployment()
    manifest["spec"]["template"]["spec"]["containers"][0]["image"] = "elsewhere/engine:2"
    assert kinds(planned(replace(running(), deployments=(parse_object(manifest),))).actions) == ["apply Deployment"]


def test_defaults_of_the_api_server_are_no_difference() -> None:
    manifest = deployment()
    manifest["spec"]["template"]["spec"]["dnsPolicy"] = "ClusterFirst"
    manifest["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"] = "6144Mi"
    assert planned(replace(running(), deployments=(parse_object(manifest),))).actions == ()


def test_objects_of_a_deleted_service_of_the_same_name_are_waited_for() -> None:
    manifest = deployment()
    manifest["metadata"]["ownerReferences"][0]["uid"] = "22222222-2222-2222-2222-222222222222"
    plan = planned(snapshot([manifest], [pod(target().name)]))
    assert plan.actions == ()
    assert condition(plan, ConditionType.PROGRESSING).reason is Reason.DRAINING


def test_a_service_of_somebody_else_is_not_taken_over() -> None:
    manifest = service(target().name)
    manifest["metadata"]["ownerReferences"] = []
    plan = planned(replace(snapshot(), service=parse_object(manifest)))
    assert plan.actions == ()
    assert condition(plan, ConditionType.READY).reason is Reason.OBSTRUCTED


def test_an_obstacle_is_told_and_nothing_more_is_tried() -> None:
    plan = planned(replace(snapshot(), obstacle="The API server refuses: quota exceeded"))
    assert plan.actions == ()
    ready = condition(plan, ConditionType.READY)
    assert ready.reason is Reason.OBSTRUCTED
    assert "quota exceeded" in ready.message


def test_a_claim_only_grows() -> None:
    claim = {
        "metadata": {"name": "tiny-compile-cache", "uid": "c", "ownerReferences": [OWNER.reference()]},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "fast",
            "resources": {"requests": {"storage": "2Gi"}},
        },
    }
    for size, expected in (("4Gi", ["apply PersistentVolumeClaim"]), ("1Gi", []), ("2048Mi", [])):
        document = spec(compileCache={"size": size, "storageClassName": "other"})
        name = target(document).name
        world = snapshot(
            [deployment(document)],
            [serving(name)],
            selected=name,
            answer=report(),
            of=resource(document),
            records=[record(document)],
            claim=parse_object(claim),
        )
        assert kinds(planned(world).actions) == expected, size


def test_scaled_to_zero_says_so() -> None:
    document = spec(replicas=0)
    name = target(document).name
    world = snapshot([deployment(document)], selected=name, of=resource(document), records=[record(document)])
    plan = planned(world)
    assert plan.actions == ()
    assert condition(plan, ConditionType.READY).reason is Reason.SCALED_TO_ZERO


def test_replicas_are_not_part_of_the_revision() -> None:
    assert target(spec(replicas=1)).name == target(spec(replicas=3)).name
    assert target(EARLIER).name != target().name


def test_starts_and_stops_are_events() -> None:
    assert [event.reason for event in planned(snapshot()).events] == ["RevisionStarted"]
    stopped = planned(begun(running(EARLIER, of=resource())))
    assert "RevisionStopped" in [event.reason for event in stopped.events]


def test_a_claim_that_is_to_grow_stands_in_nobodys_way() -> None:
    """A storage class may refuse it for ever; so it is asked only when nothing is to be started."""
    claim = {
        "metadata": {"name": "tiny-compile-cache", "uid": "c", "ownerReferences": [OWNER.reference()]},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "2Gi"}}},
    }
    document = spec(compileCache={"size": "4Gi"})
    world = snapshot([], [], of=resource(document), records=[record(document, good=False)], claim=parse_object(claim))
    found = kinds(planned(world).actions)
    assert "apply Deployment (start)" in found
    assert "apply PersistentVolumeClaim" not in found
