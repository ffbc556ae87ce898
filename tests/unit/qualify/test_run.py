"""The smoke suite against a reciting server, sound and with one fault at a time; and the command line around it."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sm70_engine.tinymodel.chains import answers
from sm70_profiles.catalog import load_profile
from sm70_profiles.documents import write_document
from sm70_profiles.qualification import (
    MAX_REPORT_BYTES,
    MAX_TERMINATION_BYTES,
    Gate,
    QualificationReport,
    RightAnswers,
    Suite,
    Verdict,
    load_suite,
    parse_qualification,
)
from sm70_qualify.asking import Asker
from sm70_qualify.cli import main
from sm70_qualify.client import Endpoint
from sm70_qualify.run import run, survey
from unit.qualify.reciter import KEY, MODEL, Reciter, serving

PROFILE = load_profile("tiny_hybrid_reference")
SMOKE = load_suite("smoke")


def judged(reciter: Reciter, suite: Suite = SMOKE, **options: Any) -> tuple[QualificationReport, Asker]:
    with serving(reciter) as url, Endpoint(url, model=MODEL, api_key=KEY) as endpoint:
        asker = Asker(endpoint, seconds=120, template=suite.chat_template_arguments)
        report, _ = run(suite, asker, survey(endpoint, PROFILE), **options)
        return report, asker


def gate(report: QualificationReport, name: str) -> Gate:
    return next(one for one in report.gates if one.name == name)


def test_a_sound_server_passes_every_gate() -> None:
    report, asker = judged(Reciter())
    assert [(one.name, one.verdict, one.message) for one in report.gates if one.verdict is not Verdict.PASSED] == []
    assert [one.name for one in report.gates] == [check.name for check in SMOKE.gates]
    assert report.skipped == ()
    assert gate(report, "mixed-load").samples == 16
    assert gate(report, "determinism").message == "compared by token ids"
    assert gate(report, "decode-rate").samples == 3
    assert report.raw_digest == asker.raw_digest
    assert {entry["gate"] for entry in asker.raw} == {one.name for one in report.gates} - {"decode-rate", "first-token"}


@pytest.mark.parametrize(
    ("fault", "failed"),
    [
        ("wrong", {"right-answers", "structured-output", "tool-call", "mixed-load"}),
        ("unstable", {"right-answers", "determinism", "stream-parity", "structured-output", "mixed-load"}),
        ("noise", {"right-answers", "text-health", "structured-output"}),
        ("streams otherwise", {"determinism", "stream-parity", "structured-output"}),
        ("no cache", {"prefix-hit"}),
        ("no tools", {"right-answers", "tool-call"}),
    ],
)
def test_each_fault_fails_the_gates_that_look_for_it(fault: str, failed: set[str]) -> None:
    report, _ = judged(Reciter(faults=frozenset({fault})))
    assert report.verdict is Verdict.FAILED
    assert {one.name for one in report.gates if one.verdict is not Verdict.PASSED} == failed
    assert {one.verdict for one in report.gates} == {Verdict.PASSED, Verdict.FAILED}
    first = next(one for one in report.gates if one.verdict is Verdict.FAILED)
    assert report.message.startswith(f"{first.name}: ")


def test_a_server_that_stops_answering_is_an_error_and_no_failure() -> None:
    reciter = Reciter()
    with serving(reciter) as url, Endpoint(url, model=MODEL, api_key=KEY) as endpoint:
        subject = survey(endpoint, PROFILE)
        reciter.faults = frozenset({"down"})
        report, _ = run(SMOKE, Asker(endpoint, seconds=120), subject)
    assert report.verdict is Verdict.ERROR
    assert {one.verdict for one in report.gates} == {Verdict.ERROR}
    assert "503: the engine is dead" in report.gates[0].message


def test_when_the_time_is_up_the_rest_is_an_error() -> None:
    with serving(Reciter()) as url, Endpoint(url, model=MODEL, api_key=KEY) as endpoint:
        report, _ = run(SMOKE, Asker(endpoint, seconds=-1), survey(endpoint, PROFILE))
    assert {(one.verdict, one.message) for one in report.gates} == {(Verdict.ERROR, "the time of the run is up")}


def test_another_server_is_judged_by_what_it_says() -> None:
    """No token ids, no /tokenize, no cached tokens in the usage: text, usage and /metrics take their places."""
    report, _ = judged(Reciter(token_ids=False, tokenizes=False, cached_tokens_in_usage=False))
    assert report.verdict is Verdict.PASSED, report.message
    assert gate(report, "determinism").message == "compared by text"
    assert gate(report, "prefix-hit").message == "by the counters of /metrics"
    assert "tokens counted by usage" in gate(report, "decode-rate").message


def test_what_nobody_says_is_inconclusive() -> None:
    report, _ = judged(Reciter(cached_tokens_in_usage=False, faults=frozenset({"no metrics"})))
    assert gate(report, "prefix-hit").verdict is Verdict.INCONCLUSIVE
    assert report.verdict is Verdict.INCONCLUSIVE


def test_floors_come_from_the_command_line_then_the_profile_then_the_suite() -> None:
    report, _ = judged(Reciter(), thresholds={"decode-rate": "1000000000"})
    assert PROFILE.floors is not None
    assert (gate(report, "decode-rate").verdict, gate(report, "decode-rate").threshold) == (
        Verdict.FAILED,
        "1000000000",
    )
    assert "floor of the command line" in gate(report, "decode-rate").message
    assert gate(report, "prefill-rate").threshold == PROFILE.floors.prefill_rate
    assert "floor of the profile" in gate(report, "prefill-rate").message


@pytest.mark.parametrize(("threshold", "status"), [("0.001", 0), ("1000000000", 1)])
def test_a_floor_of_the_command_line_decides(threshold: str, status: int, tmp_path: Path) -> None:
    """Above what the server does it fails, below it passes, whatever suite and profile say."""
    suite, out = tmp_path / "suite.yaml", tmp_path / "report.json"
    floor = "1000000000" if status == 0 else "0.001"
    suite.write_text(
        "schemaVersion: 1\nname: own\nversion: 1\ntitle: t\n"
        f"gates: [{{name: decode, check: Performance, metric: DecodeRate, floor: '{floor}', promptTokens: 64}}]\n"
    )
    with serving(Reciter()) as url:
        arguments = ["run", "--url", url, "--suite", str(suite), "--model", MODEL, "--profile", PROFILE.name]
        assert main([*arguments, "--quiet", "--threshold", f"decode={threshold}", "--out", str(out)]) == status
    found = parse_qualification(out.read_bytes(), MAX_REPORT_BYTES)
    assert [one.threshold for one in found.gates] == [threshold]


def test_the_load_is_one_that_the_context_has_room_for() -> None:
    report, _ = judged(Reciter(max_model_len=600))
    assert report.verdict is Verdict.PASSED, report.message
    assert gate(report, "decode-rate").message.startswith(f"{600 - 32 - 16} prompt tokens")


def test_gates_of_other_profiles_are_skipped_with_the_reason() -> None:
    with serving(Reciter()) as url, Endpoint(url, model=MODEL, api_key=KEY) as endpoint:
        subject = survey(endpoint, load_profile("qwen38_27b_nvfp4_dflash2"))
        report, _ = run(SMOKE, Asker(endpoint, seconds=120), subject)
    assert [one.name for one in report.skipped] == ["right-answers"]
    assert "tiny_hybrid_reference*" in report.skipped[0].because
    assert report.verdict is Verdict.PASSED


def test_the_suite_expects_what_the_tiny_model_recites() -> None:
    check = next(one for one in SMOKE.gates if isinstance(one, RightAnswers))
    documents = answers(0, "tiny", "")["answers"]
    assert len(check.questions) == len(documents)
    for question, document in zip(check.questions, documents, strict=True):
        wanted = document["expected"]
        assert question.prompt == document["request"]["messages"][0]["content"]
        assert question.max_tokens > wanted["completionTokens"]
        assert question.expected.completion_tokens == wanted["completionTokens"]
        assert question.expected.finish_reason == wanted["finishReason"]
        assert question.expected.content == wanted.get("content")
        if "toolCall" in wanted:
            assert (question.expected.tool, question.expected.arguments) == tuple(wanted["toolCall"].values())


def test_the_command_line_leaves_report_raw_data_and_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    reciter = Reciter()
    out, raw, words = (tmp_path / name for name in ("report.json", "raw.json", "termination-log"))
    with serving(reciter) as url:
        arguments = ["run", "--url", f"{url}/v1", "--suite", "smoke", "--profile", PROFILE.name, "--out", str(out)]
        assert main([*arguments, "--raw", str(raw), "--termination-log", str(words)]) == 0
    report = parse_qualification(out.read_bytes(), MAX_REPORT_BYTES)
    assert report.raw_digest == hashlib.sha256(raw.read_bytes()).hexdigest()
    assert len(words.read_bytes()) <= MAX_TERMINATION_BYTES
    assert parse_qualification(words.read_bytes()).gates == report.gates
    shown = capsys.readouterr()
    assert "verdict: Passed" in shown.out
    assert "Passed" in shown.err
    assert reciter.keys == {f"Bearer {KEY}"}
    for text in (out.read_text(), raw.read_text(), words.read_text(), shown.out, shown.err):
        assert KEY not in text
    assert main(["show", str(out)]) == 0


def test_the_key_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    reciter = Reciter(faults=frozenset({"no cache"}))
    suite = tmp_path / "suite.yaml"
    suite.write_text("schemaVersion: 1\nname: own\nversion: 3\ntitle: t\ngates: [{name: hit, check: PrefixHit}]\n")
    with serving(reciter) as url:
        arguments = ["run", "--url", url, "--suite", str(suite), "--model", MODEL, "--api-key-file", str(file)]
        assert main([*arguments, "--quiet", "--out", str(tmp_path / "out")]) == 1
    assert reciter.keys == {f"Bearer {KEY}"}
    assert parse_qualification((tmp_path / "out").read_bytes()).suite.name == "own"


def test_nobody_there_is_an_error_with_a_report(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert (
        main(["run", "--url", "http://127.0.0.1:9", "--suite", "smoke", "--quiet", "--termination-log", str(out)]) == 3
    )
    report = parse_qualification(out.read_bytes())
    assert (report.verdict, report.gates) == (Verdict.ERROR, ())
    assert "could not be asked" in report.message


@pytest.mark.parametrize(("first", "passed"), [("right-answers", 1), ("mixed-load", 0)])
def test_a_run_that_is_stopped_leaves_what_it_has(first: str, passed: int, tmp_path: Path) -> None:
    """Whether one request is under way or sixteen."""
    reciter, words, suite = Reciter(faults=frozenset({"hangs"})), tmp_path / "termination-log", tmp_path / "suite"
    gates = sorted(SMOKE.gates, key=lambda check: check.name != first)
    suite.write_text(write_document(SMOKE.model_copy(update={"gates": tuple(gates)})))
    with serving(reciter) as url:
        arguments = ["--url", url, "--suite", str(suite), "--profile", PROFILE.name, "--termination-log", str(words)]
        process = subprocess.Popen([sys.executable, "-m", "sm70_qualify.cli", "run", *arguments, "--quiet"])
        assert reciter.reached.wait(60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == Verdict.ERROR.exit_status
    report = parse_qualification(words.read_bytes())
    verdicts = [one.verdict for one in report.gates]
    assert verdicts == [Verdict.PASSED] * passed + [Verdict.ERROR] * (len(gates) - passed)
    assert report.gates[-1].message == "the run was stopped before"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "ftp://x", "--suite", "smoke"], "`--url`"),
        (["--url", "http://me:secret@x", "--suite", "smoke"], "password"),
        (["--url", "http://x", "--suite", "other"], "built in are smoke"),
        (["--url", "http://x", "--suite", "smoke", "--profile", "other"], "neither a built-in profile"),
        (["--url", "http://x", "--suite", "smoke", "--threshold", "decode-rate=fast"], "must have a number"),
        (["--url", "http://x", "--suite", "smoke", "--threshold", "tool-call=1"], "must name a performance gate"),
        (["--url", "http://x", "--suite", "smoke", "--api-key-file", "/nowhere/key"], "cannot be read"),
        (["--url", "http://x", "--suite", "smoke", "--api-key", "x"], "--api-key"),
        (["--suite", "smoke"], "--url"),
    ],
)
def test_a_command_line_that_cannot_be_used_asks_nothing(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *arguments]) == 64
    said = capsys.readouterr().err
    assert words in said
    assert "secret" not in said


def test_chats_carry_the_suites_template_arguments_and_completions_do_not() -> None:
    reciter = Reciter()
    judged(reciter)
    chats = [body for path, body in reciter.asked if path == "/v1/chat/completions"]
    assert {json.dumps(body.get("chat_template_kwargs")) for body in chats} == {'{"enable_thinking": false}'}
    assert not [body for path, body in reciter.asked if path == "/v1/completions" and "chat_template_kwargs" in body]


def test_the_raw_data_hold_what_was_asked_and_answered() -> None:
    _, asker = judged(Reciter(), SMOKE.model_copy(update={"gates": SMOKE.gates[:1]}))
    first = asker.raw[0]
    assert first["request"]["messages"] == "Recite your paragraph."
    assert first["answer"]["finishReason"] == "stop"
    assert first["answer"]["tokenIds"]
