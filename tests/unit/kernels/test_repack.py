"""The packed NVFP4 layout: same weights, same number of bytes, bad checkpoints refused."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from sm70_engine.kernels import repack
from sm70_engine.kernels.errors import KernelError

CODES, SCALES = np.zeros((32, 64), np.uint8), np.zeros((32, 8), np.uint8)


def unpack(words: NDArray[np.uint32], n: int, k: int) -> NDArray[np.float64]:
    """Reads the layout as cuda/nvfp4.cuh describes it, weight by weight."""
    magnitude = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    units = words.reshape(-(-n // 32), k // 64, 288)
    out = np.zeros((n, k))
    for row in range(n):
        inside = row % 32
        lane = (inside >> 3) * 4 + (inside & 3) + ((inside >> 2) & 1) * 16
        for column in range(k):
            unit = units[row // 32, column // 64]
            at = column % 64
            word = int(unit[at // 32 * 128 + lane * 4 + at % 32 // 8]) >> (16 * (at % 2)) & 0xFFFF
            pair = at % 8 // 2
            value = magnitude[word >> (9 - 3 * pair) & 7] * (-1 if word >> (15, 12, 14, 13)[pair] & 1 else 1)
            scale = int(unit[256 + lane]) >> (8 * (at // 16)) & 0xFF
            out[row, column] = value * (
                (1 + scale % 8 / 8) * 2.0 ** (scale // 8 - 7) if scale >= 8 else scale * 2.0**-9
            )
    return out


@pytest.mark.parametrize(("n", "k"), [(32, 64), (40, 128), (64, 192)])
def test_every_weight_is_where_the_layout_says(n: int, k: int) -> None:
    rng = np.random.default_rng(n)
    codes = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scales = rng.integers(0, 0x7F, (n, k // 16), dtype=np.uint8)
    words = repack.repack(codes, scales)
    assert words.size == repack.packed_words(n, k)
    assert words.nbytes == -(-n // 32) * 32 * k * 9 // 16
    assert np.array_equal(unpack(words, n, k), repack.dequantize(codes, scales))


def test_gate_and_up_lie_in_turn_tile_by_tile() -> None:
    rng = np.random.default_rng(3)
    codes, scales = rng.integers(0, 256, (80, 64), dtype=np.uint8), rng.integers(0, 0x7F, (80, 8), dtype=np.uint8)
    words = repack.repack_gated(codes, scales).reshape(4, -1)
    gate, up = (repack.repack(codes[i : i + 40], scales[i : i + 40]).reshape(2, -1) for i in (0, 40))
    assert np.array_equal(words, np.stack((gate[0], up[0], gate[1], up[1])))
    with pytest.raises(KernelError, match="same number of rows"):
        repack.repack_gated(codes[:79], scales[:79])


@pytest.mark.parametrize(
    ("codes", "scales", "text"),
    [
        (CODES, SCALES[:, :4], "scales of"),
        (CODES[:, :48], SCALES[:, :6], "multiple of 64"),
        (CODES[:12], SCALES[:12], "N of 8"),
        (CODES, SCALES + np.uint8(0x7F), "finite and not negative"),
        (CODES, SCALES + np.uint8(0x81), "finite and not negative"),
    ],
)
def test_a_bad_checkpoint_is_refused(codes: NDArray[np.uint8], scales: NDArray[np.uint8], text: str) -> None:
    with pytest.raises(KernelError, match=text):
        repack.repack(codes, scales)


def test_shards_are_cut_before_packing() -> None:
    rng = np.random.default_rng(4)
    codes, scales = rng.integers(0, 256, (128, 128), dtype=np.uint8), rng.integers(0, 0x7F, (128, 16), dtype=np.uint8)
    whole = repack.repack(codes, scales)
    # Columns of the result (a rank's rows of the weight), in whole tiles: the packed form is cut as well.
    rows = [repack.repack(codes[i : i + 32], scales[i : i + 32]) for i in range(0, 128, 32)]
    assert np.array_equal(np.concatenate(rows), whole)
    # Along K: the ranks' products add up to the whole one.
    x = rng.standard_normal((2, 256))
    parts = [
        x[:, i : i + 64] @ repack.dequantize(codes[:, i // 2 : i // 2 + 32], scales[:, i // 16 : i // 16 + 4]).T
        for i in range(0, 256, 64)
    ]
    assert np.allclose(sum(parts), x @ repack.dequantize(codes, scales).T)
    with pytest.raises(KernelError, match="multiple of 64"):  # 256 over eight ranks
        repack.repack(codes[:, :16], scales[:, :2])
