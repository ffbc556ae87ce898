"""Reports and last words come over the network or from a crashed pod: bounded, checked, printable."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sm70_profiles.base import printable
from sm70_profiles.catalog import load_profile
from sm70_profiles.contracts import Capabilities
from sm70_profiles.facts import EngineFlavour
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.report import (
    MAX_REPORT_BYTES,
    AccelerationReport,
    DeviceFacts,
    EffectiveConfiguration,
    EngineFacts,
    ProfileFacts,
    ReportError,
    RouteCount,
    parse_report,
)
from sm70_profiles.routes import Stage
from sm70_profiles.rules import judge_paths, summarize
from sm70_profiles.termination import MAX_BYTES, Termination, TerminationKind, parse_termination


def report() -> AccelerationReport:
    profile = load_profile("tiny_hybrid_reference")
    paths = judge_paths(profile, profile.settings, Capabilities(EngineFlavour.CPU))
    return AccelerationReport(
        engine=EngineFacts(build="0.1.0", vllm="0.32.0", torch="2.13.0"),
        profile=ProfileFacts(name=profile.name, hash="0" * 64),
        device=DeviceFacts(name="cpu", count=1),
        effective=EffectiveConfiguration(argv=("/m",), env_hash="0"),
        paths=paths,
        expected_acceleration=profile.expected_acceleration,
        summary=summarize(paths),
        observed_at="2026-11-30T12:00:00Z",
    )


def encoded(**changes: Any) -> bytes:
    return json.dumps({**json.loads(report().model_dump_json(by_alias=True)), **changes}).encode()


def test_round_trip() -> None:
    assert parse_report(encoded()) == report()
    assert str(parse_report(encoded()).summary) == "3/3"


def test_newer_members_are_passed_over() -> None:
    assert parse_report(encoded(somethingNew={"a": 1})) == report()


BAD: dict[str, bytes] = {
    "too large": b" " * (MAX_REPORT_BYTES + 1),
    "not JSON": b"{",
    "a list": b"[]",
    "another schema": encoded(schemaVersion=2),
    "negative": encoded(summary={"enabled": -1, "total": 3}),
    "too many paths": encoded(paths=[{"name": "x", "expected": True, "state": "enabled"}] * 300),
    "a state that is none": encoded(paths=[{"name": "x", "expected": True, "state": "fine"}]),
    "a long word": encoded(observedAt="x" * 200),
    "not UTF-8": b"\xff\xfe",
    "deep": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "hostile key": b'{"\\u001b[2J": 1, "schemaVersion": 1}',
}


@pytest.mark.parametrize("case", BAD)
def test_bad_reports(case: str) -> None:
    with pytest.raises(ReportError) as caught:
        parse_report(BAD[case])
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 2000


def test_printable() -> None:
    assert printable("a\x1b[2Jb\n") == "a [2Jb "
    assert printable("x" * 10, 5) == "xxxx…"
    assert printable("ok") == "ok"


@pytest.mark.parametrize("reason", TerminationReason)
def test_termination_round_trip(reason: TerminationReason) -> None:
    words = Termination(kind=TerminationKind.FAILURE, reason=reason, message="what happened", remedy="what to do")
    assert parse_termination(words.encode().decode()) == words
    assert reason.meaning


def test_termination_fits_whatever_it_holds() -> None:
    routes = tuple(RouteCount(route=f"route_{number}", stage=Stage.DECODE, dispatches=10**9) for number in range(256))
    words = Termination(
        kind=TerminationKind.SHUTDOWN,
        reason=TerminationReason.SHUTDOWN,
        message="ä" * 1500,
        remedy="ä" * 500,
        routes=routes,
    )
    data = words.encode()
    assert len(data) <= MAX_BYTES
    read = parse_termination(data.decode())
    assert read is not None
    assert read.reason is TerminationReason.SHUTDOWN


@pytest.mark.parametrize("text", ["", "Killed", "{}", "[1]", '{"kind": "failure"}', "\x00" * 10_000])
def test_other_programs_last_words(text: str) -> None:
    assert parse_termination(text) is None
