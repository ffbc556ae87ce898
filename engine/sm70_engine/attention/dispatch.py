"""Which kernel a part of a batch takes: by its contract, or by the name of a fallback and the reason.

Pure: a batch is described by where the queries of its requests begin. A segment is a run of requests with the same
number of queries; all layers of a step share the segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sm70_engine.kernels.plans import VERIFY_TILES, KvFormat
from sm70_engine.kernels.prefill import PREFILL_DIMS
from sm70_profiles.routes import Stage

HEAD_DIMS = (64, 128, 256)
MAX_GROUP = 16
XQA_GROUPS = (4, 6, 8)


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


class Refusal(StrEnum):
    """Why a call takes a fallback."""

    NO_PREFILL_KERNEL = "no prefill kernel is in this build"
    PREFILL_HEAD_DIM = "the prefill kernel takes a head dimension of 128 or 256"
    LENGTHS_UNKNOWN = "the prefill kernel needs every length on the host, and a graph or vLLM's metadata has none"
    TOO_MANY_ROWS = "query heads per KV head times queries exceed the verifier's tile"
    HEAD_DIM = "the verifier takes a head dimension of 128 or 256"


@dataclass(frozen=True)
class Heads:
    """The shape of a layer that contracts ask for."""

    dim: int
    group: int
    kv_heads: int
    kv_format: KvFormat
    window: int = 0


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


@dataclass(frozen=True)
class Choice:
    """The kernel, what it is counted as, and the reason where it is a fallback."""

    kernel: Kernel
    route: str
    stage: Stage
    refusal: Refusal | None = None


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


def choose(heads: Heads, queries: int, given: Given) -> Choice:
    """The choice for a segment."""
    stage = _stage(queries, given)
    if queries == 1 and given.causal:
        return Choice(Kernel.DECODE, _decode_route(heads), stage)
    refusal = _refused_by_verifier(heads, queries)
    if refusal is None:
        route = f"verify_{_NAMES[heads.kv_format]}_grouped" if given.causal else "draft_window"
        return Choice(Kernel.VERIFY, route, stage)
    if stage is Stage.PREFILL:
        refusal = _refused_by_prefill(heads, given)
        if refusal is None:
            return Choice(Kernel.PREFILL, _prefill_route(heads, queries), stage)
    return Choice(Kernel.ROWS, "attention_rows", stage, refusal)


@dataclass(frozen=True)
class Part:
    """Segments that one call serves. Neighbours are put together for the prefill kernel alone."""

    choice: Choice
    segments: tuple[Segment, ...]


def parts(heads: Heads, found: Sequence[Segment], given: Given) -> tuple[Part, ...]:
    """The calls of a step for layers of this shape, in the order of the batch."""
    result: list[Part] = []
    for segment in found:
        choice = choose(heads, segment.queries, given)
        last = result[-1] if result else None
        if (
            last is not None
            and choice.kernel is Kernel.PREFILL
            and last.choice == choice
            and last.segments[-1].first + last.segments[-1].count == segment.first
        ):
            result[-1] = Part(choice, (*last.segments, segment))
        else:
            result.append(Part(choice, (segment,)))
    return tuple(result)


_NAMES = {KvFormat.E4M3: "e4m3", KvFormat.E5M2: "e5m2", KvFormat.F16: "fp16"}


def _stage(queries: int, given: Given) -> Stage:
    if not given.causal:
        return Stage.DRAFT
    if queries == 1:
        return Stage.DECODE
    return Stage.VERIFY if queries <= 1 + given.drafted else Stage.PREFILL


def _prefill_route(heads: Heads, queries: int) -> str:
    if heads.dim == 256 and not heads.window:
        if heads.group == 6 and (queries == 4096 or 8000 <= queries <= 8192):
            return "prefill_gqa_fp32"
        if heads.kv_format is KvFormat.F16 and queries >= 32:
            return "prefill_bm32_paged"
    return "prefill_packed"


def _refused_by_prefill(heads: Heads, given: Given) -> Refusal | None:
    if not given.prefill:
        return Refusal.NO_PREFILL_KERNEL
    if heads.dim not in PREFILL_DIMS:
        return Refusal.PREFILL_HEAD_DIM
    return None if given.lengths else Refusal.LENGTHS_UNKNOWN


def _decode_route(heads: Heads) -> str:
    shared = heads.dim == 256 and heads.group in XQA_GROUPS and not heads.window
    return "decode_xqa_paged" if shared else "decode_scalar_paged"


def _refused_by_verifier(heads: Heads, queries: int) -> Refusal | None:
    tiles = VERIFY_TILES.get(heads.dim)
    if tiles is None:
        return Refusal.HEAD_DIM
    return Refusal.TOO_MANY_ROWS if heads.group * queries > 8 * tiles[-1] else None


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
