"""Prefill attention: its grid on the CPU, its schedule, its contract, and what its machine code asks of a V100."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from sm70_engine.kernels import build, checks_prefill, families, prefill, prefill_model, sass, toolchain
from sm70_engine.kernels.checks import Size
from sm70_engine.kernels.checks_prefill import PrefillCase
from sm70_engine.kernels.emulator import Emulator
from sm70_engine.kernels.errors import KernelError
from sm70_engine.kernels.plans import CacheLayout, KvFormat
from sm70_engine.kernels.prefill import BridgePlan, PrefillMemory, PrefillPlan

LAYOUT = CacheLayout.split(KvFormat.E4M3, 2048, 1, 256)
MEMORY = PrefillMemory(
    q=4096, out=4096, key=4096, value=4096, block_table=4096, work=4096, partial=4096, stats=4096, table_stride=8,
    q_stride=1536, out_stride=1536,
)  # fmt: skip


@pytest.mark.parametrize("kv_format", KvFormat)
def test_the_small_grid(kv_format: KvFormat) -> None:
    results = list(checks_prefill.check_prefills(Emulator(), Size.SMALL, (kv_format,)))
    assert not [f"{r.name}: {r.ratio:.3g} {r.note}" for r in results if not r.passed]


def test_bits_do_not_depend_on_the_order_of_threads_and_blocks() -> None:
    case = PrefillCase(KvFormat.E5M2, 128, 6, ((30, 300),), page=112, ctas=5)
    data = checks_prefill.prefill_data(case)
    first = checks_prefill.run_prefill(Emulator(0), case, data).tobytes()
    assert checks_prefill.run_prefill(Emulator(5), case, data).tobytes() == first


def test_the_schedule_covers_every_step_of_every_row_tile_once() -> None:
    rng = np.random.default_rng(3)
    for _ in range(60):
        lengths = rng.integers(1, 5000, 3)
        sequences = tuple((int(rng.integers(0, x + 1)), int(x)) for x in lengths)
        if not any(queries for queries, _ in sequences):
            continue
        group, ctas, window = int(rng.integers(1, 17)), int(rng.integers(1, 100)), int(rng.choice([0, 0, 1, 700]))
        plan = PrefillPlan(LAYOUT, group, sequences, ctas, window, causal=bool(rng.integers(2)))
        words = plan.work()
        bounds, items = words[: ctas + 1], np.array(words[ctas + 1 :])
        count = bounds[-1]
        assert bounds == sorted(bounds)
        merges = items[count * prefill.ITEM :].reshape(-1, prefill.MERGE)
        seen: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for item in items[: count * prefill.ITEM].reshape(-1, prefill.ITEM).tolist():
            seen.setdefault((item[0], item[2] // prefill.ROWS), []).append((item[6], item[7], item[8]))
        expected = {(i, t) for i, (q, _) in enumerate(sequences) for t in range(-(-q * group // prefill.ROWS))}
        assert set(seen) == expected
        slots: list[int] = []
        for (sequence, tile), pieces in seen.items():
            pieces.sort()
            first, last = plan.steps(sequence, tile)
            assert [pieces[0][0], *(end for _, end, _ in pieces)] == [*(begin for begin, _, _ in pieces), last]
            assert pieces[0][0] == first
            assert (len(pieces) == 1) == (pieces[0][2] == -1)
            slots += [slot for _, _, slot in pieces if slot >= 0]
            if len(pieces) > 1:
                assert [slot for _, _, slot in pieces] == list(range(pieces[0][2], pieces[0][2] + len(pieces)))
        assert sorted(slots) == list(range(len(slots)))
        assert len(slots) <= 2 * ctas  # what the workspace holds
        assert sum(merges[:, 5]) == len(slots)


@pytest.mark.parametrize(("queries", "length"), [(4096, 36864), (8000, 40000), (8192, 131072), (4096, 4096)])
def test_every_multiprocessor_gets_the_same_share(queries: int, length: int) -> None:
    plan = PrefillPlan(LAYOUT, 6, ((queries, length),))
    words = plan.work()
    bounds = words[:81]
    items = np.array(words[81 : 81 + bounds[-1] * prefill.ITEM]).reshape(-1, prefill.ITEM)
    steps = [int((items[a:b, 7] - items[a:b, 6]).sum()) for a, b in pairwise(bounds)]
    assert max(steps) <= sum(steps) / 80 * 1.03 + 2


def test_memory_that_stays_reserved_does_not_depend_on_the_batch() -> None:
    small, large = (PrefillPlan(LAYOUT, 6, ((q, n),)) for q, n in ((1, 1), (8192, 262144)))
    assert small.partial_floats == large.partial_floats
    assert 4 * (large.partial_floats + large.stats_floats) == prefill.prefill_workspace_bytes(256)
    assert prefill.bridge_workspace_bytes(262144, 1, 256) == 256 << 20
    bridge = BridgePlan(LAYOUT, (100, 0, 33))
    assert (bridge.starts, bridge.rows) == ((0, 112, 112), 160)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (PrefillPlan(LAYOUT, 17, ((1, 1),)), "1 to 16 query heads"),
        (PrefillPlan(LAYOUT, 6, ((2, 1),)), "context of 1 tokens cannot end with 2"),
        (PrefillPlan(LAYOUT, 6, ((0, 9),)), "must be a query token"),
        (PrefillPlan(LAYOUT, 6, ((1, 1),), window=-1), "window"),
        (PrefillPlan(CacheLayout.split(KvFormat.F16, 16, 1, 64), 6, ((1, 1),)), "128 or 256, not 64"),
        (PrefillPlan(LAYOUT, 6, ((1, 1),), starts=(0,)), "dense K and V must be FP16"),
        (PrefillPlan(PrefillPlan.dense_layout(1, 256), 6, ((1, 1),), starts=(0, 1)), "first row of every sequence"),
        (PrefillPlan(PrefillPlan.dense_layout(1, 256), 6, ((1, 1),), starts=(0,)), "dense ones none"),
    ],
)
def test_a_prefill_outside_the_contract_is_refused(plan: PrefillPlan, text: str) -> None:
    with pytest.raises(KernelError, match=text):
        plan.launches(MEMORY, 0.0625)


def test_scales_and_strides_outside_the_contract_are_refused() -> None:
    plan = PrefillPlan(LAYOUT, 6, ((1, 1),))
    with pytest.raises(KernelError, match="Q must be a multiple"):
        plan.launches(replace(MEMORY, q_stride=1537), 0.0625)
    with pytest.raises(KernelError, match="must be positive"):
        plan.launches(MEMORY, 0.0)
    with pytest.raises(KernelError, match="needs no bridge"):
        BridgePlan(CacheLayout.split(KvFormat.F16, 16, 1, 256), (1,)).launch(
            cache=1, block_table=1, table_stride=1, work=1, key=1, value=1
        )


@pytest.mark.parametrize("kv_format", KvFormat)
def test_no_unit_of_a_v100_forbids_75_tflops(kv_format: KvFormat) -> None:
    tools = toolchain.install()
    family = families.family(f"attention_prefill_{kv_format}")
    folder: Path = build.build((family,))[family.name, ""]
    code = sass.disassemble(tools.tool("nvdisasm"), folder / f"{family.name}.cubin")
    for dim in prefill.PREFILL_DIMS:
        step = prefill_model.step_cycles(code[f"prefill_{kv_format}_d{dim}"], dim)
        shares = prefill_model.shares(step, dim, 75.0)
        assert shares["tensor"] == pytest.approx(0.6, abs=0.02)
        assert max(shares.values()) < (0.7 if dim == 256 else 0.9), shares
