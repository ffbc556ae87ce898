"""Rollouts while the cluster breaks: nodes, API server, operator, volumes. What was begun ends as it would have."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from cluster.harness import NAMESPACE
from cluster.simulation import Simulation, Traffic
from sm70_engine.tinymodel.chains import TEXT
from stack.services import condition

pytestmark = [pytest.mark.cluster, pytest.mark.full]
ROLLOUT = {"strategy": "InPlace", "drainTimeoutSeconds": 5, "progressDeadlineSeconds": 120, "bakeSeconds": 2}
JUDGED = {"suite": "smoke", "when": "During", "repeats": 1}


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return str(request.node.name).removeprefix("test_").replace("_", "-")[:36].strip("-")


@pytest.fixture
def serving(simulation: Simulation, name: str) -> Iterator[str]:
    """A service that has proven itself; the revision that serves."""
    with simulation.serving(name, rollout=ROLLOUT, qualification=JUDGED) as revision:
        simulation.says(name, "Progressing", "Settled")
        yield revision


def test_an_operator_that_is_killed_again_and_again(simulation: Simulation, serving: str, name: str) -> None:
    """Killed without a word after every step that the status tells of."""
    simulation.behave(name, variant="next")
    seen: set[str] = set()
    deadline = time.monotonic() + 240
    while True:
        service = simulation.get(name)
        step = condition(service, "Progressing").reason
        active = service["status"]["revisions"]["active"]
        if active != serving and condition(service, "Ready").status == "True":
            break
        if step not in seen:
            seen.add(step)
            simulation.kill_operator()
        assert time.monotonic() < deadline, seen
        time.sleep(0.1)
    assert len(seen) >= 2, seen
    print(f"\nkilled at: {', '.join(sorted(seen))}")
    assert simulation.selected(name) == active


def test_an_api_server_that_hangs(simulation: Simulation, serving: str, name: str) -> None:
    """Frozen in the middle of a change; traffic through the Service does not notice."""
    simulation.behave(name, variant="next")
    simulation.says(name, "Progressing", "Qualifying")
    simulation.cluster.freeze("hub", "kube-apiserver")
    try:
        time.sleep(20)  # longer than a request may take
    finally:
        simulation.cluster.thaw("hub", "kube-apiserver")
    simulation.ready(name, other_than=serving, seconds=120)


def test_an_api_server_that_starts_anew(simulation: Simulation, serving: str, name: str) -> None:
    """Every watch ends, and every resource version is too old (410)."""
    with Traffic(simulation.service_url(name), clients=1, expected=TEXT) as traffic:
        simulation.cluster.kill("hub", "kube-apiserver")
        simulation.cluster.up()
        traffic.more(3)
        assert traffic.refused == []
        assert traffic.wrong == []
        simulation.behave(name, variant="next")
        simulation.ready(name, other_than=serving, seconds=120)


def test_a_node_that_is_lost(simulation: Simulation, name: str) -> None:
    """The engine comes back on the other node, under the same revision, without a rollout."""
    pinned = {"resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}}}
    hurry = [
        {"key": f"node.kubernetes.io/{what}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 2}
        for what in ("unreachable", "not-ready")
    ]
    # Not on node-1, which carries the host's way to Services.
    there = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["node-1"]}]}
    prefers = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": there}]}
    with simulation.serving(
        name,
        rollout=ROLLOUT,
        pod={**pinned, "sharedMemory": "16Mi", "tolerations": hurry, "affinity": {"nodeAffinity": prefers}},
    ) as before:
        (pod,) = simulation.pods(name)
        node = pod["spec"]["nodeName"]
        assert node != "node-1"
        simulation.cluster.crash(node)
        try:
            simulation.until(name, lambda one: condition(one, "Ready").status == "False", seconds=60)
        finally:
            simulation.cluster.up()
        simulation.ready(name, seconds=120)
        assert simulation.selected(name) == before


def test_a_compile_cache_that_is_full(simulation: Simulation, name: str) -> None:
    """It costs time, never service, and is said."""
    folder = "/var/lib/sm70-full-cache"
    for node in simulation.cluster.nodes:
        simulation.cluster.run(node, "mkdir", "-p", folder)
        simulation.cluster.run(node, "mount", "-t", "tmpfs", "-o", "size=16k,uid=65532,gid=65532", "tmpfs", folder)
    try:
        spec = {"compileCache": {"hostPath": folder}, "overrides": {"enforceEager": False}, "rollout": ROLLOUT}
        with simulation.serving(name, {"cacheFiles": 50}, **spec):
            found = simulation.says(name, "CacheWarm", "Unwritable")
            assert "cannot be written" in found.message
            assert condition(simulation.get(name), "Ready").status == "True"
    finally:
        for node in simulation.cluster.nodes:
            simulation.cluster.run(node, "umount", folder)


def test_a_cache_is_filled_once_and_found_again(simulation: Simulation, name: str) -> None:
    spec = {"compileCache": {"size": "1Gi"}, "overrides": {"enforceEager": False}, "rollout": ROLLOUT}
    with simulation.serving(name, {"cacheFiles": 5}, **spec):
        simulation.says(name, "CacheWarm", "Cold")
        (pod,) = simulation.pods(name)
        simulation.cluster.kubectl("delete", "pod", pod["metadata"]["name"], "-n", NAMESPACE, "--wait")
        found = simulation.says(name, "CacheWarm", "Hit", seconds=90)
        assert "5 files" in found.message
