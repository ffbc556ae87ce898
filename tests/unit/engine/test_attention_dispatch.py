"""Which kernel a part of a batch takes, and what it is called where none is made for it."""

from __future__ import annotations

import pytest

from sm70_engine.attention.dispatch import (
    Given,
    Heads,
    Kernel,
    Part,
    Refusal,
    Segment,
    choose,
    kv_format,
    parts,
    segments,
)
from sm70_engine.kernels.plans import KvFormat
from sm70_profiles.routes import ROUTES, Stage

QWEN = Heads(dim=256, group=6, kv_heads=1, kv_format=KvFormat.E4M3)


@pytest.mark.parametrize(
    ("starts", "found"),
    [
        ([0], ()),
        ([0, 1, 2, 3], (Segment(0, 3, 0, 1),)),
        ([0, 1, 2, 39, 76], (Segment(0, 2, 0, 1), Segment(2, 2, 2, 37))),
        # Padding behind the requests, as a batch that fills up a graph has it.
        ([0, 4, 8, 8, 8], (Segment(0, 2, 0, 4),)),
        # Requests with a gap between them are not one run: their rows of the block table are not either.
        ([0, 4, 4, 8], (Segment(0, 1, 0, 4), Segment(2, 1, 4, 4))),
        ([0, 8, 9, 17], (Segment(0, 1, 0, 8), Segment(1, 1, 8, 1), Segment(2, 1, 9, 8))),
    ],
)
def test_runs_of_requests_with_as_many_queries(starts: list[int], found: tuple[Segment, ...]) -> None:
    assert segments(starts) == found
    covered = [token for one in found for token in range(one.token, one.token + one.count * one.queries)]
    assert covered == list(range(starts[-1]))


@pytest.mark.parametrize(
    ("queries", "causal", "drafted", "kernel", "route", "stage"),
    [
        (1, True, 0, Kernel.DECODE, "decode_xqa_paged", Stage.DECODE),
        (8, True, 7, Kernel.VERIFY, "verify_e4m3_grouped", Stage.VERIFY),
        (8, False, 7, Kernel.VERIFY, "draft_window", Stage.DRAFT),
        (5, True, 0, Kernel.VERIFY, "verify_e4m3_grouped", Stage.PREFILL),
        (9, True, 15, Kernel.ROWS, "attention_rows", Stage.VERIFY),
        (2000, True, 7, Kernel.ROWS, "attention_rows", Stage.PREFILL),
    ],
)
def test_a_segment_takes_the_kernel_that_admits_it(
    queries: int, causal: bool, drafted: int, kernel: Kernel, route: str, stage: Stage
) -> None:
    choice = choose(QWEN, queries, Given(causal, drafted))
    assert (choice.kernel, choice.route, choice.stage) == (kernel, route, stage)
    # A reason where, and only where, no accelerated path is taken.
    assert (choice.refusal is not None) == ROUTES[choice.route].fallback


def test_the_reason_says_what_stands_in_the_way() -> None:
    assert choose(QWEN, 9, Given(drafted=15)).refusal is Refusal.TOO_MANY_ROWS
    assert choose(QWEN, 2000, Given()).refusal is Refusal.NO_PREFILL_KERNEL
    assert choose(QWEN, 2000, Given(prefill=True, lengths=False)).refusal is Refusal.LENGTHS_UNKNOWN
    assert choose(Heads(64, 6, 1, KvFormat.F16), 2000, Given(prefill=True)).refusal is Refusal.PREFILL_HEAD_DIM
    assert choose(Heads(64, 6, 1, KvFormat.F16), 8, Given(False, 7)).refusal is Refusal.HEAD_DIM


@pytest.mark.parametrize(
    ("heads", "queries", "route"),
    [
        (QWEN, 8192, "prefill_gqa_fp32"),
        (QWEN, 4096, "prefill_gqa_fp32"),
        (QWEN, 2048, "prefill_packed"),
        (Heads(256, 6, 1, KvFormat.F16), 2048, "prefill_bm32_paged"),
        (Heads(128, 6, 1, KvFormat.F16), 2048, "prefill_packed"),
    ],
)
def test_prefill_is_counted_by_the_contract_of_its_route(heads: Heads, queries: int, route: str) -> None:
    choice = choose(heads, queries, Given(prefill=True))
    assert (choice.kernel, choice.route, choice.refusal) == (Kernel.PREFILL, route, None)


def test_prompts_that_follow_each_other_are_one_call() -> None:
    found = segments([0, 1, 2, 602, 1302, 1303, 2003])
    prefill = Given(prefill=True)
    calls = [(part.choice.kernel, len(part.segments)) for part in parts(QWEN, found, prefill)]
    assert calls == [(Kernel.DECODE, 1), (Kernel.PREFILL, 2), (Kernel.DECODE, 1), (Kernel.PREFILL, 1)]
    # Without the kernel each is a call of its own, by the fallback.
    assert [len(part.segments) for part in parts(QWEN, found, Given())] == [1] * 5
    assert parts(QWEN, (), Given()) == ()
    assert isinstance(parts(QWEN, found, prefill)[0], Part)


@pytest.mark.parametrize(
    ("heads", "route"),
    [
        (Heads(256, 8, 1, KvFormat.F16), "decode_xqa_paged"),
        (Heads(256, 5, 1, KvFormat.F16), "decode_scalar_paged"),
        (Heads(128, 8, 1, KvFormat.F16), "decode_scalar_paged"),
        (Heads(256, 8, 1, KvFormat.F16, window=2048), "decode_scalar_paged"),
    ],
)
def test_decoding_is_counted_by_the_contract_of_its_route(heads: Heads, route: str) -> None:
    assert choose(heads, 1, Given()).route == route


def test_an_unknown_cache_type_is_refused_by_name() -> None:
    assert kv_format("fp8") is kv_format("fp8_e4m3") is KvFormat.E4M3
    with pytest.raises(ValueError, match="not int8_per_token_head"):
        kv_format("int8_per_token_head")
