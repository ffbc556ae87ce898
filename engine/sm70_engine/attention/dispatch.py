"""Which kernel a part of a batch takes: by its contract, or by the name of a fallback and the reason.

Pure: a batch is described by where the queries of its requests begin. A segment is a run of requests with the same
number of queries; all layers of a step share the segments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sm70_engine.kernels.plans import VERIFY_TILES, KvFormat
from sm70_engine.kernels.prefill import PREFILL_DIMS
from sm70_profiles.routes import FallbackReason, Stage

HEAD_DIMS = (64, 128, 256)
MAX_GROUP = 16
XQA_GROUPS = (4, 6, 8)
BRIDGE_PREFIX, BRIDGE_QUERIES = 8192, 1024
"""Cached tokens and queries from which on the FP8 context of a chunk is expanded once instead of for every row tile."""
LONG_CONTEXT = 262_144
"""The capacity of a request for which the verifier is counted as the long-context one."""
LONG_QUERIES = 8
TAIL_PAGE = 1024
"""The least page over which a single token of a round is counted as the scalar tail."""


class Kernel(StrEnum):
    """What is launched."""

    DECODE = "decode"
    """One query a sequence."""
    VERIFY = "verify"
    """The same few queries for each sequence."""
    PREFILL = "prefill"
    """Many queries of several requests, by their lengths on the host; never inside a graph."""
    ROWS = "rows"
    """Every query as a sequence of its own through the decode kernel: right, and reads the context once a query."""


@dataclass(frozen=True)
class Heads:
    """The shape of a layer that contracts ask for."""

    dim: int
    group: int
    kv_heads: int
    kv_format: KvFormat
    window: int = 0
    bridge_rows: int = 0
    """Tokens whose FP16 copy the reserved workspace holds; 0 where contexts are not expanded."""


@dataclass(frozen=True)
class Segment:
    """`count` requests from `first` on, `queries` query tokens each, the first of which is token `token`."""

    first: int
    count: int
    token: int
    queries: int


@dataclass(frozen=True)
class Given:
    """What holds for all segments of a step. `drafted`: tokens that a verification holds besides the first; else 0."""

    causal: bool = True
    drafted: int = 0
    prefill: bool = False
    """Whether this build has the prefill kernel."""
    lengths: bool = True
    """Whether the lengths are known on the host."""
    page: int = 0
    """Tokens of a page of the KV cache."""
    capacity: int = 0
    """Tokens that a request may have."""


@dataclass(frozen=True)
class Choice:
    """The kernel, what it is counted as, and the reason where it is a fallback."""

    kernel: Kernel
    route: str
    stage: Stage
    refusal: FallbackReason | None = None
    bridged: bool = False
    """Whether the context is expanded first, which is counted as `BRIDGE`."""


BRIDGE = "prefill_fp8_bridge"


def segments(starts: Sequence[int]) -> tuple[Segment, ...]:
    """Runs of requests with as many queries; `starts` has one entry more than there are requests.

    Requests without a query (the padding of a batch) belong to none.
    """
    found: list[Segment] = []
    for index in range(len(starts) - 1):
        queries = starts[index + 1] - starts[index]
        if queries <= 0:
            continue
        last = found[-1] if found else None
        if last is not None and last.queries == queries and last.first + last.count == index:
            found[-1] = Segment(last.first, last.count + 1, last.token, queries)
        else:
            found.append(Segment(index, 1, starts[index], queries))
    return tuple(found)


def choose(heads: Heads, queries: int, given: Given, context: int = 0) -> Choice:
    """The choice for a request, or for requests alike. context: its tokens, the queries included, where known."""
    stage = _stage(queries, given)
    if queries == 1 and given.causal:
        tail = _is_tail(heads, given)
        route = "decode_e4m3_scalar_tail" if tail else _decode_route(heads)
        return Choice(Kernel.DECODE, route, Stage.VERIFY if tail else stage)
    refusal = _refused_by_verifier(heads, queries)
    if refusal is None:
        return Choice(Kernel.VERIFY, _verify_route(heads, queries, given), stage)
    if stage is Stage.PREFILL:
        refusal = _refused_by_prefill(heads, given)
        if refusal is None:
            bridged = _is_bridged(heads, queries, context)
            return Choice(Kernel.PREFILL, _prefill_route(heads, queries), stage, bridged=bridged)
    return Choice(Kernel.ROWS, "attention_rows", stage, refusal)


@dataclass(frozen=True)
class Part:
    """Segments that one call serves. Neighbours are put together for the prefill kernel alone."""

    choice: Choice
    segments: tuple[Segment, ...]


def parts(heads: Heads, found: Sequence[Segment], given: Given, lengths: Sequence[int] = ()) -> tuple[Part, ...]:
    """The calls of a step for layers of this shape, in the order of the batch. lengths: of the requests, if known."""
    result: list[Part] = []
    rows = 0  # of the copy that the last part makes
    for segment in _by_context(heads, found, given, lengths):
        context = lengths[segment.first] if given.lengths and lengths else 0
        choice = choose(heads, segment.queries, given, context)
        needed = copied_rows(context) if choice.bridged else 0
        last = result[-1] if result else None
        if (
            last is not None
            and choice.kernel is Kernel.PREFILL
            and last.choice == choice
            and last.segments[-1].first + last.segments[-1].count == segment.first
            and (not choice.bridged or rows + needed <= heads.bridge_rows)
        ):
            result[-1] = Part(choice, (*last.segments, segment))
            rows += needed
        else:
            result.append(Part(choice, (segment,)))
            rows = needed
    return tuple(result)


def reserved_rows(heads: Heads, longest: int) -> int:
    """Rows of the workspace for copies: the longest request's, or none where no chunk of it could be bridged."""
    admitted = heads.dim in PREFILL_DIMS and heads.kv_format is not KvFormat.F16 and not heads.window
    return copied_rows(longest) if admitted and longest >= BRIDGE_PREFIX + BRIDGE_QUERIES else 0


def copied_rows(context: int) -> int:
    """Rows of the FP16 copy of a context: whole tiles of 16 tokens."""
    return -(-context // 16) * 16


def _by_context(heads: Heads, found: Sequence[Segment], given: Given, lengths: Sequence[int]) -> Iterator[Segment]:
    """The segments; those whose requests may differ in being bridged are cut into single requests."""
    for segment in found:
        if not (given.lengths and lengths and segment.count > 1 and _may_bridge(heads, segment.queries)):
            yield segment
            continue
        for index in range(segment.count):
            yield Segment(segment.first + index, 1, segment.token + index * segment.queries, segment.queries)


_NAMES = {KvFormat.E4M3: "e4m3", KvFormat.E5M2: "e5m2", KvFormat.F16: "fp16"}


def _stage(queries: int, given: Given) -> Stage:
    if not given.causal:
        return Stage.DRAFT
    if queries == 1:
        return Stage.DECODE
    return Stage.VERIFY if queries <= 1 + given.drafted else Stage.PREFILL


def _is_tail(heads: Heads, given: Given) -> bool:
    """The single token of a round of speculation, over large pages; its path builds on the long-context verifier's."""
    long = given.capacity == LONG_CONTEXT and given.page >= TAIL_PAGE
    return bool(given.drafted) and long and _is_recipe(heads)


def _is_recipe(heads: Heads) -> bool:
    """The shape whose E4M3 verifier has a long-context form and a tail of its own."""
    return (heads.dim, heads.group, heads.kv_format, heads.window) == (256, 6, KvFormat.E4M3, 0)


def _verify_route(heads: Heads, queries: int, given: Given) -> str:
    if not given.causal:
        return "draft_window"
    if given.capacity == LONG_CONTEXT and _is_recipe(heads) and 2 <= queries <= LONG_QUERIES:
        return "verify_e4m3_long"
    return f"verify_{_NAMES[heads.kv_format]}_grouped"


def _may_bridge(heads: Heads, queries: int) -> bool:
    wide = heads.dim in PREFILL_DIMS and not heads.window and heads.kv_format is not KvFormat.F16
    return wide and heads.bridge_rows > 0 and queries >= BRIDGE_QUERIES


def _is_bridged(heads: Heads, queries: int, context: int) -> bool:
    """A context that does not fit into the workspace is read as it lies, which the prefill kernel can as well."""
    fits = context - queries >= BRIDGE_PREFIX and copied_rows(context) <= heads.bridge_rows
    return fits and _may_bridge(heads, queries)


def _prefill_route(heads: Heads, queries: int) -> str:
    if heads.dim == 256 and not heads.window:
        if heads.group == 6 and (queries == 4096 or 8000 <= queries <= 8192):
            return "prefill_gqa_fp32"
        if heads.kv_format is KvFormat.F16 and queries >= 32:
            return "prefill_bm32_paged"
    return "prefill_packed"


def _refused_by_prefill(heads: Heads, given: Given) -> FallbackReason | None:
    if not given.prefill:
        return FallbackReason.NO_PREFILL_KERNEL
    if heads.dim not in PREFILL_DIMS:
        return FallbackReason.PREFILL_HEAD_DIM
    return None if given.lengths else FallbackReason.LENGTHS_UNKNOWN


def _decode_route(heads: Heads) -> str:
    shared = heads.dim == 256 and heads.group in XQA_GROUPS and not heads.window
    return "decode_xqa_paged" if shared else "decode_scalar_paged"


def _refused_by_verifier(heads: Heads, queries: int) -> FallbackReason | None:
    tiles = VERIFY_TILES.get(heads.dim)
    if tiles is None:
        return FallbackReason.VERIFIER_HEAD_DIM
    return FallbackReason.TOO_MANY_ROWS if heads.group * queries > 8 * tiles[-1] else None


def kv_format(kv_cache_dtype: str) -> KvFormat:
    """vLLM's name of a KV cache dtype. Raises `ValueError` for one that no kernel reads."""
    known = {
        "auto": KvFormat.F16,
        "float16": KvFormat.F16,
        "fp8": KvFormat.E4M3,
        "fp8_e4m3": KvFormat.E4M3,
        "fp8_e5m2": KvFormat.E5M2,
    }
    if kv_cache_dtype not in known:
        raise ValueError(f"the KV cache must be {', '.join(known)} for FLASH_ATTN_V100, not {kv_cache_dtype}")
    return known[kv_cache_dtype]
