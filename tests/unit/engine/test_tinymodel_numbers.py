"""The number formats of the tiny model against brute force, and the file against the safetensors library."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from sm70_engine.tinymodel.tensors import (
    E2M1,
    E4M3,
    GROUP,
    Source,
    bfloat16,
    encode_e2m1,
    encode_e4m3,
    float32,
    global_scale,
    quantize_nvfp4,
    write_safetensors,
)

FINITE = st.floats(-1000, 1000, width=32)


def decode_e4m3(code: int) -> float:
    """By the definition of the format: sign, 4 exponent bits with bias 7, 3 mantissa bits."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    return -magnitude if code & 128 else magnitude


def nearest(value: float, candidates: dict[int, float]) -> set[int]:
    """Codes at the least distance."""
    best = min(abs(value - candidate) for candidate in candidates.values())
    return {code for code, candidate in candidates.items() if abs(value - candidate) == best}


def test_e4m3_table_is_the_format() -> None:
    assert [float(value) for value in E4M3] == [decode_e4m3(code) for code in range(127)]
    assert E4M3[-1] == 448


@given(FINITE)
def test_e4m3_rounds_to_the_nearest_and_ties_to_even(value: float) -> None:
    code = int(encode_e4m3(np.array([value], np.float32))[0])
    finite = {code: decode_e4m3(code) for code in range(256) if code & 127 != 127}
    best = {other & 127 for other in nearest(value, finite)}
    assert code & 127 in best
    assert len(best) == 1 or code % 2 == 0
    assert bool(code & 128) == (math.copysign(1, value) < 0)


@given(st.floats(-8, 8, width=32))
def test_e2m1_rounds_to_the_nearest_and_ties_to_even(value: float) -> None:
    code = int(encode_e2m1(np.array([value], np.float32))[0])
    best = nearest(abs(value), dict(enumerate(float(magnitude) for magnitude in E2M1)))
    assert code & 7 in best
    assert len(best) == 1 or code % 2 == 0


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=64))
def test_bfloat16_rounds_to_nearest_even(values: list[float]) -> None:
    tensor = bfloat16(np.array(values, np.float32))
    stored = np.frombuffer(tensor.data, "<u2").astype(np.uint32) << 16
    for value, got in zip(values, stored.view(np.float32).tolist(), strict=True):
        # Two bfloat16 numbers enclose the value; the stored one is the nearer, or the even of two equally near.
        low = np.float32(value).view(np.uint32) & np.uint32(0xFFFF0000)
        pair = {int(bits): float(np.uint32(bits).view(np.float32)) for bits in (low, low + np.uint32(0x10000))}
        best = nearest(float(np.float32(value)), pair)
        chosen = next(bits for bits, candidate in pair.items() if candidate == got)
        assert chosen in best
        assert len(best) == 1 or (chosen >> 16) % 2 == 0


@settings(deadline=None)
@given(st.integers(0, 2**32), st.floats(0.01, 100))
def test_nvfp4_error_is_bounded_by_the_format(seed: int, spread: float) -> None:
    matrix = Source(seed).uniform("matrix", 8, 4 * GROUP, gain=spread)
    scale = global_scale(matrix)
    quantized = quantize_nvfp4(matrix, scale)
    restored = quantized.dequantized()
    largest = np.abs(matrix).reshape(8, 4, GROUP).max(axis=2)
    error = np.abs(restored - matrix).reshape(8, 4, GROUP).max(axis=2)
    # Half of E2M1's widest step (2 of 6), plus the rounding of the scale (1 in 16), of the group's largest value.
    assert (error <= largest * (1 / 6 + 1 / 16 + 1e-3)).all()
    assert math.log2(scale).is_integer()


def test_fused_matrices_share_a_scale_that_overflows_none() -> None:
    small, large = Source(1).uniform("small", 4, GROUP, gain=0.1), Source(1).uniform("large", 4, GROUP, gain=50.0)
    scale = global_scale(small, large)
    for matrix in (small, large):
        assert quantize_nvfp4(matrix, scale).scales.max() < 127
        assert np.abs(quantize_nvfp4(matrix, scale).dequantized() - matrix).max() <= 0.25 * np.abs(matrix).max()


def test_dequantized_values_are_exact_in_bfloat16() -> None:
    matrix = Source(3).uniform("matrix", 16, 8 * GROUP, gain=3.0)
    restored = quantize_nvfp4(matrix, global_scale(matrix)).dequantized()
    stored = np.frombuffer(bfloat16(restored).data, "<u2").astype(np.uint32) << 16
    assert (stored.view(np.float32) == restored.ravel()).all()


def test_codes_are_packed_with_the_even_column_low() -> None:
    row = np.array([[6, -6, 0.5, 0, *([1.0] * 12)]], np.float32)
    tensors = quantize_nvfp4(row, 1.0).tensors("m")
    assert tensors["m.weight"].shape == (1, GROUP // 2)
    assert tensors["m.weight"].data[:2] == bytes([0xF7, 0x01])
    assert tensors["m.weight_scale"].data == bytes([0x38])  # 1.0


def test_the_safetensors_library_reads_the_file(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    write_safetensors(tmp_path / "x.safetensors", {"b": float32(values), "a": bfloat16(values)})
    with safe_open(tmp_path / "x.safetensors", framework="numpy") as file:
        assert sorted(file.keys()) == ["a", "b"]
        assert file.metadata() == {"format": "pt"}
        assert (file.get_tensor("b") == values).all()
        assert file.get_slice("a").get_shape() == [2, 3]


def test_random_tensors_depend_on_seed_and_name_alone() -> None:
    one, other = Source(7), Source(7)
    other.uniform("first", 5)
    assert (one.uniform("w", 4, 4) == other.uniform("w", 4, 4)).all()
    assert (one.uniform("w", 4, 4) != Source(8).uniform("w", 4, 4)).any()
    assert sorted(one.order("o", 20)) == list(range(20))
    assert set(np.unique(one.signs("s", 100))) == {-1.0, 1.0}


def test_a_linear_map_keeps_the_variance() -> None:
    matrix = Source(0).linear("m", 512, 256)
    assert float((matrix**2).sum(axis=1).mean()) == pytest.approx(1.0, rel=0.1)
