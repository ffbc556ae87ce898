"""The kernels' torch operators on the CPU lane: references, fake kernels, schemas, and what they refuse."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from engine.server import environment

pytestmark = pytest.mark.engine


def test_operators_compute_what_the_kernels_are_checked_against(lane: Path, tmp_path: Path) -> None:
    script = Path(__file__).with_name("ops_in_lane.py")
    process = subprocess.run(
        [str(lane), str(script)], env=environment(tmp_path), capture_output=True, text=True, timeout=240
    )
    assert process.returncode == 0, process.stderr[-4000:]
    found = json.loads(process.stdout.splitlines()[-1])
    assert all(ratio < 1 for ratio in found["attention"].values()), found["attention"]
    assert len(found["attention"]) == 8
    assert found["prefill"] == [0, 0]
    assert len(found["peers"]) == 4
    assert all(0 < difference < 5e-3 for difference in found["peers"].values()), found["peers"]
    assert found["cache_write"] == {"e4m3": True, "e5m2": True, "f16": True}
    linears = found["linears"]
    for name in ("same_words", "same_gated", "unpacked", "divisor", "compiled", "mlp", "regated"):
        assert linears[name], name
    assert linears["linear"] < 1e-3
    assert linears["swiglu"] < 1e-3
    texts = ("share one global scale", "must be [80, 6]", "finite and not negative", "finite and positive", "FP16")
    for text, refused in zip((*texts, "packed weights"), linears["refusals"], strict=True):
        assert text in refused
