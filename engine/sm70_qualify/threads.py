"""Many requests at once, and an end when the run is stopped: a pool would wait for every answer first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Given = TypeVar("Given")
Got = TypeVar("Got")


def at_once(function: Callable[[Given], Got], items: Iterable[Given], workers: int) -> Iterator[Got]:
    """The results in order, as they come. Stopped in between (a signal), it leaves running calls to themselves."""
    pool = ThreadPoolExecutor(workers)
    try:
        yield from pool.map(function, items)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
