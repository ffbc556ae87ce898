"""Attention as Triton gives it to a V100: the peer that every user of one has.

Triton 3.4 and later emit no tensor core instruction for compute capability 7.0, whatever the operands of `tl.dot`: they
become FP32 multiply-adds; and they refuse E4M3 there. This kernel asks for just that (FP32 operands, IEEE precision,
codes converted by bit moves), so that a newer card runs the same kind of code. Paged K and V in our layout,
split over the context, a second launch to combine.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_FORMATS = {"f16": 0, "e4m3": 1, "e5m2": 2}


@triton.jit
def _halves(raw, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Stored elements as halves; E4M3 comes out as value * 2^-8."""
    if FORMAT == 0:
        return raw
    code = raw.to(tl.uint16)
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7) if FORMAT == 1 else code << 8
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q, cache, table, lengths, out, partial, stats, table_stride, block_stride, value_offset, token_stride,
    head_stride, page, heads, group, queries, score_scale, out_scale, FORMAT: tl.constexpr, DIM: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    split, tile = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    head, sequence = tl.program_id(1), tl.program_id(2)
    row, column = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)
    token, member = row // group, row % group
    real, length = token < queries, tl.load(lengths + sequence)
    position = length - queries + token
    place = (((sequence * queries + token) * heads + head) * group + member).to(tl.int64) * DIM
    x = tl.load(q + place[:, None] + column[None, :], mask=real[:, None], other=0.0).to(tl.float32) * score_scale
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, DIM), tl.float32)
    last = tl.minimum(length, length - queries + (tile * ROWS + ROWS - 1) // group + 1)
    steps = tl.cdiv(last, TOKENS)
    share = tl.cdiv(steps, SPLITS)
    for step in range(split * share, tl.minimum((split + 1) * share, steps)):
        at = step * TOKENS + tl.arange(0, TOKENS)
        live = at < last
        block = tl.load(table + sequence * table_stride + at // page, mask=live, other=0).to(tl.int64)
        base = cache + block * block_stride + (at % page).to(tl.int64) * token_stride + head * head_stride
        key = _halves(tl.load(base[:, None] + column[None, :], mask=live[:, None], other=0), FORMAT).to(tl.float32)
        score = tl.dot(x, tl.trans(key), input_precision="ieee")
        score = tl.where(live[None, :] & (at[None, :] <= position[:, None]), score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weight, fade = tl.exp2(score - shift[:, None]), tl.exp2(top - shift)
        value = tl.load(base[:, None] + value_offset + column[None, :], mask=live[:, None], other=0)
        sums = sums * fade[:, None] + tl.dot(weight, _halves(value, FORMAT).to(tl.float32), input_precision="ieee")
        total, top = total * fade + tl.sum(weight, 1), higher
    if SPLITS == 1:
        result = sums / total[:, None] * out_scale
        tl.store(out + place[:, None] + column[None, :], result.to(tl.float16), mask=real[:, None])
    else:
        slot = (place // DIM) * SPLITS + split
        tl.store(partial + slot[:, None] * DIM + column[None, :], sums, mask=real[:, None])
        tl.store(stats + 2 * slot, top, mask=real)
        tl.store(stats + 2 * slot + 1, total, mask=real)


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    out, partial, stats, out_scale, DIM: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr,  # noqa: N803
):  # fmt: skip
    row, split, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH), tl.arange(0, DIM)
    slot = row * SPLITS + split
    top = tl.load(stats + 2 * slot, mask=split < SPLITS, other=float("-inf"))
    weight = tl.exp2(top - tl.max(top, 0))
    total = tl.sum(tl.load(stats + 2 * slot + 1, mask=split < SPLITS, other=0.0) * weight, 0)
    sums = tl.load(partial + slot[:, None] * DIM + column[None, :], mask=(split < SPLITS)[:, None], other=0.0)
    tl.store(out + row * DIM + column, (tl.sum(sums * weight[:, None], 0) / total * out_scale).to(tl.float16))


class TritonAttention:
    """Causal attention of `queries` tokens of each sequence over a paged cache [blocks, 2, page, KV heads, D]."""

    def __init__(
        self, kv_format: str, cache: torch.Tensor, sequences: int, group: int, queries: int, ctas: int
    ) -> None:
        """`cache`: one to take strides from (uint8, or float16); `ctas`: how many fill the card."""
        _, _, self.page, self.heads, self.dim = cache.shape
        self.kv_format, self.sequences, self.group, self.queries = kv_format, sequences, group, queries
        rows = group * queries
        self.rows = 16 if rows <= 16 else 32 if rows <= 32 else 64
        self.tiles = -(-rows // self.rows)
        self.tokens = 16 if self.rows * self.dim >= 8192 else 32  # a V100 has 96 KiB of shared memory for FP32 operands
        self.splits = max(1, min(64, ctas // (self.tiles * self.heads * sequences)))
        total, device = sequences * queries * self.heads * group, cache.device
        self.out = torch.empty((sequences, queries, self.heads * group, self.dim), dtype=torch.float16, device=device)
        self.partial = torch.empty(total * self.splits * self.dim, dtype=torch.float32, device=device)
        self.stats = torch.empty(total * self.splits * 2, dtype=torch.float32, device=device)

    def __call__(
        self, q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """FP16 [sequences, queries, heads, D]; softmax scale D^-0.5, K and V scales 1."""
        read = 256.0 if self.kv_format == "e4m3" else 1.0
        block_stride, value_offset, token_stride, head_stride, _ = cache.stride()
        _attend[(self.tiles * self.splits, self.heads, self.sequences)](
            q, cache, table, lengths, self.out, self.partial, self.stats, table.stride(0), block_stride, value_offset,
            token_stride, head_stride, self.page, self.heads, self.group, self.queries,
            self.dim**-0.5 * 1.4426950408889634 * read, read, FORMAT=_FORMATS[self.kv_format], DIM=self.dim,
            ROWS=self.rows, TOKENS=self.tokens, SPLITS=self.splits,
            num_warps=8 if self.rows >= 32 else 4, num_stages=1,
        )  # fmt: skip
        if self.splits > 1:
            _combine[(self.sequences * self.queries * self.heads * self.group,)](
                self.out, self.partial, self.stats, read, DIM=self.dim, SPLITS=self.splits,
                WIDTH=triton.next_power_of_2(self.splits),
            )  # fmt: skip
        return self.out
