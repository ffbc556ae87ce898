"""What only a worker knows, and the last line that it logs. Shared by the workers of all platforms."""

from __future__ import annotations

import os
from typing import Any

from vllm.logger import init_logger

from sm70_engine.acceleration.routes import read_counters
from sm70_engine.session import session_folder

logger = init_logger("vllm.sm70")
Facts = dict[str, str | int | None]


def worker_facts(worker: Any) -> Facts:
    """Facts of any worker of vLLM that has a model runner."""
    cache = worker.vllm_config.cache_config
    backends = {group.backend.get_name() for groups in worker.model_runner.attn_groups for group in groups}
    return {
        "rank": worker.rank,
        "pid": os.getpid(),
        "block_size": cache.block_size,
        "mamba_block_size": cache.mamba_block_size,
        "blocks": cache.num_gpu_blocks,
        "kv_cache_dtype": str(cache.cache_dtype),
        "attention_backends": ",".join(sorted(backends)),
        "model_runner": type(worker.model_runner).__name__,
    }


def routes_at_shutdown() -> None:
    """Logs what was dispatched by all workers together."""
    folder = session_folder()
    if folder is not None:
        counts = (row for row in read_counters(folder.counters) if row.dispatches)
        text = ", ".join(f"{row.route}/{row.stage}={row.dispatches}" for row in counts)
        logger.info("sm70: routes at shutdown: %s", text or "none")
