"""Proof, through the planner: what becomes of a report, which key it holds for, and what is never enough."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sm70_operator.api import names
from sm70_operator.api.conditions import ConditionStatus, ConditionType, Reason
from sm70_operator.api.qualification import Evidence, parse_evidence
from sm70_operator.observe.facts import parse_pod
from sm70_operator.observe.proof import parse_job
from sm70_operator.observe.revisions import RevisionFacts, parse_revision
from sm70_operator.observe.snapshot import EngineAnswer, Resource, Snapshot, UserDocument, pinned_uuids
from sm70_operator.plan.plan import Apply, Conclude, Plan, Record
from sm70_operator.plan.planner import plan
from sm70_operator.render.objects import Manifest
from sm70_profiles.qualification import Gate, QualificationReport, SuiteReference, Verdict
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.report import DeviceFacts
from sm70_profiles.termination import FindingSeverity, PreflightFinding, Termination, TerminationKind
from unit.operator.builders import (
    KEY,
    NOW,
    SETTINGS,
    UID,
    condition,
    deployment,
    placed,
    planned,
    record,
    report,
    resource,
    running,
    snapshot,
    spec,
    target,
)

JUDGED = spec(qualification={"when": "During", "repeats": 0})
DIGEST = f"registry.test/engine-cpu@sha256:{'a' * 64}"
CHECKED = SETTINGS.model_copy(update={"preflight": True})
EARLIER = spec(overrides={"maxNumSeqs": 4})


def candidate(**more: Any) -> Snapshot:
    """A first revision that serves and has no traffic yet."""
    name = target(JUDGED).name
    box = {"started": True, "ready": True, "imageID": DIGEST, "state": {"running": {}}}
    facts = {"answer": report(), "pods": [placed(name, box, ready=True)], **more}
    world = snapshot([deployment(JUDGED)], records=[record(JUDGED, good=False)], of=resource(JUDGED), **facts)
    return replace(world, service=None)


def applied(found: Plan, kind: str) -> Manifest | None:
    manifests = [action.manifest for action in found.actions if isinstance(action, Apply)]
    return next((one for one in manifests if one["kind"] == kind and _is_ours(one)), None)


def _is_ours(manifest: Manifest) -> bool:
    """A public Service and a candidate Service are of one kind."""
    return manifest["kind"] != "Service" or bool(manifest["metadata"]["name"] == KEY.name)


def promoted(found: Plan) -> bool:
    return any(isinstance(action, Apply) and action.promotes for action in found.actions)


def begun() -> tuple[Evidence, Manifest]:
    """What the first look makes: evidence without a verdict, and the judge's Job."""
    found = planned(candidate())
    made, job = applied(found, names.QUALIFICATION_KIND), applied(found, "Job")
    assert made is not None
    assert job is not None
    assert not promoted(found)
    made["metadata"] |= {"uid": "evidence", "resourceVersion": "9"}
    evidence = parse_evidence(made)
    assert evidence is not None
    return evidence, job


def ended(job: Manifest, message: str, kind: str = "Complete") -> dict[str, Any]:
    """The world's part when a Job has ended and its pod left a message."""
    found = {**job, "status": {"conditions": [{"type": kind, "status": "True", "message": "the Job's own words"}]}}
    pod = {
        "metadata": {
            "name": f"{job['metadata']['name']}-x7k2p",
            "namespace": KEY.namespace,
            "uid": "job-pod",
            "labels": job["spec"]["template"]["metadata"]["labels"],
        },
        "spec": {"nodeName": "node-1"},
        "status": {
            "containerStatuses": [
                {"name": names.JOB_CONTAINER, "state": {"terminated": {"exitCode": 0, "message": message}}}
            ]
        },
    }
    return {"jobs": (parse_job(found),), "job_pods": (parse_pod(pod),)}


def verdict(how: Verdict) -> str:
    gate = Gate(name="parity", verdict=how, measured="0", threshold="0", unit="prompts", samples=2)
    return (
        QualificationReport(
            schema_version=1,
            suite=SuiteReference(name="smoke", version=1, digest="d" * 64),
            tool_version="0.1.0",
            started_at="2026-11-30T11:00:00Z",
            finished_at="2026-11-30T11:01:00Z",
            verdict=how,
            gates=(gate,),
            raw_digest="e" * 64,
        )
        .encode()
        .decode()
    )


def proven(evidence: Evidence, how: str) -> Evidence:
    return replace(evidence, status=evidence.status.model_copy(update={"verdict": Verdict(how), "summary": "1/1"}))


def test_a_candidate_is_judged_before_it_gets_traffic() -> None:
    evidence, job = begun()
    assert (evidence.spec.key.gpu_product, evidence.spec.key.driver_branch) == ("cpu", "cpu")
    assert evidence.spec.key.image_digest == f"sha256:{'a' * 64}"
    waiting = planned(candidate(evidence=(evidence,), jobs=(parse_job(job),)))
    assert applied(waiting, "Job") is None, "it runs already"
    assert not promoted(waiting)
    assert condition(waiting, ConditionType.QUALIFIED).reason is Reason.RUNNING


@pytest.mark.parametrize("how", list(Verdict))
def test_the_report_becomes_the_verdict(how: Verdict) -> None:
    evidence, job = begun()
    found = planned(candidate(evidence=(evidence,), **ended(job, verdict(how))))
    (written,) = (action for action in found.actions if isinstance(action, Conclude))
    assert (written.name, written.status["verdict"]) == (evidence.name, str(how))
    assert not promoted(found), "what is written is read before it decides"


def test_a_job_that_left_no_report_is_an_error() -> None:
    evidence, job = begun()
    found = planned(candidate(evidence=(evidence,), **ended(job, "Killed", "Failed")))
    (written,) = (action for action in found.actions if isinstance(action, Conclude))
    assert written.status["verdict"] == "Error"
    assert "the Job's own words" in written.status["message"]


def test_only_a_pass_for_this_very_key_moves_the_traffic() -> None:
    evidence, _ = begun()
    assert promoted(planned(candidate(evidence=(proven(evidence, "Passed"),))))
    for how in ("Failed", "Inconclusive", "Error"):
        assert not promoted(planned(candidate(evidence=(proven(evidence, how),))))
    other = evidence.spec.model_copy(update={"key": evidence.spec.key.model_copy(update={"driver_branch": "580"})})
    stale = planned(candidate(evidence=(replace(proven(evidence, "Passed"), spec=other),)))
    assert not promoted(stale)
    assert condition(stale, ConditionType.QUALIFIED).reason is Reason.STALE
    assert applied(stale, "Job") is not None, "it is judged anew"


def test_evidence_for_other_floors_is_other_evidence() -> None:
    evidence, _ = begun()
    strict = JUDGED | {"qualification": {"when": "During", "repeats": 0, "thresholds": {"decode-rate": "60"}}}
    world = replace(candidate(evidence=(proven(evidence, "Passed"),)), resource=resource(strict))
    found = planned(replace(world, revisions=(parse_revision(record(strict, good=False)),)))
    assert target(strict).name == target(JUDGED).name, "the pods are the same"
    assert not promoted(found)
    job, made = applied(found, "Job"), applied(found, names.QUALIFICATION_KIND)
    assert job is not None
    assert made is not None
    words = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert words[words.index("--threshold") + 1] == "decode-rate=60"
    assert made["spec"]["thresholds"] == {"decode-rate": "60"}
    assert made["metadata"]["name"] == job["metadata"]["name"] != evidence.name


@pytest.mark.parametrize(
    ("qualification", "words"),
    [
        ({"suite": "no-such"}, ("`qualification.suite`", "`no-such`", "smoke")),
        ({"thresholds": {"determinism": "1"}}, ("`qualification.thresholds`", "`determinism`", "`decode-rate`")),
    ],
)
def test_what_the_judge_would_refuse_is_refused_before(qualification: dict[str, Any], words: tuple[str, ...]) -> None:
    found = condition(planned(snapshot(of=resource(spec(qualification=qualification)))), ConditionType.ACCEPTED)
    assert found.reason is Reason.REFUSED
    for word in words:
        assert word in found.message
    never = {**qualification, "when": "Never"}
    found = condition(planned(snapshot(of=resource(spec(qualification=never)))), ConditionType.ACCEPTED)
    assert found.status is ConditionStatus.TRUE


MINE = """\
schemaVersion: 1
name: mine
version: 3
title: Ours
gates:
- {name: fast, check: Performance, metric: DecodeRate, floor: "5"}
"""
OWN_SUITE = {"when": "During", "suiteRef": {"configMap": {"name": "suites", "key": "mine.yaml"}}}


def test_a_suite_from_a_config_map_is_what_the_revision_is_judged_by() -> None:
    evidence, _ = begun()
    own = JUDGED | {"qualification": OWN_SUITE | {"thresholds": {"fast": "6"}}}
    world = replace(
        candidate(evidence=(proven(evidence, "Passed"),)), resource=resource(own), suite=UserDocument(text=MINE)
    )
    found = planned(world)
    assert not promoted(found), "what the built-in suite proved is no proof by this one"
    made, job = applied(found, names.QUALIFICATION_KIND), applied(found, "Job")
    assert made is not None
    assert job is not None
    assert (made["spec"]["suite"], len(made["spec"]["suiteDigest"])) == ("mine", 64)
    run = parse_evidence(made)
    assert run is not None
    passed = replace(run, uid="u", owner=UID, status=run.status.model_copy(update={"verdict": Verdict.PASSED}))
    assert promoted(planned(replace(world, evidence=(passed,))))
    edited = UserDocument(text=MINE.replace('"5"', '"7"'))
    assert not promoted(planned(replace(world, evidence=(passed,), suite=edited))), "evidence is for the very content"


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (UserDocument(missing="There is no ConfigMap `suites` in namespace `serving`"), ("no ConfigMap `suites`",)),
        (UserDocument(text="gates: []"), ("no suite", "name")),
        (UserDocument(text="#" * 300_000), ("no suite", "bytes")),
        (None, ("could not be read",)),
    ],
)
@pytest.mark.parametrize("records", [(), (record(JUDGED, good=False),)], ids=["new", "recorded"])
def test_a_suite_that_cannot_be_used_is_refused(
    document: UserDocument | None, words: tuple[str, ...], records: tuple[Any, ...]
) -> None:
    asked = resource(JUDGED | {"qualification": OWN_SUITE})
    found = condition(
        planned(replace(snapshot(of=asked, records=list(records)), suite=document)), ConditionType.ACCEPTED
    )
    assert found.reason is Reason.REFUSED
    for word in ("`qualification.suiteRef`", *words):
        assert word in found.message


def test_an_engine_that_does_not_say_where_it_runs_is_not_proven() -> None:
    """Its report is missing, which `Report` admits: then nothing tells that the evidence is for this place."""
    evidence, _ = begun()
    document = JUDGED | {"acceleration": {"policy": "Report"}}
    name = target(document).name
    box = {"started": True, "ready": True, "imageID": DIGEST, "state": {"running": {}}}
    world = snapshot(
        [deployment(document)],
        [placed(name, box, ready=True)],
        records=[record(document, good=False)],
        of=resource(document),
        answer=EngineAnswer(error="no answer"),
        evidence=(proven(evidence, "Passed"),),
    )
    found = planned(world)
    assert not promoted(found)
    assert applied(found, "Job") is None, "there is no key to judge for"


# ------------------------------------------------------------------------------------------------------ preflight


def change(**more: Any) -> Snapshot:
    """A revision serves, and the spec asks for another one."""
    world = running(EARLIER, records=[record(EARLIER)])
    return replace(world, resource=resource(), service=world.service, **more)


def checked(world: Snapshot) -> Plan:
    """Two looks: the first one records the target."""
    first = plan(world, NOW, CHECKED)
    assert first.status is not None
    recorded = replace(world, revisions=(*world.revisions, *_recorded()))
    return plan(recorded, NOW, CHECKED)


def _recorded() -> tuple[RevisionFacts, ...]:
    return (parse_revision(record(number=2, good=False)),)


def preflight_words(reason: TerminationReason, *findings: PreflightFinding) -> str:
    words = Termination(kind=TerminationKind.PREFLIGHT, reason=reason, message="m", findings=findings)
    return words.encode().decode()


def test_nothing_is_stopped_before_the_preflight_has_ended() -> None:
    found = checked(change())
    job = applied(found, "Job")
    assert job is not None
    assert job["metadata"]["name"] == names.preflight_name(KEY.name, target().name)
    assert condition(found, ConditionType.PROGRESSING).reason is Reason.PREFLIGHT
    assert condition(found, ConditionType.READY).status is ConditionStatus.TRUE


def test_a_preflight_that_fails_rejects_without_touching_anything() -> None:
    job = applied(checked(change()), "Job")
    assert job is not None
    error = PreflightFinding(
        severity=FindingSeverity.ERROR,
        reason=TerminationReason.CHECKSUM_MISMATCH,
        subject="draft",
        message="config.json differs",
        remedy="Copy it again.",
    )
    message = preflight_words(TerminationReason.CHECKSUM_MISMATCH, error)
    found = checked(change(**ended(job, message, "Failed")))
    (rejection,) = (
        action
        for action in found.actions
        if isinstance(action, Record) and names.REJECTED_ANNOTATION in action.annotations
    )
    assert "ChecksumMismatch: config.json differs. Copy it again." in str(
        rejection.annotations[names.REJECTED_ANNOTATION]
    )
    assert not [action for action in found.actions if isinstance(action, Apply) and action.starts]


def test_a_preflight_that_passes_lets_the_change_begin() -> None:
    job = applied(checked(change()), "Job")
    assert job is not None
    found = checked(change(**ended(job, preflight_words(TerminationReason.PASSED))))
    assert condition(found, ConditionType.PROGRESSING).reason is not Reason.PREFLIGHT
    assert applied(found, "Job") is None


# ------------------------------------------------------------------------------------------------------------ GPUs


def test_a_conflict_of_pins_is_told_to_whoever_has_the_gpu_too() -> None:
    pins = {"serving/tiny": ("GPU-1",), "research/other": ("GPU-1", "GPU-2")}
    found = condition(planned(running(pinned=pins)), ConditionType.GPUS_ALLOCATED)
    assert found.status is ConditionStatus.TRUE
    assert "GPU `GPU-1` is named by `serving/tiny` and by `research/other`" in found.message


def test_a_server_on_other_gpus_than_asked_for_is_not_ready() -> None:
    document = spec(gpus={"count": 1, "products": ["Tesla-V100-SXM2-16GB"]})
    device = DeviceFacts(name="Tesla V100-PCIE-32GB", compute_capability="7.0", count=1, driver="570.1")
    found = planned(running(document, answer=report(device=device)))
    allocated = condition(found, ConditionType.GPUS_ALLOCATED)
    assert allocated.reason is Reason.GPU_MISMATCH
    assert "Tesla V100-PCIE-32GB" in allocated.message
    assert condition(found, ConditionType.READY).reason is Reason.GPU_MISMATCH


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [({"uuids": ["GPU-1", 7]}, ("GPU-1",)), ({"uuids": "GPU-1"}, ()), ({}, ()), (None, ())],
)
def test_pins_are_read_from_specs_that_nobody_has_checked(gpus: Any, expected: tuple[str, ...]) -> None:
    assert pinned_uuids(Resource(KEY, "u", 1, False, {"gpus": gpus}, {})) == expected


def test_a_claim_is_there_before_the_pods_that_refer_to_it() -> None:
    pinned = {"allocation": "DRA", "count": 1, "uuids": ["GPU-1"]}
    found = planned(snapshot(of=resource(spec(gpus=pinned, overrides={"tensorParallelSize": 1}))))
    kinds = [action.manifest["kind"] for action in found.actions if isinstance(action, Apply)]
    assert kinds.index("ResourceClaimTemplate") < kinds.index("Deployment")
    manifest, template = applied(found, "Deployment"), applied(found, "ResourceClaimTemplate")
    assert manifest is not None
    assert template is not None
    (claim,) = manifest["spec"]["template"]["spec"]["resourceClaims"]
    assert claim["resourceClaimTemplateName"] == template["metadata"]["name"]
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["claims"] == [{"name": claim["name"]}]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]


def test_pins_without_claims_are_refused_also_where_they_are_stored() -> None:
    found = planned(snapshot(of=resource(spec(gpus={"uuids": ["GPU-1"]}))))
    accepted = condition(found, ConditionType.ACCEPTED)
    assert accepted.status is ConditionStatus.FALSE
    assert "`uuids` need `allocation: DRA`" in accepted.message
