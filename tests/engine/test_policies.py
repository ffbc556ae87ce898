"""Servers that are not quite right: a bad model under a strict policy, and a speculating one with an allowance."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from engine.conftest import Starter
from engine.judge import faults
from engine.qualified import failed, qualify
from sm70_profiles.catalog import load_profile
from sm70_profiles.qualification import Verdict
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.routes import Stage
from sm70_profiles.termination import TerminationKind

pytestmark = pytest.mark.engine


def test_a_bad_model_serves_and_fails_the_judge_and_a_disabled_path_keeps_it_unready(
    starter: Starter, answers: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    server = starter("tiny_hybrid_reference", "bad", overrides={"kvCacheDtype": "fp8_e5m2"})
    assert server.http.get("/health").status_code == 200
    ready = server.http.get("/sm70/ready")
    assert ready.status_code == 503
    assert ready.json()["path"] == "reference_attention_e4m3"
    assert ready.json()["reason"] == "kv_dtype"
    assert "expected path reference_attention_e4m3 is disabled: kv_dtype" in server.log

    for one in answers.values():
        assert faults(server.chat(one["request"]), one["expected"])
    report = qualify(server, tmp_path, ["right-answers", "prefix-hit"])
    assert report.verdict is Verdict.FAILED
    assert failed(report) == {"right-answers"}

    counts = server.dispatches()
    assert counts["attention_e5m2_reference", Stage.DECODE] > 0
    assert not [route for route, _ in counts if route == "attention_e4m3_reference"]
    metrics = server.http.get("/metrics").text
    assert 'sm70_acceleration_path{path="reference_attention_e4m3",state="disabled"} 1.0' in metrics
    decoded = float(counts["attention_e5m2_reference", Stage.DECODE])
    labels = 'reason="kv_dtype",route="attention_e5m2_reference",stage="decode"'
    assert f"sm70_route_fallback_total{{{labels}}} {decoded}" in metrics

    # The engine's process dies; stock vLLM would end with 0.
    os.kill(int(server.report().worker_facts["pid"] or 0), signal.SIGKILL)
    assert server.process.wait(timeout=120) == 1
    words = server.last_words()
    assert (words.kind, words.reason) == (TerminationKind.FAILURE, TerminationReason.ENGINE_DIED)
    assert {(row.route, row.stage): row.dispatches for row in words.routes} == counts


def test_a_draft_speeds_up_and_an_allowance_makes_ready(
    starter: Starter, models: Path, answers: dict[str, dict[str, Any]]
) -> None:
    profile = load_profile("tiny_hybrid_reference_dflash")
    allowed = [{"path": path, "because": "E5M2 for this test"} for path in profile.expected_acceleration]
    server = starter(
        profile.name,
        "tiny",
        draftPath=str(models / "draft"),
        overrides={"kvCacheDtype": "fp8_e5m2"},
        acceleration={"policy": "Require", "allowDisabled": allowed},
    )
    report = server.report()
    assert report.summary.enabled < report.summary.total
    assert server.http.get("/sm70/ready").status_code == 200

    before = server.dispatches()
    for one in answers.values():
        assert faults(server.chat(one["request"]), one["expected"]) == []
    after = server.dispatches()
    assert after["attention_e5m2_reference", Stage.DRAFT] > 0
    rounds = after["gdn_reference", Stage.VERIFY] - before.get(("gdn_reference", Stage.VERIFY), 0)
    tokens = sum(one["expected"]["completionTokens"] for one in answers.values())
    # Three layers a round: the first of three drafted tokens is right, so a round yields two tokens.
    assert rounds / 3 < 0.6 * tokens
    series = server.http.get("/metrics").text
    (yielded,) = re.findall(r"^sm70_spec_tokens_per_round (\S+)$", series, re.MULTILINE)
    assert 1.8 < float(yielded) <= 4
    (took,) = re.findall(r"^sm70_spec_round_seconds (\S+)$", series, re.MULTILINE)
    assert float(took) > 0
    assert server.stop() == 0
