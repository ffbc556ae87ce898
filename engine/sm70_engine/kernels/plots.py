"""Figures of a benchmark as pictures, one for each kind of kernel, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import KernelError

Groups = dict[str, list[tuple[str, float]]]
Picture = tuple[str, str, bool, float | None]

# By the start of a family's name: what its picture is called.
_SECTIONS = {
    "attention_decode": "decode",
    "attention_verify": "verify",
    "attention_prefill": "prefill",
    "nvfp4_linear": "linears",
    "nvfp4_chain": "chain",
}
_INCH_PER_BAR, _SURROUNDINGS = 0.11, 1.5
_GAP = 0.2  # above the first bar and below the last, in rows
_LONGEST_VALUE = 1.16  # room for the figures beside the bars


def _section(family: str) -> str:
    return next((name for start, name in _SECTIONS.items() if family.startswith(start)), family)


def _label(family: str, case: str) -> str:
    """The case, with the KV format in front where a family has one."""
    _, _, kv_format = family.rpartition("_")
    return f"{kv_format} {case}" if family.startswith("attention_") else case


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _bars(
    path: Path, title: str, axis: str, groups: Mapping[str, Sequence[tuple[str, float]]], log: bool, line: float | None
) -> Path:
    """A bar for each (label, value) with its figure beside it, the groups in colours of their own."""
    import matplotlib.pyplot as plt

    labels = list(dict.fromkeys(label for rows in groups.values() for label, _ in rows))
    place = {label: i for i, label in enumerate(labels)}
    height = 0.84 / max(len(groups), 1)
    rows_high = (_INCH_PER_BAR * max(len(groups), 1.6) + 0.05) * len(labels)
    figure, axes = plt.subplots(figsize=(9, rows_high + _SURROUNDINGS), layout="constrained")
    for i, (name, rows) in enumerate(groups.items()):
        bars = axes.barh(
            [place[label] + i * height for label, _ in rows], [value for _, value in rows], height=height, label=name
        )
        axes.bar_label(bars, [_figure(value) for _, value in rows], fontsize=6, padding=2)
    axes.set_yticks([i + height * (len(groups) - 1) / 2 for i in range(len(labels))], labels)
    axes.set_ylim(len(labels) - 1 + height * (len(groups) - 0.5) + _GAP, -height / 2 - _GAP)
    if log:
        axes.set_xscale("log")
        axes.set_xlim(right=axes.get_xlim()[1] * 1.6)
    else:
        axes.set_xlim(0, max(line or 0, axes.get_xlim()[1]) * _LONGEST_VALUE / 1.05)
    if line is not None:
        axes.axvline(line, linewidth=0.8, color="black")
    axes.grid(axis="x", linewidth=0.3)
    axes.set_axisbelow(True)
    axes.set_xlabel(axis, fontsize=8)
    figure.suptitle(title, fontsize=10)
    if len(groups) > 1:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(len(groups), 4), fontsize=7, frameon=False)
    axes.tick_params(axis="both", labelsize=7)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)
    plt.close(figure)
    return path


def _figures(document: Mapping[str, Any]) -> dict[Picture, Groups]:
    """(file, axis, logarithmic, line) to the bars of each build or peer."""
    found: dict[Picture, Groups] = {}

    def add(picture: Picture, group: str, label: str, value: float) -> None:
        found.setdefault(picture, {}).setdefault(group, []).append((label, value))

    for run in document["runs"]:
        for row in run["rows"]:
            shares = (_section(row["family"]), "useful bytes a second, share of 900 GB/s at a V100's clock", False, 1.0)
            add(shares, row["kind"], _label(row["family"], row["case"]), row["share"])
        for row in run.get("prefill", ()):
            label = f"{row['kernel'].split('_')[1]} {row['case']}"
            add(("prefill", "useful TFLOP/s at a V100's clock", False, None), row["kind"], label, row["v100_tflops"])
    axis = "microseconds a call: whole card, same data, same run"
    if document["about"].get("capability", [7])[0] > 7:
        axis += "\n(ours: m8n8k4 is a subroutine on this card; s2 stands in for it, with garbage as result)"
    for row in document.get("peers", ()):
        picture = f"peers_{_section(row['family'])}", axis, True, None
        add(picture, row["peer"], _label(row["family"], row["case"]), row["microseconds"])
    return found


def merge(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One document of several runs: a row of a later one replaces an earlier one's of the same kind and case."""
    rows: dict[tuple[str, ...], Any] = {}
    prefills: dict[tuple[str, ...], Any] = {}
    peers: dict[tuple[str, ...], Any] = {}
    for document in documents:
        for run in document["runs"]:
            rows |= {(row["kind"], row["family"], row["case"]): row for row in run["rows"]}
            prefills |= {(row["kind"], row["kernel"], row["case"]): row for row in run.get("prefill", ())}
        peers |= {(row["peer"], row["family"], row["case"]): row for row in document.get("peers", ())}
    run = {"rows": list(rows.values()), "prefill": list(prefills.values())}
    return {"about": documents[-1]["about"], "runs": [run], "peers": list(peers.values())}


def write(document: Mapping[str, Any], folder: Path, suffix: str = "svg") -> list[Path]:
    """Pictures of a run: a share of 900 GB/s (prefill: a rate) at a V100's clock by build, and times of the peers.

    Raises `KernelError` without matplotlib.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise KernelError(f"--plots needs matplotlib: pip install matplotlib ({error})") from error
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "sm70"  # the same file for the same figures
    mpl.rcParams["svg.fonttype"] = "none"  # text as text: a tenth of the size
    folder.mkdir(parents=True, exist_ok=True)
    about = document["about"]
    where = f"{about['device']}, {about['date'][:10]}"
    return [
        _bars(folder / f"{name}.{suffix}", f"{name.replace('_', ': ')} on {where}", axis, groups, log, line)
        for (name, axis, log, line), groups in _figures(document).items()
    ]
