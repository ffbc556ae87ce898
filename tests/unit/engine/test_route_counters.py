"""Route counters: exact across processes, alive after a killed one, and closed to foreign files."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from sm70_engine.acceleration import routes
from sm70_engine.acceleration.routes import (
    MAX_PROCESSES,
    Column,
    CountersError,
    attach,
    count,
    create_counters,
    read_counters,
    read_counts,
    set_stages,
)
from sm70_profiles.routes import ROUTES, FallbackReason, Stage

ROUTE, FALLBACK = "gdn_reference", "attention_e5m2_reference"


@pytest.fixture(autouse=True)
def _detached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_column", None)
    monkeypatch.setattr(routes, "_stages", ())


@pytest.fixture
def counters(tmp_path: Path) -> Path:
    create_counters(tmp_path / "routes")
    return tmp_path / "routes"


def counted(path: Path) -> dict[tuple[str, Stage], int]:
    return {(row.route, row.stage): row.dispatches for row in read_counters(path) if row.dispatches}


def test_a_dispatch_counts_for_every_stage_of_the_batch(counters: Path) -> None:
    attach(counters)
    set_stages((Stage.PREFILL, Stage.DECODE))
    count(ROUTE)
    set_stages((Stage.DECODE,))
    count(ROUTE)
    count(FALLBACK, stages=(Stage.DRAFT,))
    assert counted(counters) == {(ROUTE, Stage.PREFILL): 1, (ROUTE, Stage.DECODE): 2, (FALLBACK, Stage.DRAFT): 1}
    fallbacks = {row.route for row in read_counters(counters) if row.dispatches and row.fallback}
    assert fallbacks == {FALLBACK}


def test_a_fallback_is_counted_with_its_reason(counters: Path) -> None:
    attach(counters)
    rows, first = "attention_rows", ROUTES["attention_rows"].reasons[0]
    count(rows, (Stage.PREFILL,), reason=FallbackReason.TOO_MANY_ROWS)
    count(rows, (Stage.PREFILL,), reason=FallbackReason.TOO_MANY_ROWS)
    count(rows, (Stage.PREFILL,), capture=True)
    counts = read_counts(counters)
    why = {(row.reason, row.stage): (row.dispatches, row.captures) for row in counts.fallbacks if row.route == rows}
    taken = {key: found for key, found in why.items() if any(found)}
    assert taken == {(FallbackReason.TOO_MANY_ROWS, Stage.PREFILL): (2, 0), (first, Stage.PREFILL): (0, 1)}
    (row,) = (row for row in counts.routes if (row.route, row.stage) == (rows, Stage.PREFILL))
    assert (row.dispatches, row.captures) == (2, 1)
    # Every fallback has a reason that people can read, and nothing else has one.
    assert all(bool(route.reasons) == route.fallback for route in ROUTES.values())
    assert all(reason.meaning for reason in FallbackReason)


def test_captures_are_counted_apart(counters: Path) -> None:
    attach(counters)
    count(ROUTE, stages=(Stage.DECODE,), capture=True)
    (row,) = (row for row in read_counters(counters) if row.captures)
    assert (row.route, row.stage, row.captures, row.dispatches) == (ROUTE, Stage.DECODE, 1, 0)


def test_warm_up_is_no_dispatch(counters: Path) -> None:
    attach(counters)
    count(ROUTE)
    assert counted(counters) == {}


def test_outside_of_a_session_counting_does_nothing() -> None:
    set_stages((Stage.DECODE,))
    count(ROUTE)


def test_attaching_twice_takes_one_column(counters: Path) -> None:
    attach(counters)
    attach(counters)
    count(ROUTE, stages=(Stage.DECODE,))
    assert counted(counters) == {(ROUTE, Stage.DECODE): 1}


def _work(path: Path, times: int, die: bool) -> None:
    attach(path)
    set_stages((Stage.DECODE,))
    for _ in range(times):
        count(ROUTE)
    if die:
        os.kill(os.getpid(), signal.SIGKILL)


def test_processes_add_up_and_a_killed_one_still_counts(counters: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_work, args=(counters, 1000, die)) for die in (False, False, True)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert [worker.exitcode for worker in workers] == [0, 0, -signal.SIGKILL]
    assert counted(counters) == {(ROUTE, Stage.DECODE): 3000}


def test_a_foreign_file_is_refused(tmp_path: Path, counters: Path) -> None:
    content = counters.read_bytes()
    for name, data in (("empty", b""), ("foreign", b"x" * len(content)), ("short", content[:-8])):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(CountersError, match="another version"):
            read_counters(tmp_path / name)
        with pytest.raises(CountersError):
            Column(tmp_path / name)
    with pytest.raises(CountersError, match="No such file"):
        read_counters(tmp_path / "missing")


def test_more_processes_than_columns_are_refused(counters: Path) -> None:
    for _ in range(MAX_PROCESSES):
        Column(counters)
    with pytest.raises(CountersError, match="processes"):
        Column(counters)
