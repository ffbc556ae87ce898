"""Says what a long start is doing: one line a step, with seconds, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


def say(text: str) -> None:
    print(f"testcluster: {text}", file=sys.stderr, flush=True)


@contextmanager
def step(name: str) -> Iterator[None]:
    """Prints the step's name and how long it took; a step that fails says after how long."""
    start = time.monotonic()
    try:
        yield
    except BaseException:
        say(f"{time.monotonic() - start:6.1f} s  {name}: failed")
        raise
    say(f"{time.monotonic() - start:6.1f} s  {name}")
