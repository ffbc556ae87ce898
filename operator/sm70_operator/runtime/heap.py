"""Keeps the process as small as what it holds. Events come and go by the thousand; glibc would keep their memory."""

from __future__ import annotations

import ctypes
import gc

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Parameters of mallopt(3), by their numbers in malloc.h."""
LARGE_BYTES = 128 * 1024


def tame() -> bool:
    """To be called once everything is imported. Large blocks are given back when they are freed, whatever was allocated
    after them; one arena serves all; and what was imported, which is never garbage, is not searched for it any more.

    The thresholds are glibc's own at the start of a process; setting them keeps it from raising them. False where the
    C library is another one: then its heap stays as it is.
    """
    gc.collect()
    gc.freeze()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = {_TRIM_THRESHOLD: LARGE_BYTES, _MMAP_THRESHOLD: LARGE_BYTES, _ARENA_MAX: 1}
    taken = [bool(mallopt(name, value)) for name, value in wanted.items()]
    return all(taken)
