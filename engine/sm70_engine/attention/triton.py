"""vLLM's Triton attention, counted: where `FLASH_ATTN_V100` does not serve a layer, that must show."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from sm70_engine.acceleration.routes import count
from sm70_profiles.routes import Stage


class CountedTritonBackend(TritonAttentionBackend):  # type: ignore[misc]
    """vLLM's backend with our implementation."""

    @staticmethod
    def get_impl_cls() -> type[CountedTriton]:
        return CountedTriton


class CountedTriton(TritonAttentionImpl):  # type: ignore[misc]
    """One attention layer."""

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, *rest: Any, **more: Any
    ) -> Any:
        if attn_metadata is not None:
            stages = (Stage.DRAFT,) if getattr(attn_metadata, "causal", True) is False else None
            count("attention_triton", stages, capture=torch.cuda.is_current_stream_capturing())
        return super().forward(layer, query, key, value, kv_cache, attn_metadata, *rest, **more)
