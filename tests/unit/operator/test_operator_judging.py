"""Jobs of a rollout: nothing is stopped for what a preflight refuses, and nothing gets traffic that a judge refuses."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from sm70_operator.api import names
from sm70_operator.api.conditions import ConditionStatus, ConditionType, Reason
from sm70_operator.api.qualification import Evidence, parse_evidence
from sm70_operator.observe.facts import PodFacts, parse_object, parse_pod
from sm70_operator.observe.proof import parse_job
from sm70_operator.observe.revisions import Rejection, parse_revision
from sm70_operator.observe.snapshot import EngineAnswer, NodeWords, Snapshot
from sm70_operator.plan.plan import Apply, Conclude, Delete, Plan, Record
from sm70_operator.plan.planner import plan
from sm70_operator.render.objects import Manifest
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.termination import Termination, TerminationKind
from unit.operator.builders import (
    NOW,
    OWNER,
    SETTINGS,
    condition,
    deployment,
    planned,
    record,
    rejected,
    report,
    resource,
    running,
    serving,
    snapshot,
    spec,
    target,
)
from unit.operator.test_operator_rollout import promoted, rejections, scaled

OLD = spec(overrides={"maxNumSeqs": 4})
CHECKING = SETTINGS.model_copy(update={"preflight": True})
DIGEST = "registry.test/engine-cpu@sha256:" + "a" * 64
PROGRESSING, QUALIFIED, READY = ConditionType.PROGRESSING, ConditionType.QUALIFIED, ConditionType.READY


def judged(**changes: Any) -> dict[str, Any]:
    return spec(qualification={"when": "During", **changes})


def ended_job(manifest: Manifest, words: str, failed: bool = False) -> dict[str, Any]:
    """What a snapshot shows of a Job that was made by this manifest and whose one pod said this."""
    name = manifest["metadata"]["name"]
    condition = {"type": "Failed" if failed else "Complete", "status": "True", "message": "BackoffLimitExceeded"}
    raw = {**manifest, "metadata": {**manifest["metadata"], "uid": "job", "resourceVersion": "3"}}
    terminated = {"exitCode": 0, "message": words, "finishedAt": "2026-11-30T11:59:00Z"}
    pod = {
        "metadata": {
            "name": f"{name}-x1",
            "uid": "job-pod",
            "creationTimestamp": "2026-11-30T11:58:00Z",
            "labels": manifest["spec"]["template"]["metadata"]["labels"],
        },
        "spec": {"containers": [{"name": names.JOB_CONTAINER}], "nodeName": "node-1"},
        "status": {
            "phase": "Succeeded",
            "containerStatuses": [{"name": names.JOB_CONTAINER, "state": {"terminated": terminated}}],
        },
    }
    job = parse_job(raw | {"status": {"conditions": [condition]}})
    return {"jobs": (job,), "job_pods": (parse_pod(pod),)}


def made(found: Plan, kind: str) -> Manifest:
    (manifest,) = (one.manifest for one in found.actions if isinstance(one, Apply) and one.manifest["kind"] == kind)
    return manifest


def said(reason: TerminationReason, message: str = "words") -> str:
    return Termination(kind=TerminationKind.PREFLIGHT, reason=reason, message=message).encode().decode()


def changing() -> Snapshot:
    return running(OLD, of=resource(), records=[record(OLD), record(number=2, good=False)])


def test_a_preflight_runs_while_the_earlier_one_serves() -> None:
    found = plan(changing(), NOW, CHECKING)
    job = made(found, "Job")
    assert job["metadata"]["labels"][names.FOR_REVISION_LABEL] == target().name
    assert names.REVISION_LABEL not in job["spec"]["template"]["metadata"]["labels"], "or it would be an endpoint"
    assert scaled(found.actions) == {}
    assert condition(found, PROGRESSING).reason is Reason.PREFLIGHT
    assert condition(found, READY).status is ConditionStatus.TRUE


def test_what_a_preflight_refuses_is_rejected_and_nothing_was_stopped() -> None:
    job = made(plan(changing(), NOW, CHECKING), "Job")
    facts = ended_job(job, said(TerminationReason.PATH_NOT_FOUND, "`/models/target` does not exist"))
    found = plan(replace(changing(), **facts), NOW, CHECKING)
    (rejection,) = rejections(found)
    assert "/models/target" in str(rejection.annotations[names.REJECTED_ANNOTATION])
    assert scaled(found.actions) == {}
    after = replace(running(OLD, of=resource(), records=[record(OLD), rejected(spec())]), **facts)
    again = plan(after, NOW, CHECKING)
    assert [one.kind for one in again.actions if isinstance(one, Delete)] == ["Job"], "another try is checked anew"
    assert condition(again, READY).status is ConditionStatus.TRUE


def test_a_preflight_that_downloads_again_says_why_and_then_how_far_it_is() -> None:
    hub = {"huggingFace": {"repo": "owner/name", "revision": "0" * 40, "claimName": "downloads"}}
    world = running(OLD, of=resource(spec(model=hub)), records=[record(OLD), record(spec(model=hub), 2, good=False)])
    (job,) = ended_job(made(plan(world, NOW, CHECKING), "Job"), "")["jobs"]
    words = Termination(kind=TerminationKind.FAILURE, reason=TerminationReason.DOWNLOAD_FAILED, message="hub is away")
    failed = {"terminated": {"exitCode": 1, "message": words.encode().decode()}}

    def pod(name: str, phase: str, state: dict[str, Any]) -> PodFacts:
        labels = {names.JOB_UID_LABEL: job.object.uid, names.COMPONENT_LABEL: names.PREFLIGHT_COMPONENT}
        status = {"phase": phase, "initContainerStatuses": [{"name": "fetch-model", "state": state}]}
        return parse_pod({"metadata": {"name": name, "uid": name, "labels": labels}, "spec": {}, "status": status})

    first, second = pod("a", "Failed", failed), pod("b", "Pending", {"running": {}})
    world = replace(world, jobs=(replace(job, succeeded=False),), job_pods=(first, second))
    said = condition(plan(world, NOW, CHECKING), PROGRESSING)
    assert said.reason is Reason.PREFLIGHT
    assert "tries again after DownloadFailed: hub is away" in said.message
    answers = {"b": EngineAnswer(phase="Downloading", progress="1.0 of 2.0 GB (50 %)")}
    said = condition(plan(replace(world, answers=answers), NOW, CHECKING), PROGRESSING)
    assert "It downloads: 1.0 of 2.0 GB (50 %)" in said.message
    assert "hub is away" not in said.message


@pytest.mark.parametrize(
    ("minutes", "words", "found"),
    [
        (
            0,
            NodeWords("FailedMount", 'MountVolume.SetUp failed for "target": hostPath type check failed: /m/a'),
            "/m/a",
        ),
        (0, NodeWords("FailedMount", "timed out waiting for nfs-1"), ""),
        (2, NodeWords("FailedMount", "timed out waiting for nfs-1"), "nfs-1"),
        (2, NodeWords("Pulling", "Pulling image"), ""),
    ],
)
def test_a_preflight_whose_volume_is_not_mounted_ends(minutes: int, words: NodeWords, found: str) -> None:
    """The kubelet tries for ever, and says so in an event alone."""
    job = made(plan(changing(), NOW, CHECKING), "Job")
    facts = ended_job(job, "")
    (pod,), (running_job,) = facts["job_pods"], facts["jobs"]
    created = NOW - timedelta(minutes=minutes)
    pod = replace(pod, phase="Pending", scheduled=True, container=None, created=created)
    going = replace(running_job, succeeded=False, failed=False)
    stuck = replace(changing(), jobs=(going,), job_pods=(pod,), node_words={pod.uid: words})
    after = plan(stuck, NOW, CHECKING)
    assert [found in str(one.annotations[names.REJECTED_ANNOTATION]) for one in rejections(after)] == [True] * bool(
        found
    )
    assert after.wake_after_seconds is not None
    assert after.wake_after_seconds <= 5, "nobody tells when the node says something else"
    back = running(OLD, of=resource(OLD), records=[record(OLD), record(number=2, good=False)])
    gone = plan(replace(back, jobs=(going,), job_pods=(pod,)), NOW, CHECKING)
    assert [one.kind for one in gone.actions if isinstance(one, Delete)] == ["Job"], (
        "the user has changed the spec back"
    )


def test_what_passes_goes_on() -> None:
    job = made(plan(changing(), NOW, CHECKING), "Job")
    found = plan(replace(changing(), **ended_job(job, said(TerminationReason.PASSED))), NOW, CHECKING)
    assert condition(found, PROGRESSING).reason is Reason.ANNOUNCED


def test_a_revision_that_has_served_before_and_a_first_one_need_no_preflight() -> None:
    back = running(OLD, of=resource(), records=[record(OLD, 2), record()])
    assert condition(plan(back, NOW, CHECKING), PROGRESSING).reason is Reason.ANNOUNCED
    assert "Deployment" in [
        one.manifest["kind"] for one in plan(snapshot(), NOW, CHECKING).actions if isinstance(one, Apply)
    ]


def candidate(document: dict[str, Any], first: bool = False, **more: Any) -> Snapshot:
    """The new one runs in place, with an image that has a digest."""
    name = target(document).name
    raw = serving(name)
    raw["status"]["containerStatuses"][0]["imageID"] = DIGEST
    records = [record(document, 2, good=False), *([] if first else [record(OLD)])]
    deployments = [deployment(document), *([] if first else [deployment(OLD, 0)])]
    selected = "none" if first else target(OLD).name
    found = snapshot(deployments, [raw], selected=selected, of=resource(document), records=records, answer=report())
    return replace(found, **more)


def runs(document: dict[str, Any], *verdicts: str, first: bool = False) -> tuple[Evidence, ...]:
    """Evidence of that many runs, made by the planner itself."""
    found: list[Evidence] = []
    for verdict in verdicts:
        world = candidate(document, first, evidence=tuple(found))
        raw = made(planned(world), names.QUALIFICATION_KIND)
        raw["metadata"] |= {"uid": f"q{len(found)}", "resourceVersion": "1"}
        parsed = parse_evidence(raw | {"status": {"verdict": verdict} if verdict else {}})
        assert parsed is not None
        found.append(parsed)
    return tuple(found)


def test_a_candidate_is_judged_before_it_gets_traffic() -> None:
    found = planned(candidate(judged()))
    evidence, job = made(found, names.QUALIFICATION_KIND), made(found, "Job")
    assert evidence["metadata"]["name"] == job["metadata"]["name"]
    order = [one.manifest["kind"] for one in found.actions if isinstance(one, Apply)]
    assert order.index(names.QUALIFICATION_KIND) < order.index("Job"), "a run is never forgotten"
    assert promoted(found) == []
    assert condition(found, PROGRESSING).reason is Reason.QUALIFYING
    assert condition(found, READY).reason is Reason.EVIDENCE_MISSING
    again = planned(candidate(judged(), evidence=runs(judged(), "")))
    assert [one.manifest["kind"] for one in again.actions if isinstance(one, Apply)] == ["Service", "Job"]


def test_the_verdict_of_an_ended_job_enters_the_evidence() -> None:
    document = judged()
    job = made(planned(candidate(document)), "Job")
    world = candidate(document, evidence=runs(document, ""), **ended_job(job, "", failed=True))
    (verdict,) = (one for one in planned(world).actions if isinstance(one, Conclude))
    assert verdict.status["verdict"] == "Error"
    assert "BackoffLimitExceeded" in verdict.status["message"]


def test_a_job_of_evidence_that_was_deleted_says_nothing_about_the_next_run() -> None:
    document = judged()
    job = made(planned(candidate(document)), "Job")
    job["metadata"]["creationTimestamp"] = "2026-11-30T11:00:00Z"
    (run,) = runs(document, "")
    world = candidate(document, evidence=(replace(run, created=NOW),), **ended_job(job, ""))
    found = planned(world)
    assert [one.name for one in found.actions if isinstance(one, Delete)] == [run.name]
    assert not [one for one in found.actions if isinstance(one, Conclude)]


def test_pods_of_an_earlier_job_of_the_same_name_are_not_heard() -> None:
    job = made(plan(changing(), NOW, CHECKING), "Job")
    facts = ended_job(job, said(TerminationReason.PATH_NOT_FOUND))
    (pod,) = facts["job_pods"]
    running_again = replace(facts["jobs"][0], failed=False, succeeded=False)
    world = replace(changing(), jobs=(running_again,), job_pods=(replace(pod, job="another"),))
    assert condition(plan(world, NOW, CHECKING), PROGRESSING).reason is Reason.PREFLIGHT


def test_passed_evidence_promotes_and_a_rollback_needs_no_second_run() -> None:
    document = judged()
    evidence = runs(document, "Passed")
    assert promoted(planned(candidate(document, evidence=evidence))) == [target(document).name]
    elsewhere = tuple(replace(one, owner="another") for one in evidence)
    assert promoted(planned(candidate(document, evidence=elsewhere))) == [target(document).name], "the key is the same"


def test_a_failed_gate_is_rejected_also_of_a_first_revision() -> None:
    for first in (False, True):
        found = planned(candidate(judged(), first, evidence=runs(judged(), "Failed", first=first)))
        assert (promoted(found), len(rejections(found))) == ([], 1)


@pytest.mark.parametrize("verdict", ["Inconclusive", "Error"])
def test_what_is_not_decided_is_repeated_and_then_returns_in_place(verdict: str) -> None:
    document = judged(repeats=1)
    once = planned(candidate(document, evidence=runs(document, verdict)))
    assert made(once, names.QUALIFICATION_KIND)["spec"]["attempt"] == 2
    twice = planned(candidate(document, evidence=runs(document, verdict, verdict)))
    assert (promoted(twice), len(rejections(twice))) == ([], 1)


def test_a_first_revision_that_is_not_decided_is_held() -> None:
    document = judged(repeats=0)
    found = planned(candidate(document, True, evidence=runs(document, "Inconclusive", first=True)))
    assert (promoted(found), rejections(found)) == ([], [])
    assert condition(found, PROGRESSING).reason is Reason.HELD
    assert condition(found, READY).reason is Reason.INCONCLUSIVE


def test_the_users_word_promotes_what_is_not_decided_but_no_broken_run() -> None:
    document = judged(repeats=0, onInconclusive="Promote")
    assert promoted(planned(candidate(document, evidence=runs(document, "Inconclusive")))) == [target(document).name]
    assert promoted(planned(candidate(document, evidence=runs(document, "Error")))) == []


def test_before_stops_nothing_for_a_revision_without_evidence() -> None:
    document = spec(qualification={"when": "Before"})
    world = running(OLD, of=resource(document), records=[record(OLD), record(document, 2, good=False)])
    found = planned(world)
    assert scaled(found.actions) == {}
    assert condition(found, PROGRESSING).reason is Reason.EVIDENCE_MISSING
    proven = planned(replace(world, evidence=runs(document, "Passed")))
    assert condition(proven, PROGRESSING).reason is Reason.ANNOUNCED


def test_without_an_image_of_the_judge_it_says_so() -> None:
    found = plan(candidate(judged()), NOW, SETTINGS.model_copy(update={"judge_image": ""}))
    assert condition(found, QUALIFIED).reason is Reason.RUN_ERROR
    assert "SM70_OPERATOR_JUDGE_IMAGE" in condition(found, QUALIFIED).message


def test_a_new_demand_is_judged_beside_the_traffic_and_takes_nothing_away() -> None:
    document = judged()
    world = running(document)
    raw = serving(target(document).name)
    raw["status"]["containerStatuses"][0]["imageID"] = DIGEST
    found = planned(replace(world, pods=(parse_pod(raw),)))
    assert made(found, "Job")
    assert scaled(found.actions) == {}
    assert condition(found, READY).reason is Reason.EVIDENCE_MISSING


def test_a_candidate_service_reaches_the_candidate_and_nobody_else() -> None:
    manifest = made(planned(candidate(judged())), "Service")
    assert manifest["metadata"]["name"] == names.candidate_name(OWNER.name)
    assert manifest["spec"]["selector"] == names.selector(OWNER.name, target(judged()).name)
    held = replace(running(), candidate=parse_object(manifest | {"metadata": manifest["metadata"] | {"uid": "c"}}))
    assert [one.kind for one in planned(held, timedelta(0).total_seconds()).actions if isinstance(one, Delete)] == [
        "Service"
    ]


def test_who_deletes_the_evidence_has_it_judged_again() -> None:
    document = judged()
    attempt = target(document).attempt
    words = Rejection("GateFailed", "too slow", NOW - timedelta(minutes=5), attempt).encode()
    refused = record(document, 2, good=False, **{names.REJECTED_ANNOTATION: words})
    world = running(OLD, of=resource(document), records=[record(OLD), refused])
    evidence = runs(document, "Failed")
    assert condition(planned(replace(world, evidence=evidence)), PROGRESSING).reason is Reason.ROLLED_BACK
    assert condition(planned(world), PROGRESSING).reason is Reason.ANNOUNCED
    again = candidate(document, evidence=runs(document, "Passed"))
    found = planned(replace(again, revisions=tuple(parse_revision(one) for one in (record(OLD), refused))))
    decisive = (one for one in found.actions if isinstance(one, Record) or (isinstance(one, Apply) and one.promotes))
    order = [type(one).__name__ for one in decisive]
    assert order == ["Record", "Apply"], "the old verdict is gone before the traffic comes"
