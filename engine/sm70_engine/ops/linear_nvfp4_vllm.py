"""Offers the NVFP4 linear operators to vLLM's linear layers: the reference on the CPU, the kernels on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import NvFp4LinearKernel, register_linear_kernel
from vllm.platforms.interface import PlatformEnum

from sm70_engine.ops.gated_mlp import Fused, fuse
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


logger = init_logger("vllm.sm70")


class Sm70NvFp4Linear(NvFp4LinearKernel):  # type: ignore[misc]
    """A linear layer of vLLM over the packed kernels; one whose shape they refuse is unpacked for every call."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._rows = int(get_current_vllm_config().scheduler_config.max_num_batched_tokens)

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        from sm70_engine.kernels import torch_ops
        from sm70_engine.kernels.errors import KernelError
        from sm70_engine.kernels.torch_weights import pack

        layer.sm70_global_scale = float(layer.weight_global_scale)
        layer.sm70_columns, layer.sm70_inputs, layer.sm70_up_scale = 0, 0, None
        if layer.weight.is_cuda:
            torch_ops.prepare(layer.weight.device)
        try:
            packed = pack(layer.weight.data, layer.weight_scale.data, layer.weight_global_scale.data)
        except KernelError as error:
            logger.warning("sm70: linear_emulated: %s", error)
            return
        # The packed form replaces the checkpoint's: a weight takes 0.5625 bytes once.
        layer.weight = torch.nn.Parameter(packed.words, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(layer.weight_scale.data.new_empty(0), requires_grad=False)
        # Plain numbers and a buffer: torch.compile takes the first as constants and the second as an input.
        layer.sm70_columns, layer.sm70_inputs, layer.sm70_global_scale = packed.n, packed.k, packed.scale
        workspace = workspace_of(packed.words.device, packed.n, packed.k, self._rows)
        layer.register_buffer("sm70_workspace", workspace, persistent=False)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        scale = layer.sm70_global_scale
        if layer.sm70_up_scale is not None:  # gate and up: `gated_mlp` has made sure that their activation is left out
            gated: torch.Tensor = torch.ops.sm70.nvfp4_packed_swiglu(
                x, layer.weight, layer.sm70_workspace, layer.sm70_columns, scale, layer.sm70_up_scale
            )
            return gated
        if layer.sm70_columns:
            workspace, columns = layer.sm70_workspace, layer.sm70_columns
            result: torch.Tensor = torch.ops.sm70.nvfp4_packed_linear(x, layer.weight, workspace, columns, scale)
        else:
            result = nvfp4_linear(x, layer.weight, layer.weight_scale, scale)
        return result if bias is None else result + bias


_workspaces: dict[torch.device, torch.Tensor] = {}
WORKSPACE_LIMIT = 64 << 20


def workspace_of(device: torch.device, n: int, k: int, rows: int, gated: bool = False) -> torch.Tensor:
    """Scratch memory that all layers of a device share, made with the first one: no later layer needs more.

    Made while weights are loaded, so that profiling sees it.
    """
    from sm70_engine.kernels import torch_ops

    needed = torch_ops.linear_workspace_bytes(rows, [(n, k, gated)], WORKSPACE_LIMIT)
    if rows > torch_ops.MANY_ROWS:
        needed = max(needed, WORKSPACE_LIMIT)
    found = _workspaces.get(device)
    if found is None or found.numel() < needed:
        found = _workspaces[device] = torch.zeros(needed, dtype=torch.uint8, device=device)
    return found


def fuse_gated(model: Any, rows: int) -> Fused:
    """Fuses gate and up of a loaded model's MLPs with their activation. rows: the most tokens of a step."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    return fuse(
        list(model.modules()), MergedColumnParallelLinear, SiluAndMul,
        lambda device, n, k: workspace_of(device, n, k, rows, gated=True),
    )  # fmt: skip


def register_first() -> None:
    """Before vLLM's own kernels: its emulation takes every layer, and stands before whatever is registered."""
    kernels = linear._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CUDA]
    if Sm70NvFp4Linear not in kernels:
        kernels.insert(0, Sm70NvFp4Linear)


def choosing(original: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's choice of a kernel, with ours for layers whose inputs are not quantised."""

    def init_nvfp4_linear_kernel(use_a16: bool = False) -> Any:
        return Sm70NvFp4Linear(linear.NvFp4LinearLayerConfig()) if use_a16 else original(use_a16=use_a16)

    return init_nvfp4_linear_kernel
