"""The settings that paths are judged by: those that were asked for, and vLLM's choice where the choice was left to it.

Where vLLM settles on another value than the one asked for, the rules still judge the one asked for; the report says the
other in a row of its own (`settled`).
"""

from __future__ import annotations

from typing import Any

from sm70_profiles.spec import KvCacheDtype, Overrides


def effective_settings(settings: Overrides, vllm_config: Any) -> Overrides:
    """`settings`, with what vLLM's configuration says where nothing was asked for."""
    cache, model, scheduler = vllm_config.cache_config, vllm_config.model_config, vllm_config.scheduler_config
    found: dict[str, Any] = {
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "prefix_caching": bool(cache.enable_prefix_caching),
        "enforce_eager": bool(model.enforce_eager),
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
        "pipeline_parallel_size": vllm_config.parallel_config.pipeline_parallel_size,
    }
    changes = {name: value for name, value in found.items() if getattr(settings, name) is None}
    if settings.kv_cache_dtype in (None, KvCacheDtype.AUTO) and cache.cache_dtype in set(KvCacheDtype):
        changes["kv_cache_dtype"] = KvCacheDtype(cache.cache_dtype)  # by now the checkpoint has decided
    return settings.model_copy(update=changes)
