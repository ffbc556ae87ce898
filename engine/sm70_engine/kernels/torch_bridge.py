"""The bridge as a torch operator: prefill over an FP8 cache whose context is expanded to FP16 rows first.

The context of every sequence is read and converted once, into a workspace that all layers share; the prefill kernel
then reads rows of halves. Bit-equal to `torch_ops.prefill_attention`, which converts as it reads.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from . import torch_ops, torch_reference
from .errors import KernelError
from .plans import CacheLayout
from .prefill import BridgePlan, PrefillMemory, PrefillPlan, bridge_workspace_bytes
from .torch_ops import cache_layout, prefill_plan, prefill_workspace_bytes


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise KernelError(text)


@functools.lru_cache(maxsize=64)
def _plans(
    layout: CacheLayout, group: int, sequences: tuple[tuple[int, int], ...], causal: bool, multiprocessors: int
) -> tuple[BridgePlan, PrefillPlan]:
    """The copy and the prefill over it; kept, since all layers of a step share them."""
    bridge = BridgePlan(layout, tuple(length for _, length in sequences))
    dense = bridge.prefill(prefill_plan(layout, group, sequences, causal, 0, multiprocessors))
    dense.check()
    return bridge, dense


def bridged_work(
    kv_cache: torch.Tensor, kv_format: str, group: int, sequences: Sequence[tuple[int, int]], causal: bool = True
) -> torch.Tensor:
    """The copy's rows and the prefill's schedule, int32 on the host; one serves all layers of a step.

    sequences: (query tokens, context length with them) of each. Empty for a cache on the CPU.
    """
    if not kv_cache.is_cuda:
        return torch.empty(0, dtype=torch.int32)
    layout, multiprocessors = cache_layout(kv_cache, kv_format), torch_ops.prepare(kv_cache.device)
    bridge, dense = _plans(layout, group, tuple(sequences), causal, multiprocessors)
    return torch.tensor([*bridge.work(), *dense.work()], dtype=torch.int32)


@torch.library.custom_op(
    "sm70::prefill_bridged_attention", mutates_args=("out", "workspace", "copy"), device_types="cuda"
)
def bridged_attention(
    out: torch.Tensor,
    workspace: torch.Tensor,
    copy: torch.Tensor,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    work: torch.Tensor,
    kv_format: str,
    queries: Sequence[int],
    lengths: Sequence[int],
    causal: bool,
    softmax_scale: float,
    key_scale: float,
    value_scale: float,
) -> None:
    """As `prefill_attention`, without a window, over an E4M3 or E5M2 cache.

    copy: uint8 of `bridge_workspace_bytes(rows, KV heads, D)`, rows: each length rounded up to 16, together. work:
    `bridged_work` of the same lengths, on the device. Raises `KernelError` outside the contract.
    """
    layout = cache_layout(kv_cache, kv_format)
    sequences = tuple(zip(queries, lengths, strict=True))
    good = query.dim() == 3 and query.shape[2] == layout.dim and query.shape[1] % layout.heads == 0
    _require(good, f"query must be [tokens, heads, {layout.dim}], heads a multiple of {layout.heads}")
    multiprocessors = torch_ops.prepare(query.device)
    bridge, plan = _plans(layout, query.shape[1] // layout.heads, sequences, causal, multiprocessors)
    _require(query.shape == out.shape, f"out must be {list(query.shape)}, not {list(out.shape)}")
    _require(query.shape[0] == sum(queries), f"there are {query.shape[0]} query tokens for {sum(queries)}")
    for name, rows in (("query", query), ("out", out)):
        _require(rows.dtype == torch.float16, f"{name} must be FP16, not {rows.dtype}")
        _require(rows.stride(2) == 1 and rows.stride(1) == layout.dim, f"heads must lie side by side in {name}")
    good = block_table.dtype == torch.int32 and block_table.shape[0] >= len(sequences) and block_table.stride(1) == 1
    _require(good, f"the block table must be int32 with a row for each of {len(sequences)} sequences")
    front = 2 * len(sequences)
    good = work.dtype == torch.int32 and work.is_cuda and work.is_contiguous() and work.numel() > front
    _require(good, "work must be what bridged_work made of these sequences, on the device")
    for name, memory, needed in (
        ("prefill workspace", workspace, prefill_workspace_bytes(layout.dim, multiprocessors)),
        ("copy", copy, bridge_workspace_bytes(bridge.rows, layout.heads, layout.dim)),
    ):
        has = memory.numel() * memory.element_size()
        _require(has >= needed and memory.is_contiguous(), f"the {name} must have {needed} bytes, not {has}")
    key, start = copy.data_ptr(), workspace.data_ptr()
    value = key + bridge.rows * layout.heads * layout.dim * 2
    expand = bridge.launch(
        cache=kv_cache.data_ptr(), block_table=block_table.data_ptr(), table_stride=block_table.stride(0),
        work=work.data_ptr(), key=key, value=value,
    )  # fmt: skip
    partial = -(-plan.partial_floats * 4 // 256) * 256
    places = PrefillMemory(
        q=query.data_ptr(), out=out.data_ptr(), key=key, value=value, block_table=0,
        work=work.data_ptr() + 4 * front, partial=start, stats=start + partial, table_stride=0,
        q_stride=query.stride(0), out_stride=out.stride(0),
    )  # fmt: skip
    torch_ops._run(query, (expand, *plan.launches(places, softmax_scale, (key_scale, value_scale))))


@bridged_attention.register_kernel("cpu")
def _(
    out: torch.Tensor,
    workspace: torch.Tensor,
    copy: torch.Tensor,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    work: torch.Tensor,
    kv_format: str,
    queries: Sequence[int],
    lengths: Sequence[int],
    causal: bool,
    softmax_scale: float,
    key_scale: float,
    value_scale: float,
) -> None:
    """The same in steps: the copy in FP16 by the definition of the codes, and attention over it."""
    _, _, page, heads, dim = kv_cache.shape
    needed = bridge_workspace_bytes(sum(-(-n // 16) * 16 for n in lengths), heads, dim)
    _require(copy.numel() >= needed, f"the copy must have {needed} bytes, not {copy.numel()}")
    first = 0
    for i, (rows, length) in enumerate(zip(queries, lengths, strict=True)):
        part = slice(first, first + rows)
        first += rows
        position = torch.arange(length)
        block = block_table[i, : -(-length // page)].long()
        stored = kv_cache[block[position // page], :, position % page]  # [tokens, 2, KV heads, D]
        expanded = torch_reference.kv_decode(stored, kv_format).half().transpose(0, 1)[None]
        table, size = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([length])
        out[part] = torch_reference.attention(
            query[part], expanded, table, size, "f16", rows, causal, softmax_scale, (key_scale, value_scale), 0
        )


bridged_attention.register_fake(torch_ops._writes_only)
