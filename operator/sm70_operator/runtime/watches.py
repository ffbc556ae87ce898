"""Runs kopf as what it is here: the watches and their caches. They start anew whenever something may be missed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterable, Iterator

import aiohttp
import kopf
from kopf._cogs.aiokits import aiotoggles

from sm70_operator import handlers
from sm70_operator.api import names
from sm70_operator.observe.facts import PodFacts
from sm70_operator.observe.snapshot import Key
from sm70_operator.observe.store import Store
from sm70_operator.runtime.health import WatchClock
from sm70_operator.settings import Settings

logger = logging.getLogger(__name__)
ENDED_KEPT = 10_000
LIST_PAGE = 100
"""Objects of one page of a first list: a whole page is in memory at a time, as text and parsed."""
WORKER_IDLE_SECONDS = 0.2
"""How long kopf's worker of one object waits for that object's next event, holding the last one."""


class NoDiffs(kopf.DiffBaseStorage):
    """kopf compares nothing for us; otherwise it would copy every object three times at every event."""

    def build(self, *, body: kopf.Body, extra_fields: object = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        pass


class NoProgress(kopf.ProgressStorage):
    """There are no handlers whose progress would have to be remembered."""

    def fetch(self, **_: object) -> None:
        return None

    def store(self, **_: object) -> None:
        pass

    def purge(self, **_: object) -> None:
        pass

    def touch(self, **_: object) -> None:
        pass

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence


class FirstLists(aiotoggles.ToggleSet):
    """Which objects of the first lists are not in the caches yet; `complete` is called when all are.

    kopf lets the worker of every object wait for that, and wakes all of them for each object that is done: with six
    thousand objects that took 40 s and 50 MiB. Here no worker waits: nothing is decided before `complete`.
    """

    def __init__(self, complete: Callable[[], None]) -> None:
        super().__init__(all)
        self._complete = complete

    async def wait_for(self, __state: bool) -> None:
        """At once."""

    async def drop_toggle(self, toggle: aiotoggles.Toggle) -> None:
        await super().drop_toggle(toggle)
        if self.is_on():
            self._complete()


@contextlib.contextmanager
def told_of_first_lists(complete: Callable[[], None]) -> Iterator[None]:
    """kopf makes its set of all first lists as `FirstLists` meanwhile; its set of reasons to pause stays its own."""
    original = aiotoggles.ToggleSet

    def make(over: Callable[[Iterable[bool]], bool]) -> aiotoggles.ToggleSet:
        return FirstLists(complete) if over is all else original(over)

    aiotoggles.ToggleSet = make  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        aiotoggles.ToggleSet = original  # type: ignore[misc]


class Watches:
    """`woken` is called for every service that an event concerns."""

    def __init__(self, settings: Settings, woken: Callable[[Key], None]) -> None:
        self._settings = settings
        self._woken = woken
        self._stop = asyncio.Event()
        self._anew = False
        self.store: Store | None = None
        """The caches, once all of them are complete."""
        self.running = False
        self._filled: Store | None = None
        """The caches, complete or not."""
        self._lists_done = False
        self._ended: dict[Key, PodFacts] = {}
        self.clock = WatchClock(handlers.PLURALS)
        self.clock.relisted = self._relisted

    def stop(self) -> None:
        """Ends `run` soon."""
        self._anew = False
        self._stop.set()

    async def run(self) -> None:
        """Watches until `stop` or a signal. Raises what kopf cannot live with, for example missing rights."""
        while True:
            ready = asyncio.Event()
            signals = asyncio.create_task(self._take_signals(ready))
            self._anew = False
            self._stop = asyncio.Event()
            self.store = self._filled = None
            self._lists_done = False
            self.clock.reset()
            self.running = True
            try:
                with told_of_first_lists(self._listed):
                    await kopf.operator(
                        registry=self._registry(),
                        settings=self._kopf_settings(),
                        standalone=True,
                        clusterwide=not self._settings.namespaces,
                        namespaces=self._settings.namespaces,
                        stop_flag=self._stop,
                        ready_flag=ready,
                    )
            finally:
                self.running = False
                signals.cancel()
            if not self._anew:
                return

    async def _take_signals(self, ready: asyncio.Event) -> None:
        """kopf takes the signals when it starts, and then needs five seconds to end; the flag ends it at once."""
        await ready.wait()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stop)

    def _registry(self) -> kopf.OperatorRegistry:
        registry = handlers.registry(self._settings, self._event, self._pod_ended)
        kopf.on.login(registry=registry)(self._login)
        return registry

    def _event(self, store: Store, key: Key) -> None:
        self._filled = store
        if self._lists_done:
            self.store = store
            self._woken(key)

    def _listed(self) -> None:
        """All first lists are in the caches: now every service is looked at."""
        self._lists_done = True
        if self._filled is not None:
            self.store = self._filled
            for key in sorted(self.store.resources):
                self._woken(key)

    def _pod_ended(self, key: Key, pod: PodFacts) -> None:
        self._ended.pop(key, None)
        self._ended[key] = pod
        while len(self._ended) > ENDED_KEPT:
            del self._ended[next(iter(self._ended))]

    def ended(self, key: Key) -> PodFacts | None:
        """The service's pod that went last since this process started, in its final state."""
        return self._ended.get(key)

    def _relisted(self, path: str) -> None:
        """kopf does not tell of objects that vanished between two lists, so its caches are not to be trusted now."""
        if not self._stop.is_set():
            logger.warning("%s had to be listed again; all watches start anew", path)
            self._anew = True
            self.store = None
            self._lists_done = False
            self._stop.set()

    async def _login(self, **kwargs: object) -> kopf.AiohttpSession:
        """kopf's own credentials, in a session that is traced."""
        info = kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)  # type: ignore[arg-type]
        if info is None:
            raise kopf.LoginError("there is neither a service account nor a kubeconfig")
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
            headers=info.as_http_headers(),
            trace_configs=[self.clock.trace()],
        )
        return kopf.AiohttpSession(
            server=info.server, default_namespace=info.default_namespace, aiohttp_session=session
        )

    def _kopf_settings(self) -> kopf.OperatorSettings:
        settings, ours = kopf.OperatorSettings(), self._settings
        settings.process.ultimate_exiting_timeout = None  # one start of the watches is not the process
        settings.scanning.disabled = True  # no rights on CRDs and namespaces are needed
        settings.posting.enabled = False
        settings.watching.server_timeout = ours.watch_timeout_seconds
        settings.watching.client_timeout = ours.watch_timeout_seconds + 30
        settings.watching.connect_timeout = ours.request_timeout_seconds
        settings.watching.reconnect_backoff = 0.5
        settings.watching.chunk_size = LIST_PAGE
        settings.networking.request_timeout = ours.request_timeout_seconds
        settings.networking.connect_timeout = ours.request_timeout_seconds
        settings.queueing.idle_timeout = WORKER_IDLE_SECONDS
        settings.persistence.diffbase_storage = NoDiffs()
        settings.persistence.progress_storage = NoProgress()
        settings.queueing.worker_limit = None  # fewer workers than objects would never complete the indices
        for child in handlers.CHILDREN.values():
            settings.watching.label_selectors[child] = names.SERVICE_LABEL
        return settings
