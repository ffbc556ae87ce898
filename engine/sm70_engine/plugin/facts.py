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
        **_capacity(worker),
    }


def _capacity(worker: Any) -> Facts:
    """How much the KV cache holds, in the engine's own reckoning; empty for a runner that does not say."""
    config = getattr(worker.model_runner, "kv_cache_config", None)
    if config is None or not config.kv_cache_groups:
        return {}
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    longest = worker.vllm_config.model_config.max_model_len
    residents = get_max_concurrency_for_kv_cache_config(worker.vllm_config, config)
    return {"kv_tokens": int(residents * longest), "max_model_len": longest, "residents": int(residents)}


def routes_at_shutdown() -> None:
    """Logs what was dispatched by all workers together."""
    folder = session_folder()
    if folder is not None:
        counts = (row for row in read_counters(folder.counters) if row.dispatches)
        text = ", ".join(f"{row.route}/{row.stage}={row.dispatches}" for row in counts)
        logger.info("sm70: routes at shutdown: %s", text or "none")
