"""Debian's Prometheus, configured by the chart's PodMonitors, sees operator and engines; the dashboard works on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.prometheus import Prometheus, running
from cluster.simulation import Simulation
from stack import operator

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def objects(simulation: Simulation) -> list[dict[str, Any]]:
    """What the chart renders for monitoring."""
    rendered = simulation.cluster.helm(
        "template", operator.RELEASE, str(operator.CHART), "--namespace", operator.NAMESPACE,
        "--show-only", "templates/monitoring.yaml",
        "--set", "monitoring.podMonitor.enabled=true,monitoring.dashboard.enabled=true",
    )  # fmt: skip
    return [one for one in yaml.safe_load_all(rendered) if one]


@pytest.fixture(scope="module")
def prometheus(
    simulation: Simulation, objects: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """Prometheus beside one service that has answered one request."""
    monitors = [one for one in objects if one["kind"] == "PodMonitor"]
    with (
        simulation.serving("watched"),
        running(simulation.cluster, monitors, tmp_path_factory.mktemp("prometheus")) as found,
    ):
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Recite."}]}
        url = f"{simulation.service_url('watched')}/v1/chat/completions"
        assert httpx.post(url, json=body, timeout=10).status_code == 200
        yield found


def test_it_scrapes_operator_and_engine(prometheus: Prometheus, simulation: Simulation) -> None:
    up = prometheus.until("up == 1 and on (pod) sm70_acceleration_path")
    assert {one["metric"]["sm70_service"] for one in up} == {"watched"}
    assert {one["metric"]["sm70_revision"] for one in up} == {simulation.active("watched")}
    (leader,) = prometheus.until("sm70_operator_leader == 1")
    assert leader["metric"]["namespace"] == operator.NAMESPACE
    assert prometheus.query("up == 0") == []


def test_it_sees_what_was_executed(prometheus: Prometheus) -> None:
    rows = prometheus.until('sm70_route_dispatch_total{sm70_service="watched", stage="decode"} > 0')
    assert {one["metric"]["route"] for one in rows} >= {"gdn_reference", "nvfp4_linear_reference"}
    fallbacks = prometheus.until("sm70_route_fallback_total")
    assert all(one["metric"]["reason"] for one in fallbacks)
    assert {float(one["value"][1]) for one in fallbacks} == {0}


def test_no_pod_but_ours_is_scraped(prometheus: Prometheus) -> None:
    pods = {one["labels"]["pod"] for one in prometheus.targets()}
    assert pods
    assert all(name.startswith(("sm70-operator-", "watched-")) for name in pods)


def test_every_question_of_the_dashboard_is_answered(prometheus: Prometheus, objects: list[dict[str, Any]]) -> None:
    """All are valid; those over our own series have an answer."""
    (config,) = [one for one in objects if one["kind"] == "ConfigMap"]
    dashboard = json.loads(config["data"]["sm70-inference.json"])
    prometheus.until("rate(sm70_operator_reconciles_total[5s])")
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            asked = target["expr"].replace("$service", ".*").replace("$__rate_interval", "5s")
            if "vllm:" in asked or 'state="disabled"' in asked:
                prometheus.query(asked)
            else:
                prometheus.until(asked, seconds=20)


def test_the_dashboard_fits_into_a_config_map(objects: list[dict[str, Any]]) -> None:
    (config,) = [one for one in objects if one["kind"] == "ConfigMap"]
    assert len(json.dumps(config)) < 2**20
    assert (
        Path(operator.CHART / "dashboards" / "sm70-inference.json").read_text().strip()
        == next(iter(config["data"].values())).strip()
    )
