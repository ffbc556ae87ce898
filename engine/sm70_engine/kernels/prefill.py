"""Prefill: many query tokens per sequence against their whole context, as launches.

A row is one query token of one head; the rows of all heads of a KV head are packed (row = token * group + head), so
that K and V are read once for them. A row tile is 128 rows, a step 128 tokens of context. The schedule is made on
the host: every CTA gets a list of (row tile, range of steps). Whole row tiles go first, in turn over the CTAs, which
then walk the context side by side and find each other's K and V in the L2; what is left over is cut so that every CTA
ends at the same time, and a second launch adds the pieces of a cut row tile in their order. The result depends on the
shapes and the number of CTAs alone.

    plan = PrefillPlan(layout, group=6, sequences=((4096, 36864),))
    work = plan.work()                      # int32, to be copied to the device; one per step, shared by its layers
    for launch in plan.launches(memory, softmax_scale, scales): ...

Three ways to K and V:
  paged   `layout` is the cache's, E4M3, E5M2 or FP16; the kernel converts as it reads
  dense   FP16 K and V in rows (`PrefillPlan.dense_layout`), for a prompt without a prefix, or what a bridge made
  bridge  `BridgePlan` writes the context of every sequence once, as FP16 rows, into a workspace of
          `bridge_workspace_bytes`; a dense plan then reads it. Bit-equal to the paged way.

Memory that stays reserved, for memory profiling: `prefill_workspace_bytes(dim, ctas)`, and with the bridge
`bridge_workspace_bytes(tokens, heads, dim)`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .errors import KernelError
from .plans import V100_SMS, CacheLayout, KvFormat, Launch

ROWS = 128
"""Rows of a row tile."""
STEP = 128
"""Tokens of context in a step."""
PREFILL_DIMS = (128, 256)
ITEM = 12
"""int32 per item of work: table row, KV head, first row, rows, first query, length, first and last step, slot, ..."""
MERGE = 8
"""int32 per cut row tile: KV head, first row, rows, first query, first slot, slots, two unused."""
THREADS = 256
_OVERHEAD = 1
"""What starting a row tile costs, in steps: Q to shared memory, the pipeline's ends, the output."""


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise KernelError(text)


def prefill_shared_bytes(dim: int) -> int:
    """Dynamic shared memory of a prefill CTA: Q, panels of K or V and of probabilities, sums, maxima, addresses."""
    return ROWS * dim * 2 + 2 * 8192 + 2 * 4096 + 4 * THREADS * 4 + ROWS * 4 + 256


def prefill_workspace_bytes(dim: int, ctas: int = V100_SMS) -> int:
    """Bytes of partial sums and statistics that any prefill of this head dimension needs at most."""
    return 2 * ctas * ROWS * (dim * 4 + 8)


def bridge_workspace_bytes(tokens: int, heads: int, dim: int) -> int:
    """Bytes of the FP16 copy of K and V of `tokens` tokens (each sequence rounded up to 16) and `heads` KV heads."""
    return 2 * tokens * heads * dim * 2


class PrefillArgs(ctypes.Structure):
    """`PrefillArgs` of attention_prefill.cu."""

    _fields_ = [
        ("q", ctypes.c_void_p), ("out", ctypes.c_void_p), ("key", ctypes.c_void_p), ("value", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p), ("work", ctypes.c_void_p), ("merges", ctypes.c_void_p),
        ("partial", ctypes.c_void_p), ("stats", ctypes.c_void_p),
        ("page", ctypes.c_int), ("table_stride", ctypes.c_int), ("block_stride", ctypes.c_int),
        ("token_stride", ctypes.c_int), ("head_stride", ctypes.c_int), ("q_stride", ctypes.c_int),
        ("out_stride", ctypes.c_int), ("group", ctypes.c_int), ("window", ctypes.c_int), ("causal", ctypes.c_int),
        ("score_scale", ctypes.c_float), ("out_scale", ctypes.c_float),
    ]  # fmt: skip


class BridgeArgs(ctypes.Structure):
    """`BridgeArgs` of attention_prefill.cu."""

    _fields_ = [
        ("cache", ctypes.c_void_p), ("block_table", ctypes.c_void_p), ("sequences", ctypes.c_void_p),
        ("key", ctypes.c_void_p), ("value", ctypes.c_void_p),
        ("page", ctypes.c_int), ("table_stride", ctypes.c_int), ("block_stride", ctypes.c_int),
        ("value_offset", ctypes.c_int), ("token_stride", ctypes.c_int), ("head_stride", ctypes.c_int),
        ("heads", ctypes.c_int),
    ]  # fmt: skip


@dataclass(frozen=True)
class PrefillMemory:
    """Addresses and strides of a prefill.

    `q` and `out`: halves [query tokens of all sequences, heads * group, D], `q_stride` and `out_stride` halves from
    token to token. `key` and `value`: the first byte of K and of V (paged: of block 0, `value` = cache + value_offset).
    `block_table`: int32 [sequences, table_stride]; 0 for a dense plan. `work`: `PrefillPlan.work()` on the device.
    `partial` and `stats`: `PrefillPlan.partial_floats` and `stats_floats` FP32, contents of no matter.
    """

    q: int
    out: int
    key: int
    value: int
    block_table: int
    work: int
    partial: int
    stats: int
    table_stride: int
    q_stride: int
    out_stride: int


@dataclass(frozen=True)
class _Piece:
    """Steps `begin` to `end` of a row tile; `slot` -1: the whole tile, straight to the output."""

    tile: tuple[int, int, int]  # sequence, KV head, row tile
    begin: int
    end: int
    slot: int


@dataclass(frozen=True)
class PrefillPlan:
    """One prefill of a batch. `sequences`: (query tokens, context length with them) of each, in the order of `q`.

    A query sees its own position and all before it (`causal`), or the whole context; with a window, no position before
    its own - window + 1. `starts`: for dense K and V, the row where each sequence begins; None: paged. Sequences
    without query tokens cost nothing. `ctas`: one per multiprocessor. Contract: D 128 or 256, 1 to 16 query heads per
    KV head, pages of a multiple of 16 tokens, any lengths.
    """

    layout: CacheLayout
    group: int
    sequences: tuple[tuple[int, int], ...]
    ctas: int = V100_SMS
    window: int = 0
    causal: bool = True
    starts: tuple[int, ...] | None = None

    @staticmethod
    def dense_layout(heads: int, dim: int, token_stride: int = 0) -> CacheLayout:
        """FP16 K (and V) as [tokens, heads, D] in rows of `token_stride` bytes, by default without gaps."""
        stride = token_stride or heads * dim * 2
        return CacheLayout(KvFormat.F16, 16, heads, dim, 16 * stride, 16, stride, dim * 2)

    @property
    def family(self) -> str:
        """The kernels' family."""
        return f"attention_prefill_{self.layout.format}"

    @property
    def kernel(self) -> str:
        """The first launch's kernel."""
        return f"prefill_{self.layout.format}_d{self.layout.dim}"

    @property
    def partial_floats(self) -> int:
        """FP32 elements of the partial sums' workspace; depends on D and `ctas` alone."""
        return 2 * self.ctas * ROWS * self.layout.dim

    @property
    def stats_floats(self) -> int:
        """FP32 elements of the workspace for maxima and sums; depends on `ctas` alone."""
        return 2 * self.ctas * ROWS * 2

    def check(self) -> None:
        """Raises `KernelError` when the kernels cannot do this."""
        self.layout.check()
        _require(
            self.layout.dim in PREFILL_DIMS, f"prefill takes a head dimension of 128 or 256, not {self.layout.dim}"
        )
        _require(1 <= self.group <= 16, f"1 to 16 query heads may share a KV head, not {self.group}")
        _require(self.ctas >= 1, f"there must be a CTA, not {self.ctas}")
        _require(self.window >= 0, f"the window must not be negative: {self.window}")
        _require(any(queries for queries, _ in self.sequences), "there must be a query token")
        for queries, length in self.sequences:
            _require(0 <= queries <= length, f"a context of {length} tokens cannot end with {queries} query tokens")
        if self.starts is not None:
            _require(self.layout.format is KvFormat.F16, f"dense K and V must be FP16, not {self.layout.format}")
            _require(len(self.starts) == len(self.sequences), "dense K and V need the first row of every sequence")

    def steps(self, sequence: int, tile: int) -> tuple[int, int]:
        """The steps of context that some row of a row tile sees: first, and one past the last."""
        queries, length = self.sequences[sequence]
        first = length - queries + tile * ROWS // self.group
        last = length - queries + min(queries - 1, (tile * ROWS + ROWS - 1) // self.group)
        begin = max(0, first - self.window + 1) if self.window else 0
        end = last + 1 if self.causal else length
        return begin // STEP, -(-end // STEP)

    @cached_property
    def _pieces(self) -> tuple[tuple[_Piece, ...], ...]:
        """What each CTA does, in order."""
        spans = {
            (sequence, head, tile): self.steps(sequence, tile)
            for head in range(self.layout.heads)
            for sequence, (queries, _) in enumerate(self.sequences)
            for tile in range(-(-queries * self.group // ROWS))
        }
        # The longest first; there and back over the CTAs.
        order = sorted(spans, key=lambda tile: spans[tile][0] - spans[tile][1])
        whole = len(order) // self.ctas * self.ctas
        lists: list[list[_Piece]] = [[] for _ in range(self.ctas)]
        load = [0] * self.ctas
        for i, tile in enumerate(order[:whole]):
            turn, place = divmod(i, self.ctas)
            cta = place if turn % 2 == 0 else self.ctas - 1 - place
            begin, end = spans[tile]
            lists[cta].append(_Piece(tile, begin, end, -1))
            load[cta] += end - begin + _OVERHEAD
        # The rest is laid end to end and dealt out so that every CTA has the same in all.
        left = sum(spans[tile][1] - spans[tile][0] for tile in order[whole:])
        level = _level(load, left)
        room = [max(0, level - have) for have in load]
        cta = slot = 0
        for tile in order[whole:]:
            begin, end = spans[tile]
            while begin < end:
                while room[cta] <= 0:
                    cta += 1
                take = min(end - begin, room[cta])
                if end - begin - take < 2:  # a sliver costs more than it evens out
                    take = end - begin
                alone = (begin, begin + take) == spans[tile]
                lists[cta].append(_Piece(tile, begin, begin + take, -1 if alone else slot))
                slot += not alone
                room[cta] -= take
                begin += take
        return tuple(tuple(pieces) for pieces in lists)

    @cached_property
    def _merges(self) -> tuple[tuple[tuple[int, int, int], int, int], ...]:
        """Every cut row tile with its first slot and its slots."""
        cut = [piece for pieces in self._pieces for piece in pieces if piece.slot >= 0]
        tiles = dict.fromkeys(piece.tile for piece in sorted(cut, key=lambda piece: piece.slot))
        slots = {tile: [piece.slot for piece in cut if piece.tile == tile] for tile in tiles}
        return tuple((tile, min(found), len(found)) for tile, found in slots.items())

    def work(self) -> list[int]:
        """The schedule as int32, for the device: where each CTA's items begin (and the end), items, cut row tiles.

        Depends on the plan only: one serves all layers of a step. Raises `KernelError` outside the contract.
        """
        self.check()
        first_query = [0]
        for queries, _ in self.sequences:
            first_query.append(first_query[-1] + queries)
        bounds, items = [0], []
        for pieces in self._pieces:
            for piece in pieces:
                sequence, head, tile = piece.tile
                queries, length = self.sequences[sequence]
                start = self.starts[sequence] if self.starts is not None else 0
                items += [
                    sequence, head, tile * ROWS, queries * self.group, first_query[sequence], length, piece.begin,
                    piece.end, piece.slot, start, 0, 0,
                ]  # fmt: skip
            bounds.append(len(items) // ITEM)
        merges = []
        for (sequence, head, tile), slot, count in self._merges:
            rows = self.sequences[sequence][0] * self.group
            merges += [head, tile * ROWS, rows, first_query[sequence], slot, count, 0, 0]
        return [*bounds, *items, *merges]

    def launches(
        self, memory: PrefillMemory, softmax_scale: float, scales: tuple[float, float] = (1.0, 1.0)
    ) -> tuple[Launch, ...]:
        """One launch, or two when row tiles were cut; in order, on one stream. `scales` of K and V.

        Launches of one stream may share a workspace. A CUDA graph replays these lengths only, as `work` holds them.
        """
        self.check()
        _require(memory.q_stride % 8 == 0, f"tokens of Q must be a multiple of 8 halves apart, not {memory.q_stride}")
        _require(memory.out_stride % 2 == 0, f"tokens of the output must be an even number apart: {memory.out_stride}")
        _require(softmax_scale > 0 and scales[0] > 0, f"scales must be positive: {softmax_scale} and {scales[0]}")
        _require((self.starts is None) == bool(memory.block_table), "paged K and V need a block table, dense ones none")
        layout, read = self.layout, self.layout.format.read_scale
        count = sum(len(pieces) for pieces in self._pieces)
        merges = memory.work + 4 * (self.ctas + 1 + count * ITEM)
        arguments = PrefillArgs(
            memory.q, memory.out, memory.key, memory.value, memory.block_table or None, memory.work, merges,
            memory.partial, memory.stats, layout.page, memory.table_stride, layout.block_stride, layout.token_stride,
            layout.head_stride, memory.q_stride, memory.out_stride, self.group, self.window, int(self.causal),
            softmax_scale * math.log2(math.e) * scales[0] * read, scales[1] * read,
        )  # fmt: skip
        shared = prefill_shared_bytes(layout.dim)
        first = Launch(self.family, self.kernel, (self.ctas, 1, 1), THREADS, shared, (arguments,))
        if not self._merges:
            return (first,)
        grid = (len(self._merges), THREADS // 32, 1)
        name = f"prefill_combine_{layout.format}_d{layout.dim}"
        return (first, Launch(self.family, name, grid, THREADS, 0, (arguments,)))


def _level(load: Sequence[int], left: int) -> int:
    """The level to which CTAs with these loads are filled by `left` more."""
    ordered = sorted(load)
    total = left
    for i, have in enumerate(ordered):
        total += have
        level = -(-total // (i + 1))
        if i + 1 == len(ordered) or level <= ordered[i + 1]:
            return level
    raise AssertionError("the last turn returns")


@dataclass(frozen=True)
class BridgePlan:
    """The FP16 copy of the context of a batch, for a dense prefill. `lengths`: tokens of each sequence.

    K goes to `key` and V to `value` as [rows, heads, D] without gaps; sequence i begins at row `starts[i]`, a multiple
    of 16, and the rows up to the next one beyond its end are zero.
    """

    layout: CacheLayout
    lengths: tuple[int, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        """The first row of every sequence."""
        rows = [0]
        for length in self.lengths:
            rows.append(rows[-1] + -(-length // 16) * 16)
        return tuple(rows[:-1])

    @property
    def rows(self) -> int:
        """Rows of K (and of V) that are written."""
        return sum(-(-length // 16) * 16 for length in self.lengths)

    def prefill(self, plan: PrefillPlan) -> PrefillPlan:
        """A paged plan as a dense one over this copy."""
        layout = PrefillPlan.dense_layout(self.layout.heads, self.layout.dim)
        return replace(plan, layout=layout, starts=self.starts)

    def work(self) -> list[int]:
        """int32 [sequences, 2] for the device: length and first row."""
        return [x for pair in zip(self.lengths, self.starts, strict=True) for x in pair]

    def launch(self, *, cache: int, block_table: int, table_stride: int, work: int, key: int, value: int) -> Launch:
        """The copy. `cache`: of FP8 pages; `work`: on the device. Raises `KernelError` outside the contract."""
        self.layout.check()
        _require(self.layout.format is not KvFormat.F16, "an FP16 cache needs no bridge")
        _require(
            self.layout.dim in PREFILL_DIMS, f"prefill takes a head dimension of 128 or 256, not {self.layout.dim}"
        )
        _require(any(self.lengths), "there must be a token")
        layout = self.layout
        arguments = BridgeArgs(
            cache, block_table, work, key, value, layout.page, table_stride, layout.block_stride, layout.value_offset,
            layout.token_stride, layout.head_stride, layout.heads,
        )  # fmt: skip
        grid = (-(-max(self.lengths) // 16), 2 * layout.heads, len(self.lengths))
        name = f"prefill_bridge_{layout.format}_d{layout.dim}"
        return Launch(f"attention_prefill_{layout.format}", name, grid, layout.dim, 0, (arguments,))
