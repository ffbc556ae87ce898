"""Traffic follows proof: each step of a change, what ends it, and what returns."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from sm70_operator.api import names
from sm70_operator.api.conditions import ConditionStatus, ConditionType, Reason
from sm70_operator.api.hashing import revision_name
from sm70_operator.api.types import RolloutStrategy
from sm70_operator.observe.facts import NodeFacts, parse_object, parse_pod
from sm70_operator.observe.snapshot import CountWindow, EngineAnswer, Snapshot
from sm70_operator.plan.plan import Action, Apply, Delete, Plan, Record, Scale
from sm70_operator.plan.planner import plan
from sm70_operator.plan.strategy import Supply, choose
from sm70_operator.render import deployment as rendering
from sm70_operator.render import revision
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.report import PathState, RouteCount, StartupPhase, StartupReport
from sm70_profiles.routes import Stage
from sm70_profiles.termination import Termination, TerminationKind
from unit.operator.builders import (
    IMAGE,
    NOW,
    SETTINGS,
    condition,
    deployment,
    ended,
    placed,
    planned,
    record,
    rejected,
    report,
    resource,
    running,
    service,
    serving,
    snapshot,
    spec,
    target,
    unscheduled,
    with_path,
)
from unit.operator.test_operator_steps import begun, kinds

OLD, NEW = spec(overrides={"maxNumSeqs": 4}), spec()
OLD_NAME, NEW_NAME = target(OLD).name, target(NEW).name
PROGRESSING, READY = ConditionType.PROGRESSING, ConditionType.READY
NODES = (NodeFacts("node-1", "Tesla-V100-SXM2-16GB", 16384, True, {"nvidia.com/gpu": 4}),)


def candidate(raw: dict[str, Any], document: dict[str, Any] | None = None, **more: Any) -> Snapshot:
    """In place: the old one has stopped, the new one runs without traffic."""
    wanted = NEW if document is None else document
    records = [record(OLD), record(wanted, 2, good=False)]
    deployments = [deployment(OLD, 0), deployment(wanted)]
    more = {"records": records, "answer": report(), **more}
    return snapshot(deployments, [raw], selected=OLD_NAME, of=resource(wanted), **more)


def rejections(found: Plan) -> list[Record]:
    return [one for one in found.actions if isinstance(one, Record) and one.annotations.get(names.REJECTED_ANNOTATION)]


def promoted(found: Plan) -> list[str]:
    return [one.promotes for one in found.actions if isinstance(one, Apply) and one.promotes]


def scaled(actions: tuple[Action, ...]) -> dict[str, int]:
    return {one.name: one.replicas for one in actions if isinstance(one, Scale)}


def test_a_candidate_that_serves_is_promoted_and_the_decision_rests_on_what_was_seen() -> None:
    found = planned(candidate(serving(NEW_NAME)))
    assert promoted(found) == [NEW_NAME]
    (moved,) = (one for one in found.actions if isinstance(one, Apply) and one.promotes)
    assert moved.version == "7"
    assert names.PROMOTED_ANNOTATION in moved.manifest["metadata"]["annotations"]
    assert condition(found, PROGRESSING).reason is Reason.PROMOTING
    # The status is written after the actions, and all of it speaks of the world that they made.
    assert found.promotes
    assert found.status is not None
    assert found.status.revisions.active == NEW_NAME


@pytest.mark.parametrize("path", ["reference_gdn"])
def test_a_candidate_without_an_expected_path_is_rejected(path: str) -> None:
    slow = with_path(path, PathState.DISABLED, "user_override")
    found = planned(candidate(serving(NEW_NAME), answer=slow))
    assert promoted(found) == []
    (rejection,) = rejections(found)
    assert rejection.name == f"tiny-{NEW_NAME}"
    assert path in str(rejection.annotations[names.REJECTED_ANNOTATION])
    assert "RevisionRejected" in [event.reason for event in found.events]


def test_what_its_own_policy_admits_is_promoted() -> None:
    slow = with_path("reference_gdn", PathState.DISABLED, "user_override")
    for acceleration in ({"policy": "Report"}, {"allowDisabled": [{"path": "reference_gdn", "because": "known"}]}):
        document = spec(acceleration=acceleration)
        found = planned(candidate(serving(target(document).name), document, answer=slow))
        assert promoted(found) == [target(document).name], acceleration


def test_a_candidate_that_has_not_reported_waits() -> None:
    found = planned(candidate(serving(NEW_NAME), answer=EngineAnswer(error="no answer")))
    assert (promoted(found), rejections(found)) == ([], [])


def test_a_rejected_revision_stops_and_the_last_good_one_returns_with_the_traffic() -> None:
    records = [record(OLD), rejected(NEW)]
    world = candidate(serving(NEW_NAME), records=records)
    found = planned(world)
    assert scaled(found.actions) == {f"tiny-{NEW_NAME}": 0}
    assert "RevisionStarted" not in [event.reason for event in found.events], "not before the other one has gone"
    gone = snapshot([deployment(OLD, 0), deployment(NEW, 0)], selected=OLD_NAME, of=resource(NEW), records=records)
    again = planned(gone)
    starts = [one.manifest["metadata"]["name"] for one in again.actions if isinstance(one, Apply) and one.starts]
    assert starts == [f"tiny-{OLD_NAME}"]
    assert condition(again, PROGRESSING).reason is Reason.ROLLING_BACK


def test_a_rejected_revision_is_not_tried_again_and_the_status_says_why() -> None:
    world = running(OLD, of=resource(NEW), records=[record(OLD), rejected(NEW)])
    found = planned(replace(world, deployments=(*world.deployments, parse_object(deployment(NEW, 0)))))
    assert found.actions == ()
    told = condition(found, PROGRESSING)
    assert (told.status, told.reason) == (ConditionStatus.FALSE, Reason.ROLLED_BACK)
    assert condition(found, READY).reason is Reason.SERVING_EARLIER_SPEC
    assert found.status is not None
    (one,) = found.status.revisions.rejected
    assert (one.revision, one.reason) == (NEW_NAME, "RouteDisabled")
    assert (found.status.revisions.active, found.status.revisions.last_good) == (OLD_NAME, OLD_NAME)


def test_more_replicas_or_a_pause_do_not_try_it_again_but_another_spec_does() -> None:
    records = [record(OLD), rejected(NEW)]
    for same in (NEW | {"replicas": 2}, NEW | {"rollout": {"paused": True}}):
        found = planned(running(OLD, of=resource(same), records=records))
        assert "ControllerRevision" not in kinds(found.actions)
        assert condition(found, PROGRESSING).reason is not Reason.ANNOUNCED, same
    other = NEW | {"rollout": {"bakeSeconds": 5}}
    assert condition(planned(running(OLD, of=resource(other), records=records)), PROGRESSING).reason is Reason.ANNOUNCED


def test_going_back_and_forth_frees_a_rejection() -> None:
    """The same text again is another try: in between, the spec has changed."""
    found = planned(running(OLD, of=resource(OLD), records=[record(OLD), rejected(NEW)]))
    (freed,) = (one for one in found.actions if isinstance(one, Record))
    assert freed.name == f"tiny-{NEW_NAME}"
    assert '"spec": ""' in str(freed.annotations[names.REJECTED_ANNOTATION])


@pytest.mark.parametrize(
    ("container", "seconds", "fails"),
    [
        ({"state": {"running": {}}}, 0, False),
        ({"state": {"running": {}}}, 1801, True),
        (ended(1, message="boom"), 0, True),
        (ended(1, message="boom") | {"restartCount": 1}, 0, False),
        ({"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}, 0, False),
        ({"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}, 120, True),
    ],
)
def test_what_cannot_be_mended_fails_soon_and_what_may_pass_when_nothing_moves(
    container: dict[str, Any], seconds: float, fails: bool
) -> None:
    found = planned(candidate(placed(NEW_NAME, container)), seconds)
    assert bool(rejections(found)) is fails


def test_every_new_phase_restarts_the_deadline() -> None:
    world = candidate(placed(NEW_NAME, {"state": {"running": {}}}), answer=EngineAnswer(phase="LoadingWeights"))
    for seconds, phase in ((0, "LoadingWeights"), (1700, "Compiling"), (3400, "CapturingGraphs")):
        answers = {pod.uid: EngineAnswer(phase=phase) for pod in world.pods}
        found = planned(replace(world, answers=answers), seconds)
        assert rejections(found) == [], phase
        assert found.status is not None
        assert found.status.startup is not None
        assert found.status.startup.phase == phase
        status = found.status.model_dump(mode="json", by_alias=True)
        world = replace(world, resource=replace(world.resource, status=status))
    answers = {pod.uid: EngineAnswer(phase="LoadingWeights") for pod in world.pods}
    assert rejections(planned(replace(world, answers=answers), 3401)) == [], "a restart is no progress, and no end"
    assert rejections(planned(replace(world, answers=answers), 5201))


def test_gpus_that_somebody_else_took_are_waited_for() -> None:
    raw = unscheduled(NEW_NAME, "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
    found = planned(candidate(raw), 7200)
    assert rejections(found) == [], "the earlier one could not be placed either"
    assert condition(found, READY).reason is Reason.WAITING_FOR_GPU


def baking(found: float | None = None, document: dict[str, Any] = NEW, **more: Any) -> Snapshot:
    """The new one has had the traffic for ten seconds."""
    records = [record(OLD), record(document, 2, good=False)]
    world = candidate(serving(target(document).name), document, records=records, **more)
    window = None if found is None else CountWindow(seconds=60, dispatches=1000, fallbacks=round(found * 10))
    answers = {uid: replace(answer, window=window) for uid, answer in world.answers.items()}
    public = parse_object(service(target(document).name, NOW - timedelta(seconds=10)))
    return replace(world, service=public, answers=answers)


@pytest.mark.parametrize(("percent", "returns"), [(None, False), (0, False), (5, False), (5.1, True), (100, True)])
def test_fallbacks_within_the_bake_time_return(percent: float | None, returns: bool) -> None:
    found = planned(baking(percent))
    assert bool(rejections(found)) is returns
    if not returns:
        assert condition(found, PROGRESSING).reason is Reason.BAKING
        assert condition(found, READY).status is ConditionStatus.TRUE


def test_after_the_bake_time_it_is_good_and_fallbacks_only_tell() -> None:
    found = planned(baking(None), 600)
    (good,) = (one for one in found.actions if isinstance(one, Record))
    assert good.annotations == {names.GOOD_ANNOTATION: (NOW + timedelta(seconds=600)).isoformat()}
    settled = replace(baking(100), revisions=running(NEW).revisions)
    good_now = planned(replace(settled, service=parse_object(service(NEW_NAME, NOW - timedelta(hours=2)))))
    assert rejections(good_now) == []


def test_the_first_revision_is_never_given_up_for_nothing() -> None:
    first = snapshot(
        [deployment(NEW)],
        [placed(NEW_NAME, ended(1, message="boom"))],
        of=resource(NEW),
        records=[record(NEW, good=False)],
        selected="none",
    )
    found = planned(first, 7200)
    assert rejections(found) == []
    assert condition(found, ConditionType.ENGINE_STARTED).reason is Reason.CRASH_LOOPING


def test_a_pause_keeps_what_serves_and_carries_on_what_has_begun() -> None:
    paused = spec(rollout={"paused": True})
    found = planned(running(OLD, of=resource(paused)))
    assert kinds(found.actions) == ["apply ControllerRevision"]
    assert condition(found, PROGRESSING).reason is Reason.PAUSED
    assert condition(found, READY).status is ConditionStatus.TRUE
    stopped = snapshot([deployment(OLD, 0)], selected=OLD_NAME, of=resource(paused), records=[record(OLD)])
    assert "apply Deployment (start)" in kinds(planned(stopped).actions), "holding it would only be an outage"


def surging(free: int, **changes: Any) -> Snapshot:
    """The old one serves on a node with so many GPUs left."""
    holder = replace(parse_pod(serving(OLD_NAME)), gpus={"nvidia.com/gpu": 4 - free})
    wanted = spec(**changes)
    return running(OLD, of=resource(wanted), nodes=NODES, holders=(holder,))


def test_a_free_set_is_used_and_the_old_one_serves_meanwhile() -> None:
    told = planned(surging(1))
    assert "Surge" in condition(told, PROGRESSING).message
    found = planned(begun(surging(1)))
    (start,) = (one for one in found.actions if isinstance(one, Apply) and one.starts)
    assert (start.runs, start.beside) == (NEW_NAME, frozenset({OLD_NAME}))
    assert scaled(found.actions) == {}
    assert condition(found, READY).status is ConditionStatus.TRUE


def test_without_a_free_set_auto_goes_in_place_and_surge_waits() -> None:
    assert "InPlace" in condition(planned(surging(0)), PROGRESSING).message
    waits = planned(surging(0, rollout={"strategy": "Surge"}))
    assert condition(waits, PROGRESSING).reason is Reason.WAITING_FOR_GPU
    assert scaled(planned(begun(surging(0, rollout={"strategy": "Surge"}))).actions) == {}


def test_nodes_are_asked_for_only_when_they_decide() -> None:
    assert planned(replace(running(OLD, of=resource(NEW)), nodes_hidden=False)).needs_nodes
    assert not planned(replace(running(NEW), nodes_hidden=False)).needs_nodes


def test_a_surge_whose_gpus_were_taken_goes_on_in_place_and_stays_so() -> None:
    raw = unscheduled(NEW_NAME, "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
    world = snapshot(
        [deployment(OLD), deployment(NEW)],
        [serving(OLD_NAME), raw | {"metadata": raw["metadata"] | {"name": "pod-2", "uid": "uid-pod-2"}}],
        selected=OLD_NAME,
        of=resource(NEW),
        records=[record(OLD), record(NEW, 2, good=False)],
        answer=report(),
    )
    found = planned(world)
    assert scaled(found.actions) == {f"tiny-{NEW_NAME}": 0}
    assert found.status is not None
    assert found.status.rollout is not None
    assert found.status.rollout.strategy == "InPlace"
    status = found.status.model_dump(mode="json", by_alias=True)
    free = replace(running(OLD, of=resource(NEW, status=status)), nodes=NODES)
    again = planned(free)
    assert scaled(again.actions) == {f"tiny-{OLD_NAME}": 0}, "what the operator cannot see holds them"


def test_a_surged_change_keeps_the_old_one_until_the_bake_time_ends() -> None:
    world = baking()
    both = replace(world, deployments=(parse_object(deployment(OLD)), parse_object(deployment(NEW))))
    assert scaled(planned(both).actions) == {}
    assert scaled(planned(both, 700).actions) == {f"tiny-{OLD_NAME}": 0}


def test_an_operator_of_another_version_changes_no_running_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither another rendering, nor other default images: a revision that is stored stays what it was."""
    world = running(NEW)
    other = SETTINGS.model_copy(update={"engine_image_cpu": "registry.test/engine-cpu:2"})
    monkeypatch.setattr(revision, "RENDER_VERSION", 2)
    monkeypatch.setattr(rendering, "PRE_STOP_SECONDS", 17)
    found = plan(world, NOW, other)
    assert found.actions == ()
    assert found.status is not None
    assert (found.status.revisions.target, found.status.revisions.active) == (NEW_NAME, NEW_NAME)
    assert found.status.effective is not None
    assert found.status.effective.image == IMAGE
    more = plan(replace(world, resource=resource(NEW | {"replicas": 2})), NOW, other)
    assert scaled(more.actions) == {f"tiny-{NEW_NAME}": 2}, "only scaled: its template is not touched"
    assert not [one for one in more.actions if isinstance(one, Apply)]
    edited = plan(replace(world, resource=resource(OLD)), NOW, other)
    (made,) = (one.manifest for one in edited.actions if isinstance(one, Apply))
    assert made["kind"] == "ControllerRevision"
    assert (made["data"]["renderVersion"], made["data"]["image"], made["revision"]) == (2, other.engine_image_cpu, 2)


def test_a_stopped_revision_returns_with_the_template_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [record(OLD), rejected(NEW)]
    world = snapshot([deployment(OLD, 0)], selected=OLD_NAME, of=resource(NEW), records=records)
    monkeypatch.setattr(revision, "RENDER_VERSION", 2)
    monkeypatch.setattr(rendering, "PRE_STOP_SECONDS", 17)
    found = planned(world)
    assert scaled(found.actions) == {f"tiny-{OLD_NAME}": 1}


def test_a_revision_is_no_prose() -> None:
    wanted = target(NEW).revision
    profile = wanted.request.profile.model_copy(update={"description": "Other words.", "title": "T", "sources": ("x",)})
    other = wanted.model_copy(update={"request": wanted.request.model_copy(update={"profile": profile})})
    assert revision_name(other) == NEW_NAME
    faster = profile.model_copy(update={"expected_acceleration": ()})
    third = wanted.model_copy(update={"request": wanted.request.model_copy(update={"profile": faster})})
    assert revision_name(third) != NEW_NAME


def test_rollback_serves_a_stored_revision_as_it_was() -> None:
    back = spec(rollout={"rollbackTo": OLD_NAME})
    world = running(NEW, of=resource(back), records=[record(OLD), record(NEW, 2)])
    found = planned(world)
    assert found.status is not None
    assert found.status.revisions.target == OLD_NAME
    assert "rollbackTo" in condition(found, ConditionType.ACCEPTED).message
    unknown = planned(running(NEW, of=resource(spec(rollout={"rollbackTo": "abc"}))))
    refused = condition(unknown, ConditionType.ACCEPTED)
    assert refused.reason is Reason.REFUSED
    assert NEW_NAME in refused.message
    assert condition(unknown, READY).reason is Reason.SERVING_EARLIER_SPEC


def test_the_history_is_bounded_and_keeps_what_is_needed() -> None:
    documents = [spec(overrides={"maxNumSeqs": count}) for count in range(2, 7)]
    records = [record(one, number, good=False) for number, one in enumerate(documents, 1)]
    limited = spec(rollout={"revisionHistoryLimit": 2})
    stopped = [deployment(documents[0], 0)]
    world = running(limited, records=[*records, record(limited, 9)])
    world = replace(world, deployments=(*world.deployments, *(parse_object(one) for one in stopped)))
    gone = [(one.kind, one.name) for one in planned(world).actions if isinstance(one, Delete)]
    assert gone == [
        ("Deployment", f"tiny-{target(documents[0]).name}"),
        ("ControllerRevision", f"tiny-{target(documents[1]).name}"),
        ("ControllerRevision", f"tiny-{target(documents[2]).name}"),
    ]


def test_a_forgotten_revision_takes_its_claim_template_with_it() -> None:
    claiming = {"allocation": "DRA", "count": 1}
    documents = [spec(gpus=claiming, overrides={"maxNumSeqs": n, "tensorParallelSize": 1}) for n in (2, 3)]
    records = [record(one, number, good=False) for number, one in enumerate(documents, 1)]
    limited = spec(rollout={"revisionHistoryLimit": 1})
    found = planned(running(limited, records=[*records, record(limited, 9)]))
    name = target(documents[0]).name
    assert [(one.kind, one.name) for one in found.actions if isinstance(one, Delete)] == [
        ("ResourceClaimTemplate", f"tiny-gpus-{name}"),
        ("ControllerRevision", f"tiny-{name}"),
    ]


def test_a_first_revision_that_is_paused_says_so() -> None:
    found = planned(snapshot(of=resource(spec(rollout={"paused": True}))))
    assert not any(isinstance(one, Apply) and one.runs for one in found.actions)
    for kind in (READY, ConditionType.PROGRESSING):
        told = condition(found, kind)
        assert (told.status, told.reason) == (ConditionStatus.FALSE, Reason.PAUSED)
        assert "rollout.paused" in told.message


def test_the_last_words_of_a_server_that_was_asked_to_end_stay_in_the_status() -> None:
    words = Termination(
        kind=TerminationKind.SHUTDOWN,
        reason=TerminationReason.SHUTDOWN,
        message="ended by SIGTERM",
        routes=(RouteCount(route="gdn_reference", stage=Stage.DECODE, dispatches=345),),
    )
    last = {"terminated": {"exitCode": 0, "message": words.encode().decode(), "finishedAt": "2026-11-30T11:59:50Z"}}
    gone = parse_pod(placed(OLD_NAME, {"state": last}, "pod-9"))
    found = planned(replace(running(NEW), gone=gone))
    assert found.status is not None
    assert found.status.routes is not None
    kept = found.status.routes.last_shutdown
    assert kept is not None
    assert (kept.pod, kept.revision, kept.items[0].dispatches) == ("pod-9", OLD_NAME, 345)
    status = found.status.model_dump(mode="json", by_alias=True)
    later = planned(running(NEW, of=resource(NEW, status=status))).status
    assert later is not None
    assert later.routes is not None
    assert later.routes.last_shutdown == kept


def test_the_outage_is_estimated_from_the_last_start_before_anything_stops() -> None:
    phases = {StartupPhase.STARTING: 12.4, StartupPhase.LOADING_WEIGHTS: 30.2}
    started = StartupReport(phase=StartupPhase.SERVING, since="2026-11-30T11:00:00Z", seconds=phases)
    answers = report(startup=started)
    settled = planned(running(OLD, answer=answers, of=resource(OLD)))
    assert settled.status is not None
    assert settled.status.startup is not None
    assert settled.status.startup.estimate_seconds == 43
    status = settled.status.model_dump(mode="json", by_alias=True)
    found = planned(running(OLD, answer=answers, of=resource(NEW, status=status)))
    assert "43 s" in condition(found, PROGRESSING).message
    assert "RolloutBegins" in [event.reason for event in found.events]


def test_volumes_that_cannot_be_mounted_twice_speak_against_a_surge() -> None:
    wanted = target(NEW).revision
    supply = Supply(NODES, (), None, alone="A claim is ReadWriteOncePod: it cannot be mounted twice.")
    chosen = choose(RolloutStrategy.AUTO, NEW_NAME, wanted, 1, supply, None)
    assert chosen.strategy is RolloutStrategy.IN_PLACE
    assert "ReadWriteOncePod" in chosen.because
    assert choose(RolloutStrategy.AUTO, NEW_NAME, wanted, 1, Supply(NODES, (), None), None).strategy == "Surge"
    assert choose(RolloutStrategy.SURGE, NEW_NAME, wanted, 1, supply, None).strategy is None
