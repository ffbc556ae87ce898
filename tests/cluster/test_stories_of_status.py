"""What the status says over time: windows of counters, the last words of a server, evidence that no longer holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cluster.harness import NAMESPACE
from cluster.simulation import Simulation, Traffic
from sm70_engine.tinymodel.chains import TEXT
from stack.services import condition

pytestmark = [pytest.mark.cluster, pytest.mark.full]
IN_PLACE = {"strategy": "InPlace", "drainTimeoutSeconds": 5, "progressDeadlineSeconds": 60, "bakeSeconds": 1}
V100: dict[str, Any] = {"profile": "custom", "overrides": {"maxModelLen": 4096}}
"""Evidence of the reference lane is for `cpu`, whatever the driver."""
RUNS = "sm70qualifications.inference.sm70.io"
JUDGED = {"suite": "smoke", "when": "During", "repeats": 1}


@pytest.fixture
def judged(simulation: Simulation) -> Iterator[str]:
    name = "judged"
    with simulation.serving(name, rollout=IN_PLACE, qualification=JUDGED, **V100):
        simulation.says(name, "Progressing", "Settled", seconds=120)
        yield name


@pytest.fixture
def counted(simulation: Simulation) -> Iterator[str]:
    name = "counted"
    with simulation.serving(name, rollout=IN_PLACE):
        simulation.says(name, "Progressing", "Settled")
        yield name


def test_evidence_is_stale_on_another_driver_and_is_renewed(simulation: Simulation, judged: str) -> None:
    """The node was given another driver under the running server: it keeps its traffic, and is judged again."""
    before = simulation.get(judged)["status"]["qualification"]
    assert before["verdict"] == "Passed"
    with Traffic(simulation.service_url(judged), clients=1, expected=TEXT) as traffic:
        simulation.disturb(judged, device={"driver": "580.65.06"})
        renewed = simulation.until(
            judged,
            lambda one: (
                condition(one, "Qualified").reason == "Passed"
                and one["status"]["qualification"]["key"] != before["key"]
            ),
            seconds=120,
        )
        traffic.more(1)
    assert traffic.wrong == []
    assert traffic.refused == []
    assert condition(renewed, "Ready").status == "True"
    name = renewed["status"]["qualification"]["name"]
    (run,) = [one for one in simulation.cluster.items(RUNS, NAMESPACE) if one["metadata"]["name"] == name]
    assert run["spec"]["key"]["driverBranch"] == "580"
    # The status says so for a moment only, as another run begins at once; the event stays.
    told = [one for one in simulation.cluster.items("events", NAMESPACE) if one["reason"] == "Stale"]
    assert any(before["name"] in one.get("message", one.get("note", "")) for one in told)


def test_counters_have_a_window_and_begin_anew_with_the_server(simulation: Simulation, counted: str) -> None:
    with Traffic(simulation.service_url(counted), clients=1, expected=TEXT) as traffic:
        traffic.more(3)

        def dispatched(service: dict[str, Any]) -> bool:
            window = service["status"].get("routes", {}).get("window") or {}
            return bool(window.get("dispatches"))

        found = simulation.until(counted, dispatched)["status"]["routes"]
        print(f"\n{found}")
        assert found["items"]
    simulation.disturb(counted, dies={"at": "Serving", "exitCode": 3})
    simulation.until(counted, lambda one: condition(one, "Ready").status == "False")
    simulation.ready(counted)
    simulation.says(counted, "RoutesHealthy", "CountersReset")
    with Traffic(simulation.service_url(counted), clients=1, expected=TEXT) as traffic:
        traffic.more(3)
        simulation.until(counted, lambda one: one["status"]["routes"]["window"].get("resets", 0) >= 1)
    assert traffic.wrong == []
