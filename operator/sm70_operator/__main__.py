"""The operator's process: settings, logging, leadership, workers; then the watches, until a signal or a lost lease."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from sm70_operator.act.apply import Executor, NotLeaderError
from sm70_operator.act.client import ApiError, ApiServer, connect
from sm70_operator.act.events import EventRecorder
from sm70_operator.act.status_writer import StatusWriter
from sm70_operator.observe.snapshot import Key
from sm70_operator.runtime import heap
from sm70_operator.runtime.engine_client import EngineClient
from sm70_operator.runtime.health import Check, HealthServer
from sm70_operator.runtime.leader import Leadership
from sm70_operator.runtime.metrics import Metrics
from sm70_operator.runtime.poller import Poller
from sm70_operator.runtime.queue import WorkQueue
from sm70_operator.runtime.reconciler import SOON_SECONDS, Reconciler, RetryError
from sm70_operator.runtime.watches import Watches
from sm70_operator.settings import LogFormat, Settings, SettingsError

logger = logging.getLogger("sm70_operator")
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
STALE_WATCHES = 3
"""A watch is dead when it was not renewed for this many of its timeouts."""
STUCK_REQUESTS = 20
"""A worker is stuck when one look takes longer than this many requests may."""


class Process:
    """Everything that runs, wired together."""

    def __init__(self, settings: Settings, api: ApiServer, identity: str) -> None:
        self.settings = settings
        self.api = api
        self.metrics = Metrics()
        self.queue: WorkQueue[Key] = WorkQueue(
            settings.backoff_base_milliseconds / 1000, settings.backoff_limit_seconds
        )
        self.leadership = Leadership(
            api, settings.lease_namespace or own_namespace(), settings.lease_name, identity, settings.lease_seconds
        )
        self.engines = EngineClient(settings.poll_timeout_seconds)
        self.poller = Poller(
            self.engines,
            self.queue.add,
            settings.poll_seconds,
            settings.report_grace_seconds,
            settings.routes_seconds,
        )
        self.watches = Watches(settings, self.queue.add)
        self.reconciler = Reconciler(
            api=api,
            executor=Executor(api, self.may_act),
            status_writer=StatusWriter(api),
            events=EventRecorder(api, identity, self.may_act),
            poller=self.poller,
            store=lambda: self.watches.store,
            settings=settings,
            metrics=self.metrics,
            may_act=self.may_act,
            ended=self.watches.ended,
        )
        self.health = HealthServer(
            self.metrics,
            alive=[Check("watches", self._stale_watches), Check("queue", self._stuck_queue)],
            ready=[Check("apiServer", self._unheard)],
        )
        self._instrument()

    def may_act(self) -> bool:
        return self.leadership.leads() if self.settings.leader_election else True

    async def run(self) -> int:
        """Runs until a signal (0) or until the lease is lost (1)."""
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
        await self.health.start(self.settings.listen, self.settings.port)
        logger.info("/metrics and /healthz on port %d", self.health.port)
        tasks: list[asyncio.Task[None]] = []
        try:
            if self.settings.leader_election and not await self._acquire(stopping):
                return 0
            tasks = [
                *(asyncio.create_task(self._worker()) for _ in range(self.settings.workers)),
                *(asyncio.create_task(self.poller.work()) for _ in range(self.settings.polls_at_once)),
            ]
            if self.settings.leader_election:
                tasks.append(asyncio.create_task(self._leave_when_lost()))
            await self.watches.run()
            return 0 if self.may_act() else 1
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.leadership.release()
            self.queue.close()
            await self.engines.close()
            await self.health.stop()

    async def _acquire(self, stopping: asyncio.Event) -> bool:
        """Waits for the lease; False if a signal came first."""
        acquiring = asyncio.create_task(self.leadership.acquire())
        waiting = asyncio.create_task(stopping.wait())
        await asyncio.wait({acquiring, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not acquiring.done():
            acquiring.cancel()
        await asyncio.gather(acquiring, waiting, return_exceptions=True)
        return not stopping.is_set()

    async def _leave_when_lost(self) -> None:
        await self.leadership.hold()
        self.watches.stop()

    async def _worker(self) -> None:
        while True:
            key = await self.queue.get()
            try:
                await self._handle(key)
            finally:
                self.queue.done(key)

    async def _handle(self, key: Key) -> None:
        try:
            with self.metrics.reconcile_seconds.time():
                wake = await self.reconciler.reconcile(key)
        except NotLeaderError:
            # The lease may be renewed late and held again: what was left undone has to be taken up then.
            self.queue.add_after(key, SOON_SECONDS)
        except (RetryError, ApiError) as error:
            wait = self.queue.retry(key)
            logger.warning("%s: %s; again in %.1f s", key, error, wait)
        except Exception:
            # One service that breaks the planner must neither stop the others nor be tried without a pause.
            wait = self.queue.retry(key)
            self.metrics.reconciles.labels("error").inc()
            logger.exception("%s: a fault of the operator; again in %.1f s", key, wait)
        else:
            self.queue.succeeded(key)
            if wake is not None:
                self.queue.add_after(key, wake)

    def _instrument(self) -> None:
        metrics = self.metrics
        metrics.gauge("leader", "1 while this process may act.", lambda: float(self.may_act()))
        metrics.gauge("queue_depth", "Services that wait for a worker.", lambda: float(len(self.queue)))
        metrics.gauge("queue_oldest_seconds", "Age of the oldest work in the queue.", self.queue.oldest_seconds)
        metrics.gauge("services", "Services in the cache.", lambda: float(len(self._store_keys())))
        metrics.gauge(
            "watch_age_seconds",
            "Since the least recently renewed watch was renewed.",
            lambda: max(self.watches.clock.ages().values(), default=0.0),
        )
        self.api.observe = lambda verb, kind, code: metrics.api_requests.labels(verb, kind, str(code)).inc()
        self.poller.asked = lambda well: metrics.polls.labels("report" if well else "none").inc()

    def _store_keys(self) -> list[Key]:
        store = self.watches.store
        return [] if store is None else store.keys()

    def _stale_watches(self) -> str | None:
        limit = STALE_WATCHES * self.settings.watch_timeout_seconds
        stale = [path for path, age in self.watches.clock.ages().items() if age > limit]
        return f"not renewed for {limit} s: {', '.join(sorted(stale))}" if stale and self.watches.running else None

    def _stuck_queue(self) -> str | None:
        limit, age = STUCK_REQUESTS * self.settings.request_timeout_seconds, self.queue.oldest_seconds()
        return f"the oldest work is {age:.0f} s old, more than {limit} s" if age > limit else None

    def _unheard(self) -> str | None:
        if not self.settings.leader_election or self.leadership.heard is not None:
            return None
        return "the API server has not answered yet"


def own_namespace() -> str:
    """The namespace of the pod, or `default` outside a cluster."""
    return NAMESPACE_FILE.read_text().strip() if NAMESPACE_FILE.is_file() else "default"


def own_identity() -> str:
    """In a pod its name, so that a restarted container has its own lease at once; elsewhere host and process."""
    return os.environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        body = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            body["exception"] = self.formatException(record.exc_info)
        return json.dumps(body, ensure_ascii=False)


def set_up_logging(settings: Settings) -> None:
    """To stderr. The libraries speak only when something is wrong, unless everything is asked for."""
    handler = logging.StreamHandler()
    text = "%(asctime)s %(levelname)-7s %(message)s"
    handler.setFormatter(JsonFormatter() if settings.log_format is LogFormat.JSON else logging.Formatter(text))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logger.setLevel(settings.log_level)
    if settings.log_level == "DEBUG":
        logging.getLogger("kopf").setLevel(logging.DEBUG)


async def serve(settings: Settings) -> int:
    """Connects and runs. Returns the exit status."""
    api = await connect(settings.request_timeout_seconds)
    try:
        return await Process(settings, api, own_identity()).run()
    finally:
        await api.close()


def main() -> None:
    """The command `sm70-operator`."""
    parser = argparse.ArgumentParser(
        prog="sm70-operator",
        description="The operator for Sm70InferenceService. Its settings are environment variables SM70_OPERATOR_*.",
    )
    parser.add_argument("--settings", action="store_true", help="print every setting with its default, and end")
    options = parser.parse_args()
    if options.settings:
        print(Settings.describe(), end="")
        return
    try:
        settings = Settings.from_environment()
    except SettingsError as error:
        sys.exit(f"sm70-operator: {error}")
    set_up_logging(settings)
    heap.tame()
    try:
        sys.exit(asyncio.run(serve(settings)))
    except OSError as error:
        sys.exit(f"sm70-operator: {error}")


if __name__ == "__main__":
    main()
