"""Times of a streamed answer, by returned tokens: pure arithmetic on what the client wrote down.

A chunk is not a token: a server that speculates, or sends in intervals, puts several tokens into one. Time per output
token is therefore taken from the number of tokens after the first chunk, and intervals of chunks are told apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from sm70_qualify.client import Answer


class TokenSource(StrEnum):
    """Who says how many tokens there were."""

    TOKEN_IDS = "token ids"  # noqa: S105  (no password)
    USAGE = "usage"
    CHUNKS = "chunks"
    """Nobody: a chunk is taken for a token, which is wrong for a server that speculates."""


@dataclass(frozen=True)
class Timing:
    """One answer. Seconds; rates in tokens per second."""

    prompt_tokens: int | None
    computed_tokens: int | None
    """Prompt tokens that were not cached, where the server says it."""
    output_tokens: int
    token_source: TokenSource
    first_chunk_tokens: int
    first_token_seconds: float
    total_seconds: float
    tpot_seconds: float | None
    """Time per output token after the first chunk; None when nothing came after it."""
    chunk_intervals: tuple[float, ...]

    @property
    def decode_rate(self) -> float | None:
        return 1 / self.tpot_seconds if self.tpot_seconds else None

    @property
    def prefill_rate(self) -> float | None:
        """Computed prompt tokens by the time to the first token, which includes the way there and any queue."""
        return self.computed_tokens / self.first_token_seconds if self.computed_tokens is not None else None


def timing(answer: Answer) -> Timing | None:
    """The times of a streamed answer; None when no token came."""
    if not answer.chunks:
        return None
    first, last = answer.chunks[0], answer.chunks[-1]
    if answer.token_ids:
        source, tokens = TokenSource.TOKEN_IDS, len(answer.token_ids)
    elif answer.completion_tokens:
        source, tokens = TokenSource.USAGE, answer.completion_tokens
    else:
        source, tokens = TokenSource.CHUNKS, len(answer.chunks)
    in_first = first.tokens if source is TokenSource.TOKEN_IDS and first.tokens else 1
    later, passed = tokens - in_first, last.seconds - first.seconds
    computed = answer.prompt_tokens
    if computed is not None and answer.cached_tokens is not None:
        computed = max(0, computed - answer.cached_tokens)
    moments = [chunk.seconds for chunk in answer.chunks]
    return Timing(
        prompt_tokens=answer.prompt_tokens,
        computed_tokens=computed,
        output_tokens=tokens,
        token_source=source,
        first_chunk_tokens=in_first,
        first_token_seconds=first.seconds,
        total_seconds=answer.seconds,
        tpot_seconds=passed / later if later > 0 and passed > 0 else None,
        chunk_intervals=tuple(after - before for before, after in pairwise(moments)),
    )


@dataclass(frozen=True)
class Spread:
    """A distribution by its quantiles and the number of samples that they rest on."""

    samples: int
    mean: float
    minimum: float
    p50: float
    p90: float
    p99: float
    maximum: float


def quantile(ordered: Sequence[float], share: float) -> float:
    """The quantile of sorted values, linear between neighbours."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(values: Sequence[float]) -> Spread | None:
    """The distribution of values; None of none."""
    if not values:
        return None
    ordered = sorted(values)
    return Spread(
        samples=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        minimum=ordered[0],
        p50=quantile(ordered, 0.5),
        p90=quantile(ordered, 0.9),
        p99=quantile(ordered, 0.99),
        maximum=ordered[-1],
    )
