"""The sm70 engine inside vLLM's interfaces, on the CPU: hooks, configuration, and every kernel by its reference."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine.server import environment
from sm70_engine.plugin.settings import EngineSettings

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def found(lane: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, script = tmp_path_factory.mktemp("sm70"), Path(__file__).with_name("attention_in_lane.py")
    process = subprocess.run(
        [str(lane), "-W", "ignore", str(script), str(models / "tiny")],
        env=environment(folder, SM70_PRETEND="1", HF_HUB_OFFLINE="1"), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-4000:]
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def test_this_vllm_has_every_hook_of_the_gpu_platform(found: dict[str, Any]) -> None:
    assert found["missing"] == []


def test_the_platform_completes_a_configuration_for_compute_capability_7_0(found: dict[str, Any]) -> None:
    settled = found["configuration"]
    assert settled.pop("key") == EngineSettings(pretend=True).key()
    assert settled == {
        "linears": ["Sm70NvFp4Linear"],
        "compressed_tensors": 70,
        "dtype": "torch.float16",
        "quantization": "modelopt_fp4",
        "kv": "fp8_e5m2",
        "worker": "sm70_engine.plugin.cuda_worker.Sm70Worker",
        "shutdown": EngineSettings().shutdown_seconds,
        "custom_ops": ["none"],
    }


def test_operators_of_the_missing_extension_compute_what_vllm_does_without_it(found: dict[str, Any]) -> None:
    assert max(found["operators"].values()) < 1e-6, found["operators"]


def test_gate_and_up_share_a_launch_with_their_activation_where_an_mlp_does_nothing_else(
    found: dict[str, Any],
) -> None:
    for name in ("qwen2", "llama", "shared expert"):
        one = found["gated"][name]
        assert (one["fused"], one["refused"], one["activation"]) == (1, [], "Activated"), name
    refusals = {
        "looks": "Normed.forward does more than apply its layers in turn",
        "wrapped": "gate and up are a Wrapped",
        "odd": "gate and up must have a multiple of 8 columns each; together they have 40",
    }
    for name, reason in refusals.items():
        one = found["gated"][name]
        assert (one["fused"], one["refused"], one["activation"]) == (0, [reason], "CountedActivation"), name
    assert found["gated"]["gelu"]["activation"] == "GeluAndMul"
    for name, one in found["gated"].items():
        # FP16 between the two, where they are separate; the same values else.
        assert one["difference"] < 2e-3, name
        assert one["compiled"], name


def test_a_mixed_batch_is_attended_to_as_torch_does(found: dict[str, Any]) -> None:
    batches = found["batches"]
    for name, one in batches.items():
        assert one["error"] < 2e-3, name
        assert one["padding"] == 0, name
    others = ["decode_scalar_paged/decode", "verify_e4m3_grouped/verify"]
    assert batches["e4m3"]["routes"] == [others[0], "prefill_packed/prefill", others[1]]
    # A build without the prefill kernel says so by the name of a fallback.
    assert batches["without prefill"]["routes"] == ["attention_rows/prefill", *others]
    # Only the last prompt has a prefix that is long enough; it is attended to through the FP16 copy.
    for name in ("bridged e4m3", "bridged e5m2"):
        assert batches[name]["bridged"] == [False, False, False, True], name
    assert not any(batches["e4m3"]["bridged"])
    assert batches["draft"]["routes"] == ["draft_window/draft"]
    assert batches["wide draft"]["routes"] == ["attention_rows/draft"]
