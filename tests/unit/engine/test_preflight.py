"""The preflight: every fault of a request is found at once, without a GPU, and fits into a termination message."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sm70_engine.serve import preflight as module
from sm70_engine.serve.launch import Launch
from sm70_engine.serve.parse import PREFIX
from sm70_engine.serve.preflight import conclusion, preflight, read_parse
from sm70_engine.serve.weights import safetensors_fault
from sm70_engine.tinymodel.cli import main as make_model
from sm70_profiles.catalog import load_profile
from sm70_profiles.checkpoints import checksums
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.resolver import ServeRequest
from sm70_profiles.termination import (
    MAX_BYTES,
    FindingSeverity,
    PreflightFinding,
    Termination,
    TerminationKind,
    parse_termination,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_model(["--out", str(folder / "tiny"), "--draft", "dflash", "--draft-out", str(folder / "draft")])
    make_model(["--draft", "dflash", "--draft-out", str(folder / "mismatch"), "--mismatched"])
    return folder


@pytest.fixture
def models(made: Path, tmp_path: Path) -> Path:
    """The checkpoints, to be damaged."""
    return Path(shutil.copytree(made, tmp_path / "models"))


@pytest.fixture(autouse=True)
def _engine_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "check_versions", lambda _flavour: None)


def request(models: Path, **fields: Any) -> ServeRequest:
    document = {
        "profile": load_profile("tiny_hybrid_reference_dflash"),
        "modelPath": str(models / "tiny"),
        "draftPath": str(models / "draft"),
        "servedName": "tiny",
        **fields,
    }
    return ServeRequest.model_validate(document)


def accepted(_launch: Launch, _environment: Mapping[str, str]) -> PreflightFinding | None:
    return None


def found(asked: ServeRequest, **options: Any) -> list[tuple[str, str, str]]:
    result = preflight(asked, {"HOME": "/"}, parse=accepted, **options)
    assert (result.reason is TerminationReason.PASSED) == all(
        finding.severity is FindingSeverity.WARNING for finding in result.findings
    )
    return [(finding.severity, finding.reason, finding.subject) for finding in result.findings]


def test_a_good_request_passes(models: Path) -> None:
    result = preflight(request(models), {"HOME": "/"}, parse=accepted)
    assert (result.kind, result.reason, result.findings) == (TerminationKind.PREFLIGHT, TerminationReason.PASSED, ())


def test_all_faults_are_found_at_once(models: Path) -> None:
    shutil.rmtree(models / "tiny")
    with (models / "draft/model.safetensors").open("r+b") as file:
        file.truncate(1000)
    asked = request(models, overrides={"maxNumBatchedTokens": 1, "kvCacheDtype": "fp8_e5m2"})
    reasons = found(asked)
    assert ("error", "PathNotFound", "model") in reasons
    assert ("error", "ModelInvalid", "draft") in reasons
    assert ("error", "Refused", "request") in reasons
    assert ("warning", "AccelerationRefused", "request") in reasons
    assert [severity for severity, _, _ in reasons] == sorted(severity for severity, _, _ in reasons)


def test_a_draft_of_another_model_is_incompatible(models: Path) -> None:
    assert ("error", "DraftIncompatible", "draft") in found(request(models, draftPath=str(models / "mismatch")))


def test_a_draft_with_another_tokenizer_is_incompatible(models: Path) -> None:
    tokenizer = json.loads((models / "tiny/tokenizer.json").read_bytes())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (models / "draft/tokenizer.json").write_text(json.dumps(tokenizer))
    assert found(request(models)) == [("error", "DraftIncompatible", "tokenizer")]


def test_a_model_without_a_tokenizer_or_with_one_that_is_too_large(models: Path) -> None:
    path = models / "tiny/tokenizer.json"
    tokenizer = json.loads(path.read_bytes())
    tokenizer["model"]["vocab"]["one more"] = 1 << 20
    path.write_text(json.dumps(tokenizer))
    assert found(request(models)) == [("error", "ModelInvalid", "tokenizer")]
    path.write_text("[]")
    assert found(request(models)) == [("error", "ModelInvalid", "tokenizer")]
    path.unlink()
    assert ("error", "ModelInvalid", "tokenizer") in found(request(models))


def test_a_file_of_the_index_that_is_missing(models: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (models / "tiny/model.safetensors.index.json").write_text(json.dumps(index))
    assert found(request(models)) == [("error", "ModelInvalid", "model")]


def test_checksums_are_compared_and_can_be_skipped(models: Path) -> None:
    right = checksums(models / "draft")
    assert found(request(models, draftSha256=right)) == []
    wrong = {**right, "config.json": "0" * 64}
    assert found(request(models, draftSha256=wrong)) == [("error", "ChecksumMismatch", "draft")]
    assert found(request(models, draftSha256=wrong), skip=("draft-sha256",)) == []


def test_a_disabled_path_is_an_error_of_a_strict_start_alone(models: Path) -> None:
    asked = request(models, overrides={"kvCacheDtype": "fp8_e5m2"})
    assert found(asked) == [("warning", "AccelerationRefused", "request")]
    assert found(asked, strictly=True) == [("error", "AccelerationRefused", "request")]
    because = [{"path": "reference_attention_e4m3", "because": "a test"}]
    assert found(request(models, overrides={"kvCacheDtype": "fp8_e5m2"}, acceleration={"allowDisabled": because})) == []


def test_a_draft_that_cannot_be_downloaded_for_want_of_room(
    models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    profile = load_profile("tiny_hybrid_reference_dflash").model_dump(mode="json", by_alias=True, exclude_none=True)
    hub = {"repo": "some/draft", "revision": "0" * 40}
    profile["draft"]["checkpoint"] = {"huggingFace": hub, "downloadBytes": 3850000000}
    asked = request(models, profile=profile, draftPath=None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10 << 30, 8 << 30, 2 << 30))
    result = preflight(asked, {"HOME": str(tmp_path)}, parse=accepted)
    assert [(one.severity, one.reason) for one in result.findings] == [("error", "DiskFull")]
    assert "3671 MiB" in result.message


def parsed(**answer: str) -> PreflightFinding | None:
    return read_parse(0, f"vLLM says much\n{PREFIX}{json.dumps(answer)}\n", "")


def test_what_the_installed_engine_says_of_the_arguments() -> None:
    assert parsed(fault="none", message="") is None
    finding = parsed(fault="arguments", message="argument --seed: invalid int value: 'x'")
    assert finding is not None
    assert (finding.reason, finding.subject) == (TerminationReason.REFUSED, "arguments")
    finding = parsed(fault="engine", message="MissingHookError: ...")
    assert finding is not None
    assert finding.reason is TerminationReason.ENGINE_UNSUPPORTED
    finding = read_parse(-9, "half a line", "Killed")
    assert finding is not None
    assert (finding.severity, finding.subject) == (FindingSeverity.ERROR, "engine")
    assert "Killed" in finding.message


def test_findings_beyond_the_termination_messages_size_are_dropped_last_first() -> None:
    findings = [
        PreflightFinding(
            severity=FindingSeverity.ERROR if number % 2 else FindingSeverity.WARNING,
            reason=TerminationReason.MODEL_INVALID,
            subject="model",
            message=f"{number} " + "ä" * 700,
        )
        for number in range(20)
    ]
    data = conclusion(findings).encode()
    assert len(data) <= MAX_BYTES
    read = parse_termination(data.decode())
    assert isinstance(read, Termination)
    assert read.message.startswith("errors: 10, warnings: 10")
    assert [finding.message.split()[0] for finding in read.findings] == ["1"]


@pytest.mark.parametrize(
    "content", [b"", b"1234567", b"\xff" * 64, b"\x02" + bytes(7) + b"[]", b"\x0b" + bytes(7) + b'{"a": "b"} ']
)
def test_what_is_no_safetensors_file_is_said_to_be_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    assert safetensors_fault(tmp_path / "x.safetensors") is not None
