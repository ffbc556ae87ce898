"""The work queue: one at a time for each key, nothing lost, nothing doubled."""

from __future__ import annotations

import asyncio

import pytest

from sm70_operator.runtime.queue import WorkQueue


async def test_many_events_are_one_piece_of_work() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for _ in range(20):
        queue.add("a")
    queue.add("b")
    assert [await queue.get(), await queue.get()] == ["a", "b"]
    assert len(queue) == 0


async def test_a_key_is_never_handled_twice_at_a_time_and_comes_again_afterwards() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a")
    assert await queue.get() == "a"
    queue.add("a")
    queue.add("a")
    assert len(queue) == 0
    queue.done("a")
    assert len(queue) == 1
    assert await queue.get() == "a"
    queue.done("a")
    assert len(queue) == 0


async def test_a_waiting_worker_is_woken() -> None:
    queue: WorkQueue[str] = WorkQueue()
    worker = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add("a")
    assert await worker == "a"


async def test_a_later_time_replaces_the_earlier_one() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add_after("a", 3600)
    queue.add_after("a", 0)
    assert await queue.get() == "a"
    queue.done("a")
    queue.add_after("a", 0)
    queue.forget("a")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(queue) == 0


async def test_waits_double_up_to_the_limit_and_start_anew_after_a_success() -> None:
    queue: WorkQueue[str] = WorkQueue(backoff_base_seconds=1, backoff_limit_seconds=8)
    waits = [queue.retry("a") for _ in range(6)]
    for wait, expected in zip(waits, (1, 2, 4, 8, 8, 8), strict=True):
        assert wait == pytest.approx(expected, rel=0.11)
    queue.succeeded("a")
    assert queue.retry("a") == pytest.approx(1, rel=0.11)
    assert queue.retry("b") == pytest.approx(1, rel=0.11), "each key has its own count"
    queue.close()


async def test_the_age_of_stuck_work_is_told() -> None:
    queue: WorkQueue[str] = WorkQueue()
    assert queue.oldest_seconds() == 0
    queue.add("a")
    await queue.get()
    before = queue.oldest_seconds()
    await asyncio.sleep(0.01)
    assert queue.oldest_seconds() > before
    queue.done("a")
    assert queue.oldest_seconds() == 0
