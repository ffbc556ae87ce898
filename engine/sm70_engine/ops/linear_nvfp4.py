"""The NVFP4 linear operator: y = x W^T with W stored as E2M1 codes and E4M3 scales.

The reference expands the weights and multiplies; it defines what every kernel of the operator must compute. Weights are
used at their full stored precision and inputs are not quantised (weight-only), which is what the SM70 kernels do.
"""

from __future__ import annotations

import torch

from sm70_engine.acceleration.routes import count

GROUP = 16
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize_nvfp4(packed: torch.Tensor, scales: torch.Tensor, global_scale: float) -> torch.Tensor:
    """The weights as float32 [N, K].

    packed: uint8 [N, K / 2], the even column in the low half of a byte, bit 3 of a code is the sign.
    scales: float8_e4m3fn [N, K / 16]. value = magnitude(code) * sign(code) * scale * global_scale.
    """
    values = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.float32, device=packed.device)
    # By byte, the values of its low and its high half: one look-up for two weights.
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=1)
    groups = pairs[packed.int()].view(packed.shape[0], -1, GROUP)
    return (groups * (scales.float() * global_scale).unsqueeze(-1)).flatten(1)


def nvfp4_linear_reference(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, global_scale: float
) -> torch.Tensor:
    """x [..., K] times the transposed weights, accumulated in float32, in the dtype of x: [..., N]."""
    weight = dequantize_nvfp4(packed, scales, global_scale)
    return torch.nn.functional.linear(x.float(), weight).to(x.dtype)


@torch.library.custom_op("sm70::nvfp4_linear", mutates_args=())
def nvfp4_linear(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, global_scale: float) -> torch.Tensor:
    """The operator: chooses the route by device and shape, and counts it."""
    if x.is_cuda:
        count("linear_emulated", capture=torch.cuda.is_current_stream_capturing())
    else:
        count("nvfp4_linear_reference")
    return nvfp4_linear_reference(x, packed, scales, global_scale)


@nvfp4_linear.register_fake
def _(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, global_scale: float) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])
