"""Looks at a checkpoint folder before vLLM does: is it there, may we read it, and what does its config.json say.

vLLM answers the first two with the same misleading message (a folder that it cannot read is taken for the name of a
repository on the Internet), so they are told apart here.
"""

from __future__ import annotations

import os
from pathlib import Path

from sm70_engine.serve.failure import ServeError
from sm70_profiles import checkpoints
from sm70_profiles.facts import ModelFacts
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.report import printable

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
    try:
        return checkpoints.read_checkpoint(folder)
    except checkpoints.CheckpointError as error:
        raise _invalid(what, str(error)) from None


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
