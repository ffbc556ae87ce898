"""Why a download did not come to its end: a reason, what was found, and what to do."""

from __future__ import annotations

import errno

from sm70_profiles.base import printable
from sm70_profiles.reasons import TerminationReason

EXITS = {
    TerminationReason.DOWNLOAD_FAILED: 1,
    TerminationReason.REPOSITORY_NOT_FOUND: 3,
    TerminationReason.ACCESS_DENIED: 3,
    TerminationReason.CHECKSUM_MISMATCH: 4,
    TerminationReason.CACHE_UNWRITABLE: 5,
    TerminationReason.DISK_FULL: 5,
}
REMEDIES = {
    TerminationReason.DOWNLOAD_FAILED: "Run it again: what has come is kept. Check the network, proxy and mirror.",
    TerminationReason.REPOSITORY_NOT_FOUND: "Check repository and revision; a private one needs a token.",
    TerminationReason.ACCESS_DENIED: "Accept the model's terms on the hub and give a token that may read it.",
    TerminationReason.CHECKSUM_MISMATCH: "Run it again; if it comes back, the hub or the demanded digest is wrong.",
    TerminationReason.CACHE_UNWRITABLE: "Mount the volume writable for this user (`fsGroup`), or another folder.",
    TerminationReason.DISK_FULL: "Make the volume larger or free some of it.",
}


class FetchError(Exception):
    """The download ended for this reason."""

    def __init__(self, reason: TerminationReason, message: str, remedy: str | None = None) -> None:
        self.reason = reason
        self.message = printable(" ".join(message.split()), 600)
        self.remedy = REMEDIES[reason] if remedy is None else remedy
        super().__init__(f"{reason}: {self.message}. {self.remedy}")

    @property
    def exit_status(self) -> int:
        return EXITS[self.reason]


class UsageError(ValueError):
    """The command line cannot be used."""


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EIO}


def of_disk(error: BaseException) -> FetchError | None:
    """What an error says about the volume, wherever in its causes; None when it is about something else."""
    seen: BaseException | None = error
    for _ in range(10):
        if isinstance(seen, OSError) and seen.errno in FULL:
            return FetchError(TerminationReason.DISK_FULL, f"the volume is full: {seen.strerror}")
        if isinstance(seen, OSError) and seen.errno in UNWRITABLE and seen.filename is not None:
            return FetchError(TerminationReason.CACHE_UNWRITABLE, f"`{seen.filename}`: {seen.strerror}")
        if seen is None:
            return None
        seen = seen.__cause__ or seen.__context__
    return None
