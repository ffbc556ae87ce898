"""Asks every serving pod for its report, again and again, and wakes a service only when there is news."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from sm70_operator.observe.facts import PodFacts
from sm70_operator.observe.snapshot import EngineAnswer, Key
from sm70_operator.runtime.queue import WorkQueue
from sm70_profiles.report import AccelerationReport


class Reader(Protocol):
    """Whoever can ask an engine."""

    async def read(self, address: str) -> EngineAnswer: ...


@dataclass
class _Pod:
    """One container's life: a restarted engine is asked anew and its old words are forgotten."""

    key: Key
    address: str
    container: str
    answer: EngineAnswer | None = None
    heard: float = 0.0
    """When the last report came, on the loop's clock."""


class Poller:
    """Runs as `workers` tasks; `changed` is called with the service whose pod has something new to say."""

    def __init__(
        self, reader: Reader, changed: Callable[[Key], None], poll_seconds: float, grace_seconds: float
    ) -> None:
        self._reader = reader
        self._changed = changed
        self._poll_seconds = poll_seconds
        self._grace_seconds = grace_seconds
        self._pods: dict[str, _Pod] = {}
        self._by_service: dict[Key, set[str]] = {}
        self._queue: WorkQueue[str] = WorkQueue()
        self.asked: Callable[[bool], None] = lambda well: None
        """Told after each poll whether a report came."""

    def follow(self, key: Key, pods: Iterable[PodFacts]) -> bool:
        """From now on exactly these pods of the service are asked. True once each has been asked at least once."""
        wanted = {
            pod.uid: pod
            for pod in pods
            if pod.container is not None and pod.container.started and pod.ip and not pod.deleting
        }
        for uid in self._by_service.get(key, set()) - wanted.keys():
            self._drop(uid)
        for uid, pod in wanted.items():
            known = self._pods.get(uid)
            container = pod.container.id if pod.container is not None else ""
            if known is None or (known.address, known.container) != (pod.ip, container):
                self._pods[uid] = _Pod(key, pod.ip, container)
                self._queue.add(uid)
        self._by_service[key] = set(wanted)
        if not wanted:
            del self._by_service[key]
        return all(self._pods[uid].answer is not None for uid in wanted)

    def answers(self, key: Key) -> Mapping[str, EngineAnswer]:
        """What the service's pods said last, by pod uid."""
        found = ((uid, self._pods[uid].answer) for uid in self._by_service.get(key, ()))
        return {uid: answer for uid, answer in found if answer is not None}

    def forget(self, key: Key) -> None:
        """The service is gone."""
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
        found = await self._reader.read(pod.address)
        self.asked(found.report is not None)
        if self._pods.get(uid) is not pod:
            return  # gone or restarted meanwhile
        now = asyncio.get_running_loop().time()
        if found.report is not None:
            pod.heard = now
        elif pod.answer is not None and pod.answer.report is not None and now - pod.heard < self._grace_seconds:
            found = pod.answer  # a busy engine may miss a poll or two
        before, pod.answer = pod.answer, found
        if before is None or _meaning(before) != _meaning(found):
            self._changed(pod.key)
        self._queue.add_after(uid, self._poll_seconds * random.uniform(0.9, 1.1))  # noqa: S311  # spreads polls


def _meaning(answer: EngineAnswer) -> tuple[AccelerationReport | None, str]:
    """The answer without the time at which it was given."""
    report = answer.report
    return (None if report is None else report.model_copy(update={"observed_at": ""})), answer.error
