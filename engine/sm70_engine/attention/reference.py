"""The CPU lane's attention backend: vLLM's CPU kernels, with every dispatch counted by KV dtype and stage.

It registers as vLLM's CUSTOM backend, since a new name in vLLM's enumeration cannot be sent to its engine process.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from sm70_engine.acceleration.routes import count
from sm70_profiles.routes import Stage

ROUTE_OF_KV_DTYPE = {
    "fp8": "attention_e4m3_reference",
    "fp8_e4m3": "attention_e4m3_reference",
    "fp8_e5m2": "attention_e5m2_reference",
}
"""The route by vLLM's name of the KV cache dtype; any other name is the compute dtype."""


class ReferenceAttentionBackend(CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's CPU backend with our implementation."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[ReferenceAttention]:
        return ReferenceAttention


class ReferenceAttention(CPUAttentionBackendImpl):  # type: ignore[misc]
    """One attention layer."""

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, *rest: Any, **more: Any
    ) -> Any:
        if attn_metadata is not None:
            # Only a draft's layers look ahead within the block that they draft.
            stages = (Stage.DRAFT,) if attn_metadata.causal is False else None
            count(ROUTE_OF_KV_DTYPE.get(self.kv_cache_dtype, "attention_reference"), stages)
        return super().forward(layer, query, key, value, kv_cache, attn_metadata, *rest, **more)
