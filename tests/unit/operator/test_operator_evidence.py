"""Evidence: for which key it holds, when it is enough, when it may be tried again, and when it has become stale."""

from __future__ import annotations

from typing import Any

import pytest

from sm70_operator.api.conditions import MEANINGS, ConditionStatus, ConditionType, Reason
from sm70_operator.api.qualification import Evidence, parse_evidence
from sm70_operator.api.types import OnInconclusive, Qualification, Spec
from sm70_operator.plan.evidence import (
    EvidenceView,
    Place,
    Standing,
    Wanted,
    image_identity,
    judge_evidence,
    place_of,
    wanted_identity,
)
from sm70_operator.render.qualification_job import JudgeRun, render_qualification
from sm70_profiles.identity import QualificationIdentity
from sm70_profiles.report import DeviceFacts
from unit.operator.builders import OWNER, spec, target

DIGEST = f"sha256:{'a' * 64}"
V100 = DeviceFacts(name="Tesla V100-SXM2-16GB", compute_capability="7.0", count=1, driver="570.124.06")
DEMANDED = Qualification.model_validate({"suite": "smoke", "when": "During", "repeats": 1})


def wanted(document: dict[str, Any] | None = None, device: DeviceFacts | None = V100) -> Wanted:
    one = target(document)
    return wanted_identity(one.revision, one.resolution, f"registry.test/engine@{DIGEST}", device)


def key(document: dict[str, Any] | None = None, device: DeviceFacts = V100) -> QualificationIdentity:
    found = wanted(document, device).complete()
    assert found is not None
    return found


def run(verdict: str | None, attempt: int = 1, of: QualificationIdentity | None = None, **status: Any) -> Evidence:
    manifest = render_qualification(
        OWNER,
        JudgeRun(revision="r", key=of or key(), suite="smoke", attempt=attempt, image="i", served_name="s"),
    )
    manifest["status"] = {} if verdict is None else {"verdict": verdict, "summary": "1/2", **status}
    found = parse_evidence(manifest)
    assert found is not None
    return found


def judged(*runs: Evidence, device: DeviceFacts | None = V100) -> EvidenceView:
    return judge_evidence(runs, wanted(device=device), DEMANDED)


@pytest.mark.parametrize(
    ("runs", "standing", "status", "reason"),
    [
        ([], Standing.MISSING, ConditionStatus.UNKNOWN, Reason.EVIDENCE_MISSING),
        ([None], Standing.RUNNING, ConditionStatus.UNKNOWN, Reason.RUNNING),
        (["Passed"], Standing.PROVEN, ConditionStatus.TRUE, Reason.PASSED),
        (["Failed"], Standing.FAILED, ConditionStatus.FALSE, Reason.GATE_FAILED),
        (["Inconclusive"], Standing.MISSING, ConditionStatus.UNKNOWN, Reason.INCONCLUSIVE),
        (["Inconclusive", None], Standing.RUNNING, ConditionStatus.UNKNOWN, Reason.RUNNING),
        (["Inconclusive", "Inconclusive"], Standing.UNDECIDED, ConditionStatus.FALSE, Reason.INCONCLUSIVE),
        (["Inconclusive", "Error"], Standing.UNDECIDED, ConditionStatus.FALSE, Reason.RUN_ERROR),
        (["Error", "Passed"], Standing.PROVEN, ConditionStatus.TRUE, Reason.PASSED),
        (["Inconclusive", "Failed"], Standing.FAILED, ConditionStatus.FALSE, Reason.GATE_FAILED),
    ],
)
def test_what_runs_say(runs: list[str | None], standing: Standing, status: ConditionStatus, reason: Reason) -> None:
    found = judged(*(run(verdict, number + 1) for number, verdict in enumerate(runs)))
    assert (found.standing, found.finding.status, found.finding.reason) == (standing, status, reason)
    assert found.next_attempt == len(runs) + 1
    assert ConditionType.QUALIFIED in MEANINGS[reason].conditions
    assert found.admits(DEMANDED) == (standing is Standing.PROVEN)


def test_nothing_is_asked_for_by_default() -> None:
    omitted = Spec.model_validate(spec()).qualification
    found = judge_evidence([run("Failed")], wanted(), omitted)
    assert found.standing is Standing.NOT_REQUIRED
    assert found.admits(omitted)


def test_only_the_users_word_promotes_what_was_not_decided() -> None:
    promote = DEMANDED.model_copy(update={"on_inconclusive": OnInconclusive.PROMOTE})
    undecided = judged(run("Inconclusive", 1), run("Inconclusive", 2))
    assert undecided.admits(promote)
    assert not undecided.admits(DEMANDED)
    broken = judged(run("Inconclusive", 1), run("Error", 2))
    assert not broken.admits(promote), "a run that measured nothing is not one that did not decide"
    assert not judged(run("Failed")).admits(promote)


def test_the_failed_gates_are_told_with_their_figures() -> None:
    gates = [
        {"name": "decode", "verdict": "Failed", "bound": "AtLeast", "measured": "41", "threshold": "60",
         "unit": "tokens/s", "samples": 3},
        {"name": "parity", "verdict": "Passed", "measured": "0", "threshold": "0"},
    ]  # fmt: skip
    message = judged(run("Failed", gates=gates)).finding.message
    assert "gate `decode` Failed: 41 tokens/s, at least 60" in message
    assert "parity" not in message
    assert MEANINGS[Reason.GATE_FAILED].remedy in message


@pytest.mark.parametrize(
    "changes",
    [
        {"image_digest": f"sha256:{'b' * 64}"},
        {"model": "claim models/other"},
        {"draft": "claim models/draft"},
        {"profile_hash": "0"},
        {"resolution_hash": "0"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
    ],
)
def test_another_way_to_serve_is_not_proven(changes: dict[str, Any]) -> None:
    other = key().model_copy(update=changes)
    assert judged(run("Passed", of=other)).standing is Standing.MISSING
    assert judged(run("Failed", of=other)).standing is Standing.MISSING


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (V100.model_copy(update={"driver": "580.65.06"}), "driver 580"),
        (V100.model_copy(update={"name": "Tesla V100-PCIE-32GB"}), "`Tesla-V100-PCIE-32GB`"),
    ],
)
def test_evidence_becomes_stale_when_the_place_changes(device: DeviceFacts, words: str) -> None:
    proof = run("Passed")
    stale = judged(proof, device=device)
    assert (stale.standing, stale.finding.reason) == (Standing.STALE, Reason.STALE)
    assert words in stale.finding.message
    assert "570" in stale.finding.message
    assert not stale.admits(DEMANDED)
    fresh = judged(proof, run("Passed", of=key(device=device)), device=device)
    assert fresh.standing is Standing.PROVEN


def test_a_newer_driver_of_the_same_branch_changes_nothing() -> None:
    newer = V100.model_copy(update={"driver": "570.211.01"})
    assert judged(run("Passed"), device=newer).standing is Standing.PROVEN


def test_before_a_pod_runs_any_place_counts() -> None:
    assert wanted(device=None).complete() is None
    assert judged(run("Passed"), device=None).standing is Standing.PROVEN
    assert judge_evidence([run("Passed")], None, DEMANDED).standing is Standing.MISSING


def test_evidence_that_is_being_deleted_or_of_another_suite_does_not_count() -> None:
    gone = {"metadata": {"name": "x", "deletionTimestamp": "2026-11-30T12:00:00Z"}}
    manifest = render_qualification(
        OWNER, JudgeRun(revision="r", key=key(), suite="smoke", attempt=1, image="i", served_name="s")
    )
    deleting = parse_evidence(manifest | gone | {"status": {"verdict": "Passed"}})
    assert deleting is not None
    assert judged(deleting).standing is Standing.MISSING
    release = DEMANDED.model_copy(update={"suite": "release"})
    assert judge_evidence([run("Passed")], wanted(), release).standing is Standing.MISSING


def test_what_moves_without_changing_the_work_is_not_in_the_key() -> None:
    same = spec(replicas=3, pod={"labels": {"team": "x"}}, rollout={"drainTimeoutSeconds": 7})
    assert key(same) == key()
    assert key(spec(extraArgs=["--seed", "7"])) != key()


def test_a_pinned_draft_is_another_one() -> None:
    draft = {"persistentVolumeClaim": {"claimName": "models", "path": "draft"}}
    dflash = spec(profile="tiny_hybrid_reference_dflash", draft=draft)
    pinned = spec(profile="tiny_hybrid_reference_dflash", draft=draft | {"sha256": {"config.json": "1" * 64}})
    assert key(dflash).draft != key(pinned).draft
    hub = {"repo": "a/b", "revision": "0" * 40, "claimName": "one"}
    assert key(spec(model={"huggingFace": hub})) == key(spec(model={"huggingFace": hub | {"claimName": "two"}}))
    assert wanted(spec(model={"huggingFace": hub})).model == f"huggingface a/b@{'0' * 40}"


def test_places_and_images() -> None:
    assert place_of(V100) == Place("Tesla-V100-SXM2-16GB", "570")
    assert place_of(DeviceFacts(name="CPU", count=0)) == Place("cpu", "cpu")
    assert place_of(V100.model_copy(update={"driver": None})) is None
    assert image_identity("registry.test/engine:1") is None
    assert image_identity(f"registry.test/engine@{DIGEST}") == DIGEST
    assert image_identity(f"registry.test/engine@{DIGEST}", f"x@sha256:{'c' * 64}") == f"sha256:{'c' * 64}"


def test_evidence_of_another_version_proves_nothing() -> None:
    manifest = render_qualification(
        OWNER, JudgeRun(revision="r", key=key(), suite="smoke", attempt=1, image="i", served_name="s")
    )
    assert parse_evidence(manifest | {"status": {"verdict": "Brilliant"}}) is None
    manifest["spec"]["key"]["teleport"] = True
    assert parse_evidence(manifest) is None
    assert parse_evidence({}) is None
