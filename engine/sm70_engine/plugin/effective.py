"""The settings that vLLM really uses, which may differ from those it was given (`auto` is resolved by then)."""

from __future__ import annotations

from typing import Any

from sm70_profiles.spec import KvCacheDtype, Overrides


def effective_settings(settings: Overrides, vllm_config: Any) -> Overrides:
    """`settings` with what vLLM's configuration says in their place."""
    cache, model, scheduler = vllm_config.cache_config, vllm_config.model_config, vllm_config.scheduler_config
    found: dict[str, Any] = {
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "prefix_caching": bool(cache.enable_prefix_caching),
        "enforce_eager": bool(model.enforce_eager),
        "block_size": cache.block_size,
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
        "pipeline_parallel_size": vllm_config.parallel_config.pipeline_parallel_size,
    }
    if cache.cache_dtype in set(KvCacheDtype):
        found["kv_cache_dtype"] = KvCacheDtype(cache.cache_dtype)
    return settings.model_copy(update=found)
