"""What the device lane found, from the files in docs/engine/device: checks passed, and times predicted for a V100.

A file per run; where several hold the same check or case, the one whose name sorts last counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .families import FAMILIES

STAND_INS = ("s2t", "s3t")


@dataclass(frozen=True)
class Checked:
    """Checks of one kernel on the device."""

    passed: int
    total: int


@dataclass(frozen=True)
class Predicted:
    """Microseconds that the proxy predicts for a V100: by stand-in s2 and by s3; the truth should lie between."""

    kernel: str
    case: str
    low: float
    high: float
    source: str
    measured: bool = False
    """On a V100: then both are the figure."""

    @property
    def text(self) -> str:
        """For tables."""
        if self.measured:
            return f"{self.low:.1f} measured"
        return f"{self.low:.1f} / {self.high:.1f}"


@dataclass(frozen=True)
class Results:
    """`checks` by kernel; `times` by (family or `prefill`, case)."""

    checks: Mapping[str, Checked] = field(default_factory=dict)
    times: Mapping[tuple[str, str], Predicted] = field(default_factory=dict)

    def checked(self, kernels: Iterable[str]) -> Checked:
        """Of all these kernels together."""
        found = [self.checks[name] for name in kernels if name in self.checks]
        return Checked(sum(x.passed for x in found), sum(x.total for x in found))


def _times(data: Mapping[str, Any], source: str) -> dict[tuple[str, str], Predicted]:
    pairs: dict[tuple[str, str], dict[str, tuple[str, float]]] = {}
    for run in data["runs"]:
        if run.get("measured_v100"):
            measured = {"rows": run["rows"], "prefill": run.get("prefill", ())}
            both = [{**measured, "variant": name} for name in STAND_INS]
            return {key: replace(x, measured=True) for key, x in _times({"runs": both}, source).items()}
        rows = [(row["family"], row, row["v100_microseconds"]) for row in run["rows"]]
        rows += [("prefill", row, row["v100_milliseconds"] * 1e3) for row in run.get("prefill", ())]
        for family, row, microseconds in rows:
            case = row["case"] if family != "prefill" else f"{row['kernel'].split('_')[1]} {row['case']}"
            pairs.setdefault((family, case), {})[run["variant"]] = (row["kernel"], microseconds)
    found = {}
    for key, by_variant in pairs.items():
        if all(name in by_variant for name in STAND_INS):
            (kernel, low), (_, high) = (by_variant[name] for name in STAND_INS)
            found[key] = Predicted(kernel, key[1], low, high, source)
    return found


def read(folder: Path) -> Results:
    """Everything in the folder. Checks of kernels that are no longer built do not count."""
    known = {kernel.name for family in FAMILIES for kernel in family.kernels}
    passed: dict[str, dict[str, bool]] = {}
    times: dict[tuple[str, str], Predicted] = {}
    for path in sorted(folder.glob("*_checks.json")):
        for check in json.loads(path.read_text())["checks"]:
            kernel = check["name"].split()[0]
            if kernel in known:
                good = check["ratio"] <= 1.0 and not check.get("note")
                passed.setdefault(kernel, {})[check["name"]] = good
    for path in sorted(folder.glob("*_bench.json")):
        found_here = _times(json.loads(path.read_text()), path.name)
        # A measurement stays, whatever is predicted later.
        times |= {key: x for key, x in found_here.items() if x.measured or not (key in times and times[key].measured)}
    checks = {name: Checked(sum(found.values()), len(found)) for name, found in passed.items()}
    return Results(checks, times)
