"""The benchmark's result as a document, with the names that benchmarks of this kind use, so that files can be compared.

Every distribution says how many samples it rests on: a p99 of eight requests is their maximum, and says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict

from sm70_qualify.bench.load import Measured
from sm70_qualify.timing import Spread, Timing, spread


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Distribution(Part):
    """Quantiles of `samples` values, linear between neighbours."""

    samples: int
    mean: float
    min: float
    p50: float
    p90: float
    p99: float
    max: float


class Contract(Part):
    """Under which the figures hold."""

    input_len: int
    input_len_exact: bool
    """Whether every answer's usage said exactly `input_len`."""
    input_len_found: tuple[int, int] | None
    """Least and most prompt tokens by the server's usage; None where it does not say."""
    max_output_tokens: int
    concurrency: int
    requests: int
    warm_up: int
    temperature: float
    top_p: float | None
    top_k: int | None
    seed: int
    ignore_eos: bool
    prompts: Literal["token ids", "text"]


class Speculation(Part):
    """Deltas of the server's counters over the level."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    draft_acceptance_rate: float | None
    mean_acceptance_length: float | None
    accepted_tokens_per_pos: tuple[int, ...]
    round_ms: float | None
    """Time after the first token by number of rounds; only with one request at a time."""


class LevelResult(Part):
    """One level of load."""

    contract: Contract
    completed: int
    failed: int
    errors: dict[str, int]
    finish_reasons: dict[str, int]
    token_source: tuple[str, ...]
    total_output_tokens: int
    wall_seconds: float
    output_tokens_per_second: float | None
    """All requests together, by the wall."""
    requests_per_second: float | None
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    """A request's time per output token after its first chunk."""
    chunk_interval_ms: Distribution | None
    """Between chunks, which may hold several tokens."""
    tokens_per_chunk: float | None
    prefill_tokens_per_second: Distribution | None
    decode_tokens_per_second: Distribution | None
    e2e_ms: Distribution | None
    spec_decode: Speculation | None


class BenchResult(Part):
    """The whole file."""

    schema_version: Literal[1] = 1
    tool_version: str
    started_at: str
    finished_at: str
    url: str
    model: str
    label: str | None
    refused_options: tuple[str, ...]
    """Members of a request that the endpoint would not take, and was asked without."""
    levels: tuple[LevelResult, ...]


class Sampling(Part):
    """How tokens are chosen."""

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0
    ignore_eos: bool = True


def level_result(measured: Measured, sampling: Sampling) -> LevelResult:
    """The figures of one level."""
    level, timings = measured.level, measured.timings
    tokens = sum(one.output_tokens for one in timings)
    intervals = [1000 * interval for one in timings for interval in one.chunk_intervals]
    chunks = sum(1 + len(one.chunk_intervals) for one in timings)
    wall = measured.wall_seconds
    return LevelResult(
        contract=_contract(measured, sampling),
        completed=len(timings),
        failed=sum(measured.errors.values()),
        errors=dict(measured.errors.most_common(8)),
        finish_reasons=dict(Counter(str(sample.finish_reason) for sample in measured.samples if sample.timing)),
        token_source=tuple(sorted({str(one.token_source) for one in timings})),
        total_output_tokens=tokens,
        wall_seconds=round(wall, 6),
        output_tokens_per_second=_rounded(tokens / wall) if timings and wall else None,
        requests_per_second=_rounded(len(timings) / wall) if timings and wall else None,
        ttft_ms=_each(timings, lambda one: 1000 * one.first_token_seconds),
        tpot_ms=_each(timings, lambda one: None if one.tpot_seconds is None else 1000 * one.tpot_seconds),
        chunk_interval_ms=_distribution(spread(intervals)),
        tokens_per_chunk=_rounded(tokens / chunks) if chunks else None,
        prefill_tokens_per_second=_each(timings, lambda one: one.prefill_rate),
        decode_tokens_per_second=_each(timings, lambda one: one.decode_rate),
        e2e_ms=_each(timings, lambda one: 1000 * one.total_seconds),
        spec_decode=_speculation(measured, alone=level.concurrency == 1),
    )


def _contract(measured: Measured, sampling: Sampling) -> Contract:
    level = measured.level
    found = [one.prompt_tokens for one in measured.timings if one.prompt_tokens is not None]
    return Contract(
        input_len=level.prompt_tokens,
        input_len_exact=bool(found) and {level.prompt_tokens} == set(found),
        input_len_found=(min(found), max(found)) if found else None,
        max_output_tokens=level.output_tokens,
        concurrency=level.concurrency,
        requests=level.requests,
        warm_up=level.warm_up,
        prompts="token ids" if measured.exact_prompts else "text",
        **sampling.model_dump(),
    )


def _speculation(measured: Measured, *, alone: bool) -> Speculation | None:
    rounds = measured.rounds
    if rounds is None:
        return None
    seconds = sum(one.tpot_seconds * _later(one) for one in measured.timings if one.tpot_seconds is not None)
    return Speculation(
        num_drafts=rounds.num_drafts,
        num_draft_tokens=rounds.num_draft_tokens,
        num_accepted_tokens=rounds.num_accepted_tokens,
        draft_acceptance_rate=_rounded(rounds.draft_acceptance_rate),
        mean_acceptance_length=_rounded(rounds.mean_acceptance_length),
        accepted_tokens_per_pos=rounds.accepted_tokens_per_pos,
        round_ms=_rounded(1000 * seconds / rounds.num_drafts) if alone and seconds else None,
    )


def _later(one: Timing) -> int:
    """Tokens after the first chunk."""
    return one.output_tokens - one.first_chunk_tokens


def _each(timings: Iterable[Timing], value: Callable[[Timing], float | None]) -> Distribution | None:
    return _distribution(spread([found for one in timings if (found := value(one)) is not None]))


def _distribution(found: Spread | None) -> Distribution | None:
    if found is None:
        return None
    figures = (found.mean, found.minimum, found.p50, found.p90, found.p99, found.maximum)
    mean, least, p50, p90, p99, most = (round(figure, 4) for figure in figures)
    return Distribution(samples=found.samples, mean=mean, min=least, p50=p50, p90=p90, p99=p99, max=most)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
