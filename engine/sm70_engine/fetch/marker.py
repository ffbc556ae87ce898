"""The marker of a complete download: written last, by renaming, so that it is there exactly when all else is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, ValidationError

from sm70_profiles.base import Document

NAME = ".sm70-fetch.json"
MAX_MARKER_BYTES = 4 * 1024 * 1024


class MarkedFile(Document):
    bytes: int = Field(ge=0)
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Marker(Document):
    """What lies in the folder."""

    schema_version: Literal[1]
    hub: str
    repo: str
    revision: str
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    finished_at: str
    files: dict[str, MarkedFile]

    def same_source(self, other: tuple[str, str, str]) -> bool:
        return (self.hub, self.repo, self.revision) == other


def read(folder: Path) -> Marker | None:
    """The folder's marker; None where there is none, or one that cannot be read (then everything is checked again)."""
    try:
        data = (folder / NAME).read_bytes()[:MAX_MARKER_BYTES]
        return Marker.model_validate_json(data)
    except (FileNotFoundError, NotADirectoryError, ValidationError):
        return None


def write(folder: Path, marker: Marker) -> None:
    """Puts the marker in place in one step, after everything before it has reached the disk."""
    temporary = folder / f"{NAME}.new"
    with temporary.open("wb") as target:
        target.write(marker.model_dump_json(by_alias=True, indent=1).encode() + b"\n")
        target.flush()
        os.fsync(target.fileno())
    temporary.replace(folder / NAME)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def untouched(folder: Path, marker: Marker) -> bool:
    """Whether every file of the marker is there with its size."""
    places = [(folder / path, file.bytes) for path, file in marker.files.items()]
    return all(place.is_file() and place.stat().st_size == size for place, size in places)
