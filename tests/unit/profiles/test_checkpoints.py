"""Checkpoint folders: shapes from config.json, and pins that never pass on something unknown."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from sm70_profiles.checkpoints import (
    CheckpointError,
    Verdict,
    checksums,
    overall,
    parse_config,
    read_checkpoint,
    verify,
)
from sm70_profiles.profile import Checkpoint

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "text_config": {
        "vocab_size": 248320,
        "hidden_size": 5120,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_conv_kernel_dim": 4,
    },
}


def test_shape() -> None:
    facts = parse_config(json.dumps(CONFIG).encode())
    assert (facts.layers, facts.full_attention_layers, facts.linear_attention_layers) == (4, 1, 3)
    assert (facts.hidden_size, facts.kv_heads, facts.experts) == (5120, 4, 0)
    assert facts.quantization == "modelopt NVFP4"
    dense = parse_config(b'{"num_hidden_layers": 8}')
    assert (dense.full_attention_layers, dense.linear_attention_layers) == (8, 0)


@pytest.mark.parametrize("value", [-1, 1.5, "5120", True, None, [1], 10**30])
def test_odd_members_are_unknown(value: Any) -> None:
    assert parse_config(json.dumps({"hidden_size": value}).encode()).hidden_size is None


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"0" * (5 << 20)])
def test_unreadable_configs(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json must"):
        parse_config(data)


def test_hostile_words_are_made_printable() -> None:
    facts = parse_config(json.dumps({"architectures": ["\x1b[2J" + "x" * 500, 3], "quantization_config": []}).encode())
    assert all(word.isprintable() and len(word) <= 128 for word in facts.architectures)
    assert facts.quantization is None


def test_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="readable"):
        read_checkpoint(tmp_path / "absent")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), "utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert read_checkpoint(tmp_path).weight_bytes == 7
    assert checksums(tmp_path)["model.safetensors"] == hashlib.sha256(b"weights").hexdigest()
    with pytest.raises(CheckpointError, match="found neither"):
        checksums(tmp_path / "absent")


def test_unknown_is_never_passed() -> None:
    good, bad = "a" * 64, "b" * 64
    pin = Checkpoint(sha256={"config.json": good, "model.safetensors": "unknown"})
    found = {"config.json": good, "model.safetensors": bad}
    verdicts = verify(pin, found)
    assert verdicts == {"config.json": Verdict.PASSED, "model.safetensors": Verdict.UNVERIFIED}
    assert overall(verdicts) is Verdict.UNVERIFIED
    assert overall(verify(Checkpoint(), found)) is Verdict.UNVERIFIED
    assert overall(verify(pin, {"config.json": bad})) is Verdict.FAILED
    assert overall(verify(pin, {"config.json": good})) is Verdict.MISSING
    assert overall(verify(Checkpoint(sha256={"config.json": good}), found)) is Verdict.PASSED
