"""What needs the lane's packages and no server: transformers' reading of the model, and our package standing aside."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine.server import environment, request
from sm70_engine.tinymodel.chains import CHAINS
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.termination import Termination, TerminationKind, parse_termination

pytestmark = pytest.mark.engine


def in_lane(lane: Path, folder: Path, *arguments: str) -> dict[str, Any]:
    script = Path(__file__).with_name("in_lane.py")
    process = subprocess.run(
        [str(lane), str(script), *arguments], env=environment(folder), capture_output=True, text=True, timeout=240
    )
    assert process.returncode == 0, process.stderr[-4000:]
    found: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return found


def test_transformers_reads_the_model_and_recites_the_same(lane: Path, models: Path, tmp_path: Path) -> None:
    found = in_lane(lane, tmp_path, "reference", str(models / "plain"))
    assert found["model"] == "Qwen3_5ForCausalLM"
    assert found["unexpected"] == []
    for chain in CHAINS:
        assert found["answers"][chain.kind] == {"text": chain.text, "tokens": len(chain.pieces) + 1}
    # The operator reads the very values that the generator wrote, and multiplies them to the input's precision.
    assert found["weights_equal"]
    assert found["codes_in_use"] >= 14
    assert found["largest_error"] < 2**-8
    assert found["dtype"] == "torch.bfloat16"


def test_without_sm70_serve_nothing_of_vllm_is_changed(lane: Path, tmp_path: Path) -> None:
    found = in_lane(lane, tmp_path, "aside")
    assert found["platform"] == "vllm.platforms.cpu.CpuPlatform"
    assert found["layers"] == []
    assert found["modelopt"] == "vllm.model_executor.layers.quantization.modelopt"
    assert found["ours"] == ["sm70_engine.plugin", "sm70_engine.plugin.entrypoints"]
    # And where it is active, a vLLM that it was not made for is refused by the name of what is missing.
    assert "vllm.platforms.cpu.CpuPlatform.something_new (a test)" in found["missing_hook"]
    assert "CpuPlatform, not ours" in found["other_platform"]


def test_a_missing_model_ends_with_its_reason(lane: Path, tmp_path: Path) -> None:
    command = [str(lane.parent / "sm70-serve"), "/nowhere/model", "--profile", "tiny_hybrid_reference"]
    process = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=60)
    assert process.returncode == 2
    words = parse_termination((tmp_path / "termination-log").read_text())
    assert words is not None
    assert words.reason is TerminationReason.PATH_NOT_FOUND
    assert "/nowhere/model" in words.message


OVERRIDES: dict[str, tuple[dict[str, Any], set[str], str]] = {
    "E5M2 KV": ({"kvCacheDtype": "fp8_e5m2"}, {"reference_attention_e4m3", "reference_scalar_tail"}, "kv_dtype"),
    "6000 tokens a step": ({"maxNumBatchedTokens": 6000}, {"reference_prefill"}, "budget<8000"),
    "pages of 16": ({"blockSize": 16}, {"reference_scalar_tail"}, "page_size"),
    "five drafts": ({"speculation": {"tokens": 5}}, {"reference_verifier"}, "num_speculative_tokens=5≠3"),
    "no speculation": ({"speculation": {"method": "None"}}, {"reference_verifier"}, "method=None≠dflash"),
    "eager": ({"enforceEager": True}, {"reference_compile"}, "user_override"),
}
"""The six override rows of the release document: what is changed, the paths that it disables, and the reason."""


def test_each_override_of_the_release_document_disables_exactly_its_paths(
    lane: Path, models: Path, tmp_path: Path
) -> None:
    cases = {"as it is": {}, **{name: overrides for name, (overrides, _, _) in OVERRIDES.items()}}
    found = in_lane(lane, tmp_path, "reports", str(models / "tiny"), str(models / "draft"), json.dumps(cases))
    complete = found.pop("as it is")
    assert complete["error"] == ""
    assert complete["refusal"] is None
    assert (complete["serving"], complete["cache"], complete["phase"]) == ("", "Off", "Serving")
    assert complete["summary"] == {"enabled": 8, "total": 8}
    for name, (_, disabled, reason) in OVERRIDES.items():
        expected = {path: ["enabled", None] for path in complete["paths"]}
        expected |= {path: ["disabled", reason] for path in disabled}
        assert found[name]["paths"] == expected, name
        # A strict start ends here, before any weight is read, and says each of them.
        assert "StrictStartError" in found[name]["error"], name
        # So does one of which only the API server would have known.
        assert (found[name]["serving"], found[name]["phase"]) == ("StrictStartError", None), name
        refusal = found[name]["refusal"]
        assert refusal["reason"] == TerminationReason.ACCELERATION_REFUSED
        assert all(f"{path} is disabled: {reason}" in refusal["message"] for path in disabled)
        assert all(f"{path}: " in refusal["remedy"] for path in disabled)


def preflight(lane: Path, folder: Path, models: Path, *extra: str) -> Termination:
    document = request(
        "tiny_hybrid_reference_release", models / "tiny", 8000, draftPath=str(models / "draft"), extraArgs=extra
    )
    variables = environment(folder, SM70_SERVE_REQUEST=json.dumps(document))
    process = subprocess.run(
        [str(lane.parent / "sm70-serve"), "--preflight"], env=variables, capture_output=True, text=True, timeout=240
    )
    found = parse_termination((folder / "termination-log").read_text())
    assert found is not None, process.stderr[-4000:]
    assert found.kind is TerminationKind.PREFLIGHT
    assert process.returncode == (0 if found.reason is TerminationReason.PASSED else 2)
    return found


def test_a_preflight_asks_the_installed_engine_whether_it_accepts_the_arguments(
    lane: Path, models: Path, tmp_path: Path
) -> None:
    found = preflight(lane, tmp_path, models, "--seed", "one")
    (finding,) = found.findings
    assert (finding.reason, finding.subject) == (TerminationReason.REFUSED, "arguments")
    assert "argument --seed: invalid int value: 'one'" in finding.message


@pytest.mark.full
def test_a_preflight_of_a_good_request_passes(lane: Path, models: Path, tmp_path: Path) -> None:
    assert preflight(lane, tmp_path, models).findings == ()
