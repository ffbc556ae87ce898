"""Looks at a checkpoint folder before vLLM does: is it there, may we read it, and what does its config.json say.

vLLM answers the first two with the same misleading message (a folder that it cannot read is taken for the name of a
repository on the Internet), so they are told apart here.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sm70_engine.serve.failure import ServeError
from sm70_profiles.facts import ModelFacts
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.report import printable

NUMBERS = {
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
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "max_position": "max_position_embeddings",
    "block_size": "block_size",
}
"""Members of a config.json that are numbers, by the fact that they give."""
MAX_CONFIG_BYTES = 4 * 2**20
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def read_checkpoint(folder: Path, what: str) -> ModelFacts:
    """What the checkpoint says of itself. `what` is `model` or `draft`, for the messages. Raises ServeError."""
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208  # the names alone, without a stat of each
    except (FileNotFoundError, NotADirectoryError):
        raise _not_found(what, folder, "there is no such folder") from None
    except PermissionError:
        raise _unreadable(what, folder) from None
    if "config.json" not in names:
        found = ", ".join(names[:8]) if names else "an empty folder"
        raise _not_found(what, folder, f"it holds no config.json; found {printable(found, 300)}")
    for path in [folder / "config.json", *(path for pattern in WEIGHTS for path in sorted(folder.glob(pattern)))]:
        if not os.access(path, os.R_OK):
            raise _unreadable(what, path)
    return parse_config((folder / "config.json").read_bytes()[: MAX_CONFIG_BYTES + 1], what)


def parse_config(data: bytes, what: str) -> ModelFacts:
    """Reads a config.json. Raises ServeError; unknown members are None."""
    if len(data) > MAX_CONFIG_BYTES:
        raise _invalid(what, f"its config.json exceeds {MAX_CONFIG_BYTES} bytes")
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):
        raise _invalid(what, "its config.json is not JSON") from None
    if not isinstance(config, dict):
        raise _invalid(what, "its config.json is not an object")
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    draft = config.get("dflash_config")
    draft = draft if isinstance(draft, dict) else {}
    layers = text.get("layer_types")
    layers = layers if isinstance(layers, list) else None
    captured = draft.get("target_layer_ids")
    return ModelFacts(
        architectures=_words(config.get("architectures")),
        quantization=_quantization(config.get("quantization_config")),
        full_attention_layers=None if layers is None else layers.count("full_attention"),
        linear_attention_layers=None if layers is None else layers.count("linear_attention"),
        capture_layers=len(captured) if isinstance(captured, list) else None,
        selector_top_k=_number(draft.get("selector_top_k")),
        **{field: _number(text.get(name)) for field, name in NUMBERS.items()},
    )


def _words(value: Any) -> tuple[str, ...]:
    return (
        tuple(printable(item, 128) for item in value[:16] if isinstance(item, str)) if isinstance(value, list) else ()
    )


def _number(value: Any) -> int | None:
    """A whole number in the bounds of a fact; anything else is unknown."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1 << 40 else None


def _quantization(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    named = [value.get("quant_method"), value.get("quant_algo")]
    return " ".join(printable(part, 64) for part in named if isinstance(part, str)) or None


def _not_found(what: str, folder: Path, why: str) -> ServeError:
    return ServeError(
        TerminationReason.PATH_NOT_FOUND,
        f"the {what} must be a folder with a checkpoint; found {printable(str(folder), 512)}: {why}",
        f"Check the path and the volume of the {what}.",
    )


def _unreadable(what: str, path: Path) -> ServeError:
    return ServeError(
        TerminationReason.PATH_UNREADABLE,
        f"the {what} must be readable for user {os.getuid()}, group {os.getgid()}; "
        f"{printable(str(path), 512)} is there and is not",
        "Make files mode 0644 and folders 0755, or set the pod's `fsGroup`.",
    )


def _invalid(what: str, why: str) -> ServeError:
    return ServeError(
        TerminationReason.MODEL_INVALID, f"the {what} is not a valid checkpoint: {why}", "Copy the checkpoint again."
    )
