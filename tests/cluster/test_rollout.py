"""Rollouts on a real cluster with simulated engines: changes that prove themselves, changes that do not, and faults.

Every story starts from a service that serves and watches what its clients see. What happens to traffic is measured, and
printed with `-s`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cluster.harness import NAMESPACE
from cluster.simulation import MODELS, Simulation, Traffic
from sm70_engine.tinymodel.chains import TEXT
from sm70_qualify.client import Endpoint
from stack.services import condition

pytestmark = pytest.mark.cluster
full = pytest.mark.full
"""The gate tells the story that shows most; the others take a minute each."""
REPEATS = 1
JUDGED = {"suite": "smoke", "when": "During", "repeats": REPEATS}
IN_PLACE = {"strategy": "InPlace", "drainTimeoutSeconds": 10, "progressDeadlineSeconds": 60, "bakeSeconds": 2}
SURGE = {**IN_PLACE, "strategy": "Auto"}


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A service's name from the test's."""
    return str(request.node.name).removeprefix("test_").partition("[")[0].replace("_", "-")[:36].strip("-")


@pytest.fixture
def judged(simulation: Simulation, name: str) -> Iterator[str]:
    """A service that has proven itself, in place and with a judge; the revision that serves."""
    with simulation.serving(name, rollout=IN_PLACE, qualification=JUDGED) as revision:
        simulation.says(name, "Progressing", "Settled")
        yield revision


def runs(simulation: Simulation) -> int:
    """How often the judge was sent out so far."""
    return len(simulation.cluster.items("sm70qualifications.inference.sm70.io", NAMESPACE))


def rejected(service: dict[str, Any], revision: str) -> dict[str, Any] | None:
    """What the status says of a rejected revision."""
    entries = service["status"]["revisions"].get("rejected") or ()
    return next((one for one in entries if one["revision"] == revision), None)


def returns(simulation: Simulation, name: str, before: str, reason: str, seconds: float = 90) -> dict[str, Any]:
    """Waits until a change was rejected for this reason and the earlier revision serves again."""

    def back(service: dict[str, Any]) -> bool:
        return condition(service, "Progressing").reason == "RolledBack" and condition(service, "Ready").status == "True"

    service = simulation.until(name, back, seconds)
    target = service["status"]["revisions"]["target"]
    assert service["status"]["revisions"]["active"] == simulation.selected(name) == before != target
    found = rejected(service, target)
    assert found is not None
    assert found["reason"] == reason, found
    assert found["message"]
    return service


def test_a_change_in_place_under_traffic(simulation: Simulation, judged: str, name: str) -> None:
    """Judged, promoted; nothing is cut, nothing is wrong, and the outage is what the stop and the start took."""
    with Traffic(simulation.service_url(name), expected=TEXT) as traffic:
        traffic.more(1)
        simulation.behave(name, variant="next")
        simulation.ready(name, other_than=judged, seconds=90)
        promoted = time.monotonic()
        traffic.more(5)
    print(f"\noutage of an in-place change with a judge: {traffic.outage():.1f} s, {len(traffic.finished)} answers")
    assert traffic.wrong == []
    assert [begin for begin in traffic.refused if begin > promoted] == []
    service = simulation.says(name, "Progressing", "Settled")
    assert service
    found = simulation.get(name)
    assert found["status"]["qualification"]["verdict"] == "Passed"
    assert found["status"]["revisions"]["lastGood"] == found["status"]["revisions"]["active"] != judged


@full
def test_a_long_stream_is_finished_before_its_server_ends(simulation: Simulation, name: str) -> None:
    slow = {"tokenSeconds": 0.05}  # 4.5 s an answer
    with simulation.serving(name, slow, rollout=IN_PLACE) as before:
        began, texts = threading.Event(), []

        def ask() -> None:
            with Endpoint(simulation.service_url(name), model="tiny") as endpoint:
                texts.append(endpoint.ask("Recite.", seen=lambda _piece: began.set()).text)

        thread = threading.Thread(target=ask)
        thread.start()
        assert began.wait(20)
        simulation.behave(name, variant="next")
        simulation.ready(name, other_than=before)
        thread.join(30)
        assert texts == [TEXT]
        shutdown = simulation.get(name)["status"]["routes"]["lastShutdown"]
        assert shutdown["revision"] == before


@full
def test_a_path_that_is_off(simulation: Simulation, judged: str, name: str) -> None:
    simulation.behave(name, disabled={"reference_gdn": "operator_missing:gdn"})
    service = returns(simulation, name, judged, "RouteDisabled")
    found = rejected(service, service["status"]["revisions"]["target"])
    assert found is not None
    assert "reference_gdn" in found["message"]


@full
def test_a_failing_gate(simulation: Simulation, judged: str, name: str) -> None:
    with Traffic(simulation.service_url(name), expected=TEXT) as traffic:
        simulation.behave(name, answers="Wrong")
        service = returns(simulation, name, judged, "GateFailed")
        traffic.more(3)
    assert traffic.wrong == [], "public traffic has met the bad revision"
    assert condition(service, "Ready").reason == "ServingEarlierSpec"
    print(f"\noutage of a change that its judge refuses: {traffic.outage():.1f} s")


@full
def test_a_judge_that_cannot_decide(simulation: Simulation, judged: str, name: str) -> None:
    """In place it is repeated and then returns, because holding it would be an outage."""
    before = runs(simulation)
    simulation.behave(name, answers="Brief")
    returns(simulation, name, judged, "Inconclusive", seconds=120)
    assert runs(simulation) == before + 1 + REPEATS


@full
def test_a_suite_of_the_users_own(simulation: Simulation, name: str) -> None:
    """From a ConfigMap: the judge reads it, the evidence names its content, and other floors are other evidence."""
    gates = [
        {"name": "same", "check": "Determinism", "prompts": ["Recite."], "repeats": 2},
        {"name": "fast", "check": "Performance", "metric": "DecodeRate", "floor": "1", "outputTokens": 32},
    ]
    suite = {"schemaVersion": 1, "name": "mine", "version": 1, "title": "Ours", "gates": gates}
    document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}}
    document["data"] = {"mine.yaml": json.dumps(suite)}
    simulation.cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=json.dumps(document))
    own = {"when": "During", "repeats": 0, "suiteRef": {"configMap": {"name": name, "key": "mine.yaml"}}}
    with simulation.serving(name, rollout=IN_PLACE, qualification=own) as before:
        simulation.says(name, "Progressing", "Settled")
        found = simulation.cluster.items("sm70qualifications.inference.sm70.io", NAMESPACE)
        (run,) = [one for one in found if one["spec"]["serviceRef"]["name"] == name]
        assert (run["spec"]["suite"], run["status"]["verdict"], run["status"]["summary"]) == ("mine", "Passed", "2/2")
        assert run["spec"]["suiteDigest"] == run["status"]["suiteDigest"]
        simulation.patch(
            name,
            qualification={**own, "thresholds": {"fast": "1000000000"}},
            env=[{"name": "SIMULATED_ENGINE", "value": json.dumps({"variant": "next"})}],
        )
        returns(simulation, name, before, "GateFailed")


@full
def test_a_rollback_to_a_proven_revision(simulation: Simulation, judged: str, name: str) -> None:
    simulation.behave(name, variant="next")
    newer = simulation.ready(name, other_than=judged, seconds=90)["status"]["revisions"]["active"]
    before = runs(simulation)
    simulation.patch(name, rollout={**IN_PLACE, "rollbackTo": judged})
    simulation.ready(name, other_than=newer)
    assert simulation.selected(name) == judged
    assert runs(simulation) == before
    assert simulation.get(name)["status"]["qualification"]["verdict"] == "Passed"


@full
def test_a_change_beside(simulation: Simulation, name: str) -> None:
    """A second set of GPUs is free: no request is lost, and Inconclusive is held beside the one that serves."""
    with simulation.serving(name, rollout=SURGE, qualification={**JUDGED, "repeats": 0}) as before:
        simulation.says(name, "Progressing", "Settled")
        with Traffic(simulation.service_url(name), expected=TEXT) as traffic:
            simulation.behave(name, variant="next")
            after = simulation.ready(name, other_than=before, seconds=90)["status"]["revisions"]["active"]
            simulation.says(name, "Progressing", "Settled")
            simulation.behave(name, answers="Brief")
            held = simulation.says(name, "Progressing", "Held", seconds=90)
        assert traffic.wrong == []
        assert traffic.refused == []
        assert held.message
        assert simulation.selected(name) == after
        print(f"\nlongest wait of a change beside: {traffic.outage():.2f} s, {len(traffic.finished)} answers")


@full
def test_an_image_that_is_not_there(simulation: Simulation, judged: str, name: str) -> None:
    """The preflight finds it, so nothing is stopped."""
    pods = {pod["metadata"]["uid"] for pod in simulation.pods(name)}
    with Traffic(simulation.service_url(name), clients=1, expected=TEXT) as traffic:
        simulation.patch(name, engine={"image": "sm70.test/no-such-image:1"})
        simulation.says(name, "Progressing", "Preflight")
        time.sleep(3)  # a stop would come now
    assert traffic.wrong == []
    assert traffic.refused == []
    assert {pod["metadata"]["uid"] for pod in simulation.pods(name)} == pods
    assert simulation.selected(name) == judged


@full
@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"model": {"hostPath": {"path": f"{MODELS}/not-there"}, "servedName": "tiny"}}, "not-there"),
        (
            {
                "profile": "tiny_hybrid_reference_dflash",
                "draft": {"hostPath": {"path": f"{MODELS}/draft-mismatch"}},
            },
            "draft",
        ),
    ],
    ids=["model", "draft"],
)
def test_what_a_preflight_finds(
    simulation: Simulation, judged: str, name: str, spec: dict[str, Any], words: str
) -> None:
    with Traffic(simulation.service_url(name), clients=1, expected=TEXT) as traffic:
        simulation.patch(name, **spec)
        service = returns(simulation, name, judged, "PreflightFailed")
    assert traffic.wrong == []
    assert traffic.refused == []
    found = rejected(service, service["status"]["revisions"]["target"])
    assert found is not None
    assert words in found["message"]


@full
def test_a_fallback_within_the_bake_time(simulation: Simulation, name: str) -> None:
    with simulation.serving(name, rollout=IN_PLACE) as before:
        simulation.says(name, "Progressing", "Settled")
        simulation.patch(name, rollout={**IN_PLACE, "bakeSeconds": 120})
        with Traffic(simulation.service_url(name), clients=1):
            simulation.behave(name, fallbacks={"attention_e5m2_reference": 100_000})
            returns(simulation, name, before, "FallbackObserved", seconds=120)


@full
def test_a_container_that_comes_back_without_a_path(simulation: Simulation, judged: str, name: str) -> None:
    """No traffic reaches it, with the operator frozen or not: the probe decides that, not the operator."""
    simulation.disturb(name, disabled={"reference_gdn": "sick"})
    simulation.disturb(name, dies={"at": "Serving", "exitCode": 3})
    simulation.until(name, lambda one: condition(one, "Ready").status == "False")
    found = simulation.says(name, "AccelerationComplete", "RouteDisabled")
    assert "reference_gdn" in found.message
    # The report may be read before the kubelet's word is.
    simulation.until(name, lambda one: one["status"].get("readyReplicas", 0) == 0)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{simulation.service_url(name)}/health", timeout=3)


@full
def test_a_pod_that_is_killed(simulation: Simulation, judged: str, name: str) -> None:
    (pod,) = simulation.pods(name)
    simulation.cluster.kubectl("delete", "pod", pod["metadata"]["name"], "-n", NAMESPACE, "--grace-period=0", "--force")
    simulation.until(name, lambda one: condition(one, "Ready").status == "False")
    simulation.ready(name)
    assert simulation.selected(name) == judged


@full
def test_all_at_once_in_a_plain_status(simulation: Simulation, judged: str, name: str) -> None:
    """The status can be deleted at any time, and comes back."""
    before = simulation.get(name)["status"]
    simulation.cluster.kubectl(
        "patch", "sm70", name, "-n", NAMESPACE, "--subresource=status", "--type=json",
        "-p", json.dumps([{"op": "remove", "path": "/status"}]),
    )  # fmt: skip
    after = simulation.ready(name)["status"]
    assert after["revisions"] == before["revisions"]
    assert {one["type"]: one["reason"] for one in after["conditions"]} == {
        one["type"]: one["reason"] for one in before["conditions"]
    }
