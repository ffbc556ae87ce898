"""Prefill attention against the FP64 reference of checks.py, and the bridged way against the paged one, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .backend import Array, Backend, poison
from .checks import (
    HALF_ULP,
    NOWHERE,
    POISON,
    SMALLEST,
    Result,
    Size,
    judge,
    random_codes,
)
from .plans import CacheLayout, KvFormat
from .prefill import BridgePlan, PrefillMemory, PrefillPlan, prefill_workspace_bytes


@dataclass(frozen=True)
class PrefillCase:
    """A batch of (query tokens, context). `dense`: K and V as rows instead of pages (FP16)."""

    format: KvFormat
    dim: int
    group: int
    sequences: tuple[tuple[int, int], ...]
    page: int = 16
    ctas: int = 3
    heads: int = 1
    window: int = 0
    causal: bool = True
    packed: bool = False
    dense: bool = False
    amplitude: float = 1.0

    @property
    def plan(self) -> PrefillPlan:
        """The launches' plan."""
        if not self.dense:
            make = CacheLayout.packed if self.packed else CacheLayout.split
            layout = make(self.format, self.page, self.heads, self.dim)
            return PrefillPlan(layout, self.group, self.sequences, self.ctas, self.window, self.causal)
        # Rows without gaps, a few halves apart, as projections leave them.
        layout = PrefillPlan.dense_layout(self.heads, self.dim, self.heads * self.dim * 2 + 64)
        starts = tuple(int(x) for x in np.cumsum([0, *(length for _, length in self.sequences)])[:-1])
        return PrefillPlan(layout, self.group, self.sequences, self.ctas, self.window, self.causal, starts)

    @property
    def name(self) -> str:
        """For tables."""
        text = f"{self.plan.kernel} g{self.group} heads {self.heads} ctas {self.ctas}"
        text += " dense" if self.dense else f" page {self.page}"
        text += "" if self.causal else " not causal"
        text += f" window {self.window}" if self.window else ""
        text += " packed" if self.packed else ""
        text += f" x{self.amplitude:g}" if self.amplitude != 1.0 else ""
        sequences = self.sequences if len(self.sequences) <= 4 else f"{len(self.sequences)} sequences"
        return f"{text} queries, lengths {sequences}"


@dataclass(frozen=True)
class PrefillData:
    """Inputs: the bytes of K and of V (one array for pages), block table, queries, and K and V as stored values."""

    key: Array
    value: Array | None
    table: Array | None
    q: Array
    keys: list[Array]
    values: list[Array]


def _seen(case: PrefillCase, queries: int, length: int) -> int:
    """The first position that a query of a sequence sees."""
    return max(0, length - queries - case.window + 1) if case.window else 0


def prefill_data(case: PrefillCase, seed: int = 0) -> PrefillData:
    """Makes the inputs of a case; slots that no query sees are poison, pages that hold none of the others nowhere."""
    rng = np.random.default_rng([seed, case.dim, case.group, case.page, sum(x for _, x in case.sequences)])
    plan, row = case.plan, case.dim * case.format.bytes
    total_queries, width = sum(queries for queries, _ in case.sequences), case.heads * case.group * case.dim
    q = np.full((total_queries, width + 64), np.nan, np.float16)
    q[:, :width] = rng.standard_normal((total_queries, width)) * case.amplitude
    stored = []  # per sequence: K and V, each bytes [tokens, heads, row] and values [tokens, heads, D]
    for _, length in case.sequences:
        for _part in (0, 1):
            raw, value = random_codes(rng, case.format, length * case.heads * case.dim, case.amplitude)
            stored.append((raw.reshape(length, case.heads, row), value.reshape(length, case.heads, case.dim)))
    keys, values = ([value for _, value in stored[part::2]] for part in (0, 1))
    if case.dense:
        rows = np.full((2, sum(x for _, x in case.sequences), plan.layout.token_stride), POISON[case.format], np.uint8)
        at = 0
        for i, (queries, length) in enumerate(case.sequences):
            first = _seen(case, queries, length)
            for part in (0, 1):
                raw = stored[2 * i + part][0].reshape(length, -1)
                rows[part, at + first : at + length, : raw.shape[1]] = raw[first:]
            at += length
        return PrefillData(rows[0], rows[1], None, q, keys, values)
    used = [-(-length // case.page) for _, length in case.sequences]
    order = rng.permutation(sum(used) + 2).astype(np.int32)
    table = np.full((len(used), max(used) + 2), NOWHERE, np.int32)
    cache = np.full((sum(used) + 2) * plan.layout.block_stride, POISON[case.format], np.uint8)
    blocks = cache.reshape(sum(used) + 2, -1)
    if case.packed:
        view = blocks.reshape(-1, case.heads, case.page, 2, row).transpose(0, 3, 2, 1, 4)
    else:
        view = blocks.reshape(-1, 2, case.page, case.heads, row)
    taken = 0
    for i, (queries, length) in enumerate(case.sequences):
        first = _seen(case, queries, length)
        live = range(first // case.page, used[i])
        table[i, live.start : live.stop] = order[taken + live.start : taken + live.stop]
        taken += used[i]
        for j in live:
            begin, end = max(first, j * case.page), min(length, (j + 1) * case.page)
            for part in (0, 1):
                raw = stored[2 * i + part][0]
                view[table[i, j], part, begin - j * case.page : end - j * case.page] = raw[begin:end]
    return PrefillData(cache, None, table, q, keys, values)


def run_prefill(backend: Backend, case: PrefillCase, data: PrefillData, *, bridged: bool = False) -> Array:
    """The output with the untouched ends of its rows. `bridged`: through FP16 rows."""
    plan, width = case.plan, case.heads * case.group * case.dim
    key = backend.put(data.key)
    value_at = key.address + plan.layout.value_offset
    table = None if data.table is None else backend.put(data.table)
    if data.value is not None:
        value = backend.put(data.value)
        value_at = value.address
    if bridged:
        assert table is not None
        assert data.table is not None
        bridge = BridgePlan(plan.layout, tuple(length for _, length in case.sequences))
        shape = (bridge.rows, case.heads, case.dim)
        copies, lengths = [backend.put(poison(shape)) for _ in range(2)], backend.put(np.array(bridge.work(), np.int32))
        backend.run(
            bridge.launch(
                cache=key.address, block_table=table.address, table_stride=data.table.shape[1], work=lengths.address,
                key=copies[0].address, value=copies[1].address,
            )
        )  # fmt: skip
        plan, value_at = bridge.prefill(plan), copies[1].address
    out = backend.put(poison((data.q.shape[0], width + 16)))
    partial = backend.put(poison(plan.partial_floats, np.float32))
    stats = backend.put(poison(plan.stats_floats, np.float32))
    assert 4 * (plan.partial_floats + plan.stats_floats) == prefill_workspace_bytes(case.dim, case.ctas)
    q, work = backend.put(data.q), backend.put(np.array(plan.work(), np.int32))
    memory = PrefillMemory(
        q=q.address,
        out=out.address,
        key=copies[0].address if bridged else key.address,
        value=value_at,
        block_table=0 if table is None or bridged else table.address,
        work=work.address,
        partial=partial.address,
        stats=stats.address,
        table_stride=0 if data.table is None else data.table.shape[1],
        q_stride=data.q.shape[1],
        out_stride=width + 16,
    )
    for launch in plan.launches(memory, case.dim**-0.5):
        backend.run(launch)
    return out.read()


def prefill_reference(case: PrefillCase, data: PrefillData, sample: int = 0) -> tuple[Array, Array, Array]:
    """Query tokens (all, or about `sample` of a sequence), output in FP64 [tokens, heads, group, D], tolerance."""
    width, at = case.heads * case.group * case.dim, 0
    chosen, wants, tolerances = [], [], []
    for i, (queries, length) in enumerate(case.sequences):
        step = max(1, queries // sample) if sample else 1
        for j in sorted({*range(0, queries, step), *range(max(0, queries - 2), queries)}):
            position = length - queries + j
            end = position + 1 if case.causal else length
            start = max(0, position - case.window + 1) if case.window else 0
            q = data.q[at + j, :width].astype(np.float64).reshape(case.heads, case.group, case.dim)
            want = np.zeros_like(q)
            tolerance = np.full_like(q, SMALLEST)
            for h in range(case.heads):
                key, value = (x[i][start:end, h].astype(np.float64) for x in (data.keys, data.values))
                score = q[h] @ key.T * case.dim**-0.5
                weight = np.exp(score - score.max(axis=1, keepdims=True))
                weight /= weight.sum(axis=1, keepdims=True)
                want[h] = weight @ value
                tolerance[h] += HALF_ULP * (np.abs(want[h]) + 1.25 * (weight @ np.abs(value)))
            chosen.append(at + j)
            wants.append(want)
            tolerances.append(tolerance)
        at += queries
    return np.array(chosen), np.array(wants), np.array(tolerances)


def check_prefill(backend: Backend, case: PrefillCase, sample: int = 0) -> Iterator[Result]:
    """One case; for FP8 also the bridged way, which must give the same bits."""
    data = prefill_data(case)
    got = run_prefill(backend, case, data)
    width = case.heads * case.group * case.dim
    rows, want, tolerance = prefill_reference(case, data, sample)
    note = "" if np.isnan(got[:, width:]).all() else "wrote past the rows of the output"
    note = "left rows of the output out" if np.isnan(got[:, :width]).any() else note
    yield judge(case.name, got[rows, :width].reshape(want.shape), want, tolerance, note)
    if case.format is not KvFormat.F16 and not case.window:
        bridged = run_prefill(backend, case, data, bridged=True)
        wrong = int(np.count_nonzero(bridged[:, :width].view(np.uint16) != got[:, :width].view(np.uint16)))
        yield Result(f"bridge: {case.name}", np.inf if wrong else 0.0, 0.0, f"{wrong} halves differ" if wrong else "")


def prefill_cases(size: Size, formats: tuple[KvFormat, ...] = tuple(KvFormat)) -> Iterator[PrefillCase]:
    """Row tiles and steps of 128 with every kind of end, cut row tiles, prefixes, windows, batches, pages, rows."""
    for kv_format in formats:
        for dim in (128, 256):
            yield PrefillCase(kv_format, dim, 6, ((21, 150), (1, 1), (23, 257)), page=48, ctas=2)
            yield PrefillCase(kv_format, dim, 5, ((30, 300), (0, 70)), ctas=3, heads=2, window=70, packed=True)
            if kv_format is KvFormat.F16:
                yield PrefillCase(kv_format, dim, 4, ((33, 33), (40, 145)), ctas=4, heads=2, dense=True)
            if size is not Size.SMALL:
                yield PrefillCase(kv_format, dim, 1, ((127, 127), (128, 255), (129, 385)), page=112, causal=False)
                yield PrefillCase(kv_format, dim, 16, ((17, 640), (8, 8)), page=784, ctas=7, amplitude=6.0)
                yield PrefillCase(kv_format, dim, 8, ((64, 1000),), page=832, ctas=5, window=200, causal=False)
            if size is Size.DEVICE:
                yield PrefillCase(kv_format, dim, 6, ((512, 5000), (1000, 1000), (77, 16384)), page=1648, ctas=132)
                yield PrefillCase(kv_format, dim, 6, ((4096, 8192),), page=2048, ctas=80)
                yield PrefillCase(kv_format, dim, 8, ((3000, 3000), (700, 4000)), ctas=80, heads=2, window=2048)
    if size is Size.DEVICE:
        for queries, length in ((4096, 32768), (8000, 40000), (8192, 131072), (4096, 262144)):
            yield PrefillCase(KvFormat.E4M3, 256, 6, ((queries, length),), page=2048, ctas=80)
        yield PrefillCase(KvFormat.F16, 256, 6, ((8192, 8192),), ctas=80, dense=True)


def check_prefills(backend: Backend, size: Size, formats: tuple[KvFormat, ...] = tuple(KvFormat)) -> Iterator[Result]:
    """The whole grid; on a device a sample of the query tokens is compared."""
    for case in prefill_cases(size, formats):
        yield from check_prefill(backend, case, sample=16 if size is Size.DEVICE else 0)
