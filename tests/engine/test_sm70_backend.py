"""The sm70 engine's attention backend inside vLLM's interfaces, on the CPU: every kernel by its reference."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from engine.server import environment

pytestmark = pytest.mark.engine


def test_a_mixed_batch_is_attended_to_as_torch_does(lane: Path, tmp_path: Path) -> None:
    script = Path(__file__).with_name("attention_in_lane.py")
    process = subprocess.run(
        [str(lane), "-W", "ignore", str(script)], env=environment(tmp_path), capture_output=True, text=True, timeout=240
    )
    assert process.returncode == 0, process.stderr[-4000:]
    found = json.loads(process.stdout.splitlines()[-1])
    for name, one in found.items():
        assert one["error"] < 2e-3, name
        assert one["padding"] == 0, name
    # Long prompts have no kernel yet and say so by the name of a fallback; all else has one.
    assert found["e4m3"]["routes"] == [
        "attention_rows/prefill",
        "decode_scalar_paged/decode",
        "verify_e4m3_grouped/verify",
    ]
    assert found["draft"]["routes"] == ["draft_window/draft"]
    assert found["wide draft"]["routes"] == ["attention_rows/draft"]
