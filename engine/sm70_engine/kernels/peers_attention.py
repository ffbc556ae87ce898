"""Ways to compute one attention case on the same data: our kernels, and whatever else the machine has.

Every way reads the same numbers: our kernels, Triton and FlashInfer the paged cache through one block table, torch and
flash-attn a dense FP16 copy of it, since neither reads ours on every card. `copies` caches of equal content lie apart
in memory, so that none stays in the L2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from . import plans
from .bench import AttentionBench
from .bench_prefill import PrefillBench
from .device import Device
from .plans import AttentionMemory, CacheLayout, DecodePlan, KvFormat, Launch, VerifyPlan
from .prefill import PrefillMemory, PrefillPlan

ROTATE_BYTES = 1 << 29
# Bits that may be set in random codes, so that all values are finite and at most about 1 (E5M2: half of that).
_FINITE = {KvFormat.E4M3: 0xB7, KvFormat.E5M2: 0xB7, KvFormat.F16: 0xBBFF}


@dataclass(frozen=True)
class Way:
    """One way: `call(i)` computes with copy i. It returns the result, or None when that says nothing (stand-ins).

    `bytes`: of K and V, or of weights, that a call must read. `multiplies`: None, or operations, for a rate.
    """

    name: str
    bytes: int
    call: Callable[[int], torch.Tensor | None]


@dataclass(frozen=True)
class Case:
    """What decode, verify and prefill cases have in common."""

    format: KvFormat
    dim: int
    group: int
    heads: int
    sequences: int
    context: int
    page: int
    queries: int
    kind: str

    @classmethod
    def of(cls, case: AttentionBench | PrefillBench) -> Case:
        """From a benchmark's case."""
        if isinstance(case, PrefillBench):
            return cls(case.format, case.dim, case.group, 1, 1, case.length, 2048, case.queries, "prefill")
        kind = "verify" if case.queries else "decode"
        return cls(
            case.format, case.dim, case.group, case.heads, case.sequences, case.context, case.page, case.queries or 1,
            kind,
        )  # fmt: skip


class Data:
    """The tensors of a case, on the current device."""

    def __init__(self, case: Case, device: str = "cuda", rotate: int = ROTATE_BYTES) -> None:
        self.case = case
        half = case.format is KvFormat.F16
        pages = -(-case.context // case.page)
        blocks = pages * case.sequences
        shape = (blocks, 2, case.page, case.heads, case.dim)
        self.bytes = 2 * case.sequences * case.context * case.heads * case.dim * case.format.bytes
        self.copies = max(1, rotate // self.bytes)
        generator = torch.Generator(device=device).manual_seed(0)
        kind = torch.int16 if half else torch.uint8
        low, high = (-(1 << 15), 1 << 15) if half else (0, 256)
        mask = _FINITE[case.format] - (1 << 16 if half else 0)
        raw = torch.randint(low, high, shape, dtype=kind, device=device, generator=generator) & mask
        one = raw.view(torch.float16) if half else raw
        self.caches = one.unsqueeze(0).repeat(self.copies, *[1] * len(shape))
        order = torch.randperm(blocks, device=device, generator=generator)
        self.table = order.to(torch.int32).view(case.sequences, pages)
        self.lengths = torch.full((case.sequences,), case.context, dtype=torch.int32, device=device)
        rows = (case.sequences * case.queries, case.heads * case.group, case.dim)
        self.q = torch.randn(rows, dtype=torch.float16, device=device, generator=generator) * 0.3
        self.out = torch.empty_like(self.q)

    def dense(self) -> torch.Tensor:
        """FP16 [2, sequences, heads, context, D], the cache as it is read."""
        case = self.case
        one = self.caches[0]
        if case.format is not KvFormat.F16:
            one = one.view({"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[case.format]).to(torch.float16)
        rows = one[self.table.long()].permute(2, 0, 4, 1, 3, 5)  # [2, sequences, heads, pages, page, D]
        return rows.reshape(2, case.sequences, case.heads, -1, case.dim)[:, :, :, : case.context].contiguous()


def _launcher(device: Device, launches: Callable[[int], tuple[Launch, ...]]) -> Callable[[int], None]:
    def call(i: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for launch in launches(i):
            device.kernels.launch(launch, stream)

    return call


def own_launches(data: Data, multiprocessors: int) -> Callable[[int], tuple[Launch, ...]]:
    """Our launches for copy i; the workspace lives as long as the function."""
    case, caches = data.case, data.caches
    layout = CacheLayout.split(case.format, case.page, case.heads, case.dim)
    where, stride = caches.device, caches.stride(0) * caches.element_size()
    width = case.heads * case.group * case.dim
    scale = case.dim**-0.5

    def floats(count: int) -> torch.Tensor:
        return torch.zeros(max(count, 1), dtype=torch.float32, device=where)

    if case.kind == "prefill":
        prefill = PrefillPlan(layout, case.group, ((case.queries, case.context),) * case.sequences, multiprocessors)
        room = floats(prefill.partial_floats), floats(prefill.stats_floats)
        work = torch.tensor(prefill.work(), dtype=torch.int32, device=where)

        def prefills(i: int) -> tuple[Launch, ...]:
            key = caches.data_ptr() + i * stride
            memory = PrefillMemory(
                q=data.q.data_ptr(), out=data.out.data_ptr(), key=key, value=key + layout.value_offset,
                block_table=data.table.data_ptr(), work=work.data_ptr(), partial=room[0].data_ptr(),
                stats=room[1].data_ptr(), table_stride=data.table.shape[1], q_stride=width, out_stride=width,
            )  # fmt: skip
            return prefill.launches(memory, scale)

        return prefills
    plan: DecodePlan | VerifyPlan
    if case.kind == "verify":
        splits = plans.verify_splits(layout, case.sequences, multiprocessors)
        plan = VerifyPlan(layout, case.sequences, case.group, splits, queries=case.queries)
    else:
        splits = plans.decode_splits(layout, case.sequences, case.group, multiprocessors)
        plan = DecodePlan(layout, case.sequences, case.group, splits)
    partial, stats = floats(plan.partial_floats), floats(plan.stats_floats)

    def launches(i: int) -> tuple[Launch, ...]:
        memory = AttentionMemory(
            q=data.q.data_ptr(), out=data.out.data_ptr(), cache=caches.data_ptr() + i * stride,
            block_table=data.table.data_ptr(), lengths=data.lengths.data_ptr(), partial=partial.data_ptr(),
            stats=stats.data_ptr(), table_stride=data.table.shape[1], q_stride=width,
            out_stride=width,
        )  # fmt: skip
        return plan.launches(memory, scale)

    return launches


def own(data: Data, device: Device, name: str, stand_in: bool = False) -> Way:
    """Our kernels, of the build that `device` loaded."""
    run = _launcher(device, own_launches(data, device.multiprocessors))

    def call(i: int) -> torch.Tensor | None:
        run(i)
        return None if stand_in else data.out

    return Way(name, data.bytes, call)


def triton_way(data: Data, ctas: int) -> Way:
    """Triton's kernel of peers_triton.py. Raises `ImportError` without Triton."""
    from .peers_triton import TritonAttention

    case = data.case
    attention = TritonAttention(case.format, data.caches[0], case.sequences, case.group, case.queries, ctas)
    return Way(
        "Triton, paged, sm_70-level code", data.bytes,
        lambda i: attention(data.q, data.caches[i], data.table, data.lengths),
    )  # fmt: skip


def sdpa_way(data: Data, dense: torch.Tensor) -> Way:
    """torch's own attention on copies of the dense cache [copies, 2, sequences, heads, context, D]."""
    case = data.case
    q = data.q.view(case.sequences, case.queries, -1, case.dim).transpose(1, 2)
    attend: Any = torch.nn.functional.scaled_dot_product_attention
    mask: Any = None
    if case.queries > 1:  # aligned to the end of the context, so that the fast paths stay open
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(case.queries, case.context)

    def call(i: int) -> torch.Tensor:
        result: torch.Tensor = attend(q, *dense[i % len(dense)], attn_mask=mask, enable_gqa=True)
        return result.transpose(1, 2)

    return Way("torch SDPA, dense FP16", _dense_bytes(case), call)


def flash_way(data: Data, dense: torch.Tensor) -> Way:
    """flash-attn on the same dense cache. Raises `ImportError` without it."""
    from flash_attn import flash_attn_with_kvcache

    case = data.case
    q = data.q.view(case.sequences, case.queries, -1, case.dim)
    pairs = dense.transpose(3, 4)
    return Way(
        "flash-attn, dense FP16", _dense_bytes(case),
        lambda i: flash_attn_with_kvcache(q, *pairs[i % len(pairs)], causal=True),
    )  # fmt: skip


def flashinfer_way(data: Data) -> Way:
    """FlashInfer on the paged cache itself. Raises `ImportError` without it."""
    import flashinfer

    case, device = data.case, data.q.device
    kind = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "f16": torch.float16}[case.format]
    caches = data.caches.view(kind)
    pages = data.table.shape[1]
    starts = torch.arange(case.sequences + 1, dtype=torch.int32, device=device)
    last = torch.full((case.sequences,), (case.context - 1) % case.page + 1, dtype=torch.int32, device=device)
    room = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    shape = (case.heads * case.group, case.heads, case.dim, case.page)
    types = {"q_data_type": torch.float16, "kv_data_type": kind}
    if case.queries == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(room, "NHD", use_tensor_cores=True)
        wrapper.plan(starts * pages, data.table.view(-1), last, *shape, **types)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(room, "NHD")
        wrapper.plan(
            starts * case.queries, starts * pages, data.table.view(-1), last, *shape, causal=True, **types
        )  # fmt: skip
    return Way("FlashInfer, paged", data.bytes, lambda i: wrapper.run(data.q, caches[i]))


def _dense_bytes(case: Case) -> int:
    return 2 * case.sequences * case.context * case.heads * case.dim * 2


def peers(data: Data, ctas: int) -> Iterator[tuple[str, Callable[[], Way]]]:
    """The others' ways by name, made when called; those that share the dense copy come last."""
    yield "triton", lambda: triton_way(data, ctas)
    yield "flashinfer", lambda: flashinfer_way(data)
    one = data.dense()
    dense = one.unsqueeze(0).repeat(max(1, ROTATE_BYTES // (one.numel() * 2)), *[1] * one.dim())
    yield "torch", lambda: sdpa_way(data, dense)
    yield "flash_attn", lambda: flash_way(data, dense)
