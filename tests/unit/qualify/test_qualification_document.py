"""The report of a run as a termination message, and what is refused as one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm70_profiles.qualification import (
    MAX_GATES,
    MAX_TERMINATION_BYTES,
    Bound,
    Gate,
    QualificationError,
    QualificationReport,
    Skipped,
    Verdict,
    combined,
    decimal,
    load_suite,
    parse_qualification,
    parse_suite,
)

SUITE = load_suite("smoke")


def gate(name: str, verdict: Verdict = Verdict.PASSED, message: str = "") -> Gate:
    bad = verdict is not Verdict.PASSED
    return Gate(
        name=name, verdict=verdict, measured=str(int(bad)), threshold="0", unit="answers", samples=3, message=message
    )


def report(*gates: Gate, **fields: Any) -> QualificationReport:
    values = {
        "schema_version": 1,
        "suite": SUITE.reference,
        "tool_version": "0.1.0",
        "started_at": "2026-11-30T20:00:00Z",
        "finished_at": "2026-11-30T20:01:00.5Z",
        "verdict": combined(one.verdict for one in gates),
        "gates": gates,
        "raw_digest": "0" * 64,
    }
    return QualificationReport(**{**values, **fields})


def test_a_report_comes_back_as_it_was() -> None:
    whole = report(gate("a"), gate("b", Verdict.FAILED, "two differ"), profile="tiny", message="b: two differ")
    assert parse_qualification(whole.encode()) == whole


@given(
    verdicts=st.lists(st.sampled_from(list(Verdict)), min_size=1, max_size=MAX_GATES),
    message=st.text(st.characters(exclude_categories=["Cs"]), max_size=600),
    skipped=st.integers(0, MAX_GATES),
)
def test_any_report_fits_a_termination_message_and_keeps_its_verdict(
    verdicts: list[Verdict], message: str, skipped: int
) -> None:
    gates = [gate(f"{'x' * 58}-{index}", verdict, message) for index, verdict in enumerate(verdicts)]
    left_out = tuple(Skipped(name=f"{'y' * 58}-{index}", because=message) for index in range(skipped))
    whole = report(*gates, message=message, skipped=left_out)
    data = whole.encode()
    assert len(data) <= MAX_TERMINATION_BYTES
    read = parse_qualification(data)
    assert read.verdict is whole.verdict
    assert len(read.gates) + read.omitted_gates == len(gates)
    if read.omitted_gates:
        # What was left out is no worse than what was kept.
        kept = {one.name for one in read.gates}
        assert combined(one.verdict for one in gates if one.name in kept) is whole.verdict


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"verdict": "Passed"}, "must be that of the gates, Failed"),
        ({"surprise": 1}, "surprise"),
        ({"schemaVersion": 2}, "schemaVersion"),
        ({"gates": []}, "must be that of the gates, Error"),
        ({"gates": [{"name": "a", "verdict": "Passed"}]}, "passes only with"),
        ({"gates": [{"name": "a", "verdict": "Passed", "measured": "3", "threshold": "0", "samples": 1}]}, "keeps to"),
        ({"gates": [{"name": "a", "verdict": "Failed", "measured": "1e3"}]}, "measured"),
        ({"gates": [{"name": "A b", "verdict": "Failed"}]}, "name"),
        ({"gates": [{"name": "a", "verdict": "Failed"}] * 2}, "once"),
        ({"finishedAt": "2026-11-30T19:00:00Z"}, "before"),
        ({"finishedAt": "2026-13-30T19:00:00Z"}, "month"),
        ({"rawDigest": "z"}, "rawDigest"),
    ],
)
def test_what_a_pod_may_not_say(change: dict[str, Any], words: str) -> None:
    document = json.loads(report(gate("a", Verdict.FAILED)).encode())
    with pytest.raises(QualificationError, match=words):
        parse_qualification(json.dumps({**document, **change}))


@pytest.mark.parametrize("text", ["", "{", "[]", "x" * 5000, b"\xff\xfe", "null", '{"schemaVersion":1}'])
def test_other_text_is_no_report(text: str | bytes) -> None:
    with pytest.raises(QualificationError) as caught:
        parse_qualification(text)
    assert len(str(caught.value)) < 600
    assert str(caught.value).isprintable()


def test_messages_are_one_printable_line() -> None:
    document = json.loads(report(gate("a", Verdict.FAILED)).encode())
    document["gates"][0]["message"] = "bad\n\x1b[31mred\u202e"
    assert parse_qualification(json.dumps(document)).gates[0].message == "bad [31mred"


@pytest.mark.parametrize(
    ("bound", "measured", "passes"),
    [
        (Bound.AT_LEAST, "10", True),
        (Bound.AT_LEAST, "9.999", False),
        (Bound.AT_MOST, "10", True),
        (Bound.AT_MOST, "10.001", False),
    ],
)
def test_reaching_the_threshold_passes(bound: Bound, measured: str, passes: bool) -> None:
    def make() -> Gate:
        return Gate(name="a", verdict=Verdict.PASSED, bound=bound, measured=measured, threshold="10", samples=1)

    if passes:
        make()
    else:
        with pytest.raises(ValueError, match="keeps to"):
            make()


@pytest.mark.parametrize(
    ("value", "text"), [(3, "3"), (0.1 + 0.2, "0.3"), (1200.0, "1200"), (-0.0001, "0"), (1e-9, "0"), (2.5005, "2.5")]
)
def test_figures_are_canonical(value: float, text: str) -> None:
    assert decimal(value) == text


def test_figures_are_finite() -> None:
    with pytest.raises(ValueError, match="finite"):
        decimal(float("nan"))


def test_exit_statuses_are_those_of_the_documentation() -> None:
    assert [verdict.exit_status for verdict in Verdict] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"name: x", "schemaVersion"),
        (b"- 1", "mapping"),
        (b"schemaVersion: 1\nname: x\nversion: 1\ntitle: t\ngates: [{name: a, check: Magic}]", "gates"),
        (
            b"schemaVersion: 1\nname: x\nversion: 1\ntitle: t\n"
            b"gates: [{name: a, check: PrefixHit}, {name: a, check: PrefixHit}]",
            "once",
        ),
    ],
)
def test_a_suite_says_what_is_wrong_with_it(text: bytes, words: str) -> None:
    with pytest.raises(QualificationError, match=words):
        parse_suite(text)


def test_an_unknown_suite_is_told_of_those_there_are() -> None:
    with pytest.raises(QualificationError, match="there are: smoke"):
        load_suite("other")
