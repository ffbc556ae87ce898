"""The HTTP face: health, readiness, report, metrics and OpenAI completions, and one endpoint of its own for faults."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import ValidationError

from simulated_engine.behaviour import Behaviour, ReportFault
from simulated_engine.recital import MAX_MODEL_LEN, BadRequestError, Recital, Reciter, tool_call
from simulated_engine.reporting import Reporter
from sm70_engine.acceleration.series import ReportCollector
from sm70_engine.tinymodel.chains import Kind
from sm70_profiles.routes import Stage

FAULTS = "/simulated"
"""GET shows the behaviour, POST changes members of it, for this container and its next starts in the same pod."""
GARBAGE = b'{"schemaVersion": 1, "paths": "\xff'


class Server:
    """One engine's listening life. `busy` is the number of requests that are being answered."""

    def __init__(
        self, reporter: Reporter, api_key: str | None, model: str, changed: Callable[[Behaviour], None]
    ) -> None:
        self._reporter = reporter
        self._key = api_key
        self._reciter = Reciter(model)
        self._changed = changed
        self._registry = CollectorRegistry()
        self._registry.register(ReportCollector(lambda: reporter))
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self.busy = 0
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listens; `port` 0 takes any free one."""
        application = web.Application(middlewares=[self._guard])
        application.add_routes(
            [
                web.get("/health", self._health),
                web.get("/sm70/ready", self._ready),
                web.get("/sm70/acceleration", self._report),
                web.get("/v1/sm70/acceleration", self._report),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._complete),
                web.get(FAULTS, self._show),
                web.post(FAULTS, self._change),
            ]
        )
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, host, port)
        await self._site.start()
        self.port = self._runner.addresses[0][1]

    async def drain(self, seconds: float) -> int:
        """Listens no more, and finishes what it began within this time. Returns how many requests were cut off."""
        assert self._runner is not None
        assert self._site is not None
        await self._site.stop()
        if self._runner.server is not None:
            self._runner.server.pre_shutdown()  # ends connections that only wait for another request
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        cut = self.busy
        await self._runner.cleanup()
        return cut

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """As vLLM's middleware: a key for every path below /v1."""
        if self._key and request.path.startswith("/v1"):
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self._key.encode()):
                return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=self._reporter.behaviour.health_status)

    async def _ready(self, _request: web.Request) -> web.Response:
        blocking = self._reporter.blocking()
        if blocking is not None:
            body = {
                "ready": False,
                "path": blocking.name,
                "state": blocking.state,
                "reason": blocking.reason,
                "message": blocking.message,
            }
            return web.json_response(body, status=503)
        if self._reporter.behaviour.never_ready:
            body = {"ready": False, "reason": "Starting", "message": "the engine is not there yet"}
            return web.json_response(body, status=503)
        return web.json_response({"ready": True, "summary": str(self._reporter.report().summary)})

    async def _report(self, _request: web.Request) -> web.Response:
        fault = self._reporter.behaviour.report
        if fault is ReportFault.ABSENT:
            return web.json_response({"detail": "Not Found"}, status=404)
        if fault is ReportFault.GARBAGE:
            return web.Response(body=GARBAGE, content_type="application/json")
        text = self._reporter.report().model_dump_json(by_alias=True)
        return web.Response(text=text, content_type="application/json")

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _models(self, _request: web.Request) -> web.Response:
        model = {"id": self._reciter.model, "object": "model", "owned_by": "simulated", "max_model_len": MAX_MODEL_LEN}
        return web.json_response({"object": "list", "data": [model]})

    async def _show(self, _request: web.Request) -> web.Response:
        return web.json_response(self._reporter.behaviour.model_dump(mode="json", by_alias=True))

    async def _change(self, request: web.Request) -> web.Response:
        try:
            changed = self._reporter.behaviour.changed(await request.text())
        except ValidationError as error:
            return web.json_response({"error": str(error)}, status=400)
        self._reporter.behaviour = changed
        self._changed(changed)
        return await self._show(request)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=True)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=False)

    async def _answer(self, request: web.Request, chat: bool) -> web.StreamResponse:
        self.busy += 1
        self._idle.clear()
        try:
            return await self._recite(request, chat)
        finally:
            self.busy -= 1
            if not self.busy:
                self._idle.set()

    async def _recite(self, request: web.Request, chat: bool) -> web.StreamResponse:
        behaviour = self._reporter.behaviour
        try:
            body = json.loads(await request.text())
            if not isinstance(body, dict):
                raise BadRequestError(400, "the body must be an object")
            recital = self._reciter.recite(body, behaviour.answers, chat)
        except ValueError as error:
            status = error.status if isinstance(error, BadRequestError) else 400
            return web.json_response({"error": {"message": str(error), "code": status}}, status=status)
        self._reporter.count({Stage.PREFILL: 1, Stage.DECODE: max(0, len(recital.ids) - 1)})
        writer = _Writer(body, recital, chat)
        if not body.get("stream"):
            await asyncio.sleep(behaviour.token_seconds * len(recital.ids))
            return web.json_response(writer.whole())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in writer.chunks():
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
            await asyncio.sleep(behaviour.token_seconds)
        await response.write(b"data: [DONE]\n\n")
        return response


class _Writer:
    """Writes one recital as OpenAI's documents."""

    def __init__(self, body: dict[str, Any], recital: Recital, chat: bool) -> None:
        self._recital, self._chat = recital, chat
        self._with_ids = bool(body.get("return_token_ids"))
        self._with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self._head = {"id": f"cmpl-{time.monotonic_ns()}", "created": int(time.time()), "model": body.get("model")}
        # A parser holds a tool call back until it is complete; words out of order are no call, but text.
        self._call = tool_call(recital)

    def whole(self) -> dict[str, Any]:
        recital = self._recital
        choice: dict[str, Any] = {"index": 0, "finish_reason": self._ending(), "logprobs": None}
        if self._chat:
            text = None if self._call else "".join(recital.pieces)
            message = {"role": "assistant", "content": text, "tool_calls": [self._call] if self._call else []}
            choice["message"] = message
        else:
            choice["text"] = "".join(recital.pieces)
        if self._with_ids:
            choice["token_ids"] = recital.ids
        kind = "chat.completion" if self._chat else "text_completion"
        whole = {**self._head, "object": kind, "choices": [choice], "usage": recital.usage()}
        return whole | ({"prompt_token_ids": list(recital.prompt)} if self._with_ids else {})

    def chunks(self) -> list[dict[str, Any]]:
        recital = self._recital
        found = [self._chunk({"role": "assistant", "content": ""})] if self._chat else []
        if self._call:
            found.append(self._chunk({"tool_calls": [{"index": 0, **self._call}]}, ids=recital.ids[:-1]))
        else:
            for piece, number in zip(recital.pieces, recital.ids, strict=False):
                found.append(self._chunk({"content": piece}, ids=[number]))
        found.append(self._chunk({}, ending=self._ending(), ids=recital.ids[len(recital.pieces) :]))
        if self._with_ids and found:
            found[0]["prompt_token_ids"] = list(recital.prompt)
        if self._with_usage:
            found.append({**self._head, "object": self._object, "choices": [], "usage": recital.usage()})
        return found

    @property
    def _object(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _ending(self) -> str:
        wrong_call = self._recital.kind is Kind.TOOL_CALL and self._call is None
        return "stop" if wrong_call and self._recital.finish_reason == "tool_calls" else self._recital.finish_reason

    def _chunk(self, delta: dict[str, Any], ending: str | None = None, ids: list[int] | None = None) -> dict[str, Any]:
        words = {"delta": delta} if self._chat else {"text": delta.get("content", "")}
        choice: dict[str, Any] = {"index": 0, **words, "finish_reason": ending, "logprobs": None}
        if self._with_ids:
            choice["token_ids"] = ids or []
        return {**self._head, "object": self._object, "choices": [choice]}
