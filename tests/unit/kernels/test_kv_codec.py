"""The codecs' definition: every later check of a kernel rests on it."""

from __future__ import annotations

import numpy as np
import pytest

from sm70_engine.ops import kv_codec

FORMATS = ("e4m3", "e5m2")


@pytest.mark.parametrize("kv_format", FORMATS)
def test_every_finite_code_survives_a_round_trip(kv_format: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = kv_codec.decode(codes, kv_format)
    finite = np.isfinite(values)
    assert np.array_equal(kv_codec.encode(values[finite], kv_format), codes[finite])


def test_known_values() -> None:
    e4m3 = kv_codec.decode(np.array([0x00, 0x01, 0x08, 0x38, 0x7E, 0xFE, 0x7F], np.uint8), "e4m3")
    assert e4m3[:6].tolist() == [0.0, 2.0**-9, 2.0**-6, 1.0, 448.0, -448.0]
    assert np.isnan(e4m3[6])
    e5m2 = kv_codec.decode(np.array([0x01, 0x04, 0x3C, 0x7B, 0x7C], np.uint8), "e5m2")
    assert e5m2.tolist() == [2.0**-16, 2.0**-14, 1.0, 57344.0, np.inf]


@pytest.mark.parametrize(("kv_format", "largest"), [("e4m3", 448.0), ("e5m2", 57344.0)])
def test_what_is_too_large_saturates_and_nan_has_one_code(kv_format: str, largest: float) -> None:
    x = np.array([largest * 1.01, 65504.0, np.inf, -np.inf, np.nan, -np.nan])
    codes = kv_codec.encode(x, kv_format)
    assert kv_codec.decode(codes[:4], kv_format).tolist() == [largest, largest, largest, -largest]
    assert codes[4:].tolist() == [0x7F, 0x7F]


@pytest.mark.parametrize("kv_format", FORMATS)
def test_rounding_is_to_nearest_and_ties_go_to_the_even_code(kv_format: str) -> None:
    table = kv_codec.decode_table(kv_format)[: kv_codec.MAX_FINITE_CODE[kv_format] + 1]
    middle = (table[1:] + table[:-1]) / 2
    lower = np.arange(len(middle))
    assert np.array_equal(kv_codec.encode(middle, kv_format), np.where(lower % 2, lower + 1, lower))
    assert np.array_equal(kv_codec.encode(np.nextafter(middle, 0), kv_format), lower)
    assert np.array_equal(kv_codec.encode(-np.nextafter(middle, np.inf), kv_format), (lower + 1) | 0x80)


def test_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="e4m3 or e5m2"):
        kv_codec.decode_table("e3m4")
