"""Which kernel a part of a batch takes, and what it is called where none is made for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sm70_engine.attention.dispatch import (
    BRIDGE,
    Given,
    Heads,
    Kernel,
    Part,
    Segment,
    choose,
    kv_format,
    parts,
    reserved_rows,
    segments,
)
from sm70_engine.kernels.plans import KvFormat
from sm70_profiles.routes import ROUTES, FallbackReason, Stage

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
    assert choice.refusal is None or choice.refusal in ROUTES[choice.route].reasons


def test_the_reason_says_what_stands_in_the_way() -> None:
    assert choose(QWEN, 9, Given(drafted=15)).refusal is FallbackReason.TOO_MANY_ROWS
    assert choose(QWEN, 2000, Given()).refusal is FallbackReason.NO_PREFILL_KERNEL
    assert choose(QWEN, 2000, Given(prefill=True, lengths=False)).refusal is FallbackReason.LENGTHS_UNKNOWN
    assert choose(Heads(64, 6, 1, KvFormat.F16), 2000, Given(prefill=True)).refusal is FallbackReason.PREFILL_HEAD_DIM
    assert choose(Heads(64, 6, 1, KvFormat.F16), 8, Given(False, 7)).refusal is FallbackReason.VERIFIER_HEAD_DIM


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


BRIDGING = replace(QWEN, bridge_rows=65536)


@pytest.mark.parametrize(
    ("heads", "queries", "context", "bridged"),
    [
        (BRIDGING, 4096, 4096 + 8192, True),
        (BRIDGING, 4096, 4095 + 8192, False),  # a short prefix is read as it lies
        (BRIDGING, 1023, 60000, False),  # and so is one for few queries
        (BRIDGING, 1024, 65536, True),
        (BRIDGING, 1024, 65537, False),  # more than the workspace holds
        (QWEN, 4096, 40000, False),  # none is reserved
        (replace(BRIDGING, kv_format=KvFormat.E5M2), 4096, 40000, True),
        (replace(BRIDGING, kv_format=KvFormat.F16), 4096, 40000, False),
        (replace(BRIDGING, window=2048), 4096, 40000, False),
        (replace(BRIDGING, dim=64), 4096, 40000, False),
    ],
)
def test_a_long_fp8_context_is_expanded_once_a_chunk(heads: Heads, queries: int, context: int, bridged: bool) -> None:
    choice = choose(heads, queries, Given(prefill=True), context)
    assert choice.bridged is bridged
    # Either way the prefill kernel of the call is counted; the bridge beside it.
    assert ROUTES[BRIDGE].stages == (Stage.PREFILL,)
    assert choice.route == choose(heads, queries, Given(prefill=True)).route


@pytest.mark.parametrize(
    ("heads", "longest", "rows"),
    [
        (QWEN, 262144, 262144),
        (QWEN, 32001, 32016),  # whole tiles of 16
        (QWEN, 9216, 9216),
        (QWEN, 9215, 0),  # no chunk of such a request could be bridged
        (replace(QWEN, kv_format=KvFormat.F16), 262144, 0),
        (replace(QWEN, window=2048), 262144, 0),
        (replace(QWEN, dim=64), 262144, 0),
    ],
)
def test_memory_is_reserved_for_the_longest_request_that_can_be_bridged(heads: Heads, longest: int, rows: int) -> None:
    assert reserved_rows(heads, longest) == rows


def test_contexts_that_are_expanded_together_fit_into_the_workspace() -> None:
    found, prefill = segments([0, 1, 2049, 4097, 6145, 8193]), Given(prefill=True)
    lengths = (900, 30000, 3000, 30001, 30000)
    calls = parts(BRIDGING, found, prefill, lengths)
    spans = [(part.choice.bridged, part.segments[0].first, sum(one.count for one in part.segments)) for part in calls]
    # 30016 and 30000 rows fit together; a context that is not expanded keeps its place in the batch.
    assert spans == [(False, 0, 1), (True, 1, 1), (False, 2, 1), (True, 3, 2)]
    assert [one.token for part in calls for one in part.segments] == [0, 1, 2049, 4097, 6145]
    narrow = replace(BRIDGING, bridge_rows=40000)
    assert [len(part.segments) for part in parts(narrow, found, prefill, lengths)] == [1, 1, 1, 1, 1]
    # Without lengths nothing is expanded, and the prompts stay one call.
    assert [part.choice.bridged for part in parts(BRIDGING, found, prefill)] == [False, False]


@pytest.mark.parametrize(
    ("heads", "queries", "given", "route", "stage"),
    [
        (QWEN, 8, Given(drafted=7, capacity=262144), "verify_e4m3_long", Stage.VERIFY),
        (QWEN, 2, Given(drafted=7, capacity=262144), "verify_e4m3_long", Stage.VERIFY),
        (QWEN, 8, Given(drafted=7, capacity=262143), "verify_e4m3_grouped", Stage.VERIFY),
        (QWEN, 8, Given(False, 7, capacity=262144), "draft_window", Stage.DRAFT),
        (replace(QWEN, group=4), 8, Given(drafted=7, capacity=262144), "verify_e4m3_grouped", Stage.VERIFY),
        (replace(QWEN, kv_format=KvFormat.E5M2), 8, Given(drafted=7, capacity=262144), "verify_e5m2_grouped",
         Stage.VERIFY),
        (QWEN, 1, Given(drafted=7, page=2048, capacity=262144), "decode_e4m3_scalar_tail", Stage.VERIFY),
        (QWEN, 1, Given(drafted=7, page=2048, capacity=65536), "decode_xqa_paged", Stage.DECODE),
        (QWEN, 1, Given(drafted=7, page=832, capacity=262144), "decode_xqa_paged", Stage.DECODE),
        (QWEN, 1, Given(page=2048, capacity=262144), "decode_xqa_paged", Stage.DECODE),
    ],
)  # fmt: skip
def test_the_recipes_verifier_and_tail_are_counted_by_their_contracts(
    heads: Heads, queries: int, given: Given, route: str, stage: Stage
) -> None:
    choice = choose(heads, queries, given)
    assert (choice.route, choice.stage) == (route, stage)
    assert stage in ROUTES[route].stages


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
