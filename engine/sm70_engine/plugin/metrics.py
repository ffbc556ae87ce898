"""Our series in vLLM's own `/metrics`, read from the report and the shared counters when Prometheus asks.

With one API server vLLM's registry is the process-wide one and takes a collector. With several it merges files of
values, which a collector cannot be part of; then our route answers `/metrics`, with vLLM's registry and ours in it.
Either way every API server gives the same numbers, because the counters are shared. A stat logger would do less: it is
called when a batch ends, and its mere entry point changes what an unrelated vLLM logs.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from fastapi import FastAPI
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest

from sm70_engine.acceleration.series import SPECULATION_SAMPLES, ReportCollector, Reporter, SpeculationCollector


def attach_metrics(app: FastAPI, reporter: Callable[[], Reporter | None]) -> None:
    """Adds our series to the server's `/metrics`."""
    collector = ReportCollector(reporter)
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        REGISTRY.register(collector)
        # Restricted: collecting everything would collect ourselves.
        REGISTRY.register(SpeculationCollector(lambda: REGISTRY.restricted_registry(SPECULATION_SAMPLES).collect()))
        return
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    @app.get("/metrics", include_in_schema=False)
    def metrics() -> Response:
        registry = get_prometheus_registry()
        families = list(registry.collect())
        registry.register(collector)
        registry.register(SpeculationCollector(lambda: families))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
