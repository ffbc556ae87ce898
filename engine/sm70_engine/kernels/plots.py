"""Figures of a benchmark as pictures, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import KernelError


def write(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """A picture a build: each case's share of 900 GB/s at a V100's clock. Raises `KernelError` without matplotlib."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise KernelError(f"--plots needs matplotlib: pip install matplotlib ({error})") from error
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for run in document["runs"]:
        rows = run["rows"]
        if not rows:
            continue
        figure, axes = plt.subplots(figsize=(9, 0.22 * len(rows) + 1.5))
        labels = [f"{row['kernel']}  {row['case']}" for row in rows]
        axes.barh(labels, [row["share"] for row in rows])
        axes.axvline(1.0, linewidth=0.8, color="black")
        axes.invert_yaxis()
        axes.set_xlabel("useful bytes a second, share of 900 GB/s at a V100's clock")
        axes.set_title(f"{document['about']['device']}: {rows[0]['kind']}")
        axes.tick_params(axis="y", labelsize=6)
        figure.tight_layout()
        path = folder / f"{run['variant'] or 'plain'}.svg"
        figure.savefig(path)
        plt.close(figure)
        written.append(path)
    return written
