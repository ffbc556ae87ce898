"""Liveness that tells the truth: leadership, age of the watches, age of the queue; and the HTTP server for it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from sm70_operator.runtime.metrics import Metrics

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class WatchClock:
    """When each watch was last answered. A watch that lives is renewed within its timeout, also when nothing happens.

    kopf neither tells this nor that it had to list again; both are seen in the HTTP session that it is given.
    """

    plurals: frozenset[str]
    """The watched resources, as the last part of a request's path."""
    clock: Callable[[], float] = time.monotonic
    answered: dict[str, float] = field(default_factory=dict)
    listed: set[str] = field(default_factory=set)
    relisted: Callable[[str], None] = lambda path: None
    """Told when a list is asked for a second time: what was deleted in between was missed."""

    def reset(self) -> None:
        """The watches start anew."""
        self.answered.clear()
        self.listed.clear()

    def trace(self) -> aiohttp.TraceConfig:
        """To be given to the session."""
        config = aiohttp.TraceConfig()
        config.on_request_end.append(self._ended)
        return config

    async def _ended(self, _session: Any, _context: Any, params: aiohttp.TraceRequestEndParams) -> None:
        self.note(params.url.path, params.url.query, params.response.status)

    def note(self, path: str, query: Mapping[str, str], status: int) -> None:
        """One request of kopf's was answered."""
        if status != 200 or path.rpartition("/")[2] not in self.plurals:
            return
        if query.get("watch") == "true":
            self.answered[path] = self.clock()
        elif "continue" not in query:
            if path in self.listed:
                self.relisted(path)
            self.listed.add(path)

    def ages(self) -> dict[str, float]:
        """Seconds since the last answer, by path."""
        now = self.clock()
        return {path: now - then for path, then in self.answered.items()}


@dataclass(frozen=True)
class Check:
    """One thing that must hold for the process to be alive. `problem` is None while it does."""

    name: str
    problem: Callable[[], str | None]


class HealthServer:
    """Serves /healthz, /readyz and /metrics."""

    def __init__(self, metrics: Metrics, alive: list[Check], ready: list[Check]) -> None:
        self._metrics = metrics
        self._alive = alive
        self._ready = ready
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listens; `port` 0 takes any free one. Raises OSError."""
        application = web.Application()
        application.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._serve_metrics),
            ]
        )
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _healthz(self, _request: web.Request) -> web.Response:
        return _answer(self._alive)

    async def _readyz(self, _request: web.Request) -> web.Response:
        return _answer(self._ready)

    async def _serve_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": METRICS_TYPE})


def _answer(checks: list[Check]) -> web.Response:
    found = {check.name: check.problem() for check in checks}
    body = json.dumps({name: problem or "ok" for name, problem in found.items()})
    status = 503 if any(found.values()) else 200
    return web.Response(text=body + "\n", status=status, content_type="application/json")
