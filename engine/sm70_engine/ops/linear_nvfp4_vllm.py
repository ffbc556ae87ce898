"""Offers the NVFP4 linear operator to vLLM's linear layers."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.kernels.linear import NvFp4LinearKernel, register_linear_kernel
from vllm.platforms.interface import PlatformEnum

from sm70_engine.ops.linear_nvfp4 import nvfp4_linear


class ReferenceNvFp4Linear(NvFp4LinearKernel):  # type: ignore[misc]
    """A linear layer of vLLM that computes with our operator."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        # A number rather than a tensor: the operator then reads no tensor on the host at run time.
        layer.sm70_global_scale = float(layer.weight_global_scale)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        result: torch.Tensor = nvfp4_linear(x, layer.weight, layer.weight_scale, layer.sm70_global_scale)
        return result if bias is None else result + bias


def register() -> None:
    register_linear_kernel(ReferenceNvFp4Linear, PlatformEnum.CPU, kernel_type="nvfp4")
