"""Times kernels on the GPU at hand and, on a card newer than Volta, predicts a V100 (docs/engine/v100_model.md).

The proxy runs a timing build (m8n8k4 replaced by a stand-in, weights and KV stretched to four bytes of traffic a useful
byte) on 80 multiprocessors of the card. A prediction is marked as one; on a V100 the plain build runs and the figures
are measurements. Buffers rotate through far more than the L2 holds; a figure is the median of the replays of a graph
of launches, its spread the lowest and the highest of them.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from . import plans, v100
from .device import Device, DeviceBuffer, Partition
from .plans import AttentionMemory, CacheLayout, ChainOp, DecodePlan, KvFormat, Launch, LinearTile, VerifyPlan

USEFUL_BYTES = 1 << 30
MEASURED = "measured"
LAYERS = 16  # full-attention layers of the 27B model
FINITE_FP8, FINITE_HALF = 0x37373737, 0x3BFF3BFF


@dataclass(frozen=True)
class Row:
    """One figure: `microseconds` of a launch, `useful_gbs` of weights or KV, `share` of 900 GB/s at a V100's clock.

    `issue_share`: of a V100's issue slots, by the main loop's sm_70 instructions at that rate; None where the static
    model has no figure for the loop. `error`: of a prediction's set-up on this card (v100.proxy_error), in words.
    """

    family: str
    case: str
    kernel: str
    microseconds: float
    low: float
    high: float
    useful_bytes: int
    useful_gbs: float
    gigahertz: float
    share: float
    v100_microseconds: float
    kind: str
    issue_share: float | None = None
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class AttentionBench:
    """A batch of equal contexts. `queries` 0: decode, one token per sequence."""

    format: KvFormat
    dim: int
    group: int
    sequences: int
    context: int
    page: int = 2048
    heads: int = 1
    window: int = 0
    queries: int = 0
    causal: bool = True

    @property
    def family(self) -> str:
        """The kernels' family."""
        return f"attention_{'verify' if self.queries else 'decode'}_{self.format}"

    @property
    def name(self) -> str:
        """For tables."""
        name = f"d{self.dim} g{self.group} B{self.sequences} context {self.context} page {self.page}"
        name += f" q{self.queries}" if self.queries else ""
        return name + (f" window {self.window}" if self.window else "")


@dataclass(frozen=True)
class LinearBench:
    """One product; `tile` None: what the dispatch chooses."""

    m: int
    n: int
    k: int
    tile: LinearTile | None = None
    gated: bool = False

    @property
    def name(self) -> str:
        """For tables."""
        return f"M{self.m} N{self.n} K{self.k}{' gated' if self.gated else ''}"


# The 27B model's linears per rank at TP4: gate_up, down, qkvz, o.
TP4_SHAPES = ((8704, 5120), (5120, 4352), (4128, 5120), (5120, 1536))
ATTENTION_CASES: tuple[AttentionBench, ...] = (
    *(AttentionBench(KvFormat.E4M3, 256, 6, b, n) for n in (4096, 32768, 131072) for b in (1, 4, 8)),
    *(AttentionBench(KvFormat.E4M3, 256, 8, 1, n) for n in (32768, 131072)),
    *(AttentionBench(f, 256, 6, 1, n) for f in (KvFormat.E5M2, KvFormat.F16) for n in (32768, 131072)),
    *(AttentionBench(f, 128, 8, 1, n) for f in KvFormat for n in (32768, 131072)),
    AttentionBench(KvFormat.E4M3, 256, 12, 1, 131072),
    AttentionBench(KvFormat.E4M3, 64, 8, 1, 131072),
    AttentionBench(KvFormat.E4M3, 256, 6, 1, 32768, page=16),
    AttentionBench(KvFormat.E4M3, 256, 6, 1, 131072, window=2048),
    *(AttentionBench(KvFormat.E4M3, 256, 6, b, n, queries=8) for n in (4096, 32768, 131072) for b in (1, 4)),
    *(AttentionBench(KvFormat.E4M3, 256, 6, 1, 131072, queries=q) for q in (2, 5)),
    *(AttentionBench(f, 256, 6, 1, 131072, queries=8) for f in (KvFormat.E5M2, KvFormat.F16)),
    AttentionBench(KvFormat.E4M3, 128, 8, 1, 131072, queries=8),
    AttentionBench(KvFormat.F16, 128, 4, 1, 131072, heads=2, window=2048, queries=8, causal=False),
)
LINEAR_CASES: tuple[LinearBench, ...] = (
    *(LinearBench(m, n, k) for m in (1, 8, 16, 32, 64) for n, k in TP4_SHAPES),
    *(LinearBench(m, 4352, 5120, gated=True) for m in (1, 8, 16)),
)


@dataclass(frozen=True)
class ChainBench:
    """Linears (n, k, gated) in one launch, each reading what the one before computed."""

    name: str
    m: int
    shapes: tuple[tuple[int, int, bool], ...]


MLP = ((4352, 5120, True), (5120, 4352, False))
FOUR = tuple((n, k, False) for n, k in TP4_SHAPES)
CHAIN_CASES: tuple[ChainBench, ...] = tuple(
    ChainBench(name, m, shapes)
    for m in (1, 8, 16, 32, 64)
    for name, shapes in (("mlp", MLP), *((f"{4 * n} linears", FOUR * n) for n in (1, 2, 4, 16)))
)


class Bench:
    """A device with a build, on part of the card or all of it."""

    def __init__(self, device: Device, spread: int, multiprocessors: int, kind: str) -> None:
        """`spread`: 4 for a stretched build, else 1. `kind` names what the figures are."""
        self.device, self.spread, self.kind = device, spread, kind
        self.part = Partition(device, multiprocessors)
        self.newer = device.kernels.capability[0] > 7
        self.scratch = device.put(np.zeros(1 << 16, np.uint64))
        self.error = ""
        self._sources: dict[int, DeviceBuffer] = {}

    def source(self, mask: int) -> DeviceBuffer:
        """Random bits under a mask that keeps them finite, `USEFUL_BYTES` times the stretch of them."""
        if mask not in self._sources:
            self._sources.clear()
            piece = np.random.default_rng(0).integers(0, 2**32, 1 << 24, dtype=np.uint32) & np.uint32(mask)
            self._sources[mask] = self.device.fill(piece, USEFUL_BYTES * self.spread)
        return self._sources[mask]

    def shared(self, launch: Launch) -> int:
        """Dynamic shared memory with which no more CTAs share a multiprocessor than on a V100."""
        if not self.newer:
            return launch.shared_bytes
        facts = self.device.kernels.facts[launch.family].kernels[launch.kernel]
        return v100.keep_ctas_off(facts.registers, launch.threads, launch.shared_bytes)

    def _row(
        self, family: str, case: str, make: Callable[[int], tuple[Launch, ...]], launches: int, useful: int
    ) -> Row:
        def prepared(i: int) -> list[tuple[Launch, int]]:
            return [(launch, self.shared(launch)) for launch in make(i)]

        times = [1e3 * x / launches for x in self.part.time(prepared, launches)]
        ghz = self.part.gigahertz(self.scratch)
        middle = statistics.median(times)
        gbs = useful / middle * 1e-3
        scale = v100.GIGAHERTZ / ghz if self.newer else 1.0
        kernel = make(0)[0].kernel
        needed = v100.loop_bytes(kernel)
        share = gbs * scale / v100.MEMORY_GBS
        issue = v100.loop_budget(self.device.kernels.facts[family].kernels[kernel], needed).issue if needed else None
        return Row(
            family=family, case=case, kernel=kernel, microseconds=round(middle, 3), low=round(min(times), 3),
            high=round(max(times), 3), useful_bytes=useful, useful_gbs=round(gbs, 1), gigahertz=round(ghz, 3),
            share=round(share, 3), v100_microseconds=round(middle / scale, 2), kind=self.kind,
            issue_share=None if issue is None else round(share * issue, 3), error=self.error,
        )  # fmt: skip

    def calibrate(self) -> dict[str, float]:
        """What the card gives in this set-up: useful read rate, launch cost, clock, m8n8k4 or stand-in cycles."""
        part, device, total = self.part, self.device, USEFUL_BYTES
        source = self.source(FINITE_FP8)
        read = Launch(
            "calibration", "read_stream", (part.multiprocessors * 8, 1, 1), 256, 0,
            (ctypes.c_void_p(source.address), ctypes.c_uint64(total // 16), ctypes.c_void_p(self.scratch.address)),
        )  # fmt: skip
        nothing = Launch("calibration", "nothing", (80, 1, 1), 256, 0, (ctypes.c_void_p(0),))
        result = {
            "multiprocessors": float(part.multiprocessors),
            "useful_read_gbs": total / statistics.median(part.time(lambda _: [(read, 0)], 3)) * 3e-6,
            "empty_launch_us": statistics.median(part.time(lambda _: [(nothing, 0)], 200)) * 5.0,
            "gigahertz": part.gigahertz(self.scratch),
        }
        out = device.put(np.zeros(80 * 512, np.float32))
        for name, chains in (("dependent", 1), ("independent", 4)):
            arguments = (
                ctypes.c_void_p(out.address), ctypes.c_void_p(self.scratch.address), ctypes.c_int(1000),
            )  # fmt: skip
            device.run(Launch("calibration", f"matrix_rate_{name}", (80, 1, 1), 512, 0, arguments))
            cycles = self.scratch.read()[:80].astype(np.float64)
            # 16 warps: four on each sub-partition
            result[f"mma_cycles_{name}"] = float(cycles.mean()) / 1000 / chains / 4
        if self.kind != MEASURED:
            found = v100.proxy_error(result)
            self.error = ", ".join(f"{name} {value:+.0%}" for name, value in found.items())
        return {name: round(value, 3) for name, value in result.items()}

    def attention(self, case: AttentionBench) -> Row:
        """One attention, both launches."""
        layout = CacheLayout.split(case.format, case.page, case.heads, case.dim, self.spread)
        token = 2 * case.heads * case.dim * case.format.bytes
        per_sequence = -(-case.context // case.page)
        need = case.sequences * per_sequence
        # As in a model: the layers of a step share one block table, each has a cache of its own.
        blocks = USEFUL_BYTES // (case.page * token)
        layers = max(1, min(LAYERS, blocks // need))
        per_layer = blocks // layers
        steps = max(1, min(per_layer // need, 16))
        source = self.source(FINITE_HALF if case.format is KvFormat.F16 else FINITE_FP8)
        rng = np.random.default_rng(1)
        tables = self.device.put(rng.permutation(per_layer)[: steps * need].astype(np.int32))
        lengths = self.device.put(np.full(case.sequences, case.context, np.int32))
        width, rows = case.heads * case.group * case.dim, case.sequences * (case.queries or 1)
        q = self.device.put((rng.standard_normal((rows, width)) * 0.3).astype(np.float16))
        out = self.device.put(np.zeros((rows, width), np.float16))
        sms = self.part.multiprocessors
        plan: DecodePlan | VerifyPlan
        if case.queries:
            splits = plans.verify_splits(layout, case.sequences, sms)
            plan = VerifyPlan(layout, case.sequences, case.group, splits, case.window, case.queries, case.causal)
        else:
            splits = plans.decode_splits(layout, case.sequences, case.group, sms)
            plan = DecodePlan(layout, case.sequences, case.group, splits, case.window)
        partial = self.device.put(np.zeros(plan.partial_floats, np.float32))
        stats = self.device.put(np.zeros(plan.stats_floats, np.float32))

        def make(i: int) -> tuple[Launch, ...]:
            layer, step = i % layers, i // layers % steps
            memory = AttentionMemory(
                q=q.address, out=out.address, cache=source.address + layer * per_layer * layout.block_stride,
                block_table=tables.address + step * need * 4, lengths=lengths.address, partial=partial.address,
                stats=stats.address, table_stride=per_sequence, q_stride=width, out_stride=width,
            )  # fmt: skip
            return plan.launches(memory, case.dim**-0.5)

        visible = min(case.context, case.window + (case.queries or 1) - 1 if case.window else case.context)
        return self._row(case.family, case.name, make, layers * steps, case.sequences * visible * token)

    def linear(self, case: LinearBench) -> Row:
        """One NVFP4 linear."""
        useful = case.n * case.k * 9 // 16 * (2 if case.gated else 1)
        copies = max(1, min(USEFUL_BYTES // useful, 200))
        source = self.source(FINITE_FP8)
        a = self.device.put((np.random.default_rng(2).standard_normal((64, case.k)) * 0.1).astype(np.float16))
        out = self.device.put(np.zeros(64 * case.n, np.float16))

        def make(i: int) -> tuple[Launch, ...]:
            product = plans.linear(
                m=case.m, n=case.n, k=case.k, weight=source.address + i % copies * useful * self.spread,
                a=a.address, out=out.address, scale=1e-3, a_stride=case.k, out_stride=case.n, tile=case.tile,
                up_scale=1e-3 if case.gated else None,
            )  # fmt: skip
            return (product,)

        return self._row("nvfp4_linear", case.name, make, copies, useful)

    def chain(self, case: ChainBench) -> Row:
        """Several NVFP4 linears in one launch."""
        sizes = [n * k * 9 // 16 * (2 if gated else 1) for n, k, gated in case.shapes]
        useful, last = sum(sizes), len(sizes) - 1
        copies, (n_last, _, _), (_, k_first, _) = max(1, USEFUL_BYTES // useful), case.shapes[last], case.shapes[0]
        source, rng = self.source(FINITE_FP8), np.random.default_rng(2)
        x = self.device.put((rng.standard_normal(64 * k_first) * 0.1).astype(np.float16))
        out = self.device.put(np.zeros(64 * n_last, np.float16))

        def linears(i: int) -> list[ChainOp]:
            at, ops = source.address + i % copies * useful * self.spread, []
            for j, (n, k, gated) in enumerate(case.shapes):
                to, scale = (out.address if j == last else 0), (1e-3 if gated else None)
                ops.append(ChainOp(at, 0 if j else x.address, to, 1e-3, n, k, k, n, scale, j - 1 if j else None))
                at += sizes[j] * self.spread
            return ops

        size = plans.chain_workspace_bytes(linears(0), case.m)
        workspace = self.device.put(np.zeros(size, np.uint8))
        tables = [
            self.device.put(np.frombuffer(bytes(plans.chain_table(linears(i), case.m)), np.uint8).copy())
            for i in range(copies)
        ]

        def make(i: int) -> tuple[Launch, ...]:
            return (
                plans.chain(
                    linears(i), m=case.m, workspace=workspace.address, workspace_bytes=size,
                    table=tables[i % copies].address, multiprocessors=self.part.multiprocessors,
                ),
            )  # fmt: skip

        return self._row("nvfp4_chain", f"M{case.m} {case.name}", make, copies, useful)

    def run(self, families: tuple[str, ...] = ()) -> Iterator[Row]:
        """Every case of the named families (a prefix is enough), or of all."""
        for case in ATTENTION_CASES:
            if not families or any(case.family.startswith(x) for x in families):
                yield self.attention(case)
        for product in LINEAR_CASES:
            if not families or any("nvfp4_linear".startswith(x) for x in families):
                yield self.linear(product)
        for chained in CHAIN_CASES:
            if not families or any("nvfp4_chain".startswith(x) for x in families):
                yield self.chain(chained)


def markdown(rows: list[Row]) -> str:
    """The rows as a table."""
    lines = [
        "| kernel | case | us (low, high) | useful GB/s | share of 900 GB/s | share of the issue rate | V100 us | kind "
        "| set-up against a V100 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        spread = f"{row.microseconds:.2f} ({row.low:.2f}, {row.high:.2f})"
        lines.append(
            f"| {row.kernel} | {row.case} | {spread} | {row.useful_gbs:.0f} | {row.share:.2f} "
            f"| {'' if row.issue_share is None else f'{row.issue_share:.2f}'} "
            f"| {row.v100_microseconds:.1f} | {row.kind} | {row.error} |"
        )
    return "\n".join(lines) + "\n"


def linear_totals(rows: list[Row]) -> dict[int, float]:
    """For each M: bytes of the four TP4 shapes over their summed time, as a share of 900 GB/s."""
    totals: dict[int, list[float]] = {}
    shapes = {f"N{n} K{k}" for n, k in TP4_SHAPES}
    for row in rows:
        m, _, shape = row.case.partition(" ")
        if row.family == "nvfp4_linear" and shape in shapes:
            sums = totals.setdefault(int(m[1:]), [0.0, 0.0])
            sums[0] += row.useful_bytes
            sums[1] += row.v100_microseconds
    return {m: round(b / us * 1e-3 / v100.MEMORY_GBS, 3) for m, (b, us) in totals.items()}
