"""Asks every serving pod for its report, again and again, and wakes a service only when there is news."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from sm70_operator.observe.facts import PodFacts
from sm70_operator.observe.snapshot import CountWindow, EngineAnswer, Key
from sm70_operator.runtime.queue import WorkQueue
from sm70_profiles.report import AccelerationReport

STARTING_SECONDS = 5.0
"""Between two questions for the phase of a start."""
REPORTS_READ = 64
"""Reports that are kept as they are read: those of services that were looked at last."""


class Reader(Protocol):
    """Whoever can ask an engine."""

    async def read(self, address: str) -> EngineAnswer: ...

    async def read_phase(self, address: str) -> EngineAnswer: ...


@dataclass
class _Counts:
    """What one container's counters did, from one report to the next."""

    window_seconds: float
    at: float
    dispatches: int
    fallbacks: int
    last: int
    resets: int = 0
    window: CountWindow | None = None

    @classmethod
    def begin(cls, report: AccelerationReport, now: float, window_seconds: float, resets: int) -> _Counts:
        """`resets`: how often the pod's counters began anew before. After one, all they hold is new."""
        dispatches, fallbacks = _sums(report)
        if resets:
            return cls(window_seconds, now, 0, 0, 0, resets, CountWindow(0, 0, 0, resets))
        return cls(window_seconds, now, dispatches, fallbacks, dispatches)

    def note(self, report: AccelerationReport, now: float) -> CountWindow | None:
        """The newest stretch with traffic, this report included. It stands while nothing more is dispatched."""
        dispatches, fallbacks = _sums(report)
        if dispatches < self.last:
            self.resets += 1
            self.at, self.dispatches, self.fallbacks, self.last = now, 0, 0, 0
            self.window = CountWindow(0, 0, 0, self.resets)
        if dispatches > self.last:
            self.window = CountWindow(
                seconds=round(now - self.at),
                dispatches=dispatches - self.dispatches,
                fallbacks=max(fallbacks - self.fallbacks, 0),
                resets=self.resets,
            )
            if now - self.at >= self.window_seconds:
                self.at, self.dispatches, self.fallbacks = now, dispatches, fallbacks
        self.last = dispatches
        return self.window


def _sums(report: AccelerationReport) -> tuple[int, int]:
    """All dispatches, and those of them on fallback routes."""
    fallbacks = sum(row.dispatches for row in report.routes if row.fallback)
    return sum(row.dispatches for row in report.routes), fallbacks


@dataclass(frozen=True)
class _Said:
    """An answer as it is kept. A report takes 59 KiB as read and 2 KiB packed, and few are looked at."""

    answer: EngineAnswer
    """Without its report."""
    packed: bytes = b""
    """The report without the time at which it was given, so that equal bytes mean the same."""
    observed_at: str = ""

    @classmethod
    def of(cls, answer: EngineAnswer) -> _Said:
        if answer.report is None:
            return cls(answer)
        timeless = answer.report.model_copy(update={"observed_at": ""}).model_dump_json(by_alias=True)
        return cls(replace(answer, report=None), zlib.compress(timeless.encode(), 1), answer.report.observed_at)

    @property
    def news(self) -> tuple[bytes, str]:
        """What has to differ for the service to be woken."""
        return self.packed, self.answer.error

    def read(self) -> EngineAnswer:
        if not self.packed:
            return self.answer
        report = _report(self.packed).model_copy(update={"observed_at": self.observed_at})
        return replace(self.answer, report=report)


@lru_cache(maxsize=REPORTS_READ)
def _report(packed: bytes) -> AccelerationReport:
    return AccelerationReport.model_validate_json(zlib.decompress(packed))


@dataclass
class _Pod:
    """One container's life: a restarted engine is asked anew and its old words are forgotten."""

    key: Key
    address: str
    container: str
    started: bool
    said: _Said | None = None
    counts: _Counts | None = None
    resets: int = 0
    """How often its counters began anew before this container."""
    heard: float = 0.0
    """When the last report came, on the loop's clock."""


class Poller:
    """Runs as `workers` tasks; `changed` is called with the service whose pod has something new to say."""

    def __init__(
        self,
        reader: Reader,
        changed: Callable[[Key], None],
        poll_seconds: float,
        grace_seconds: float,
        window_seconds: float = 60.0,
    ) -> None:
        self._reader = reader
        self._changed = changed
        self._poll_seconds = poll_seconds
        self._grace_seconds = grace_seconds
        self._window_seconds = window_seconds
        self._pods: dict[str, _Pod] = {}
        self._by_service: dict[Key, set[str]] = {}
        self._silent: dict[Key, dict[str, int]] = {}
        """Pods between two containers, by uid: how often their counters began anew."""
        self._queue: WorkQueue[str] = WorkQueue()
        self.asked: Callable[[bool], None] = lambda well: None
        """Told after each poll whether a report came."""

    def follow(self, key: Key, pods: Iterable[PodFacts]) -> bool:
        """From now on exactly these pods of the service are asked: those that serve for their report, those that start
        for their phase. True once each that serves has been asked at least once.
        """
        there = {pod.uid: pod for pod in pods if not pod.deleting}
        wanted = {uid: pod for uid, pod in there.items() if pod.ip and _talks(pod)}
        silent = {uid: resets for uid, resets in self._silent.pop(key, {}).items() if uid in there}
        for uid in self._by_service.get(key, set()) - wanted.keys():
            if uid in there and (resets := _resets_after(self._pods.get(uid), "")):
                silent[uid] = resets
            self._drop(uid)
        for uid, pod in wanted.items():
            known = self._pods.get(uid)
            container = _talks(pod)
            started = pod.container is not None and pod.container.started
            if known is None or (known.address, known.container, known.started) != (pod.ip, container, started):
                resets = silent.pop(uid, 0) if known is None else _resets_after(known, container)
                self._pods[uid] = _Pod(key, pod.ip, container, started, resets=resets)
                self._queue.add(uid)
        if silent:
            self._silent[key] = silent
        self._by_service[key] = set(wanted)
        if not wanted:
            del self._by_service[key]
        return all(self._pods[uid].said is not None for uid in wanted if self._pods[uid].started)

    def answers(self, key: Key) -> Mapping[str, EngineAnswer]:
        """What the service's pods said last, by pod uid."""
        found = ((uid, self._pods[uid].said) for uid in self._by_service.get(key, ()))
        return {uid: said.read() for uid, said in found if said is not None}

    def forget(self, key: Key) -> None:
        """The service is gone."""
        self._silent.pop(key, None)
        for uid in self._by_service.pop(key, set()):
            self._drop(uid)

    async def work(self) -> None:
        """One worker; runs until it is cancelled."""
        while True:
            uid = await self._queue.get()
            try:
                await self._ask(uid)
            finally:
                self._queue.done(uid)

    def _drop(self, uid: str) -> None:
        self._pods.pop(uid, None)
        self._queue.forget(uid)

    async def _ask(self, uid: str) -> None:
        pod = self._pods.get(uid)
        if pod is None:
            return
        if not pod.started:
            await self._ask_phase(uid, pod)
            return
        found = await self._reader.read(pod.address)
        self.asked(found.report is not None)
        if self._pods.get(uid) is not pod:
            return  # gone or restarted meanwhile
        now = asyncio.get_running_loop().time()
        if found.report is not None:
            pod.heard = now
            if pod.counts is None:
                pod.counts = _Counts.begin(found.report, now, self._window_seconds, pod.resets)
            said = _Said.of(replace(found, window=pod.counts.note(found.report, now)))
        elif pod.said is not None and pod.said.packed and now - pod.heard < self._grace_seconds:
            said = pod.said  # a busy engine may miss a poll or two
        else:
            said = _Said(found)
        before, pod.said = pod.said, said
        if before is None or before.news != said.news:
            self._changed(pod.key)
        self._queue.add_after(uid, self._poll_seconds * random.uniform(0.9, 1.1))  # noqa: S311  # spreads polls

    async def _ask_phase(self, uid: str, pod: _Pod) -> None:
        found = await self._reader.read_phase(pod.address)
        if self._pods.get(uid) is not pod:
            return
        before, pod.said = pod.said, _Said(found)
        told = (found.phase, found.progress)
        if found.phase and (before is None or (before.answer.phase, before.answer.progress) != told):
            self._changed(pod.key)
        self._queue.add_after(uid, min(self._poll_seconds, STARTING_SECONDS) * random.uniform(0.9, 1.1))  # noqa: S311


def _resets_after(known: _Pod | None, container: str) -> int:
    """The resets that the pod's next container begins with: another one has lost what the last one counted."""
    if known is None:
        return 0
    if known.counts is None:
        return known.resets
    lost = known.container != container and known.counts.last > 0
    return known.counts.resets + int(lost)


def _talks(pod: PodFacts) -> str:
    """The container that can be asked: the server, or the download before it; empty while there is none."""
    if pod.container is not None and pod.container.running:
        return pod.container.id or pod.container.name
    return next((step.id or step.name for step in pod.steps if step.running), "")
