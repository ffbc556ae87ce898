"""The kernels as torch operators (`torch.ops.sm70.*`), one for each family, with fake kernels and CPU references.

CUDA graphs: the attention operators write into tensors that the caller gives and allocate nothing; the linears allocate
their result, through torch. Call `prepare(device)` before the first capture: it loads every kernel. Launches go to the
current stream. A workspace belongs to one stream at a time.

Outside a contract an operator raises `KernelError`; it never takes another way silently. Kernels come as built objects
(kernels/loader.py): no compiler is needed where this runs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from sm70_engine.acceleration.routes import count

from . import driver, plans, prefill, report, torch_reference
from .errors import KernelError
from .families import FAMILIES
from .loader import Kernels, objects_folder
from .plans import AttentionMemory, AttentionPlan, CacheLayout, DecodePlan, KvFormat, Launch, VerifyPlan
from .prefill import PrefillMemory, PrefillPlan
from .repack import packed_words

KEPT_BYTES = 4 << 20
"""The front of an attention workspace: what the CTAs of a decode pass to each other, zeros between launches."""
_ALIGNMENT = 256


@dataclass(frozen=True)
class _Device:
    kernels: Kernels
    multiprocessors: int


_devices: dict[int, _Device] = {}
_lock = threading.Lock()


def _device(device: torch.device) -> _Device:
    index = torch.cuda.current_device() if device.index is None else device.index
    found = _devices.get(index)
    if found is not None:
        return found
    with _lock, torch.cuda.device(index):
        if index in _devices:
            return _devices[index]
        if torch.cuda.is_current_stream_capturing():
            raise KernelError("kernels must be loaded before a graph is captured: call torch_ops.prepare(device) first")
        torch.empty(1, device=f"cuda:{index}")  # torch's own context is then there and current
        number, _ = driver.primary_context(index)
        kernels = Kernels(objects_folder(), number)
        for family in FAMILIES:
            if family.name not in kernels.facts:  # a folder built for a test: what is missing is refused when launched
                continue
            for kernel in family.kernels:
                kernels.get(family.name, kernel.name, report.shared_bytes(kernel.name))
        made = _Device(kernels, driver.attribute(number, driver.MULTIPROCESSORS))
        _devices[index] = made
        return made


def prepare(device: torch.device | str | int = "cuda") -> int:
    """Loads every kernel on a GPU, so that captures may begin; its number of multiprocessors.

    Raises `KernelError` without a driver or built objects, for objects of other sources, and before Volta.
    """
    return _device(torch.device(device)).multiprocessors


def _run(where: torch.Tensor, launches: Iterable[Launch]) -> None:
    kernels = _device(where.device).kernels
    with torch.cuda.device(where.device):
        stream = torch.cuda.current_stream().cuda_stream
        for launch in launches:
            kernels.launch(launch, stream)


def _writes_only(*_arguments: object) -> None:
    """The fake of every operator that writes into what it is given and returns nothing."""


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise KernelError(text)


# ---------------------------------------------------------------- KV cache


def cache_layout(kv_cache: torch.Tensor, kv_format: str) -> CacheLayout:
    """Where the tokens of a cache lie. `kv_cache`: a view [blocks, 2, page, KV heads, D], whatever its strides.

    FP16, or FP8 as uint8 or float8. Raises `KernelError` for a shape or strides that the kernels do not read.
    """
    _require(
        kv_cache.dim() == 5 and kv_cache.shape[1] == 2,
        f"the KV cache must be a view [blocks, 2, page, KV heads, D], not {list(kv_cache.shape)}",
    )
    form = KvFormat(kv_format)
    size = kv_cache.element_size()
    _require(size == form.bytes, f"a cache in {kv_format} has {form.bytes} bytes an element, not {size}")
    _require(kv_cache.stride(4) == 1, "the elements of a head must lie side by side in the KV cache")
    _, _, page, heads, dim = kv_cache.shape
    block, part, token, head = (step * size for step in kv_cache.stride()[:4])
    # The stride of a dimension of size 1 says nothing.
    head = dim * size if heads == 1 else head
    block = 2 * page * heads * dim * size if kv_cache.shape[0] == 1 else block
    layout = CacheLayout(form, page, heads, dim, block, part, token, head)
    layout.check()
    return layout


@torch.library.custom_op("sm70::kv_cache_write", mutates_args=("kv_cache",), device_types="cuda")
def kv_cache_write(
    kv_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    kv_format: str,
    key_scale: float,
    value_scale: float,
) -> None:
    """Writes new tokens into pages: what is stored is value / scale.

    kv_cache: view [blocks, 2, page, KV heads, D] (`cache_layout`). key, value: FP16 [tokens, KV heads, D], D and heads
    side by side. slots: int64 [tokens], block * page + position; a negative one leaves its token out.
    kv_format: e4m3, e5m2 (saturating, nearest even) or f16 (scales must be 1).
    """
    if slots.shape[0] == 0:
        return
    layout = cache_layout(kv_cache, kv_format)
    shape = (slots.shape[0], layout.heads, layout.dim)
    for name, rows in (("key", key), ("value", value)):
        # More rows than slots: a padded batch. Their slots do not exist, so they are not written.
        good = rows.dtype == torch.float16 and rows.shape[0] >= shape[0] and tuple(rows.shape[1:]) == shape[1:]
        _require(good, f"{name} must be FP16 {list(shape)}, not {rows.dtype} {list(rows.shape)}")
        together = rows.stride(2) == 1 and (layout.heads == 1 or rows.stride(1) == layout.dim)
        _require(together, f"the heads of a token must lie side by side in {name}; its strides are {rows.stride()}")
    _require(slots.dtype == torch.int64 and slots.is_contiguous(), f"slots must be contiguous int64, not {slots.dtype}")
    launch = plans.kv_write(
        layout, tokens=slots.shape[0], key=key.data_ptr(), value=value.data_ptr(), slots=slots.data_ptr(),
        cache=kv_cache.data_ptr(), key_stride=key.stride(0), value_stride=value.stride(0), key_scale=key_scale,
        value_scale=value_scale,
    )  # fmt: skip
    _run(kv_cache, (launch,))


@kv_cache_write.register_kernel("cpu")
def _(
    kv_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    kv_format: str,
    key_scale: float,
    value_scale: float,
) -> None:
    rows = slots.shape[0]
    torch_reference.kv_cache_write(kv_cache, key[:rows], value[:rows], slots, kv_format, key_scale, value_scale)


kv_cache_write.register_fake(_writes_only)


# ---------------------------------------------------------------- attention


def _up(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _room(plan: AttentionPlan) -> tuple[int, int, int]:
    """Where the statistics of a plan start in the workspace, where the partials, and where they end."""
    start = 0 if isinstance(plan, DecodePlan) else KEPT_BYTES
    if isinstance(plan, DecodePlan) and plan.splits == 1:
        return 0, 0, 0
    partial = start + _up(plan.stats_floats * 4)
    return start, partial, partial + _up(plan.partial_floats * 4)


def decode_plan(layout: CacheLayout, sequences: int, group: int, window: int, multiprocessors: int) -> DecodePlan:
    """The plan that `decode_attention` runs: on a very large card with fewer splits, so that they fit `KEPT_BYTES`."""
    splits = plans.decode_splits(layout, sequences, group, multiprocessors)
    plan = DecodePlan(layout, sequences, group, splits, window)
    needed = _room(plan)[2]
    return replace(plan, splits=max(1, splits * KEPT_BYTES // needed)) if needed > KEPT_BYTES else plan


def verify_plan(
    layout: CacheLayout, sequences: int, group: int, queries: int, causal: bool, window: int, multiprocessors: int
) -> VerifyPlan:
    """The plan that `verify_attention` runs."""
    splits = plans.verify_splits(layout, sequences, multiprocessors)
    return VerifyPlan(layout, sequences, group, splits, window, queries, causal)


def attention_workspace_bytes(
    kv_format: str,
    kv_heads: int,
    group: int,
    dim: int,
    max_sequences: int,
    max_queries: int = 1,
    multiprocessors: int = plans.V100_SMS,
) -> int:
    """What a workspace must have for every batch up to these sizes. Make it once, with zeros: `torch.zeros(bytes,
    dtype=torch.uint8, device=...)`; operators leave it ready for the next one on the same stream.
    """
    layout = CacheLayout.split(KvFormat(kv_format), 16, kv_heads, dim)
    needed = KEPT_BYTES
    for sequences in range(1, max_sequences + 1):
        for queries in range(2, max_queries + 1):
            if group * queries <= 8 * max(plans.VERIFY_TILES.get(dim, (0,))):
                plan = verify_plan(layout, sequences, group, queries, True, 0, multiprocessors)
                needed = max(needed, _room(plan)[2])
    return needed


def _memory(
    plan: AttentionPlan,
    out: torch.Tensor,
    workspace: torch.Tensor,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
) -> AttentionMemory:
    dim = plan.layout.dim
    for name, rows in (("query", query), ("out", out)):
        _require(rows.dtype == torch.float16, f"{name} must be FP16, not {rows.dtype}")
        _require(rows.stride(2) == 1 and rows.stride(1) == dim, f"heads must lie side by side in {name}")
    _require(query.shape == out.shape, f"out must be {list(query.shape)}, not {list(out.shape)}")
    _require(lengths.dtype == torch.int32 and lengths.is_contiguous(), "lengths must be contiguous int32")
    good = block_table.dtype == torch.int32 and block_table.shape[0] >= plan.sequences and block_table.stride(1) == 1
    _require(good, f"the block table must be int32 with a row for each of {plan.sequences} sequences")
    (stats, partial, needed), has = _room(plan), workspace.numel() * workspace.element_size()
    _require(
        has >= needed and workspace.is_contiguous(),
        f"the attention workspace must have {needed} contiguous bytes, not {has} (attention_workspace_bytes says how "
        "many)",
    )
    start = workspace.data_ptr()
    # The stride of a dimension of size 1 says nothing.
    table_stride = block_table.stride(0) if block_table.shape[0] > 1 else block_table.shape[1]
    return AttentionMemory(
        q=query.data_ptr(), out=out.data_ptr(), cache=kv_cache.data_ptr(), block_table=block_table.data_ptr(),
        lengths=lengths.data_ptr(), partial=start + partial, stats=start + stats, table_stride=table_stride,
        q_stride=query.stride(0), out_stride=out.stride(0),
    )  # fmt: skip


def _group(query: torch.Tensor, layout: CacheLayout) -> int:
    good = query.dim() == 3 and query.shape[2] == layout.dim and query.shape[1] % layout.heads == 0
    _require(
        good, f"query must be [tokens, heads, {layout.dim}], heads a multiple of {layout.heads}: {list(query.shape)}"
    )
    return int(query.shape[1]) // layout.heads


@torch.library.custom_op("sm70::decode_attention", mutates_args=("out", "workspace"), device_types="cuda")
def decode_attention(
    out: torch.Tensor,
    workspace: torch.Tensor,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    kv_format: str,
    softmax_scale: float,
    key_scale: float,
    value_scale: float,
    window: int,
) -> None:
    """Attention of one query token a sequence over its pages.

    out, query: FP16 [sequences, heads, D], D 64, 128 or 256, 1 to 16 heads a KV head. kv_cache: as in
    `kv_cache_write`. block_table: int32 [sequences, blocks]. lengths: int32 [sequences], the new token included; 0
    marks a padded row, which becomes zeros. window: 0, or how many tokens a query sees, itself included.
    workspace: `attention_workspace_bytes`, zeros when it was made.
    """
    layout = cache_layout(kv_cache, kv_format)
    plan = decode_plan(layout, query.shape[0], _group(query, layout), window, _device(query.device).multiprocessors)
    _require(lengths.shape[0] >= plan.sequences, f"there must be {plan.sequences} lengths, not {lengths.shape[0]}")
    memory = _memory(plan, out, workspace, query, kv_cache, block_table, lengths)
    _run(query, plan.launches(memory, softmax_scale, (key_scale, value_scale)))


@decode_attention.register_kernel("cpu")
def _(
    out: torch.Tensor,
    workspace: torch.Tensor,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    kv_format: str,
    softmax_scale: float,
    key_scale: float,
    value_scale: float,
    window: int,
) -> None:
    lengths = lengths[: query.shape[0]]
    scales = (key_scale, value_scale)
    out.copy_(
        torch_reference.attention(
            query, kv_cache, block_table, lengths, kv_format, 1, True, softmax_scale, scales, window
        )
    )


decode_attention.register_fake(_writes_only)


@torch.library.custom_op("sm70::verify_attention", mutates_args=("out", "workspace"), device_types="cuda")
def verify_attention(
    out: torch.Tensor,
    workspace: torch.Tensor,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    kv_format: str,
    queries: int,
    causal: bool,
    softmax_scale: float,
    key_scale: float,
    value_scale: float,
    window: int,
) -> None:
    """Attention of the last `queries` tokens of each sequence: a verifier (causal) or a draft's block (not causal).

    out, query: FP16 [sequences * queries, heads, D], D 128 or 256, heads a KV head times `queries` at most 64 (D 256:
    48). lengths: int32 [sequences], the queries included; 0 marks a padded sequence. The rest as `decode_attention`.
    """
    layout = cache_layout(kv_cache, kv_format)
    _require(queries >= 1 and query.shape[0] % queries == 0, f"{query.shape[0]} rows are no multiple of {queries}")
    plan = verify_plan(
        layout, query.shape[0] // queries, _group(query, layout), queries, causal, window,
        _device(query.device).multiprocessors,
    )  # fmt: skip
    _require(lengths.shape[0] >= plan.sequences, f"there must be {plan.sequences} lengths, not {lengths.shape[0]}")
    memory = _memory(plan, out, workspace, query, kv_cache, block_table, lengths)
    _run(query, plan.launches(memory, softmax_scale, (key_scale, value_scale)))


@verify_attention.register_kernel("cpu")
def _(
    out: torch.Tensor,
    workspace: torch.Tensor,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    kv_format: str,
    queries: int,
    causal: bool,
    softmax_scale: float,
    key_scale: float,
    value_scale: float,
    window: int,
) -> None:
    lengths = lengths[: query.shape[0] // queries]
    scales = (key_scale, value_scale)
    out.copy_(
        torch_reference.attention(
            query, kv_cache, block_table, lengths, kv_format, queries, causal, softmax_scale, scales, window
        )
    )


verify_attention.register_fake(_writes_only)


@functools.lru_cache(maxsize=64)
def prefill_plan(
    layout: CacheLayout,
    group: int,
    sequences: tuple[tuple[int, int], ...],
    causal: bool,
    window: int,
    multiprocessors: int,
) -> PrefillPlan:
    """The plan that `prefill_attention` runs; kept, since all layers of a step share it."""
    plan = PrefillPlan(layout, group, sequences, multiprocessors, window, causal)
    plan.check()
    return plan


def prefill_work(
    kv_cache: torch.Tensor,
    kv_format: str,
    group: int,
    sequences: Sequence[tuple[int, int]],
    causal: bool = True,
    window: int = 0,
) -> torch.Tensor:
    """The schedule of a prefill, int32 on the host; one serves all layers of a step with caches of one layout.

    sequences: (query tokens, context length with them) of each. On a GPU's cache; empty for one on the CPU.
    """
    if not kv_cache.is_cuda:
        return torch.empty(0, dtype=torch.int32)
    layout, multiprocessors = cache_layout(kv_cache, kv_format), _device(kv_cache.device).multiprocessors
    plan = prefill_plan(layout, group, tuple(sequences), causal, window, multiprocessors)
    return torch.tensor(plan.work(), dtype=torch.int32)


def prefill_workspace_bytes(dim: int, multiprocessors: int = plans.V100_SMS) -> int:
    """What the workspace of any prefill with this head dimension must have; its content is of no matter."""
    return _ALIGNMENT + prefill.prefill_workspace_bytes(dim, multiprocessors)


@torch.library.custom_op("sm70::prefill_attention", mutates_args=("out", "workspace"), device_types="cuda")
def prefill_attention(
    out: torch.Tensor,
    workspace: torch.Tensor,
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
    window: int,
) -> None:
    """Attention of many query tokens a sequence over its pages, which hold them already.

    out, query: FP16 [tokens of all sequences, heads, D], D 128 or 256. queries, lengths: query tokens and context
    length of each sequence, on the host: a CUDA graph would replay these lengths. work: `prefill_work` of the same, on
    the device. workspace: uint8 of `prefill_workspace_bytes`. The rest as `decode_attention`.
    """
    layout = cache_layout(kv_cache, kv_format)
    sequences = tuple(zip(queries, lengths, strict=True))
    multiprocessors = _device(query.device).multiprocessors
    plan = prefill_plan(layout, _group(query, layout), sequences, causal, window, multiprocessors)
    _require(query.shape == out.shape, f"out must be {list(query.shape)}, not {list(out.shape)}")
    _require(query.shape[0] == sum(queries), f"there are {query.shape[0]} query tokens for {sum(queries)}")
    for name, rows in (("query", query), ("out", out)):
        _require(rows.dtype == torch.float16, f"{name} must be FP16, not {rows.dtype}")
        _require(rows.stride(2) == 1 and rows.stride(1) == layout.dim, f"heads must lie side by side in {name}")
    good = block_table.dtype == torch.int32 and block_table.shape[0] >= len(sequences) and block_table.stride(1) == 1
    _require(good, f"the block table must be int32 with a row for each of {len(sequences)} sequences")
    good = work.dtype == torch.int32 and work.is_cuda and work.is_contiguous() and work.numel() > multiprocessors
    _require(good, "work must be what prefill_work made of these sequences, on the device")
    partial, needed = _up(plan.partial_floats * 4), prefill_workspace_bytes(layout.dim, multiprocessors)
    has = workspace.numel() * workspace.element_size()
    _require(has >= needed and workspace.is_contiguous(), f"the prefill workspace must have {needed} bytes, not {has}")
    start = workspace.data_ptr()
    memory = PrefillMemory(
        q=query.data_ptr(), out=out.data_ptr(), key=kv_cache.data_ptr(),
        value=kv_cache.data_ptr() + layout.value_offset, block_table=block_table.data_ptr(), work=work.data_ptr(),
        partial=start, stats=start + partial, table_stride=block_table.stride(0), q_stride=query.stride(0),
        out_stride=out.stride(0),
    )  # fmt: skip
    _run(query, plan.launches(memory, softmax_scale, (key_scale, value_scale)))


@prefill_attention.register_kernel("cpu")
def _(
    out: torch.Tensor,
    workspace: torch.Tensor,
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
    window: int,
) -> None:
    first, scales = 0, (key_scale, value_scale)
    for i, (rows, length) in enumerate(zip(queries, lengths, strict=True)):
        part = slice(first, first + rows)
        first += rows
        size = torch.tensor([length])
        out[part] = torch_reference.attention(
            query[part], kv_cache, block_table[i : i + 1], size, kv_format, rows, causal, softmax_scale, scales, window
        )


prefill_attention.register_fake(_writes_only)


# ---------------------------------------------------------------- NVFP4 linears

FEW_ROWS = 64
"""What one launch of the small kernels takes."""
MANY_ROWS = 128
"""Above it, weights are unpacked for cuBLAS: two small launches read less than one unpacked copy."""
CHAIN_ROWS = 64
"""What one launch of a chain takes."""
_BLOCK = 128  # columns: the least that is unpacked at a time


def _columns(space: int, rows: int, n: int, k: int, gated: bool) -> int:
    """How many columns of the weights fit into `space` bytes, with the products of a gate and its up beside them."""
    each = 2 * (k + (2 * rows if gated else 0))
    return min(-(-n // 32) * 32, space // each // _BLOCK * _BLOCK)


def linear_workspace_bytes(
    max_rows: int, shapes: Iterable[tuple[int, int, bool]], limit: int = 64 << 20, chained: int = 0
) -> int:
    """What a workspace for these linears must have; make it once, with zeros, as uint8.

    shapes: (n, k, gated) of each packed weight, n as the operators take it. limit: bytes beyond which weights are
    unpacked in several pieces; a piece has at least 128 columns. chained: the inner size of `nvfp4_mlp`, which then
    is the only user of the workspace.
    """
    needed = 0
    for n, k, gated in shapes if max_rows > MANY_ROWS else ():
        each = 2 * (k + (2 * max_rows if gated else 0))
        most = -(-n // _BLOCK) * _BLOCK
        needed = max(needed, each * min(most, max(_BLOCK, limit // each // _BLOCK * _BLOCK)))
    return (_chain_bytes(chained) if chained else 0) + needed


def _chain_bytes(inner: int) -> int:
    """The front of an `nvfp4_mlp` workspace: of its one launch for few rows."""
    return plans.CHAIN_STATE_BYTES + 2 * (2 * CHAIN_ROWS * inner)


def _matrix(x: torch.Tensor, weight: torch.Tensor, n: int, gated: bool) -> torch.Tensor:
    k = x.shape[-1]
    _require(x.dtype == torch.float16, f"activations must be FP16, not {x.dtype}")
    words = packed_words(n, k) * (2 if gated else 1)
    good = weight.dtype == torch.int32 and weight.is_contiguous() and weight.numel() == words and k % 64 == 0
    _require(
        good,
        f"the packed weights of [{n}, {k}]{' twice' if gated else ''} must be {words} int32 words, K a multiple of 64; "
        f"they are {weight.numel()} of {weight.dtype}",
    )
    rows = x.reshape(-1, k)
    return rows if rows.stride(1) == 1 and rows.stride(0) % 8 == 0 else rows.contiguous()


def _count(route: str) -> None:
    count(route, capture=torch.cuda.is_current_stream_capturing())


def _few(
    out: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, n: int, scale: float, up_scale: float | None
) -> None:
    step = rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]
    _run(
        rows,
        (
            plans.linear(
                m=min(FEW_ROWS, rows.shape[0] - first), n=n, k=rows.shape[1], weight=weight.data_ptr(),
                a=rows.data_ptr() + first * step * 2, out=out.data_ptr() + first * n * 2, scale=scale,
                a_stride=step, out_stride=n, up_scale=up_scale,
            )
            for first in range(0, rows.shape[0], FEW_ROWS)
        ),
    )  # fmt: skip


class _Precise:
    """cuBLAS sums in FP32 to the end: the parts of a product that was split are not added in FP16."""

    def __enter__(self) -> None:
        self._before = torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    def __exit__(self, *_: object) -> None:
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = self._before


def _many(
    out: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    workspace: torch.Tensor,
    n: int,
    scale: float,
    up_scale: float | None,
) -> None:
    """Unpacks the weights, some columns at a time, and multiplies with cuBLAS: FP16 in, FP32 sums and scale."""
    gated, (m, k) = up_scale is not None, rows.shape
    columns = _columns(workspace.numel(), m, n, k, gated)
    _require(
        columns > 0 and workspace.dtype == torch.uint8 and workspace.is_contiguous(),
        f"the workspace of {m} rows of [{n}, {k}] must have {linear_workspace_bytes(m, [(n, k, gated)], 0)} bytes of "
        f"contiguous uint8, not {workspace.numel()} of {workspace.dtype} (linear_workspace_bytes says how many)",
    )
    scratch = workspace.view(torch.float16)
    unpacked = scratch[: columns * k].view(columns, k)
    step = 2 if gated else 1

    def product(first: int, part: int, by: float, to: torch.Tensor) -> None:
        tiles = -(-to.shape[1] // 32)
        launch = plans.expand(
            weight=weight.data_ptr(), out=unpacked.data_ptr(), k=k, tiles=tiles, first=first // 32 * step + part,
            step=step,
        )  # fmt: skip
        _run(rows, (launch,))
        torch.addmm(to, rows, unpacked[: to.shape[1]].t(), beta=0, alpha=by, out=to)

    with _Precise():
        for first in range(0, n, columns):
            width = min(columns, n - first)
            if up_scale is None:
                product(first, 0, scale, out[:, first : first + width])
                continue
            gate, up = scratch[columns * k : columns * k + 2 * m * width].view(2, m, width)
            product(first, 0, scale, gate)
            product(first, 1, up_scale, up)
            launch = plans.silu_times(
                gate=gate.data_ptr(), up=up.data_ptr(), out=out.data_ptr() + 2 * first, m=m, n=width, stride=width,
                out_stride=n,
            )  # fmt: skip
            _run(rows, (launch,))


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, workspace: torch.Tensor, n: int, scale: float, up_scale: float | None
) -> torch.Tensor:
    rows = _matrix(x, weight, n, gated=up_scale is not None)
    out = torch.empty((rows.shape[0], n), dtype=torch.float16, device=x.device)
    if rows.shape[0] > MANY_ROWS:
        _count("nvfp4_packed_prefill")
        _many(out, rows, weight, workspace, n, scale, up_scale)
    elif rows.shape[0]:
        few = "nvfp4_qpn2" if up_scale is None else "nvfp4_gated"
        _count(few if rows.shape[0] <= FEW_ROWS else "nvfp4_batch")
        _few(out, rows, weight, n, scale, up_scale)
    return out.view(*x.shape[:-1], n)


@torch.library.custom_op("sm70::nvfp4_packed_linear", mutates_args=("workspace",), device_types="cuda")
def nvfp4_packed_linear(
    x: torch.Tensor, weight: torch.Tensor, workspace: torch.Tensor, n: int, scale: float
) -> torch.Tensor:
    """scale * x [..., K] times the transposed weights [n, K]: FP16 [..., n], accumulated in FP32, rounded once.

    weight: int32 words of `torch_weights.pack`. n: columns of the result, a multiple of 8. workspace: uint8 of
    `linear_workspace_bytes`, used with many rows only.
    """
    return _multiply(x, weight, workspace, n, scale, None)


@nvfp4_packed_linear.register_kernel("cpu")
def _(x: torch.Tensor, weight: torch.Tensor, workspace: torch.Tensor, n: int, scale: float) -> torch.Tensor:
    rows = _matrix(x, weight, n, gated=False)
    count("nvfp4_linear_reference")
    return torch_reference.nvfp4_linear(rows, weight, n, scale).view(*x.shape[:-1], n)


@nvfp4_packed_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, workspace: torch.Tensor, n: int, scale: float) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], n)


@torch.library.custom_op("sm70::nvfp4_packed_swiglu", mutates_args=("workspace",), device_types="cuda")
def nvfp4_packed_swiglu(
    x: torch.Tensor, weight: torch.Tensor, workspace: torch.Tensor, n: int, gate_scale: float, up_scale: float
) -> torch.Tensor:
    """silu(gate_scale * x gate^T) * (up_scale * x up^T): FP16 [..., n].

    Up to 128 rows in FP32 and rounded once; with more, gate and up are rounded to FP16 before silu.
    weight: int32 words of `torch_weights.pack` with gated=True. n: columns of gate, and of up.
    """
    return _multiply(x, weight, workspace, n, gate_scale, up_scale)


@nvfp4_packed_swiglu.register_kernel("cpu")
def _(
    x: torch.Tensor, weight: torch.Tensor, workspace: torch.Tensor, n: int, gate_scale: float, up_scale: float
) -> torch.Tensor:
    rows = _matrix(x, weight, n, gated=True)
    count("nvfp4_linear_reference")
    return torch_reference.nvfp4_swiglu(rows, weight, n, gate_scale, up_scale).view(*x.shape[:-1], n)


@nvfp4_packed_swiglu.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, workspace: torch.Tensor, n: int, gate_scale: float, up_scale: float
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], n)


@torch.library.custom_op("sm70::nvfp4_mlp", mutates_args=("workspace",), device_types="cuda")
def nvfp4_mlp(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    workspace: torch.Tensor,
    inner: int,
    n: int,
    gate_scale: float,
    up_scale: float,
    down_scale: float,
) -> torch.Tensor:
    """down of (silu(gate x) * up x): FP16 [..., n], up to 64 rows in one launch; the inner result rounded to FP16.

    gate_up, down: int32 words of `torch_weights.pack`, the first one gated. inner: columns of gate, and K of down.
    workspace: `linear_workspace_bytes(..., chained=inner)` of uint8, zeros when it was made, of this operator only.
    """
    rows, needed = _matrix(x, gate_up, inner, gated=True), _chain_bytes(inner)
    if not 1 <= rows.shape[0] <= CHAIN_ROWS:
        between = _multiply(rows, gate_up, workspace[needed:], inner, gate_scale, up_scale)
        return _multiply(between, down, workspace[needed:], n, down_scale, None).view(*x.shape[:-1], n)
    m, k = rows.shape
    words = packed_words(n, inner)
    good = down.dtype == torch.int32 and down.is_contiguous() and down.numel() == words
    _require(good, f"the packed weights of [{n}, {inner}] must be {words} int32 words; they are {down.numel()}")
    good = workspace.numel() * workspace.element_size() >= needed and workspace.is_contiguous()
    _require(good, f"the workspace must have {needed} contiguous bytes or more (linear_workspace_bytes, chained)")
    out = torch.empty((m, n), dtype=torch.float16, device=x.device)
    _count("nvfp4_qpn2")
    step = rows.stride(0) if m > 1 else k
    ops = (
        plans.ChainOp(gate_up.data_ptr(), rows.data_ptr(), 0, gate_scale, inner, k, step, 0, up_scale),
        plans.ChainOp(down.data_ptr(), 0, out.data_ptr(), down_scale, n, inner, 0, n, reads=0),
    )
    launch = plans.chain(
        ops, m=m, workspace=workspace.data_ptr(), workspace_bytes=needed,
        multiprocessors=_device(x.device).multiprocessors,
    )  # fmt: skip
    _run(rows, (launch,))
    return out.view(*x.shape[:-1], n)


@nvfp4_mlp.register_kernel("cpu")
def _(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    workspace: torch.Tensor,
    inner: int,
    n: int,
    gate_scale: float,
    up_scale: float,
    down_scale: float,
) -> torch.Tensor:
    rows = _matrix(x, gate_up, inner, gated=True)
    count("nvfp4_linear_reference")
    between = torch_reference.nvfp4_swiglu(rows, gate_up, inner, gate_scale, up_scale)
    return torch_reference.nvfp4_linear(between, down, n, down_scale).view(*x.shape[:-1], n)


@nvfp4_mlp.register_fake
def _(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    workspace: torch.Tensor,
    inner: int,
    n: int,
    gate_scale: float,
    up_scale: float,
    down_scale: float,
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], n)
