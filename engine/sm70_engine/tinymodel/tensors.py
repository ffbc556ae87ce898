"""Numbers of a checkpoint made without a framework: random tensors, the formats they are stored in, and the file.

Everything here is exact or elementwise IEEE arithmetic on raw generator bits, so the same seed gives the same bytes on
every machine and with every version of numpy. The safetensors file is written by hand for the same reason: its layout
is a length, a JSON header and the data, and the library's own writer has changed its interface and order before.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
GROUP = 16
"""Elements that share one E4M3 scale in NVFP4."""

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=np.float32)
"""The magnitudes of a 4-bit element, by code; bit 3 is the sign."""


def _e4m3_magnitudes() -> Floats:
    codes = np.arange(127, dtype=np.int64)  # 127 is NaN
    exponent, mantissa = codes >> 3, codes & 7
    normal = (8 + mantissa) * np.exp2(exponent.astype(np.float64) - 10)
    subnormal = mantissa * 2.0**-9
    return np.where(exponent > 0, normal, subnormal).astype(np.float32)


E4M3 = _e4m3_magnitudes()
"""The finite magnitudes of an 8-bit float with 4 exponent bits, by code."""


@dataclass(frozen=True)
class Tensor:
    """A stored tensor: its safetensors format code, its shape, and its bytes in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Source:
    """Random tensors by name: each depends on the seed and its own name only, not on the order of the calls."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def _bits(self, name: str, count: int) -> NDArray[np.uint64]:
        key = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        return np.random.PCG64(int.from_bytes(key, "little")).random_raw(count).astype(np.uint64)

    def uniform(self, name: str, *shape: int, gain: float = 1.0) -> Floats:
        """Uniform in [-gain, gain)."""
        whole = (self._bits(name, math.prod(shape)) >> np.uint64(40)).astype(np.float32)
        return ((whole * np.float32(2.0**-23) - np.float32(1)) * np.float32(gain)).reshape(shape)

    def linear(self, name: str, rows: int, columns: int, gain: float = 1.0) -> Floats:
        """A matrix [rows, columns] that maps inputs of variance 1 to outputs of variance gain squared."""
        return self.uniform(name, rows, columns, gain=gain * math.sqrt(3 / columns))

    def signs(self, name: str, *shape: int) -> Floats:
        """Minus or plus one, evenly."""
        odd = (self._bits(name, math.prod(shape)) >> np.uint64(63)).astype(np.float32)
        return (odd * np.float32(2) - np.float32(1)).reshape(shape)

    def order(self, name: str, count: int) -> list[int]:
        """A permutation of range(count)."""
        bits = self._bits(name, count)
        return sorted(range(count), key=lambda index: (int(bits[index]), index))


def bfloat16(values: Floats) -> Tensor:
    """Rounded to the nearest bfloat16, ties to even. The values must be finite."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return Tensor("BF16", values.shape, rounded.astype("<u2").tobytes())


def float32(values: Floats) -> Tensor:
    return Tensor("F32", values.shape, np.ascontiguousarray(values, dtype="<f4").tobytes())


def scalar(value: float) -> Tensor:
    return Tensor("F32", (), np.float32(value).astype("<f4").tobytes())


def encode_e4m3(values: Floats) -> NDArray[np.uint8]:
    """Codes of the nearest E4M3 numbers, ties to the even code; magnitudes beyond 448 become 448."""
    return _nearest(E4M3, np.abs(values)) | (np.signbit(values).astype(np.uint8) << np.uint8(7))


def encode_e2m1(values: Floats) -> NDArray[np.uint8]:
    """Codes of the nearest E2M1 numbers, ties to the even code; magnitudes beyond 6 become 6."""
    return _nearest(E2M1, np.abs(values)) | (np.signbit(values).astype(np.uint8) << np.uint8(3))


def _nearest(table: Floats, magnitudes: Floats) -> NDArray[np.uint8]:
    """Index of the nearest entry of an ascending table; a tie goes to the even index."""
    above = np.clip(np.searchsorted(table, magnitudes), 1, len(table) - 1)
    below = above - 1
    middle = (table[below].astype(np.float64) + table[above]) / 2
    up = (magnitudes > middle) | ((magnitudes == middle) & (above % 2 == 0))
    return np.where(up, above, below).astype(np.uint8)


@dataclass(frozen=True)
class Nvfp4:
    """A matrix [rows, columns] in NVFP4: value = E2M1(code) * E4M3(scale) * global_scale."""

    codes: NDArray[np.uint8]
    """[rows, columns], one code an element."""
    scales: NDArray[np.uint8]
    """[rows, columns / 16], E4M3 codes."""
    global_scale: float

    def dequantized(self) -> Floats:
        """The values. The global scale is a power of two, so every one is exact in bfloat16 (and float32)."""
        sign = np.where(self.codes & 8, np.float32(-1), np.float32(1))
        scale = np.repeat(E4M3[self.scales], GROUP, axis=1) * np.float32(self.global_scale)
        values: Floats = (E2M1[self.codes & 7] * sign * scale).astype(np.float32)
        return values

    def tensors(self, module: str) -> dict[str, Tensor]:
        """As ModelOpt stores it: two codes a byte, the even column in the low half."""
        packed = (self.codes[:, 0::2] | (self.codes[:, 1::2] << np.uint8(4))).astype(np.uint8)
        return {
            f"{module}.weight": Tensor("U8", packed.shape, packed.tobytes()),
            f"{module}.weight_scale": Tensor("F8_E4M3", self.scales.shape, self.scales.tobytes()),
            f"{module}.weight_scale_2": scalar(self.global_scale),
            f"{module}.input_scale": scalar(1 / 448),
        }


def global_scale(*matrices: Floats) -> float:
    """The scale that matrices which vLLM fuses must share: the least power of two at which no group scale overflows."""
    largest = max(float(np.abs(matrix).max()) for matrix in matrices)
    return 2.0 ** math.ceil(math.log2(largest / (6 * 448)))


def quantize_nvfp4(matrix: Floats, scale: float) -> Nvfp4:
    """Rounds to NVFP4 under this global scale; columns must be a multiple of 16."""
    rows, columns = matrix.shape
    groups = matrix.reshape(rows, columns // GROUP, GROUP)
    wanted = np.abs(groups).max(axis=2) / np.float32(6) / np.float32(scale)
    scales = np.maximum(encode_e4m3(wanted), np.uint8(1))  # a scale of zero would erase the group
    codes = encode_e2m1(groups / (E4M3[scales] * np.float32(scale))[:, :, None])
    return Nvfp4(codes.reshape(rows, columns), scales, scale)


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes the file, tensors in order of their names, data aligned to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(tensor.data)],
        }
        offset += len(tensor.data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in sorted(tensors):
            file.write(tensors[name].data)
