"""The dashboard asks for series that exist, with labels that they have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from sm70_operator.runtime.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "charts/sm70-operator/dashboards/sm70-inference.json").read_text())
RECORDED = json.loads((ROOT / "tests/simulated_engine/recorded.json").read_text())["series"]
SERIES = re.compile(r"\b(?:sm70_|vllm:)[a-z0-9_]+")
ENDINGS = re.compile(r"_(total|bucket|sum|count)$")
TARGET_LABELS = {"sm70_service", "sm70_revision"}
"""What the PodMonitor adds to every series."""


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


def operator_series() -> set[str]:
    """Counters and histograms from the registry; gauges are made when the process is wired together."""
    counters = {family.name for family in text_string_to_metric_families(Metrics().render().decode())}
    wiring = (ROOT / "operator/sm70_operator/__main__.py").read_text()
    return counters | {f"sm70_operator_{name}" for name in re.findall(r'gauge\(\s*"([a-z_]+)"', wiring)}


def test_every_series_exists() -> None:
    known = operator_series() | set(RECORDED)
    asked = {name for text in expressions() for name in SERIES.findall(text) if name not in TARGET_LABELS}
    assert asked
    for name in asked:
        assert name in known or ENDINGS.sub("", name) in known, name


def test_every_panel_says_what_it_shows_and_reads_the_chosen_source() -> None:
    panels: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    for panel in panels:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["targets"], panel["title"]
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_no_two_panels_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
