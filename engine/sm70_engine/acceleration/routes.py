"""Route counters: what did run. Every dispatch of every operation goes through `count`.

The counters lie in a file that `sm70-serve` makes (in shared memory where it can) and every worker maps. They survive a
worker that is killed, and anyone with the file can add them up without asking a worker. Each process writes a column of
its own, so counting needs no lock: a process counts only from the thread that runs the model.

Counted are dispatches from Python, and captures into a graph apart from them. Replays of a graph are not counted.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sm70_profiles.report import FallbackCount, RouteCount
from sm70_profiles.routes import ROUTES, FallbackReason, Stage

if TYPE_CHECKING:
    from collections.abc import Iterator

MAGIC = b"SM70RC01"
MAX_PROCESSES = 128
_CELLS: tuple[tuple[str, Stage, FallbackReason | None], ...] = tuple(
    (route.name, stage, reason) for route in ROUTES.values() for stage in Stage for reason in route.reasons or (None,)
)
_INDEX = {cell: number for number, cell in enumerate(_CELLS)}
_FIRST_REASON = {route.name: (route.reasons or (None,))[0] for route in ROUTES.values()}
_CATALOGUE = hashlib.sha256(repr(_CELLS).encode()).digest()[:8]
# The file: magic, catalogue, number of columns in use; then a column a process of (dispatches, captures) a cell.
_HEADER_WORDS = 3
_COLUMN_WORDS = 2 * len(_CELLS)
_BYTES = 8 * (_HEADER_WORDS + MAX_PROCESSES * _COLUMN_WORDS)


class CountersError(RuntimeError):
    """The counter file is missing, foreign or full."""


def create_counters(path: Path) -> None:
    """Makes an empty counter file."""
    with path.open("xb") as file:
        file.write(MAGIC + _CATALOGUE)
        file.truncate(_BYTES)


@contextmanager
def _open(path: Path) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError as error:
        raise CountersError(f"route counters: {error}") from None
    try:
        if os.pread(descriptor, 16, 0) != MAGIC + _CATALOGUE or os.fstat(descriptor).st_size != _BYTES:
            raise CountersError(f"route counters: {path} was made by another version of sm70_engine")
        yield descriptor
    finally:
        os.close(descriptor)


class Column:
    """The counters of this process."""

    def __init__(self, path: Path) -> None:
        """Takes the next free column. Raises CountersError."""
        with _open(path) as descriptor:
            fcntl.lockf(descriptor, fcntl.LOCK_EX)  # released with the descriptor
            number = int.from_bytes(os.pread(descriptor, 8, 16), "little")
            if number == MAX_PROCESSES:
                raise CountersError(f"route counters: more than {MAX_PROCESSES} processes count")
            os.pwrite(descriptor, (number + 1).to_bytes(8, "little"), 16)
            self._words = memoryview(mmap.mmap(descriptor, _BYTES)).cast("Q")
        self._start = _HEADER_WORDS + number * _COLUMN_WORDS

    def add(self, cell: int, capture: bool) -> None:
        self._words[self._start + 2 * cell + capture] += 1


@dataclass(frozen=True)
class Counts:
    """What all processes of a server have counted, dead or alive, added up."""

    routes: tuple[RouteCount, ...]
    """A row a route and stage."""
    fallbacks: tuple[FallbackCount, ...]
    """A row a fallback route, stage and reason."""


def read_counters(path: Path) -> tuple[RouteCount, ...]:
    """One row a route and stage. Raises CountersError."""
    return read_counts(path).routes


def read_counts(path: Path) -> Counts:
    """Everything that was counted. Raises CountersError."""
    with _open(path) as descriptor:
        words = memoryview(os.pread(descriptor, _BYTES, 0)).cast("Q")
    columns = [_HEADER_WORDS + number * _COLUMN_WORDS for number in range(min(words[2], MAX_PROCESSES))]
    sums: dict[tuple[str, Stage], tuple[int, int]] = {}
    fallbacks = []
    for cell, (route, stage, reason) in enumerate(_CELLS):
        dispatches = sum(words[column + 2 * cell] for column in columns)
        captures = sum(words[column + 2 * cell + 1] for column in columns)
        before = sums.get((route, stage), (0, 0))
        sums[route, stage] = before[0] + dispatches, before[1] + captures
        if reason is not None:
            fallbacks.append(
                FallbackCount(route=route, stage=stage, reason=reason, dispatches=dispatches, captures=captures)
            )
    rows = (
        RouteCount(route=route, stage=stage, dispatches=dispatches, captures=captures, fallback=ROUTES[route].fallback)
        for (route, stage), (dispatches, captures) in sums.items()
    )
    return Counts(tuple(rows), tuple(fallbacks))


_column: Column | None = None
_stages: tuple[Stage, ...] = ()
_captured: tuple[Stage, ...] = ()


def attach(path: Path) -> None:
    """Makes this process count into the file. Raises CountersError. A second call changes nothing."""
    global _column
    if _column is None:
        _column = Column(path)


def set_stages(stages: Iterable[Stage]) -> None:
    """Says what the next dispatches are for. A batch may hold several stages; outside of a batch there is none."""
    global _stages
    _stages = tuple(stages)


def set_captured_stages(stages: Iterable[Stage]) -> None:
    """Says what the graphs that are captured next are for: no batch runs then."""
    global _captured
    _captured = tuple(stages)


def count(
    route: str, stages: tuple[Stage, ...] | None = None, capture: bool = False, reason: FallbackReason | None = None
) -> None:
    """Counts one dispatch of a route: once for each stage that the running batch holds (or for `stages`).

    reason: of a fallback, one of the route's; by default its first. Warm-up runs belong to no stage and are not
    counted. Nothing is counted in a process that is not attached.
    """
    if _column is None:
        return
    chosen = _captured if capture else _stages
    why = reason or _FIRST_REASON[route]
    for stage in chosen if stages is None else stages:
        _column.add(_INDEX[route, stage, why], capture)


def count_now(route: str, stage: Stage, capture: bool, reason: FallbackReason | None = None) -> None:
    """Counts one dispatch for a stage that the caller knows; nothing in warm-up runs, which are no batch."""
    if capture or _stages:
        count(route, (stage,), capture, reason)
