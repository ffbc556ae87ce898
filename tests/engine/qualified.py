"""Runs the judge as its Job does against a server of these tests: the command line, the key in the environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from engine.server import Server
from sm70_profiles.documents import write_document
from sm70_profiles.qualification import QualificationReport, Verdict, load_suite, parse_qualification
from sm70_qualify.bench.cli import main as measure
from sm70_qualify.bench.result import BenchResult
from sm70_qualify.cli import main

QUICK = ("right-answers", "structured-output", "tool-call", "prefix-hit")
"""A few hundred tokens; the whole suite takes a minute or two of two cores."""


def qualify(server: Server, folder: Path, gates: Sequence[str] | None = None) -> QualificationReport:
    """The report of the smoke suite, or of some of its gates, as the termination message gives it."""
    smoke = load_suite("smoke")
    chosen = (
        smoke
        if gates is None
        else smoke.model_copy(update={"gates": tuple(check for check in smoke.gates if check.name in gates)})
    )
    file, words = folder / "suite.yaml", folder / "qualification-words"
    file.write_text(write_document(chosen))
    arguments = ["run", "--url", server.url, "--suite", str(file), "--model", "tiny", "--termination-log", str(words)]
    with patch.dict(os.environ, VLLM_API_KEY=server.key):
        status = main(arguments)
    report = parse_qualification(words.read_bytes())
    assert status == report.verdict.exit_status
    assert server.key not in words.read_text()
    return report


def failed(report: QualificationReport) -> set[str]:
    return {gate.name for gate in report.gates if gate.verdict is not Verdict.PASSED}


def bench(server: Server, folder: Path, *more: str) -> BenchResult:
    """The benchmark's result, for answers of sixteen tokens."""
    out = folder / "bench.json"
    arguments = ["--url", server.url, "--model", "tiny", "--output-tokens", "16", "--out", str(out), *more]
    with patch.dict(os.environ, VLLM_API_KEY=server.key):
        assert measure(arguments) == 0
    return BenchResult.model_validate_json(out.read_text())
