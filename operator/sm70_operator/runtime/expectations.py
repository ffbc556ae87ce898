"""Remembers what this process wrote until its cache shows it: a look at an older cache would only write it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from sm70_operator.act.apply import Written
from sm70_operator.observe.snapshot import Key
from sm70_operator.observe.store import Store

PATIENCE_SECONDS = 5.0
"""A cache that shows a write no sooner is looked at as it is: the watch may be broken, or the object gone again."""


@dataclass(frozen=True)
class _Expected:
    kind: str
    name: str
    before: str
    """The version in the cache before the write; empty: none was there."""
    at: datetime


class Expectations:
    """By service. Any other version in the cache counts as the write, so it is never waited for in vain."""

    def __init__(self, clock: Callable[[], datetime]) -> None:
        self._clock = clock
        self._expected: dict[Key, list[_Expected]] = {}

    def note(self, key: Key, store: Store, written: Written, before: str | None) -> None:
        """A write was done; `before` is what `store.version_of` said ahead of it."""
        if before is None or written.version == before or store.version_of(written.kind, key, written.name) != before:
            return
        self._expected.setdefault(key, []).append(_Expected(written.kind, written.name, before, self._clock()))

    def waits(self, key: Key, store: Store) -> float | None:
        """Seconds until the cache is to be looked at anyway; None: it shows everything."""
        now = self._clock()
        left = [
            one
            for one in self._expected.pop(key, ())
            if 0 <= (now - one.at).total_seconds() < PATIENCE_SECONDS
            and store.version_of(one.kind, key, one.name) == one.before
        ]
        if not left:
            return None
        self._expected[key] = left
        return PATIENCE_SECONDS - min((now - one.at).total_seconds() for one in left)

    def forget(self, key: Key) -> None:
        """The service is gone."""
        self._expected.pop(key, None)
