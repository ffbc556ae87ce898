"""Times prefill on the GPU at hand: useful TFLOP/s, and the V100's by the proxy of docs/engine/v100_model.md.

Useful: 4 * D operations for every pair of a query row and a position that it sees. A prediction scales the measured
rate by the clocks; the stand-in s3 has the V100's matrix rate (9.3 cycles a multiply against 8.4), s2 about twice of
it: for a kernel that the matrix unit may bind, s3 is the figure and s2 the bound from above.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from . import v100
from .bench import FINITE_FP8, FINITE_HALF, USEFUL_BYTES, Bench
from .plans import CacheLayout, KvFormat, Launch
from .prefill import PrefillMemory, PrefillPlan

LAUNCHES = 2


@dataclass(frozen=True)
class PrefillBench:
    """One sequence."""

    format: KvFormat
    dim: int
    group: int
    queries: int
    length: int

    @property
    def name(self) -> str:
        """For tables."""
        return f"d{self.dim} g{self.group} queries {self.queries} context {self.length}"


@dataclass(frozen=True)
class PrefillRow:
    """One figure: `tflops` useful on this card, `v100_tflops` at a V100's clock."""

    kernel: str
    case: str
    milliseconds: float
    low: float
    high: float
    tflops: float
    gigahertz: float
    v100_tflops: float
    v100_milliseconds: float
    kind: str
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


PREFILL_CASES: tuple[PrefillBench, ...] = (
    PrefillBench(KvFormat.E4M3, 256, 6, 4096, 4096),
    *(PrefillBench(KvFormat.E4M3, 256, 6, 4096, n) for n in (32768, 131072)),
    PrefillBench(KvFormat.E4M3, 256, 6, 8000, 40000),
    *(PrefillBench(KvFormat.E4M3, 256, 6, 8192, n) for n in (32768, 131072)),
    PrefillBench(KvFormat.E4M3, 256, 6, 512, 32768),
    PrefillBench(KvFormat.E5M2, 256, 6, 8192, 32768),
    PrefillBench(KvFormat.F16, 256, 6, 8192, 32768),
    PrefillBench(KvFormat.E4M3, 128, 8, 8192, 32768),
    PrefillBench(KvFormat.F16, 128, 8, 8192, 32768),
)


def prefill_row(bench: Bench, case: PrefillBench, page: int = 2048) -> PrefillRow:
    """One case on the bench's part of the card; the useful rate counts causal pairs only."""
    device, sms = bench.device, bench.part.multiprocessors
    layout = CacheLayout.split(case.format, page, 1, case.dim, bench.spread)
    plan = PrefillPlan(layout, case.group, ((case.queries, case.length),), sms)
    blocks = -(-case.length // page)
    source = bench.source(FINITE_HALF if case.format is KvFormat.F16 else FINITE_FP8)
    copies = max(1, USEFUL_BYTES * bench.spread // (blocks * layout.block_stride))
    rng = np.random.default_rng(1)
    table = device.put(rng.permutation(blocks).astype(np.int32))
    width = case.group * case.dim
    q = device.put((rng.standard_normal((case.queries, width)) * 0.3).astype(np.float16))
    out = device.put(np.zeros((case.queries, width), np.float16))
    partial = device.put(np.zeros(plan.partial_floats, np.float32))
    stats = device.put(np.zeros(plan.stats_floats, np.float32))
    work = device.put(np.array(plan.work(), np.int32))

    def make(i: int) -> list[tuple[Launch, int]]:
        cache = source.address + i % copies * blocks * layout.block_stride
        memory = PrefillMemory(
            q=q.address, out=out.address, key=cache, value=cache + layout.value_offset, block_table=table.address,
            work=work.address, partial=partial.address, stats=stats.address, table_stride=blocks, q_stride=width,
            out_stride=width,
        )  # fmt: skip
        return [(launch, bench.shared(launch)) for launch in plan.launches(memory, case.dim**-0.5)]

    times = [x / LAUNCHES for x in bench.part.time(make, LAUNCHES, repeats=3)]
    ghz = bench.part.gigahertz(bench.scratch)
    middle = statistics.median(times)
    pairs = case.queries * (case.length - case.queries) + case.queries * (case.queries + 1) // 2
    tflops = 4 * case.dim * case.group * pairs / middle * 1e-9
    scale = v100.GIGAHERTZ / ghz if bench.newer else 1.0
    return PrefillRow(
        kernel=plan.kernel, case=case.name, milliseconds=round(middle, 4), low=round(min(times), 4),
        high=round(max(times), 4), tflops=round(tflops, 2), gigahertz=round(ghz, 3),
        v100_tflops=round(tflops * scale, 2), v100_milliseconds=round(middle / scale, 4), kind=bench.kind,
        error=bench.error,
    )  # fmt: skip


def prefill_rows(bench: Bench, families: tuple[str, ...] = ()) -> Iterator[PrefillRow]:
    """Every case of the named families (a prefix is enough), or of all."""
    for case in PREFILL_CASES:
        if not families or any(f"attention_prefill_{case.format}".startswith(x) for x in families):
            yield prefill_row(bench, case)


def markdown(rows: list[PrefillRow]) -> str:
    """The rows as a table."""
    lines = [
        "| kernel | case | ms (low, high) | TFLOP/s here | V100 TFLOP/s | V100 ms | kind | set-up against a V100 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.kernel} | {row.case} | {row.milliseconds:.3f} ({row.low:.3f}, {row.high:.3f}) | {row.tflops:.1f} "
        f"| {row.v100_tflops:.1f} | {row.v100_milliseconds:.3f} | {row.kind} | {row.error} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"
