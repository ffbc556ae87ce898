"""Contracts are checked before a launch, and the dispatch covers them without gaps."""

from __future__ import annotations

from typing import Any

import pytest

from sm70_engine.kernels import families, plans
from sm70_engine.kernels.errors import KernelError
from sm70_engine.kernels.plans import AttentionMemory, CacheLayout, DecodePlan, KvFormat, VerifyPlan

LAYOUT = CacheLayout.split(KvFormat.E4M3, 784, 1, 256)
POINTERS = dict.fromkeys(("q", "out", "cache", "block_table", "lengths", "partial", "stats"), 4096)


def decode(plan: DecodePlan | VerifyPlan, q_stride: int = 1536) -> tuple[plans.Launch, ...]:
    return plan.launches(AttentionMemory(**POINTERS, table_stride=4, q_stride=q_stride, out_stride=1536), 0.0625)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (DecodePlan(LAYOUT, 1, 17, 8), "1 to 16 query heads"),
        (DecodePlan(LAYOUT, 1, 6, 257), "1 to 256 splits"),
        (DecodePlan(LAYOUT, 0, 6, 8), "must be a sequence"),
        (DecodePlan(LAYOUT, 1, 6, 8, window=-1), "window"),
        (DecodePlan(CacheLayout.split(KvFormat.F16, 24, 1, 128), 1, 6, 8), "multiple of 16 tokens"),
        (DecodePlan(CacheLayout.split(KvFormat.F16, 16, 1, 96), 1, 6, 8), "head dimension"),
    ],
)
def test_a_decode_outside_the_contract_is_refused(plan: DecodePlan, text: str) -> None:
    with pytest.raises(KernelError, match=text):
        decode(plan)
    with pytest.raises(KernelError, match="Q must be a multiple"):
        decode(DecodePlan(LAYOUT, 1, 6, 8), q_stride=1537)


def test_every_decode_contract_has_a_kernel_that_fits_a_v100() -> None:
    known = {kernel.name: kernel for family in families.FAMILIES for kernel in family.kernels}
    for kv_format in KvFormat:
        for dim in (64, 128, 256):
            for group in range(1, 17):
                for splits in (1, 12, 80, 256):
                    (launch,) = decode(DecodePlan(CacheLayout.split(kv_format, 16, 1, dim), 1, group, splits))
                    assert known[launch.kernel].threads == launch.threads
                    # Two CTAs share a multiprocessor where the dispatch counts on it.
                    ctas = 2 if dim <= 128 and group <= 8 else 1
                    assert launch.shared_bytes * ctas <= plans.SHARED_LIMIT
                    assert launch.waiting < plans.V100_SMS


def test_the_ctas_of_a_decode_that_wait_for_others_are_fewer_than_a_v100_holds() -> None:
    for dim, group in ((64, 8), (128, 16), (256, 6)):
        for heads in (1, 2, 8):
            layout = CacheLayout.split(KvFormat.E4M3, 16, heads, dim)
            for sequences in range(1, 200):
                splits = plans.decode_splits(layout, sequences, group)
                (launch,) = decode(DecodePlan(layout, sequences, group, splits))
                per_sm = 2 if dim <= 128 and group <= 8 else 1
                assert launch.waiting < plans.V100_SMS * per_sm
                assert (launch.waiting == 0) == (splits == 1)


def test_every_verify_contract_has_a_kernel_that_fits_a_v100() -> None:
    known = {kernel.name: kernel for family in families.FAMILIES for kernel in family.kernels}
    for kv_format in KvFormat:
        for dim, most in ((128, 64), (256, 48)):
            for group in range(1, 17):
                for queries in range(1, most // group + 1):
                    plan = VerifyPlan(CacheLayout.split(kv_format, 16, 1, dim), 1, group, 80, queries=queries)
                    for launch in decode(plan):
                        assert known[launch.kernel].threads == launch.threads
                        assert launch.shared_bytes <= plans.SHARED_LIMIT


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (VerifyPlan(LAYOUT, 1, 6, 8, queries=9), "1 to 48 at D 256, not 54"),
        (VerifyPlan(LAYOUT, 1, 6, 8, queries=0), "not 0"),
        (VerifyPlan(CacheLayout.split(KvFormat.F16, 16, 1, 64), 1, 6, 8), "128 or 256"),
    ],
)
def test_a_verify_outside_the_contract_is_refused(plan: VerifyPlan, text: str) -> None:
    with pytest.raises(KernelError, match=text):
        decode(plan)


def test_splits_fill_the_card_once() -> None:
    assert plans.decode_splits(LAYOUT, 1, 6) == 80
    assert plans.decode_splits(LAYOUT, 8, 6) == 10
    assert plans.verify_splits(LAYOUT, 1) == 80
    assert plans.decode_splits(CacheLayout.split(KvFormat.F16, 16, 8, 128), 1, 4) == 20
    assert plans.decode_splits(CacheLayout.split(KvFormat.F16, 16, 8, 128), 256, 4) == 1


def test_every_m_has_a_linear_and_others_are_refused() -> None:
    known = {kernel.name: kernel for kernel in families.family("nvfp4_linear").kernels}
    for m in range(1, 65):
        for n in (1024, 8704, 163840):
            launch = plans.linear(m=m, n=n, k=5120, weight=0, a=0, out=0, scale=1.0, a_stride=5120, out_stride=n)
            assert known[launch.kernel].threads == launch.threads
            assert launch.shared_bytes <= plans.SHARED_LIMIT
            assert launch.grid[0] * int(launch.kernel.split("_")[2]) * int(launch.kernel.split("_")[3]) * 32 >= n
    for m in (0, 65):
        with pytest.raises(KernelError, match="1 to 64 rows"):
            plans.linear_tile(m, 1024)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"k": 96}, "K must be"),
        ({"n": 12}, "N must be"),
        ({"a_stride": 60}, "rows of A"),
        ({"out_stride": 63}, "rows of the output"),
    ],
)
def test_a_linear_outside_the_contract_is_refused(change: dict[str, Any], text: str) -> None:
    good: dict[str, Any] = {"m": 1, "n": 64, "k": 64, "weight": 0, "a": 0, "out": 0, "a_stride": 64, "out_stride": 64}
    with pytest.raises(KernelError, match=text):
        plans.linear(**{**good, **change}, scale=1.0)


def test_a_write_outside_the_contract_is_refused() -> None:
    layout = CacheLayout.split(KvFormat.F16, 16, 1, 64)
    common = {"tokens": 1, "key": 0, "value": 0, "slots": 0, "cache": 0, "key_stride": 64, "value_stride": 64}
    with pytest.raises(KernelError, match="FP16 storage has no scale"):
        plans.kv_write(layout, **common, key_scale=0.5)
    with pytest.raises(KernelError, match="must be positive"):
        plans.kv_write(CacheLayout.split(KvFormat.E4M3, 16, 1, 64), **common, key_scale=0.0)
