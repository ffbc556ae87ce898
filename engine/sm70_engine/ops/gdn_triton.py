"""vLLM's Triton gated delta net, counted: the fallback until this repository's own kernels are there."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

from sm70_engine.acceleration.routes import count

LAYER_NAME = "QwenGatedDeltaNetAttention"


class CountedGatedDeltaNet(QwenGatedDeltaNetAttention):  # type: ignore[misc]
    """vLLM's layer. Its core runs inside one opaque operator, so counting is no part of a compiled graph."""

    def _forward_core(self, *arguments: Any, **options: Any) -> Any:
        count("gdn_triton", capture=torch.cuda.is_current_stream_capturing())
        return super()._forward_core(*arguments, **options)


def register() -> None:
    """Makes vLLM build our layer wherever a model asks for its own."""
    PluggableLayer.register_oot(CountedGatedDeltaNet, name=LAYER_NAME)
