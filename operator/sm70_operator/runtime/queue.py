"""The work queue: each key at most once in it, never handled twice at a time, with back-off after failures.

kopf delivers every event of every object; behind this queue a burst becomes one look at the world.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
JITTER = 0.1


class WorkQueue(Generic[K]):
    """A key that is added while it is handled comes once more afterwards. Times are those of the running loop."""

    def __init__(self, backoff_base_seconds: float = 0.5, backoff_limit_seconds: float = 120.0) -> None:
        self._base = backoff_base_seconds
        self._limit = backoff_limit_seconds
        self._due: OrderedDict[K, float] = OrderedDict()
        self._handled: dict[K, float] = {}
        self._again: set[K] = set()
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}
        self._ready = asyncio.Event()

    def __len__(self) -> int:
        return len(self._due)

    def add(self, key: K) -> None:
        """The key is to be handled as soon as possible. A later time that was set for it stands."""
        if key in self._handled:
            self._again.add(key)
        elif key not in self._due:
            self._due[key] = asyncio.get_running_loop().time()
            self._ready.set()

    def add_after(self, key: K, seconds: float) -> None:
        """The key is to be handled after this time; replaces the time that was set before."""
        self._cancel(key)
        loop = asyncio.get_running_loop()
        self._timers[key] = loop.call_later(max(0.0, seconds), self._fire, key)

    def retry(self, key: K) -> float:
        """The key's handling failed: again after a wait that doubles with each failure in a row. Returns the wait."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        wait = min(self._limit, self._base * 2.0 ** min(failures - 1, 30))
        wait *= 1 + random.uniform(-JITTER, JITTER)  # noqa: S311  # spreads retries, guards nothing
        self.add_after(key, wait)
        return wait

    def succeeded(self, key: K) -> None:
        """The next failure of this key is the first one again."""
        self._failures.pop(key, None)

    def forget(self, key: K) -> None:
        """The key is gone: no timer and no count is kept."""
        self._cancel(key)
        self._failures.pop(key, None)

    async def get(self) -> K:
        """The next key. Whoever takes it must call `done` in the end."""
        while not self._due:
            self._ready.clear()
            await self._ready.wait()
        key, _ = self._due.popitem(last=False)
        self._handled[key] = asyncio.get_running_loop().time()
        return key

    def done(self, key: K) -> None:
        """The key's handling has ended, well or not."""
        del self._handled[key]
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def oldest_seconds(self) -> float:
        """How long the longest waiting or longest handled key has been at it."""
        now = asyncio.get_running_loop().time()
        first = next(iter(self._due.values()), now)
        return max(0.0, now - min([first, *self._handled.values()]))

    def close(self) -> None:
        """Cancels all timers."""
        for key in list(self._timers):
            self._cancel(key)

    def _fire(self, key: K) -> None:
        self._timers.pop(key, None)
        self.add(key)

    def _cancel(self, key: K) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
