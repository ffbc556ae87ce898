"""The definition of the KV cache's number formats, in numpy: what the kernels must do with every code and every half.

E4M3 (fn): 4 exponent bits (bias 7), 3 mantissa bits, no infinity, NaN = s1111111, largest finite 448. E5M2: the upper
byte of a half: 5 exponent bits (bias 15), 2 mantissa bits, largest finite 57344, infinities and NaN as in a half.

Encoding rounds to nearest, ties to the even code, and saturates: what is beyond the largest finite value, infinities
included, becomes the largest finite code with its sign. NaN becomes 0x7f. Decoding is exact, for NaN
and infinities as well.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.uint8]

MAX_FINITE_CODE = {"e4m3": 0x7E, "e5m2": 0x7B}


@functools.cache
def decode_table(kv_format: str) -> NDArray[np.float64]:
    """The value of each of the 256 codes; the array is read-only."""
    code = np.arange(256)
    if kv_format == "e4m3":
        exponent, mantissa = code >> 3 & 15, code & 7
        value = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
        value[(code & 0x7F) == 0x7F] = np.nan
        value = np.where(code >= 128, -value, value)
    elif kv_format == "e5m2":
        value = (code.astype(np.uint16) << 8).view(np.float16).astype(np.float64)
    else:
        raise ValueError(f"the format must be e4m3 or e5m2, not {kv_format}")
    value.setflags(write=False)
    return value


def decode(codes: Codes, kv_format: str) -> NDArray[np.float64]:
    """The values of the codes, exactly."""
    return decode_table(kv_format)[codes]


def encode(values: NDArray[np.floating], kv_format: str) -> Codes:
    """The codes of the values, by the rules of the module's docstring. Slow and plain: it searches."""
    last = MAX_FINITE_CODE[kv_format]
    table = decode_table(kv_format)[: last + 1]
    x = np.asarray(values, dtype=np.float64)
    size = np.minimum(np.abs(np.where(np.isnan(x), 0, x)), table[-1])
    above = np.clip(np.searchsorted(table, size), 1, last)
    low, high = table[above - 1], table[above]
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    code = np.where(up, above, above - 1).astype(np.uint8)
    code = np.where(np.signbit(x), code | np.uint8(0x80), code)
    return np.where(np.isnan(x), np.uint8(0x7F), code).astype(np.uint8)
