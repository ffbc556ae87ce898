"""Figures of a benchmark as pictures, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import KernelError


def _bars(path: Path, title: str, axis: str, groups: Mapping[str, Sequence[tuple[str, float]]], log: bool) -> Path:
    """A bar for each (label, value), the groups in colours of their own."""
    import matplotlib.pyplot as plt

    labels = list(dict.fromkeys(label for rows in groups.values() for label, _ in rows))
    place = {label: i for i, label in enumerate(labels)}
    height = 0.8 / max(len(groups), 1)
    figure, axes = plt.subplots(figsize=(10, (0.13 * len(groups) + 0.1) * len(labels) + 1.6), layout="constrained")
    for i, (name, rows) in enumerate(groups.items()):
        axes.barh(
            [place[label] + i * height for label, _ in rows], [value for _, value in rows], height=height, label=name
        )
    axes.set_yticks([i + height * (len(groups) - 1) / 2 for i in range(len(labels))], labels)
    axes.set_ylim(len(labels), -0.6)
    if log:
        axes.set_xscale("log")
    else:
        axes.axvline(1.0, linewidth=0.8, color="black")
    axes.grid(axis="x", linewidth=0.3)
    axes.set_xlabel(axis)
    axes.set_title(title)
    if len(groups) > 1:
        axes.legend(loc="lower right", fontsize=7)
    axes.tick_params(axis="y", labelsize=6)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def write(document: Mapping[str, Any], folder: Path, suffix: str = "svg") -> list[Path]:
    """Pictures of a run: shares of 900 GB/s at a V100's clock by build, prefill's rates, and the peers.

    Raises `KernelError` without matplotlib.
    """
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        mpl.rcParams["svg.hashsalt"] = "sm70"  # the same file for the same figures
    except ImportError as error:
        raise KernelError(f"--plots needs matplotlib: pip install matplotlib ({error})") from error
    folder.mkdir(parents=True, exist_ok=True)
    card, written = document["about"]["device"], []
    shares, rates = {}, {}
    for run in document["runs"]:
        name = run["variant"] or "plain"
        if run["rows"]:
            shares[name] = [(f"{row['kernel']}  {row['case']}", row["share"]) for row in run["rows"]]
        if run.get("prefill"):
            rates[name] = [(f"{row['kernel']}  {row['case']}", row["v100_tflops"]) for row in run["prefill"]]
    for title, axis, name, groups, log in (
        ("shares", "useful bytes a second, share of 900 GB/s at a V100's clock", "shares", shares, False),
        ("prefill", "useful TFLOP/s at a V100's clock", "prefill", rates, True),
    ):
        if groups:
            kinds = {row["kind"] for run in document["runs"] for row in run["rows"]} or {title}
            heading = f"{card}: {title}; {', '.join(sorted(kinds))}"
            written.append(_bars(folder / f"{name}.{suffix}", heading, axis, groups, log))
    peers: dict[str, list[tuple[str, float]]] = {}
    for row in document.get("peers", ()):
        peers.setdefault(row["peer"], []).append((f"{row['family']}  {row['case']}", row["microseconds"]))
    if peers:
        axis = "microseconds a call, the whole card, same data, same run"
        written.append(_bars(folder / f"peers.{suffix}", f"{card}: peers", axis, peers, True))
    return written
