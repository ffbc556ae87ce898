"""From a problem to a launch: which kernel, which grid, how much shared memory and workspace.

Pure functions. The structures mirror the argument structures of the CUDA sources field by field; pointers are plain
integers, so that a device, the emulator and a test can hold the memory in their own way.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from .errors import KernelError

V100_SMS = 80
SHARED_LIMIT = 96 * 1024


class KvFormat(StrEnum):
    """How K and V are stored. The value is the suffix in kernel names."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    F16 = "f16"

    @property
    def bytes(self) -> int:
        """Bytes per element."""
        return 2 if self is KvFormat.F16 else 1

    @property
    def read_scale(self) -> float:
        """What attention multiplies by, because its cheap reading of E4M3 yields value * 2^-8."""
        return 256.0 if self is KvFormat.E4M3 else 1.0


@dataclass(frozen=True)
class Launch:
    """One kernel launch. `arguments` are ctypes values in the order of the kernel's parameters.

    `cooperative`: its CTAs wait for each other, so all of them must be on the card at a time.
    `waiting`: at most so many of its CTAs wait for others; the card must hold one more.
    """

    family: str
    kernel: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    arguments: tuple[Any, ...]
    cooperative: bool = False
    waiting: int = 0


@dataclass(frozen=True)
class CacheLayout:
    """Where a token's K and V of a head lie: strides in bytes, `value_offset` from K to V."""

    format: KvFormat
    page: int
    heads: int
    dim: int
    block_stride: int
    value_offset: int
    token_stride: int
    head_stride: int

    @classmethod
    def split(cls, kv_format: KvFormat, page: int, heads: int, dim: int, spread: int = 1) -> CacheLayout:
        """[block, 2, page, head, D]. `spread` > 1: a timing build's stretched memory."""
        token = heads * dim * kv_format.bytes * spread
        return cls(kv_format, page, heads, dim, 2 * page * token, page * token, token, dim * kv_format.bytes * spread)

    @classmethod
    def packed(cls, kv_format: KvFormat, page: int, heads: int, dim: int) -> CacheLayout:
        """[block, head, page, 2 * D]: a token's K and V side by side."""
        row = dim * kv_format.bytes
        return cls(kv_format, page, heads, dim, heads * page * 2 * row, row, 2 * row, page * 2 * row)

    def check(self) -> None:
        """Raises `KernelError` when the kernels cannot read this layout."""
        _require(self.page > 0 and self.page % 16 == 0, f"a page must hold a multiple of 16 tokens, not {self.page}")
        _require(self.dim in (64, 128, 256), f"the head dimension must be 64, 128 or 256, not {self.dim}")
        for name in ("block_stride", "value_offset", "token_stride", "head_stride"):
            value = getattr(self, name)
            _require(value % 16 == 0, f"{name} must be a multiple of 16 bytes, not {value}")
            _require(0 < value < 2**31, f"{name} must lie between 0 and 2 GiB, not {value}")


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise KernelError(text)


class WriteArgs(ctypes.Structure):
    """`WriteArgs` of kv_cache.cu."""

    _fields_ = [
        ("key", ctypes.c_void_p), ("value", ctypes.c_void_p), ("slots", ctypes.c_void_p), ("cache", ctypes.c_void_p),
        ("key_stride", ctypes.c_int), ("value_stride", ctypes.c_int), ("heads", ctypes.c_int), ("dim", ctypes.c_int),
        ("page", ctypes.c_int), ("block_stride", ctypes.c_int), ("value_offset", ctypes.c_int),
        ("token_stride", ctypes.c_int), ("head_stride", ctypes.c_int),
        ("key_inverse", ctypes.c_float), ("value_inverse", ctypes.c_float),
    ]  # fmt: skip


def kv_write(
    layout: CacheLayout,
    *,
    tokens: int,
    key: int,
    value: int,
    slots: int,
    cache: int,
    key_stride: int,
    value_stride: int,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Launch:
    """Writes `tokens` new tokens; a negative slot leaves its token out. Strides are halves from token to token.

    What is stored is value / scale. Raises `KernelError` outside the contract.
    """
    layout.check()
    _require(key_stride % 8 == 0 and value_stride % 8 == 0, "tokens of K and V must be a multiple of 8 halves apart")
    _require(tokens >= 1, "there must be a token to write")
    if layout.format is KvFormat.F16:
        _require(key_scale == 1.0 and value_scale == 1.0, "FP16 storage has no scale: K and V scales must be 1")
    _require(key_scale > 0 and value_scale > 0, f"scales must be positive, not {key_scale} and {value_scale}")
    arguments = WriteArgs(
        key, value, slots, cache, key_stride, value_stride, layout.heads, layout.dim, layout.page, layout.block_stride,
        layout.value_offset, layout.token_stride, layout.head_stride, 1.0 / key_scale, 1.0 / value_scale,
    )  # fmt: skip
    return Launch("kv_cache", f"kv_write_{layout.format}", (tokens, 1, 1), 128, 0, (arguments,))


def kv_convert(direction: str, kv_format: KvFormat, *, source: int, target: int, count: int) -> Launch:
    """`encode` halves to codes or `decode` codes to halves, element by element."""
    _require(kv_format is not KvFormat.F16, "FP16 needs no codec")
    arguments: tuple[Any, ...] = (ctypes.c_void_p(source), ctypes.c_void_p(target), ctypes.c_int(count))
    if direction == "encode":
        arguments = (*arguments, ctypes.c_float(1.0))
    return Launch("kv_cache", f"{direction}_{kv_format}", (-(-count // 256), 1, 1), 256, 0, arguments)


class AttentionArgs(ctypes.Structure):
    """`AttentionArgs` of attention_decode.cu."""

    _fields_ = [
        ("q", ctypes.c_void_p), ("out", ctypes.c_void_p), ("cache", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p), ("lengths", ctypes.c_void_p),
        ("partial", ctypes.c_void_p), ("stats", ctypes.c_void_p),
        ("page", ctypes.c_int), ("table_stride", ctypes.c_int), ("block_stride", ctypes.c_int),
        ("value_offset", ctypes.c_int), ("token_stride", ctypes.c_int), ("head_stride", ctypes.c_int),
        ("q_stride", ctypes.c_int), ("out_stride", ctypes.c_int), ("group", ctypes.c_int), ("window", ctypes.c_int),
        ("splits", ctypes.c_int), ("queries", ctypes.c_int), ("causal", ctypes.c_int), ("combiners", ctypes.c_int),
        ("score_scale", ctypes.c_float), ("out_scale", ctypes.c_float),
    ]  # fmt: skip


@dataclass(frozen=True)
class AttentionMemory:
    """Addresses and strides of a launch: halves from token to token, block table entries from sequence to sequence."""

    q: int
    out: int
    cache: int
    block_table: int
    lengths: int
    partial: int
    stats: int
    table_stride: int
    q_stride: int
    out_stride: int


@dataclass(frozen=True)
class AttentionPlan:
    """What both attention plans share. `sequences` is the batch with its padded ones (length 0)."""

    layout: CacheLayout
    sequences: int
    group: int
    splits: int
    window: int = 0

    COMBINE_WARPS: ClassVar[int] = 16

    @property
    def row_tiles(self) -> int:
        """Tiles of 8 rows (query heads times query tokens) that share one read of K and V."""
        raise NotImplementedError

    @property
    def partial_floats(self) -> int:
        """FP32 elements of the partial sums' workspace."""
        return self.sequences * self.layout.heads * self.splits * self.row_tiles * 8 * self.layout.dim

    @property
    def stats_floats(self) -> int:
        """FP32 elements of the workspace for maxima and sums."""
        return self.sequences * self.layout.heads * self.splits * self.row_tiles * 16

    @property
    def combiners(self) -> int:
        """CTAs per sequence and KV head that add the partials within the launch."""
        return 0

    def _check(self, memory: AttentionMemory) -> None:
        self.layout.check()
        _require(1 <= self.group <= 16, f"1 to 16 query heads may share a KV head, not {self.group}")
        _require(1 <= self.splits <= 256, f"there must be 1 to 256 splits, not {self.splits}")
        _require(self.sequences >= 1, "there must be a sequence")
        _require(self.window >= 0, f"the window must not be negative: {self.window}")
        _require(memory.q_stride % 8 == 0, f"tokens of Q must be a multiple of 8 halves apart, not {memory.q_stride}")

    def _arguments(
        self,
        memory: AttentionMemory,
        softmax_scale: float,
        scales: tuple[float, float],
        queries: int = 1,
        causal: bool = True,
    ) -> AttentionArgs:
        layout, read = self.layout, self.layout.format.read_scale
        return AttentionArgs(
            memory.q, memory.out, memory.cache, memory.block_table, memory.lengths, memory.partial, memory.stats,
            layout.page, memory.table_stride, layout.block_stride, layout.value_offset,
            layout.token_stride, layout.head_stride, memory.q_stride, memory.out_stride, self.group, self.window,
            self.splits, queries, int(causal), self.combiners, softmax_scale * math.log2(math.e) * scales[0] * read,
            scales[1] * read,
        )  # fmt: skip

    def _combine(self, family: str, name: str, arguments: AttentionArgs) -> Launch:
        grid = (self.row_tiles * self.layout.dim // 32, self.layout.heads, self.sequences)
        shared = self.COMBINE_WARPS * (128 * 8 + 16 * 4) + self.splits * 32
        return Launch(family, name, grid, self.COMBINE_WARPS * 32, shared, (arguments,))


@dataclass(frozen=True)
class DecodePlan(AttentionPlan):
    """One query token per sequence. `partial` and `stats` must be zeros before the first launch; every launch leaves
    zeros.
    """

    WARPS: ClassVar[int] = 8
    COMBINERS: ClassVar[int] = 32
    WAITING: ClassVar[int] = 64

    @property
    def row_tiles(self) -> int:
        """1 to 8 query heads: one tile, up to 16: two."""
        return 1 if self.group <= 8 else 2

    @property
    def stats_floats(self) -> int:
        """FP32 elements of the workspace for maxima and sums: four for 32 elements of a partial, four times."""
        return self.partial_floats // 8

    @property
    def combiners(self) -> int:
        """CTAs per sequence and KV head that wait for the others' partials and add them.

        As many as pay (each adds its own rows and columns), and over all heads fewer than a V100 holds at a time.
        """
        return max(1, min(self.COMBINERS, self.WAITING // (self.sequences * self.layout.heads)))

    @property
    def kernel(self) -> str:
        """The launch's kernel."""
        return f"decode_{self.layout.format}_d{self.layout.dim}_r{self.row_tiles}"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        rows, dim = self.row_tiles * 8, self.layout.dim
        q = rows * dim * 2 if self.row_tiles * dim > 256 or dim == 128 else 0
        tiles = min(8, self.row_tiles * dim // 32)
        return q + self.WARPS * tiles * 1024 + self.WARPS * rows * 8

    def launches(
        self, memory: AttentionMemory, softmax_scale: float, scales: tuple[float, float] = (1.0, 1.0)
    ) -> tuple[Launch, ...]:
        """One launch. `scales` of K and V."""
        self._check(memory)
        layout = self.layout
        _require(
            16 * layout.token_stride + layout.value_offset < 2**32,
            f"16 tokens and value_offset must lie within 4 GiB, not {layout.token_stride} and {layout.value_offset}",
        )
        return (
            Launch(
                f"attention_decode_{layout.format}", self.kernel, (self.splits, layout.heads, self.sequences),
                self.WARPS * 32, self.shared_bytes, (self._arguments(memory, softmax_scale, scales),),
                waiting=min(self.combiners, self.splits) * layout.heads * self.sequences if self.splits > 1 else 0,
            ),
        )  # fmt: skip


# Row tiles of the verifier's kernels, by head dimension.
VERIFY_TILES = {128: (2, 4, 6, 8), 256: (2, 4, 6)}


@dataclass(frozen=True)
class VerifyPlan(AttentionPlan):
    """The same number of query tokens for every sequence: the last ones of its length.

    Causal (a verifier) or not (a draft's block, whose tokens see each other); with a window, a query at position p sees
    nothing before p - window + 1.
    """

    THREADS: ClassVar[int] = 384

    queries: int = 2
    causal: bool = True

    @property
    def row_tiles(self) -> int:
        """An even number of tiles of 8 rows."""
        return -(-self.group * self.queries // 16) * 2

    @property
    def kernel(self) -> str:
        """The first launch's kernel."""
        return f"verify_{self.layout.format}_d{self.layout.dim}_r{self.row_tiles}"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA of the first launch."""
        # Per row: Q, two steps of scores and of probabilities, two factors, two limits; then pages of eight steps.
        per_row = self.layout.dim * 2 + 2 * 80 * 4 + 2 * 72 * 2 + 2 * 4 + 2 * 4
        return self.row_tiles * 8 * per_row + 33 * 8 + 3 * 4 + 4 * 4

    def launches(
        self, memory: AttentionMemory, softmax_scale: float, scales: tuple[float, float] = (1.0, 1.0)
    ) -> tuple[Launch, ...]:
        """Two launches, in order, on one stream. `scales` of K and V."""
        self._check(memory)
        tiles = VERIFY_TILES.get(self.layout.dim, ())
        _require(bool(tiles), f"the verifier takes a head dimension of 128 or 256, not {self.layout.dim}")
        rows = self.group * self.queries
        _require(
            self.queries >= 1 and rows <= tiles[-1] * 8,
            f"heads per KV head times query tokens must be 1 to {tiles[-1] * 8} at D {self.layout.dim}, not {rows}",
        )
        arguments = self._arguments(memory, softmax_scale, scales, self.queries, self.causal)
        family, layout = f"attention_verify_{self.layout.format}", self.layout
        grid = (self.splits, layout.heads, self.sequences)
        first = Launch(family, self.kernel, grid, self.THREADS, self.shared_bytes, (arguments,))
        return (first, self._combine(family, f"verify_combine_{layout.format}_d{layout.dim}", arguments))


def decode_splits(layout: CacheLayout, sequences: int, group: int, sms: int = V100_SMS) -> int:
    """CTAs per sequence and KV head that fill the card once: two per SM where registers allow, else one."""
    per_sm = 2 if layout.dim <= 128 and group <= 8 else 1
    return max(1, min(256, round(sms * per_sm / (sequences * layout.heads))))


def verify_splits(layout: CacheLayout, sequences: int, sms: int = V100_SMS) -> int:
    """CTAs per sequence and KV head that fill the card once, one per SM."""
    return max(1, min(256, round(sms / (sequences * layout.heads))))


class LinearArgs(ctypes.Structure):
    """`LinearArgs` of nvfp4_linear.cu."""

    _fields_ = [
        ("weight", ctypes.c_void_p), ("a", ctypes.c_void_p), ("out", ctypes.c_void_p), ("scale", ctypes.c_float),
        ("up_scale", ctypes.c_float), ("m", ctypes.c_int), ("n", ctypes.c_int), ("k", ctypes.c_int),
        ("a_stride", ctypes.c_int), ("out_stride", ctypes.c_int),
    ]  # fmt: skip


@dataclass(frozen=True)
class LinearTile:
    """A variant of the NVFP4 linear: row tiles of 8, column tiles of 32 per warp, column warps, K-slice warps.

    `wide`: 16 x 16 a product instead of 8 x 32 (nvfp4_tile.cuh).
    """

    rows: int
    columns: int
    column_warps: int
    k_warps: int
    wide: bool = False

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return self._name("linear")

    def _name(self, kind: str) -> str:
        return f"{kind}_{self.rows}{'w' if self.wide else ''}_{self.columns}_{self.column_warps}_{self.k_warps}"

    @property
    def gated(self) -> str:
        """The name of the kernel with silu(gate) * up at its end."""
        return self._name("swiglu")

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return self.column_warps * self.k_warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: staged activations, later the partial sums."""
        tiles = self.rows * self.columns
        while tiles * self.warps > 32:
            tiles //= 2
        return max(tiles * self.warps * 1024, self.k_warps * 2 * self.rows * 1152)


# The widest M of each, and from which N a shape with fewer K slices pays (enough CTAs to fill the card).
LINEAR_TILES: tuple[tuple[int, LinearTile, LinearTile], ...] = (
    (8, LinearTile(1, 1, 2, 8), LinearTile(1, 1, 2, 8)),
    (16, LinearTile(2, 1, 2, 8), LinearTile(2, 1, 4, 4)),
    (32, LinearTile(4, 2, 1, 8), LinearTile(4, 2, 2, 4)),
    (64, LinearTile(8, 1, 2, 4, wide=True), LinearTile(8, 1, 4, 2, wide=True)),
)
_WIDE_N = {8: 1 << 30, 16: 8192, 32: 8192, 64: 8192}


def linear_tile(m: int, n: int) -> LinearTile:
    """The variant for M rows and N columns. Raises `KernelError` for M outside 1..64."""
    for most, narrow, wide in LINEAR_TILES:
        if 1 <= m <= most:
            return wide if n >= _WIDE_N[most] else narrow
    raise KernelError(f"the NVFP4 linear takes 1 to 64 rows, not {m}")


def linear(
    *,
    m: int,
    n: int,
    k: int,
    weight: int,
    a: int,
    out: int,
    scale: float,
    a_stride: int,
    out_stride: int,
    tile: LinearTile | None = None,
    up_scale: float | None = None,
) -> Launch:
    """out[m, n] = scale * a[m, k] x weight[n, k]^T; `n` counts logical columns. Strides are halves from row to row.

    With `up_scale`, the weights are those of `repack_gated` and out = silu(scale * gate) * up_scale * up.
    """
    _require(k >= 64 and k % 64 == 0, f"K must be a multiple of 64, not {k}")
    _require(n >= 8 and n % 8 == 0, f"N must be a multiple of 8, not {n}")
    _require(a_stride >= k and a_stride % 8 == 0, f"rows of A must be a multiple of 8 halves apart, not {a_stride}")
    _require(out_stride >= n and out_stride % 2 == 0, f"rows of the output must be an even number apart: {out_stride}")
    columns = n if up_scale is None else 2 * n
    chosen = tile or linear_tile(m, columns)
    _require(1 <= m <= chosen.rows * 8, f"{chosen.kernel} takes 1 to {chosen.rows * 8} rows, not {m}")
    tiles = -(-n // 32) * (1 if up_scale is None else 2)
    grid = (-(-tiles // (chosen.column_warps * chosen.columns)), 1, 1)
    arguments = LinearArgs(weight, a, out, scale, up_scale or 0.0, m, n, k, a_stride, out_stride)
    kernel = chosen.kernel if up_scale is None else chosen.gated
    return Launch("nvfp4_linear", kernel, grid, chosen.warps * 32, chosen.shared_bytes, (arguments,))


class ExpandArgs(ctypes.Structure):
    """`ExpandArgs` of nvfp4_expand.cu."""

    _fields_ = [
        ("weight", ctypes.c_void_p), ("out", ctypes.c_void_p), ("units", ctypes.c_int), ("tiles", ctypes.c_int),
        ("first", ctypes.c_int), ("step", ctypes.c_int),
    ]  # fmt: skip


def expand(*, weight: int, out: int, k: int, tiles: int, first: int = 0, step: int = 1) -> Launch:
    """Unpacks `tiles` tiles of 32 columns to FP16 [tiles * 32, k], exactly, without the global scale.

    `first`, `step`: the first tile and the way to the next one; of gated weights, step 2 and first even is the gate's.
    """
    _require(k >= 64 and k % 64 == 0, f"K must be a multiple of 64, not {k}")
    _require(tiles >= 1 and first >= 0 and step >= 1, "there must be a tile to unpack")
    arguments = ExpandArgs(weight, out, k // 64, tiles, first, step)
    return Launch("nvfp4_expand", "nvfp4_expand", (-(-tiles * (k // 64) // 8), 1, 1), 256, EXPAND_SHARED, (arguments,))


EXPAND_SHARED = 8 * 32 * 144


class SiluArgs(ctypes.Structure):
    """`SiluArgs` of nvfp4_expand.cu."""

    _fields_ = [
        ("gate", ctypes.c_void_p), ("up", ctypes.c_void_p), ("out", ctypes.c_void_p), ("n", ctypes.c_int),
        ("stride", ctypes.c_int), ("out_stride", ctypes.c_int),
    ]  # fmt: skip


def silu_times(*, gate: int, up: int, out: int, m: int, n: int, stride: int, out_stride: int) -> Launch:
    """out[m, n] = silu(gate) * up, FP16 in and out. Strides are halves from row to row."""
    _require(n >= 8 and n % 8 == 0 and stride % 8 == 0 and out_stride % 8 == 0, "N and strides must be multiples of 8")
    _require(m >= 1, "there must be a row")
    return Launch("nvfp4_expand", "silu_times", (m, 1, 1), 256, 0, (SiluArgs(gate, up, out, n, stride, out_stride),))


CHAIN_INLINE = 8
"""Linears whose table travels in a launch's parameters; the table of more lies in device memory."""
CHAIN_STATE_BYTES = 256
_NO_RELAY = 1
_SHARED_BYTES = 96 * 1024  # of a multiprocessor of a V100


class ChainOpArgs(ctypes.Structure):
    """`ChainOp` of nvfp4_chain.cu."""

    _fields_ = [
        ("weight", ctypes.c_void_p), ("a", ctypes.c_void_p), ("out", ctypes.c_void_p), ("scale", ctypes.c_float),
        ("up_scale", ctypes.c_float), ("n", ctypes.c_int), ("k", ctypes.c_int), ("a_stride", ctypes.c_int),
        ("out_stride", ctypes.c_int), ("gated", ctypes.c_int), ("source", ctypes.c_uint32), ("relay", ctypes.c_uint32),
    ]  # fmt: skip


class ChainArgs(ctypes.Structure):
    """`ChainArgs` of nvfp4_chain.cu."""

    _fields_ = [
        ("op", ChainOpArgs * CHAIN_INLINE), ("table", ctypes.c_void_p), ("workspace", ctypes.c_void_p),
        ("half", ctypes.c_uint32), ("used", ctypes.c_uint32), ("ops", ctypes.c_int), ("m", ctypes.c_int),
    ]  # fmt: skip


@dataclass(frozen=True)
class ChainOp:
    """One linear of a chain, with the meaning of `linear`'s parameters; `up_scale`: gated.

    It reads `a` or, when `reads` is set, what that earlier linear of the chain (by number) computed; then `a` and
    `a_stride` mean nothing. `out` 0: only later linears read the result.
    """

    weight: int
    a: int
    out: int
    scale: float
    n: int
    k: int
    a_stride: int = 0
    out_stride: int = 0
    up_scale: float | None = None
    reads: int | None = None


@dataclass(frozen=True)
class ChainTile(LinearTile):
    """A variant of the chain."""

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return self._name("chain")

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory without the table: staged activations, beside them the partial sums."""
        tiles, stage = self.rows * self.columns, self.k_warps * 2 * self.rows * 1152
        while tiles * self.warps > min(40, 96 - -(-stage // 1024)):
            tiles //= 2
        return tiles * self.warps * 1024 + stage

    @property
    def most_ops(self) -> int:
        """Linears of a launch: their table lies in what is left of a V100's shared memory."""
        return (_SHARED_BYTES - self.shared_bytes) // ctypes.sizeof(ChainOpArgs)


# The widest M of each variant.
CHAIN_TILES: tuple[tuple[int, ChainTile], ...] = (
    (8, ChainTile(1, 1, 2, 10)),
    (16, ChainTile(2, 1, 2, 8)),
    (32, ChainTile(4, 2, 1, 8)),
    (64, ChainTile(8, 1, 2, 4, wide=True)),
)


def _relays(ops: Sequence[ChainOp], m: int) -> tuple[dict[int, int], int]:
    """Where the result of each linear that a later one reads lies on a side of the workspace, and a side's bytes."""
    offsets, used = {}, 0
    for i in sorted({op.reads for op in ops if op.reads is not None}):
        if 0 <= i < len(ops):
            offsets[i] = used
            used += -(-m * ops[i].n * 2 // 64) * 64
    return offsets, used


def chain_workspace_bytes(ops: Sequence[ChainOp], m: int) -> int:
    """What the workspace of these linears must have at least; more is well, and serves other chains up to it."""
    return CHAIN_STATE_BYTES + 2 * max(64, _relays(ops, m)[1])


def chain_table(ops: Sequence[ChainOp], m: int) -> ctypes.Array[ChainOpArgs]:
    """The table of a chain, for device memory when there are more than `CHAIN_INLINE` linears.

    Raises `KernelError` for linears that cannot be chained.
    """
    offsets, _ = _relays(ops, m)
    table = (ChainOpArgs * len(ops))()
    inputs = {op.a for op in ops if op.reads is None}
    outs = [op.out for op in ops if op.out]
    _require(len(outs) == len(set(outs)), "every linear of a chain must have an output of its own")
    for i, op in enumerate(ops):
        at = f"linear {i} of a chain"
        stride = op.a_stride
        if op.reads is not None:
            _require(0 <= op.reads < i, f"{at} must read an earlier one, not {op.reads}")
            stride = ops[op.reads].n
            _require(op.k <= stride, f"{at} reads {op.k} columns; linear {op.reads} has {stride}")
        _require(bool(op.out) or i in offsets, f"nobody reads the result of {at}: it must have an output")
        _require(op.out not in inputs or not op.out, f"the output of {at} is an input of the chain")
        good = not op.out or (op.out % 8 == 0 and op.out_stride % 4 == 0)
        _require(good, f"rows of the output of {at} must lie at multiples of 8 bytes")
        # The same contract as alone; only the launch differs.
        linear(
            m=m, n=op.n, k=op.k, weight=op.weight, a=op.a, out=op.out, scale=op.scale, a_stride=stride,
            out_stride=op.out_stride if op.out else op.n, up_scale=op.up_scale,
        )  # fmt: skip
        table[i] = ChainOpArgs(
            op.weight, op.a if op.reads is None else 0, op.out, op.scale, op.up_scale or 0.0, op.n, op.k, stride,
            op.out_stride, int(op.up_scale is not None), 0 if op.reads is None else offsets[op.reads],
            offsets.get(i, _NO_RELAY),
        )  # fmt: skip
    return table


def chain(
    ops: Sequence[ChainOp],
    *,
    m: int,
    workspace: int,
    workspace_bytes: int,
    table: int = 0,
    multiprocessors: int = V100_SMS,
    tile: ChainTile | None = None,
    cooperative: bool = True,
) -> Launch:
    """Linears one after another in one launch; one may read what an earlier one computes. What the launch writes, it
    must not read otherwise. `workspace`: device memory, zeros before the first launch, of chains only and of one at a
    time (`chain_workspace_bytes`). `table`: `chain_table` in device memory, with more than `CHAIN_INLINE` linears.
    Not `cooperative`: for timing, and where nothing else on the card can keep a CTA from starting.
    """
    chosen = tile or next((x for most, x in CHAIN_TILES if m <= most), None)
    _require(chosen is not None and 1 <= m <= chosen.rows * 8, f"a chain takes 1 to 64 rows, not {m}")
    assert chosen is not None
    most = chosen.most_ops
    _require(1 <= len(ops) <= most, f"a chain of {m} rows has 1 to {most} linears, not {len(ops)}: use more launches")
    entries, (_, used) = chain_table(ops, m), _relays(ops, m)
    needed = chain_workspace_bytes(ops, m)
    good = workspace_bytes >= needed and workspace % 16 == 0
    _require(good, f"the workspace of this chain must have {needed} bytes at a multiple of 16, not {workspace_bytes}")
    inline = len(ops) <= CHAIN_INLINE
    _require(inline or table != 0, f"the table of more than {CHAIN_INLINE} linears must lie in device memory")
    half = (workspace_bytes - CHAIN_STATE_BYTES) // 2 // 64 * 64
    arguments = ChainArgs(table=table, workspace=workspace, half=half, used=used, ops=len(ops), m=m)
    if inline:
        arguments.op[: len(ops)] = entries
    shared = chosen.shared_bytes + ctypes.sizeof(entries)
    grid, threads = (multiprocessors, 1, 1), chosen.warps * 32
    return Launch("nvfp4_chain", chosen.kernel, grid, threads, shared, (arguments,), cooperative)
