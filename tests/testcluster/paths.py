"""Where things lie: the sources of this package, and the cache that survives a checkout."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).resolve().parent


def cache() -> Path:
    """`$SM70_CACHE`, or `~/.cache/sm70`; it exists afterwards."""
    folder = Path(os.environ.get("SM70_CACHE") or Path.home() / ".cache" / "sm70").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Holds an exclusive lock on a file; without `wait` it yields False when another holds it.

    The kernel drops the lock when its holder dies, so none is ever stale.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True
