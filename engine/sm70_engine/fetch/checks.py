"""Whether a file on the disk is the one that the hub lists."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from sm70_engine.fetch.selection import RemoteFile

CHUNK = 4 * 1024 * 1024


def sha256(file: Path, read: Callable[[int], None] = lambda _bytes: None) -> str:
    """SHA-256 of a file; `read` is told of each part."""
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while part := source.read(CHUNK):
            digest.update(part)
            read(len(part))
    return digest.hexdigest()


def git_blob(file: Path) -> str:
    """The name that git gives the file's content."""
    digest = hashlib.sha1(usedforsecurity=False)
    digest.update(f"blob {file.stat().st_size}\0".encode())
    with file.open("rb") as source:
        while part := source.read(CHUNK):
            digest.update(part)
    return digest.hexdigest()


def fault(file: Path, wanted: RemoteFile) -> tuple[str | None, str]:
    """What is wrong with a file, None if nothing; and its SHA-256 (empty when there is no file to read)."""
    if file.is_symlink() or not file.is_file():
        return "it is not there", ""
    size = file.stat().st_size
    if size != wanted.size:
        return f"it has {size} bytes, not {wanted.size}", ""
    found = sha256(file)
    if wanted.sha256 is not None:
        return (None if found == wanted.sha256 else f"its SHA-256 is {found}, not {wanted.sha256}"), found
    if wanted.git_blob is not None and git_blob(file) != wanted.git_blob:
        return "its content is not the one that the hub names", found
    return None, found
