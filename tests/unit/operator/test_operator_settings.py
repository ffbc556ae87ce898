"""Settings: typed, all mistakes at once, documented."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sm70_operator.settings import Settings, SettingsError

CHART = Path(__file__).resolve().parents[3] / "charts" / "sm70-operator"
NOT_IN_THE_CHART = {
    "namespaces", "observe_nodes", "engine_image_cpu", "engine_image_sm70", "port", "listen",
    "leader_election", "lease_name", "lease_namespace", "judge_image",
}  # fmt: skip
"""Set by the chart itself, from values of their own."""


def test_variables_are_read_by_prefix() -> None:
    found = Settings.from_environment(
        {"SM70_OPERATOR_POLL_SECONDS": "3", "SM70_OPERATOR_NAMESPACES": "a, b", "PATH": "/bin"}
    )
    assert (found.poll_seconds, found.namespaces) == (3, ("a", "b"))


def test_every_mistake_is_named_at_once() -> None:
    wrong = {"SM70_OPERATOR_POLL_SECONDS": "soon", "SM70_OPERATOR_WORKERS": "0", "SM70_OPERATOR_POLLSECONDS": "1"}
    with pytest.raises(SettingsError) as caught:
        Settings.from_environment(wrong)
    assert all(name in str(caught.value) for name in wrong)


def test_all_are_documented() -> None:
    text = Settings.describe()
    assert all(f"`SM70_OPERATOR_{name.upper()}`" in text for name in Settings.model_fields)
    assert "|  |\n" not in text


def test_the_documents_hold_the_present_table() -> None:
    page = CHART.parents[1] / "docs" / "operations" / "operator.md"
    assert Settings.describe() in page.read_text(), "copy what `sm70-operator --settings` prints"


def test_the_chart_knows_every_setting() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    known = set(schema["properties"]["settings"]["properties"])
    wanted = {
        "".join(word.capitalize() if position else word for position, word in enumerate(name.split("_")))
        for name in set(Settings.model_fields) - NOT_IN_THE_CHART
    }
    assert known == wanted
