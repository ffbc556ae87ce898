"""Writes checkpoints: folders that another user may read, with files that are complete or absent."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sm70_engine.tinymodel.chains import answers
from sm70_engine.tinymodel.draft import DraftKind, draft_config, draft_tensors
from sm70_engine.tinymodel.target import Target, target_config, target_tensors
from sm70_engine.tinymodel.tensors import Tensor, write_safetensors
from sm70_engine.tinymodel.tokenizer import (
    CHAT_TEMPLATE,
    END_OF_TURN,
    PAD,
    build_tokenizer,
    tokenizer_config,
    vocabulary,
)


def write_target(folder: Path, target: Target, size_name: str, quantized: bool = True) -> None:
    """Writes the target with its tokenizer and `answers.json`."""
    _write_model(folder, target_config(target, quantized), target_tensors(target, quantized))
    _write_tokenizer(folder, target)
    _write_json(folder / "answers.json", answers(target.seed, size_name, END_OF_TURN))


def write_draft(folder: Path, target: Target, kind: DraftKind, mismatched: bool = False) -> None:
    """Writes a draft for the target; a mismatched one claims another vocabulary."""
    _write_model(folder, draft_config(target, kind, mismatched), draft_tensors(target, kind))
    _write_tokenizer(folder, target)


def _write_model(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    unfinished = folder / "model.safetensors.unfinished"
    write_safetensors(unfinished, tensors)
    _finish(unfinished, folder / "model.safetensors")
    _write_json(folder / "config.json", config)


def _write_tokenizer(folder: Path, target: Target) -> None:
    ids = vocabulary()
    _write(folder / "tokenizer.json", build_tokenizer().to_str(pretty=True) + "\n")
    _write_json(folder / "tokenizer_config.json", tokenizer_config(target.size.positions))
    _write_json(folder / "generation_config.json", {"eos_token_id": ids[END_OF_TURN], "pad_token_id": ids[PAD]})
    _write(folder / "chat_template.jinja", CHAT_TEMPLATE)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    # In the given order: a grammar made from the schema in `answers.json` demands the members in that order.
    _write(path, json.dumps(value, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text)
    _finish(unfinished, path)


def _finish(unfinished: Path, path: Path) -> None:
    unfinished.chmod(0o644)  # the server's user is not the one who made the files
    os.replace(unfinished, path)  # noqa: PTH105  # atomic, and that is the point
