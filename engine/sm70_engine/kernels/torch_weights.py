"""Checkpoint NVFP4 weights to the form of the linear operators, on the device where they lie, once, at load.

Both known layouts hold uint8 codes [N, K / 2] and E4M3 scales [N, K / 16]. They differ in the global scale: ModelOpt
stores what the weights are multiplied with (`weight_scale_2`), compressed-tensors what they were divided by
(`weight_global_scale`). What does not fit the kernels is refused; nothing is rounded to make it fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch

from .errors import KernelError
from .repack import GROUP, UNIT_WORDS, columns, pair_bits


class NvFp4Layout(StrEnum):
    """Where a checkpoint's tensors come from."""

    MODELOPT = "modelopt"
    COMPRESSED_TENSORS = "compressed-tensors"


@dataclass(frozen=True)
class PackedWeights:
    """`words`: int32, for `nvfp4_packed_linear`; with `up_scale`, for `nvfp4_packed_swiglu` (`n`: columns of one)."""

    words: torch.Tensor
    n: int
    k: int
    scale: float
    up_scale: float | None = None


def _words(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[tiles, words of a tile]; N is filled up to a multiple of 32 with zero codes."""
    n, k = codes.shape[0], codes.shape[1] * 2
    padded = -(-n // 32) * 32
    codes, scales = (torch.nn.functional.pad(x, (0, 0, 0, padded - n)) for x in (codes, scales))
    tiles, units = padded // 32, k // 64
    column = torch.from_numpy(columns()).to(codes.device)
    pairs = codes.view(tiles, 32, units, 2, 4, 4)[:, column]
    table = torch.from_numpy(pair_bits().view(np.int32)).to(codes.device)
    words = table[0][pairs[..., 0].int()]
    for pair in range(1, 4):
        words |= table[pair][pairs[..., pair].int()]
    packed = torch.empty((tiles, units, UNIT_WORDS), dtype=torch.int32, device=codes.device)
    packed[:, :, :256] = words.permute(0, 2, 3, 1, 4).reshape(tiles, units, 256)
    grouped = scales.view(tiles, 32, units, 4)[:, column].contiguous()
    packed[:, :, 256:] = grouped.view(torch.int32)[..., 0].permute(0, 2, 1)
    return packed.view(tiles, -1)


def gate(packed: PackedWeights) -> PackedWeights:
    """Gate rows and as many up rows, packed as one weight, in the form of the gated kernel: what `pack` makes of the
    same weights with `gated`. Raises `KernelError` where the halves are no multiple of 8 columns.
    """
    half, units = packed.n // 2, packed.k // 64
    if packed.up_scale is not None or packed.n % 16:
        raise KernelError(f"gate and up must have a multiple of 8 columns each; together they have {packed.n}")
    column = torch.from_numpy(columns()).to(packed.words.device)
    tiles = packed.words.view(-1, units, UNIT_WORDS)
    by_column = torch.empty((tiles.shape[0], 32, units, 9), dtype=torch.int32, device=tiles.device)
    by_column[:, column, :, :8] = tiles[:, :, :256].view(-1, units, 2, 32, 4).permute(0, 3, 1, 2, 4).flatten(3)
    by_column[:, column, :, 8] = tiles[:, :, 256:].permute(0, 2, 1)
    rows, fill = by_column.view(-1, units, 9), -half % 32
    parts = [
        torch.nn.functional.pad(rows[first : first + half], (0, 0, 0, 0, 0, fill)).view(-1, 32, units, 9)[:, column]
        for first in (0, half)
    ]
    both = torch.stack(parts, dim=1).flatten(0, 1)
    words = torch.empty((both.shape[0], units, UNIT_WORDS), dtype=torch.int32, device=tiles.device)
    words[:, :, :256] = both[..., :8].unflatten(3, (2, 4)).permute(0, 2, 3, 1, 4).flatten(2)
    words[:, :, 256:] = both[..., 8].permute(0, 2, 1)
    return PackedWeights(words.view(-1), half, packed.k, packed.scale, packed.scale)


def _global_scales(values: torch.Tensor, layout: NvFp4Layout) -> list[float]:
    found = [float(x) for x in values.reshape(-1).tolist()]
    if not found or not all(math.isfinite(x) and x > 0 for x in found):
        raise KernelError(f"global scales must be finite and positive; the checkpoint holds {found}")
    return [1.0 / x for x in found] if layout is NvFp4Layout.COMPRESSED_TENSORS else found


def pack(
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor,
    layout: NvFp4Layout | str = NvFp4Layout.MODELOPT,
    gated: bool = False,
) -> PackedWeights:
    """codes: uint8 [N, K / 2]; scales: float8_e4m3fn or uint8 [N, K / 16]; global_scale: one, or one per merged part.

    Merged parts with different global scales are refused, except gate and up (`gated`: gate rows, then as many up
    rows), whose kernel takes two. Raises `KernelError` for shapes, scales or dtypes outside the contract.
    """
    form = NvFp4Layout(layout)
    if codes.dtype != torch.uint8 or codes.dim() != 2 or scales.element_size() != 1:
        raise KernelError(f"codes must be uint8 [N, K / 2] and scales one byte each, not {codes.dtype}, {scales.dtype}")
    n, k = codes.shape[0], codes.shape[1] * 2
    parts = 2 if gated else 1
    if tuple(scales.shape) != (n, k // GROUP):
        raise KernelError(f"scales of [{n}, {k}] weights must be [{n}, {k // GROUP}], not {list(scales.shape)}")
    if not n or not k or k % 64 or n % (8 * parts):
        raise KernelError(f"K must be a multiple of 64 and N of {8 * parts}; the weights are [{n}, {k}]")
    raw = scales.contiguous().view(torch.uint8)
    if bool((raw >= 0x7F).any()):
        raise KernelError("weight scales must be finite and not negative: the checkpoint holds others")
    found = _global_scales(global_scale, form)
    if gated and len(found) == 2:
        first, second = found
    elif len(set(found)) == 1:
        first = second = found[0]
    else:
        raise KernelError(f"merged parts must share one global scale; the checkpoint holds {found}")
    codes = codes.contiguous()
    if not gated:
        return PackedWeights(_words(codes, raw).view(-1), n, k, first)
    half = n // 2
    tiles = [_words(codes[i : i + half], raw[i : i + half]) for i in (0, half)]
    return PackedWeights(torch.stack(tiles, dim=1).reshape(-1), half, k, first, second)
