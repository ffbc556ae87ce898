"""Which files of a repository are wanted, and what makes them complete. Paths come from a hub and are not trusted."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from sm70_engine.fetch.errors import FetchError
from sm70_profiles.reasons import TerminationReason

WANTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
CODE = ("*.py", "*.pt", "*.pth", "*.bin", "*.pkl", "*.ckpt")
"""Code, or formats that run code when they are read: never by default."""
SAFE_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._ +@=,()-]*(/[A-Za-z0-9_][A-Za-z0-9._ +@=,()-]*){0,8}")
MAX_FILES = 10_000
MAX_BYTES = 1 << 44


@dataclass(frozen=True)
class RemoteFile:
    """A file as the hub lists it."""

    path: str
    size: int
    sha256: str | None = None
    git_blob: str | None = None
    """SHA-1 of the file as a git object: what a hub gives for small files."""


@dataclass(frozen=True)
class Selection:
    """Globs over whole paths: `*` passes over `/` too."""

    include: tuple[str, ...] = WANTED
    exclude: tuple[str, ...] = CODE

    def takes(self, path: str) -> bool:
        return any(fnmatchcase(path, glob) for glob in self.include) and not any(
            fnmatchcase(path, glob) for glob in self.exclude
        )


def select(listed: Sequence[RemoteFile], selection: Selection, demanded: Mapping[str, str]) -> dict[str, RemoteFile]:
    """The wanted files by path, with the digests that the user demands in place of the hub's. Hidden files are left.

    Raises FetchError for a listing that cannot be trusted or holds nothing, and for a demanded file that is not there.
    """
    if len(listed) > MAX_FILES:
        raise FetchError(TerminationReason.DOWNLOAD_FAILED, f"the hub lists {len(listed)} files, more than {MAX_FILES}")
    chosen: dict[str, RemoteFile] = {}
    for file in listed:
        hidden = re.search(r"(^|/)\.[^./]", file.path) is not None
        if hidden or (file.path not in demanded and not selection.takes(file.path)):
            continue
        if SAFE_PATH.fullmatch(file.path) is None or ".." in file.path.split("/") or not 0 <= file.size <= MAX_BYTES:
            raise FetchError(
                TerminationReason.DOWNLOAD_FAILED, f"the hub lists a file with a strange name or size: {file.path!r}"
            )
        digest = demanded.get(file.path, file.sha256)
        chosen[file.path] = RemoteFile(file.path, file.size, digest, file.git_blob)
    if missing := sorted(set(demanded) - set(chosen)):
        raise FetchError(
            TerminationReason.CHECKSUM_MISMATCH,
            f"the revision has no file {', '.join(missing)}, for which a digest is demanded",
        )
    if not chosen:
        raise FetchError(
            TerminationReason.REPOSITORY_NOT_FOUND, "the revision holds no file that is wanted", "Check `--include`."
        )
    return chosen
