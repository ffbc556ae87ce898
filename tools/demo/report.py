"""What the demo prints: numbered steps with their seconds, and each change of a service's conditions as it happens."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from stack.services import Condition, conditions

ORDER = (
    "Accepted", "GPUsAllocated", "ModelAvailable", "CacheWarm", "EngineStarted", "AccelerationComplete", "Qualified",
    "RoutesHealthy", "Progressing", "Ready",
)  # fmt: skip


class Report:
    """Prints steps; every line carries the seconds since the demo began."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.steps: dict[str, float] = {}

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.start:6.1f} s] {text}", flush=True)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        self.say(f"▶ {name}")
        yield
        self.steps[name] = time.monotonic() - begin
        self.say(f"✓ {name} ({self.steps[name]:.1f} s)")

    def summary(self) -> None:
        width = max(map(len, self.steps))
        print("\nWhere the time went")
        for name, seconds in self.steps.items():
            print(f"  {name:<{width}}  {seconds:7.1f} s")
        print(f"  {'in all':<{width}}  {time.monotonic() - self.start:7.1f} s")


class ConditionWatcher:
    """Says each condition's change once, in the order in which a start goes through them."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.seen: dict[str, Condition] = {}

    def __call__(self, service: dict[str, Any]) -> None:
        now = conditions(service)
        for kind in ORDER:
            one = now.get(kind)
            if one is None or one.status == "Unknown":
                continue
            before = self.seen.get(kind)
            if before is None or (before.status, before.reason) != (one.status, one.reason):
                self.report.say(f"    {one.type}={one.status} {one.reason}: {one.message}"[:220])
            self.seen[kind] = one


def fail(text: str) -> NoReturn:
    print(f"demo: {text}", file=sys.stderr, flush=True)
    raise SystemExit(1)
