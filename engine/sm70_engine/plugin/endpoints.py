"""The HTTP face: the acceleration report, guarded and unguarded, and the readiness that Kubernetes asks for.

vLLM's own middleware asks for the API key on every path below /v1; the twins below /sm70 are for the kubelet and hold
no secret.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import torch
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from vllm.logger import init_logger

from sm70_engine.acceleration.capabilities import capabilities
from sm70_engine.acceleration.enforce import enforce
from sm70_engine.acceleration.report import blocking_path, build_report
from sm70_engine.acceleration.routes import read_counts
from sm70_engine.plugin.effective import effective_settings
from sm70_engine.plugin.metrics import attach_metrics
from sm70_engine.plugin.phases import enter_phase
from sm70_engine.session import current_session, session_folder
from sm70_profiles.report import AccelerationReport, CacheState, StartupPhase

logger = init_logger("vllm.sm70")
router = APIRouter()
FACTS_TIMEOUT_SECONDS = 10.0


class Observer:
    """Puts the report together for one server process."""

    def __init__(self, engine_client: Any) -> None:
        self._engine = engine_client
        self._facts: dict[str, str | int | None] | None = None
        folder = session_folder()
        assert folder is not None
        self._folder = folder
        self._session = current_session()

    def alive(self) -> bool:
        """Whether the engine behind this server can still answer."""
        return self._engine is not None and not self._engine.errored

    def report(self) -> AccelerationReport:
        """The report of now, with the workers' facts if they were asked for before."""
        settings = effective_settings(self._session.settings, self._engine.vllm_config)
        counts = read_counts(self._folder.counters)
        return build_report(
            self._session,
            settings,
            capabilities(self._session, os.environ),
            counts.routes,
            os.environ,
            self._facts,
            torch.version.cuda,
            self._folder,
            counts.fallbacks,
        )

    def started(self) -> None:
        """What is done once when the engine is there and before the server listens.

        Raises StrictStartError.
        """
        enforce(self._session, self._folder, self.report().paths)
        if not self._folder.finish_once():
            return
        try:
            self._publish()
        except Exception:  # whatever is wrong with the cache, the engine is there
            logger.exception("sm70: the compile cache is not published")
        enter_phase(StartupPhase.SERVING)

    def _publish(self) -> None:
        cache = self._session.cache.finish()
        self._folder.write_cache(cache)
        log = logger.info if cache.state in (CacheState.OFF, CacheState.WARM) else logger.warning
        log("sm70: compile cache %s: %s", cache.state, cache.message)

    async def learn_worker_facts(self) -> None:
        """Asks the workers once; the answers do not change while a server lives. Kept: those of rank 0."""
        if self._facts is not None or not self.alive():
            return
        try:
            answers = await self._engine.collective_rpc("sm70_facts", timeout=FACTS_TIMEOUT_SECONDS)
        except Exception as error:  # whatever the engine raises, the report is readable without
            logger.warning("sm70: the workers did not say their facts: %s", error)
            return
        self._facts = next((answer for answer in answers if answer.get("rank") == 0), {})

    def readiness(self) -> tuple[int, dict[str, Any]]:
        """Status code and body of `/sm70/ready`."""
        if not self.alive():
            return 503, {"ready": False, "reason": "EngineDied", "message": "the engine process is gone"}
        report = self.report()
        blocking = blocking_path(report.paths, self._session.request.acceleration)
        if blocking is not None:
            return 503, {
                "ready": False,
                "path": blocking.name,
                "state": blocking.state,
                "reason": blocking.reason,
                "message": blocking.message,
            }
        return 200, {"ready": True, "summary": str(report.summary)}


def _observer(request: Request) -> Observer | None:
    return getattr(request.app.state, "sm70_observer", None)


@router.get("/v1/sm70/acceleration")
@router.get("/sm70/acceleration")
async def acceleration(request: Request) -> Response:
    """The acceleration report (`sm70_profiles.report.AccelerationReport`)."""
    observer = _observer(request)
    if observer is None:
        return JSONResponse({"message": "no engine behind this server"}, status_code=503)
    await observer.learn_worker_facts()
    report = await asyncio.to_thread(observer.report)
    return Response(report.model_dump_json(by_alias=True), media_type="application/json")


@router.get("/sm70/ready")
async def ready(request: Request) -> JSONResponse:
    """200 while the engine lives and the acceleration policy holds; 503 with the first path that is in the way."""
    observer = _observer(request)
    if observer is None:
        return JSONResponse({"ready": False, "reason": "Starting", "message": "the engine is not there yet"}, 503)
    status, body = await asyncio.to_thread(observer.readiness)
    return JSONResponse(body, status)


class AccelerationEndpoints:
    """vLLM's `vllm.endpoint_plugins` contract."""

    name = "sm70_endpoints"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        if session_folder() is None:
            return
        app.include_router(router)
        attach_metrics(app, lambda: getattr(app.state, "sm70_observer", None))

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        if engine_client is not None and session_folder() is not None:
            observer = Observer(engine_client)
            await observer.learn_worker_facts()
            await asyncio.to_thread(observer.started)
            state.sm70_observer = observer
