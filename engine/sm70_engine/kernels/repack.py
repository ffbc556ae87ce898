"""Checkpoint NVFP4 to the packed layout of the linear kernel (cuda/nvfp4.cuh), once, at load.

Checkpoints (ModelOpt, compressed-tensors) hold uint8 [N, K / 2], the even column in the low half of a byte, bit 3 of
a code the sign, and E4M3 scales [N, K / 16]. The packed form has the same 0.5625 bytes a weight: N is filled up to a
multiple of 32 with zero codes, which no output sees.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from sm70_engine.ops.kv_codec import decode_table

from .errors import KernelError

GROUP = 16
UNIT_WORDS = 288
_SIGN_BIT = (15, 12, 14, 13)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def packed_words(n: int, k: int) -> int:
    """32-bit words of the packed form of [n, k] weights."""
    return -(-n // 32) * (k // 64) * UNIT_WORDS


@functools.cache
def pair_bits() -> NDArray[np.uint32]:
    """[4][256]: the bits of a word for pair f of its codes, given as the checkpoint's byte (even k low, odd k high)."""
    byte = np.arange(256, dtype=np.uint32)
    table = np.zeros((4, 256), np.uint32)
    for pair, sign in enumerate(_SIGN_BIT):
        for half, code in enumerate((byte & 15, byte >> 4)):
            table[pair] |= ((code & 7) << (9 - 3 * pair) | (code >> 3) << sign) << (16 * half)
    return table


def columns() -> NDArray[np.intp]:
    """Which of a tile's 32 columns each lane holds."""
    lane = np.arange(32)
    return np.asarray((lane >> 2 & 3) * 8 + (lane & 3) + (lane >> 4) * 4)


def repack(codes: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """The packed words of checkpoint codes [N, K / 2] and scale bytes [N, K / 16].

    Raises `KernelError` for shapes that do not fit, K that is no multiple of 64, and scales that are negative or NaN.
    """
    n, k = codes.shape[0], codes.shape[1] * 2
    if scales.shape != (n, k // GROUP):
        raise KernelError(f"scales of [{n}, {k}] weights must be [{n}, {k // GROUP}], not {list(scales.shape)}")
    if k % 64 or n % 8 or not n or not k:
        raise KernelError(f"K must be a multiple of 64 and N of 8; the weights are [{n}, {k}]")
    if (scales >= 0x7F).any():
        raise KernelError("weight scales must be finite and not negative: the checkpoint holds others")
    padded = -(-n // 32) * 32
    codes, scales = (np.pad(x, ((0, padded - n), (0, 0))) for x in (codes, scales))
    tiles, units, column = padded // 32, k // 64, columns()
    pairs = codes.reshape(tiles, 32, units, 2, 4, 4)[:, column]  # [tile, lane, unit, half, word, pair]
    table, words = pair_bits(), np.zeros(pairs.shape[:-1], np.uint32)
    for pair in range(4):
        words |= table[pair][pairs[..., pair]]
    packed = np.empty((tiles, units, UNIT_WORDS), np.uint32)
    packed[:, :, :256] = words.transpose(0, 2, 3, 1, 4).reshape(tiles, units, 256)
    grouped = np.ascontiguousarray(scales.reshape(tiles, 32, units, 4)[:, column])
    packed[:, :, 256:] = grouped.view("<u4")[..., 0].transpose(0, 2, 1)
    return packed.reshape(-1)


def repack_gated(codes: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Gate rows, then as many up rows, for the gated linear: tiles of 32 columns of the two in turn, each filled up.

    Raises `KernelError` as `repack` does, and for an odd number of rows.
    """
    if codes.shape[0] % 2:
        raise KernelError(f"gate and up must have the same number of rows; together they have {codes.shape[0]}")
    half = codes.shape[0] // 2
    parts = [repack(codes[i : i + half], scales[i : i + half]) for i in (0, half)]
    tiles = -(-half // 32)
    return np.stack([part.reshape(tiles, -1) for part in parts], axis=1).reshape(-1)


def dequantize(codes: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float64]:
    """The weights [N, K] of checkpoint codes and scales, exactly, without the global scale."""
    table = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
    values = np.stack((table[codes & 15], table[codes >> 4]), -1).reshape(codes.shape[0], -1)
    return np.asarray(values * np.repeat(decode_table("e4m3")[scales], GROUP, axis=1))
