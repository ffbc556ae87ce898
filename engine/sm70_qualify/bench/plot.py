"""The chart of a result: rates and latencies over prompt length, a line a concurrency. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from sm70_qualify.bench.result import BenchResult, Distribution, LevelResult
from sm70_qualify.inputs import UsageError

PANELS: tuple[tuple[str, Callable[[LevelResult], Distribution | None]], ...] = (
    ("time to first token (ms)", lambda level: level.ttft_ms),
    ("prefill (tokens/s)", lambda level: level.prefill_tokens_per_second),
    ("time per output token (ms)", lambda level: level.tpot_ms),
    ("decode (tokens/s a request)", lambda level: level.decode_tokens_per_second),
)


def require_matplotlib() -> None:
    """Raises UsageError where there is no matplotlib; called before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("`--plot` needs matplotlib: pip install 'sm70[plots]'")


def plot(result: BenchResult, file: Path) -> None:
    """Writes a PNG: medians, with bars from the least to the most."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    axes = figure.subplots(2, 2).flat
    for axis, (title, of) in zip(axes, PANELS, strict=True):
        for concurrency in sorted({level.contract.concurrency for level in result.levels}):
            rows = [
                (level.contract.input_len, found)
                for level in result.levels
                if level.contract.concurrency == concurrency and (found := of(level)) is not None
            ]
            middle = [found.p50 for _, found in rows]
            bars = (
                [found.p50 - found.min for _, found in rows],
                [found.max - found.p50 for _, found in rows],
            )
            label = f"{concurrency} at a time"
            axis.errorbar([length for length, _ in rows], middle, yerr=bars, marker="o", capsize=3, label=label)
        axis.set_title(title)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("prompt tokens")
        axis.set_ylim(bottom=0)
        axis.grid(visible=True, alpha=0.3)
        axis.legend()
    figure.suptitle(f"{result.model}{f', {result.label}' if result.label else ''}, {result.started_at[:10]}")
    figure.savefig(file, format="png", dpi=110)
