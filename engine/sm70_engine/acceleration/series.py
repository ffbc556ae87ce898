"""The report as Prometheus series. The names are fixed: dashboards and alert rules are written against them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sm70_profiles.report import AccelerationReport, CacheState, PathState

REPLAYS = "Counted are dispatches from Python, not replays of CUDA graphs."


class Reporter(Protocol):
    def report(self) -> AccelerationReport: ...


def series(report: AccelerationReport) -> Iterator[Metric]:
    """The report as metric families."""
    states = GaugeMetricFamily(
        "sm70_acceleration_path", "1 for the state that an acceleration path is in.", labels=["path", "state"]
    )
    for path in report.paths:
        for state in PathState:
            states.add_metric([path.name, state], float(path.state is state))
    yield states
    dispatches = CounterMetricFamily(
        "sm70_route_dispatch", f"Dispatches of a route, summed over workers. {REPLAYS}", labels=["route", "stage"]
    )
    for row in report.routes:
        dispatches.add_metric([row.route, row.stage], row.dispatches)
    yield dispatches
    fallbacks = CounterMetricFamily(
        "sm70_route_fallback",
        f"Dispatches of routes that are no accelerated path, by reason. {REPLAYS}",
        labels=["route", "stage", "reason"],
    )
    for fallback in report.fallbacks:
        fallbacks.add_metric([fallback.route, fallback.stage, fallback.reason], fallback.dispatches)
    yield fallbacks
    cache = report.compile_cache
    if cache is not None:
        for name, when, value in (
            ("sm70_compile_cache_files_before", "before this start", cache.files_before),
            ("sm70_compile_cache_files_added", "added since this start", cache.files_added),
        ):
            yield GaugeMetricFamily(name, f"Files in the compile cache {when}.", value=value or 0)
        held = GaugeMetricFamily(
            "sm70_compile_cache_state", "1 for what the cache did at this start.", labels=["state"]
        )
        for cached in CacheState:
            held.add_metric([cached], float(cache.state is cached))
        yield held
    if report.startup is not None:
        took = GaugeMetricFamily("sm70_startup_seconds", "How long a phase of this start took.", labels=["phase"])
        for phase, seconds in report.startup.seconds.items():
            took.add_metric([phase], seconds)
        yield took
    if report.capacity is not None:
        yield GaugeMetricFamily(
            "sm70_kv_cache_tokens", "Tokens that the KV cache holds.", value=report.capacity.kv_tokens
        )


ROUNDS, ACCEPTED, STEPS = (
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:inter_token_latency_seconds",
)
"""Of vLLM: rounds of speculation, drafted tokens that were accepted, and the time between two steps of a request."""
SPECULATION_SAMPLES = (f"{ROUNDS}_total", f"{ACCEPTED}_total", f"{STEPS}_sum", f"{STEPS}_count")


def speculation_series(families: Iterable[Metric]) -> Iterator[Metric]:
    """What a round of speculation yields and takes on average since the start, by vLLM's own metrics.

    Nothing before the first round. While something speculates, a step of a request is a round.
    """
    sums = dict.fromkeys(SPECULATION_SAMPLES, 0.0)
    for family in families:
        for sample in family.samples:
            if sample.name in sums:
                sums[sample.name] += sample.value
    rounds, accepted, seconds, steps = (sums[name] for name in SPECULATION_SAMPLES)
    if not rounds:
        return
    yield GaugeMetricFamily(
        "sm70_spec_tokens_per_round", "Tokens that a round of speculation yields, mean.", value=1 + accepted / rounds
    )
    if steps:
        yield GaugeMetricFamily(
            "sm70_spec_round_seconds", "Time between two rounds of a request, mean.", value=seconds / steps
        )


class SpeculationCollector(Collector):
    """The speculation series over the families that `families` gives."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def describe(self) -> Iterator[Metric]:
        return iter(())  # else the registry would collect in order to learn the names

    def collect(self) -> Iterator[Metric]:
        yield from speculation_series(self._families())


class ReportCollector(Collector):
    """Yields the series of whoever can report at the moment; nothing before the engine is there."""

    def __init__(self, reporter: Callable[[], Reporter | None]) -> None:
        self._reporter = reporter

    def describe(self) -> Iterator[Metric]:
        return iter(())  # else the registry would collect in order to learn the names

    def collect(self) -> Iterator[Metric]:
        reporter = self._reporter()
        if reporter is not None:
            yield from series(reporter.report())
