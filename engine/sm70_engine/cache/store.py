"""Entries of the compile cache on a volume that others may share, fill, damage or take away.

    VOLUME/KEY/GENERATION/manifest.json     what the entry is and the SHA-256 of each of its files
    VOLUME/KEY/GENERATION/files/...         the files
    VOLUME/KEY/.new-*                       an entry that is being written

An entry appears by a rename and never changes: a later one of the same key gets the next generation. Whoever reads it
copies it file by file and compares the sums, so half an entry, or a damaged one, is found before anything is loaded.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, ValidationError

from sm70_profiles.base import Document, printable
from sm70_profiles.identity import CompileCacheIdentity

MAX_FILES = 50_000
MAX_MANIFEST_BYTES = 32 << 20
STALE_SECONDS = 6 * 3600
"""After so long an unfinished entry belongs to a process that is gone."""
_CHUNK = 1 << 20
_MANIFEST, _FILES, _NEW = "manifest.json", "files", ".new-"
_VOLATILE_SUFFIXES = (".lock", ".tmp")

Name = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class EntryError(Exception):
    """The entry cannot be used. The message says why, in words for a person."""


class StoreError(Exception):
    """The volume cannot be written. The message says why."""


class StoredFile(Document):
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    size: int = Field(ge=0, le=1 << 40)


class Manifest(Document):
    """What an entry is: its identity, and its files by their place below `files`."""

    schema_version: Literal[1] = 1
    key: str
    identity: CompileCacheIdentity
    files: dict[Name, StoredFile] = Field(max_length=MAX_FILES)


def restore(volume: Path, key: str, work: Path) -> int:
    """Copies the newest entry of the key into the folder; returns how many files it has, 0 when there is no entry.

    Raises EntryError when there is one that cannot be used; the folder is empty then.
    """
    entry = _newest(volume / key)
    if entry is None:
        return 0
    try:
        manifest = _read_manifest(entry, key)
        for name, wanted in manifest.files.items():
            _copy_checked(entry / _FILES / name, work / name, wanted)
    except OSError as error:
        _empty(work)
        raise EntryError(f"the entry cannot be copied: {error.strerror or error}") from None
    except EntryError:
        _empty(work)
        raise
    return len(manifest.files)


def entry_size(volume: Path, key: str) -> int:
    """How many files the newest entry of the key has; 0 when there is none that can be read."""
    entry = _newest(volume / key)
    try:
        return len(_read_manifest(entry, key).files) if entry is not None else 0
    except (OSError, EntryError):
        return 0


def publish(volume: Path, identity: CompileCacheIdentity, work: Path, parts: Iterable[str]) -> int:
    """Makes the folder's files (below `parts`) the newest entry of the key; returns how many there are.

    Raises StoreError; the volume is then as it was.
    """
    key = identity.key
    assert key is not None
    place = volume / key
    new: Path | None = None
    try:
        place.mkdir(parents=True, exist_ok=True)
        _forget_unfinished(place)
        new = Path(tempfile.mkdtemp(prefix=_NEW, dir=place))
        new.chmod(0o755)
        stored = {}
        for name in files_below(work, parts):
            target = new / _FILES / name
            target.parent.mkdir(parents=True, exist_ok=True)
            stored[name] = _copy(work / name, target)
        manifest = Manifest(key=key, identity=identity, files=stored)
        with (new / _MANIFEST).open("w") as file:
            file.write(manifest.model_dump_json(by_alias=True, exclude_none=True))
            file.flush()
            os.fsync(file.fileno())
        _make_newest(place, new)
    except (OSError, ValidationError) as error:
        if new is not None:
            shutil.rmtree(new, ignore_errors=True)
        raise StoreError(_why(error)) from None
    return len(stored)


def files_below(work: Path, parts: Iterable[str]) -> Iterator[str]:
    """Names of the files that an entry keeps, relative to the folder; not locks and half-written ones."""
    for part in sorted(parts):
        for folder, folders, names in os.walk(work / part):
            folders.sort()
            for name in sorted(names):
                path = Path(folder) / name
                if not name.endswith(_VOLATILE_SUFFIXES) and path.is_file() and not path.is_symlink():
                    yield path.relative_to(work).as_posix()


def _newest(place: Path) -> Path | None:
    generations = _generations(place)
    return place / str(generations[-1]) if generations else None


def _generations(place: Path) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(place) if name.isascii() and name.isdigit())  # noqa: PTH208
    except OSError:
        return []


def _make_newest(place: Path, new: Path) -> None:
    while True:
        generations = _generations(place)
        number = generations[-1] + 1 if generations else 1
        try:
            new.rename(place / str(number))
        except OSError:
            if (place / str(number)).exists():
                continue  # another server of the same key was faster
            raise
        break
    for old in generations:
        shutil.rmtree(place / str(old), ignore_errors=True)


def _forget_unfinished(place: Path) -> None:
    for path in place.glob(f"{_NEW}*"):
        if time.time() - path.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def _read_manifest(entry: Path, key: str) -> Manifest:
    with (entry / _MANIFEST).open("rb") as file:
        data = file.read(MAX_MANIFEST_BYTES + 1)
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        where = ".".join(map(str, error.errors(include_url=False)[0]["loc"])) or "its text"
        raise EntryError(
            f"the entry is damaged or of another version ({printable(where, 80)} in its manifest)"
        ) from None
    if manifest.key != key or manifest.identity.key != key:
        raise EntryError(f"the entry is of another version: it is for key {printable(manifest.key, 64)}")
    for name in manifest.files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise EntryError(f"the entry is damaged: `{printable(name, 80)}` is no name of a file in it")
    return manifest


def _copy(source: Path, target: Path) -> StoredFile:
    digest, size = hashlib.sha256(), 0
    with source.open("rb") as reading, target.open("wb") as writing:
        while chunk := reading.read(_CHUNK):
            digest.update(chunk)
            size += writing.write(chunk)
    return StoredFile(sha256=digest.hexdigest(), size=size)


def _copy_checked(source: Path, target: Path, wanted: StoredFile) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not source.is_file() or source.is_symlink():
        raise EntryError(f"the entry is damaged: `{printable(source.name, 80)}` is missing")
    if _copy(source, target) != wanted:
        raise EntryError(f"the entry is damaged: `{printable(source.name, 80)}` has another checksum")


def _empty(work: Path) -> None:
    for path in work.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _why(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return f"it would have more than {MAX_FILES} files or names that are too long"
    return str(error.strerror or error) if isinstance(error, OSError) else str(error)
