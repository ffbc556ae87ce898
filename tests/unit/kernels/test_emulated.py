"""Every kernel's grid on the CPU, and that the emulator catches what it is there to catch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from sm70_engine.kernels import checks, families, grid, plans
from sm70_engine.kernels.checks import AttentionCase, LinearCase, Size
from sm70_engine.kernels.emulator import Emulator
from sm70_engine.kernels.errors import KernelError
from sm70_engine.kernels.plans import KvFormat


def require(results: Iterator[checks.Result]) -> None:
    failed = [f"{r.name}: {r.ratio:.3g} {r.note}" for r in results if not r.passed]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("family", families.FAMILIES, ids=lambda family: family.name)
def test_the_emulated_library_holds_exactly_the_declared_kernels(family: families.Family) -> None:
    assert Emulator().kernels(family.name) == sorted(kernel.name for kernel in family.kernels)


def test_kv_cache() -> None:
    require(checks.check_kv_cache(Emulator(), Size.SMALL))


@pytest.mark.parametrize("kv_format", KvFormat)
def test_decode_attention(kv_format: KvFormat) -> None:
    backend = Emulator()
    require(checks.check_attention(backend, case) for case in checks.decode_cases(Size.SMALL, (kv_format,)))


@pytest.mark.parametrize("kv_format", KvFormat)
def test_verifier_and_draft_attention(kv_format: KvFormat) -> None:
    backend = Emulator()
    require(checks.check_attention(backend, case) for case in checks.verify_cases(Size.SMALL, (kv_format,)))


def test_nvfp4_linear() -> None:
    backend = Emulator()
    require(checks.check_linear(backend, case) for case in checks.linear_cases(Size.SMALL))


@pytest.mark.parametrize("order", [0, 5])
def test_nvfp4_chain(order: int) -> None:
    backend = Emulator(order)
    require(checks.check_chain(backend, case) for case in checks.chain_cases(Size.SMALL))


def test_nvfp4_for_many_rows() -> None:
    require(checks.check_many_rows(Emulator(), Size.SMALL))


def test_a_chain_that_is_not_launched_together_is_a_deadlock() -> None:
    backend = Emulator()
    workspace, memory = backend.put(np.zeros(1024, np.uint8)), backend.put(np.zeros(1 << 20, np.uint8))
    first = plans.ChainOp(memory.address, memory.address, 0, 1.0, 128, 64, 64)
    second = plans.ChainOp(memory.address, 0, memory.address + (1 << 19), 1.0, 64, 128, out_stride=64, reads=0)
    launch = plans.chain([first, second], m=1, workspace=workspace.address, workspace_bytes=1024, multiprocessors=2)
    backend.run(launch)
    with pytest.raises(KernelError, match="deadlock"):
        backend.run(replace(launch, cooperative=False))


def test_linears_that_cannot_be_chained_are_refused() -> None:
    good = plans.ChainOp(1 << 12, 1 << 13, 0, 1.0, 128, 64, 64)
    last = plans.ChainOp(1 << 12, 0, 1 << 14, 1.0, 64, 128, out_stride=64, reads=0)
    many = [good, *(replace(last, out=1 << 20 | i << 10) for i in range(130))]

    def chained(ops: list[plans.ChainOp], m: int = 1, room: int = 1 << 12, table: int = 0) -> None:
        plans.chain(ops, m=m, workspace=1 << 16, workspace_bytes=room, table=table)

    chained([good, last])
    chained(many[:9], table=1 << 18)
    for ops, reason in (
        ([good, replace(last, reads=1)], "nobody reads the result of linear 0"),
        ([good, replace(last, k=192)], "reads 192 columns; linear 0 has 128"),
        ([good, last, good], "nobody reads the result of linear 2"),
        ([good, last, last], "an output of its own"),
        ([good, replace(last, out=good.a)], "is an input of the chain"),
        (many[:9], "must lie in device memory"),
    ):
        with pytest.raises(KernelError, match=reason):
            chained(ops)
    with pytest.raises(KernelError, match="the workspace of this chain must have 768 bytes"):
        chained([good, last], room=512)
    with pytest.raises(KernelError, match="1 to 128 linears, not 131"):
        chained(many, m=64, table=1 << 18)
    with pytest.raises(KernelError, match="1 to 64 rows"):
        chained([good, last], m=65)


def test_a_decode_on_a_card_without_room_for_the_ctas_that_wait_is_a_deadlock() -> None:
    case = AttentionCase(KvFormat.E4M3, 128, 6, (1500,), 112, 10)
    backend = Emulator(1)  # the CTAs that wait start first
    assert checks.check_attention(backend, case).passed

    class Small(Emulator):
        def run(self, launch: plans.Launch) -> None:
            super().run(replace(launch, waiting=1))

    with pytest.raises(KernelError, match="deadlock"):
        checks.check_attention(Small(1), case)


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("order", [1, 7])
def test_the_full_grid(order: int) -> None:
    require(grid.run_all(Emulator(order), Size.FULL))


@pytest.mark.parametrize("kv_format", KvFormat)
@pytest.mark.parametrize(("splits", "queries"), [(10, 0), (20, 0), (20, 5)])
def test_bits_do_not_depend_on_the_order_of_threads_and_blocks(kv_format: KvFormat, splits: int, queries: int) -> None:
    case = AttentionCase(kv_format, 128, 6, (300, 0, 2100), 112, splits, heads=2, queries=queries)
    data = checks.attention_data(case)
    first = checks.run_attention(Emulator(0), case, data)[0].tobytes()
    for order in (1, 5):
        assert checks.run_attention(Emulator(order), case, data)[0].tobytes() == first


@pytest.mark.parametrize("order", [1, 5])
def test_linear_results_hold_in_every_order(order: int) -> None:
    backend = Emulator(order)
    require(checks.check_linear(backend, LinearCase(m, 96, 320)) for m in (1, 16, 32, 64))


def test_decode_bits_do_not_depend_on_where_pages_lie() -> None:
    case = AttentionCase(KvFormat.E4M3, 256, 6, (500, 77), 48, 8)
    data = checks.attention_data(case)
    blocks = data.cache.size // data.layout.block_stride
    moved = np.random.default_rng(1).permutation(blocks)
    cache = np.empty_like(data.cache).reshape(blocks, -1)
    cache[moved] = data.cache.reshape(blocks, -1)
    table = np.where(data.table < blocks, moved[np.minimum(data.table, blocks - 1)], data.table).astype(np.int32)
    other = replace(data, cache=cache.reshape(-1), table=table)
    want = checks.run_attention(Emulator(), case, data)[0]
    assert checks.run_attention(Emulator(), case, other)[0].tobytes() == want.tobytes()


def test_a_read_past_a_buffer_is_reported_with_its_place() -> None:
    backend = Emulator()
    source, target = backend.put(np.zeros(300, np.uint8)), backend.put(np.zeros(512, np.float16))
    with pytest.raises(KernelError, match=r"outside every buffer .*block 1,0,0 thread"):
        backend.run(plans.kv_convert("decode", KvFormat.E4M3, source=source.address, target=target.address, count=512))


def test_a_misaligned_access_is_reported() -> None:
    case = LinearCase(1, 32, 64)
    backend = Emulator()
    weight, a, out = (backend.put(np.zeros(4096, np.uint8)) for _ in range(3))
    launch = plans.linear(
        m=1, n=32, k=64, weight=weight.address + 4, a=a.address, out=out.address, scale=1.0, a_stride=64, out_stride=32
    )
    with pytest.raises(KernelError, match="undefined behaviour"):
        backend.run(launch)
    # and the emulator goes on working
    assert checks.check_linear(backend, case).passed


def test_too_much_shared_memory_is_refused() -> None:
    backend = Emulator()
    buffer = backend.put(np.zeros(64, np.uint8))
    launch = plans.kv_convert("decode", KvFormat.E5M2, source=buffer.address, target=buffer.address, count=1)
    with pytest.raises(KernelError, match="sm_70 has 1024"):
        backend.run(replace(launch, shared_bytes=97 * 1024))


def test_a_wrong_result_fails_its_check() -> None:
    want = np.ones((2, 2))
    tolerance = np.full((2, 2), 1e-3)
    assert checks.judge("good", want + 5e-4, want, tolerance).passed
    assert not checks.judge("far", want + 2e-3, want, tolerance).passed
    assert not checks.judge("nan", np.array([[1, 1], [1, np.nan]]), want, tolerance).passed
    assert not checks.judge("note", want, want, tolerance, "wrote past its output").passed
