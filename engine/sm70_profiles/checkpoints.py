"""What a checkpoint's folder says of itself: its shape for the rules and the memory model, its checksums for a pin.

A config.json comes with downloaded weights, so it is read as untrusted text: bounded, and every member that is not what
it should be counts as unknown.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from sm70_profiles.base import printable
from sm70_profiles.facts import ModelFacts
from sm70_profiles.profile import UNKNOWN, Checkpoint

MAX_CONFIG_BYTES = 4 << 20
MAX_DIMENSION = 1 << 40
PINNED = ("config.json", "*.safetensors", "*.safetensors.index.json")
_CHUNK = 1 << 20

_MEMBERS = {
    "vocabulary": "vocab_size",
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "intermediate_size": "intermediate_size",
    "attention_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "linear_key_heads": "linear_num_key_heads",
    "linear_value_heads": "linear_num_value_heads",
    "linear_key_dim": "linear_key_head_dim",
    "linear_value_dim": "linear_value_head_dim",
    "conv_kernel": "linear_conv_kernel_dim",
    "sliding_window": "sliding_window",
    "experts_per_token": "num_experts_per_tok",
    "max_position": "max_position_embeddings",
    "block_size": "block_size",
    "selector_top_k": "selector_top_k",
}


class CheckpointError(ValueError):
    """The folder or its config.json cannot be read. The message says what must hold and what was found."""


def parse_config(data: bytes) -> ModelFacts:
    """The shape that a config.json states. Raises CheckpointError; members that are absent or odd are unknown."""
    if len(data) > MAX_CONFIG_BYTES:
        raise CheckpointError(f"config.json must not exceed {MAX_CONFIG_BYTES} bytes; found {len(data)}")
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):
        raise CheckpointError("config.json must be JSON") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"config.json must be an object; found {type(config).__name__}")
    inner = config.get("text_config")
    text: Mapping[str, Any] = inner if isinstance(inner, dict) else config
    numbers = {name: _number(text.get(member)) for name, member in _MEMBERS.items()}
    kinds = text.get("layer_types")
    kinds = kinds if isinstance(kinds, list) else []
    linear = sum(kind == "linear_attention" for kind in kinds) if kinds else None
    return ModelFacts(
        **numbers,
        architectures=_words(config.get("architectures")),
        quantization=_quantization(config.get("quantization_config")),
        full_attention_layers=len(kinds) - linear if linear is not None else numbers["layers"],
        linear_attention_layers=linear if linear is not None else 0 if numbers["layers"] is not None else None,
        experts=_number(text.get("num_experts", 0)),
    )


def read_checkpoint(folder: Path) -> ModelFacts:
    """The shape of the checkpoint in a folder, with the size of its weights. Raises CheckpointError."""
    path = folder / "config.json"
    try:
        with path.open("rb") as file:
            facts = parse_config(file.read(MAX_CONFIG_BYTES + 1))
        size = sum(weights.stat().st_size for weights in folder.glob("*.safetensors"))
    except OSError as error:
        raise CheckpointError(f"{printable(str(path))} must be readable; {error.strerror or error}") from None
    return facts.model_copy(update={"weight_bytes": size or None})


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of the files that a pin names, by file name. Raises CheckpointError."""
    try:
        files = sorted({path for pattern in PINNED for path in folder.glob(pattern)})
        if not files:
            raise CheckpointError(f"{printable(str(folder))} must hold a config.json and weights; found neither")
        return {path.name: _sha256(path) for path in files}
    except OSError as error:
        raise CheckpointError(f"{printable(str(folder))} must be readable; {error.strerror or error}") from None


class Verdict(StrEnum):
    """What a comparison with a pin says. Unknown never passes."""

    PASSED = "passed"
    FAILED = "failed"
    UNVERIFIED = "unverified"
    MISSING = "missing"


def verify(pin: Checkpoint, found: Mapping[str, str]) -> dict[str, Verdict]:
    """A verdict for every file that the pin names."""
    return {name: _verdict(wanted, found.get(name)) for name, wanted in sorted(pin.sha256.items())}


def overall(verdicts: Mapping[str, Verdict]) -> Verdict:
    """The worst of the verdicts; nothing to compare is unverified."""
    order = (Verdict.FAILED, Verdict.MISSING, Verdict.UNVERIFIED, Verdict.PASSED)
    return next((verdict for verdict in order if verdict in verdicts.values()), Verdict.UNVERIFIED)


def _verdict(wanted: str, found: str | None) -> Verdict:
    if found is None:
        return Verdict.MISSING
    if wanted == UNKNOWN:
        return Verdict.UNVERIFIED
    return Verdict.PASSED if wanted == found else Verdict.FAILED


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _number(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= MAX_DIMENSION else None


def _words(value: Any) -> tuple[str, ...]:
    words = value[:16] if isinstance(value, list) else []
    return tuple(printable(word, 128) for word in words if isinstance(word, str))


def _quantization(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    named = (value.get("quant_method"), value.get("quant_algo"), value.get("format"))
    return " ".join(printable(part, 64) for part in named if isinstance(part, str)) or None
