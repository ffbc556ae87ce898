"""Checkpoint folders: missing, unreadable and broken ones are told apart, and config.json is untrusted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sm70_engine.serve.checkpoint import read_checkpoint
from sm70_engine.serve.failure import ServeError
from sm70_profiles.reasons import TerminationReason


def checkpoint(folder: Path, **config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_reads_what_the_resolver_needs(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", architectures=["A"], vocab_size=5, hidden_size=6, num_hidden_layers=7)
    facts = read_checkpoint(folder, "model")
    assert (facts.architectures, facts.vocabulary, facts.hidden_size, facts.layers) == (("A",), 5, 6, 7)
    assert facts.quantization is None


@pytest.mark.parametrize("make", ["nothing", "file", "empty", "other"])
def test_a_missing_checkpoint_is_not_found(tmp_path: Path, make: str) -> None:
    path = tmp_path / "m"
    if make == "file":
        path.write_text("x")
    elif make != "nothing":
        path.mkdir()
        if make == "other":
            (path / "weights.txt").write_text("x")
    with pytest.raises(ServeError) as error:
        read_checkpoint(path, "draft")
    assert error.value.reason is TerminationReason.PATH_NOT_FOUND
    assert "draft" in error.value.message
    assert str(path) in error.value.message


@pytest.mark.parametrize("part", [".", "config.json", "model.safetensors"])
def test_an_unreadable_checkpoint_is_no_missing_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    folder = checkpoint(tmp_path / "m", architectures=["A"])
    locked = folder / part

    def access(path: Path, mode: int) -> bool:
        return path != locked

    def listdir(path: Path) -> list[str]:
        if path == locked:
            raise PermissionError(13, "Permission denied")
        return ["config.json", "model.safetensors"]

    # Root may read everything, so the refusal of the kernel is played.
    monkeypatch.setattr(os, "access", access)
    monkeypatch.setattr(os, "listdir", listdir)
    with pytest.raises(ServeError) as error:
        read_checkpoint(folder, "model")
    assert error.value.reason is TerminationReason.PATH_UNREADABLE
    assert str(os.getuid()) in error.value.message
    assert "fsGroup" in error.value.remedy


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_broken_config_is_an_invalid_model(tmp_path: Path, text: str) -> None:
    folder = checkpoint(tmp_path / "m")
    (folder / "config.json").write_text(text)
    with pytest.raises(ServeError) as error:
        read_checkpoint(folder, "model")
    assert error.value.reason is TerminationReason.MODEL_INVALID
    assert "config.json must be" in error.value.message
