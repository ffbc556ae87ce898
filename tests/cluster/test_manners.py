"""Manners on a real cluster: deletion in any phase leaves nothing, and two replicas never act at once."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from cluster.harness import NAMESPACE, POD_SELECTOR
from cluster.simulation import PERIODS, Simulation
from stack import operator
from stack.services import KIND, condition, wait_gone
from testcluster import audit
from testcluster.processes import until

pytestmark = [pytest.mark.cluster, pytest.mark.full]
ROLLOUT = {"strategy": "InPlace", "drainTimeoutSeconds": 5, "progressDeadlineSeconds": 60, "bakeSeconds": 2}
JUDGED = {"suite": "smoke", "when": "During"}
PROPAGATIONS = ("background", "foreground", "orphan")


def leave_nothing(simulation: Simulation, name: str, propagation: str) -> None:
    """Deletes a service and waits until it is gone, with all that it had; orphans are collected by hand."""
    kinds = "deployments,services,jobs,persistentvolumeclaims,controllerrevisions.apps,pods,sm70qualifications"
    selector = f"inference.sm70.io/service={name}"
    simulation.cluster.kubectl("delete", KIND, name, "-n", NAMESPACE, f"--cascade={propagation}", "--wait")
    assert simulation.cluster.get(KIND, name, NAMESPACE) is None
    if propagation == "orphan":
        # What is left belongs to nobody, and nobody adopts or recreates it.
        simulation.cluster.kubectl("delete", kinds, "-n", NAMESPACE, "-l", selector, "--wait")
    wait_gone(simulation.cluster, name, NAMESPACE, seconds=90)


def scale(simulation: Simulation, replicas: int) -> None:
    """Changes the number of operators, and waits until there are so many."""
    words = ["-n", operator.NAMESPACE, f"deployment/{operator.RELEASE}"]
    simulation.cluster.kubectl("scale", f"--replicas={replicas}", *words)
    simulation.cluster.kubectl("rollout", "status", *words, "--timeout=90s")
    deadline = time.monotonic() + 60
    while len(simulation.operator_pods()) != replicas:
        assert time.monotonic() < deadline
        time.sleep(0.2)


@contextmanager
def without_operator(simulation: Simulation) -> Iterator[None]:
    """While this lasts, no operator runs."""
    scale(simulation, 0)
    try:
        yield
    finally:
        scale(simulation, 1)


PHASES: dict[str, tuple[dict[str, Any], str]] = {
    "starting": ({"stuckIn": "LoadingWeights"}, "EngineStarted"),
    "crashing": ({"dies": {"reason": "ModelInvalid", "exitCode": 2}}, "ModelAvailable"),
    "serving": ({}, ""),
}
"""By phase: how the engine behaves, and the condition that is then False (none: Ready is True)."""


@pytest.mark.parametrize("propagation", PROPAGATIONS)
@pytest.mark.parametrize("phase", PHASES)
def test_deleting_in_a_phase(simulation: Simulation, phase: str, propagation: str) -> None:
    name = f"{phase}-{propagation}"
    behaviour, kind = PHASES[phase]
    simulation.apply(simulation.service(name, behaviour, rollout=ROLLOUT))
    if kind:
        simulation.until(name, lambda one: condition(one, kind).status == "False")
    else:
        simulation.ready(name)
    leave_nothing(simulation, name, propagation)


@pytest.mark.parametrize("propagation", PROPAGATIONS)
def test_deleting_in_the_middle_of_a_change(simulation: Simulation, propagation: str) -> None:
    name = f"change-{propagation}"
    simulation.apply(simulation.service(name, rollout=ROLLOUT, qualification=JUDGED))
    simulation.says(name, "Progressing", "Qualifying")
    leave_nothing(simulation, name, propagation)


@pytest.mark.parametrize("propagation", PROPAGATIONS)
def test_deleting_while_there_is_no_operator(simulation: Simulation, propagation: str) -> None:
    name = f"absent-{propagation}"
    simulation.apply(simulation.service(name, rollout=ROLLOUT))
    simulation.ready(name)
    with without_operator(simulation):
        leave_nothing(simulation, name, propagation)


def test_nothing_carries_a_finalizer_of_ours(simulation: Simulation) -> None:
    with simulation.serving("finalizers", rollout=ROLLOUT, qualification=JUDGED):
        kinds = f"{KIND},deployments,services,jobs,controllerrevisions.apps,sm70qualifications"
        listed = simulation.cluster.kubectl("get", kinds, "-n", NAMESPACE, "-o", "json")
        for one in json.loads(listed)["items"]:
            ours = [text for text in one["metadata"].get("finalizers") or () if "sm70" in text]
            assert ours == [], one["metadata"]["name"]


def test_two_replicas_and_the_leader_is_killed_in_a_change(simulation: Simulation) -> None:
    """The standby goes on; no object is written by both, and the change ends as it would have."""
    scale(simulation, 2)
    try:
        with simulation.serving("pair", rollout=ROLLOUT, qualification=JUDGED) as before:
            simulation.says("pair", "Progressing", "Settled")
            (leader,) = leaders(simulation)
            simulation.behave("pair", variant="next")
            simulation.says("pair", "Progressing", "Qualifying")
            simulation.cluster.kubectl(
                "delete", "pod", leader, "-n", operator.NAMESPACE, "--grace-period=0", "--force"
            )  # fmt: skip
            simulation.ready("pair", other_than=before, seconds=90)
            assert len(leaders(simulation)) == 1
            assert leaders(simulation) != [leader]
    finally:
        scale(simulation, 1)


def leaders(simulation: Simulation) -> list[str]:
    """Pods of the operator that say that they lead."""
    found = []
    for pod in simulation.operator_pods():
        text = httpx.get(f"http://{pod['status']['podIP']}:8080/metrics", timeout=5).text
        if "sm70_operator_leader 1.0" in text:
            found.append(pod["metadata"]["name"])
    return found


def test_installed_for_one_namespace(simulation: Simulation) -> None:
    """With Roles in that namespace and no cluster-wide right, a change works, and nothing is asked in vain."""
    operator.uninstall(simulation.cluster)
    # A pod that ends with its release has no rights left for the last word about its lease.
    selected = ("get", "pods", "-n", operator.NAMESPACE, "-l", POD_SELECTOR, "-o", "name")
    until(lambda: not simulation.cluster.kubectl(*selected).strip(), "the end of the operator before")
    start = audit.position(simulation.cluster.audit_log)
    try:
        simulation.cluster.helm(
            "upgrade", "--install", operator.RELEASE, str(operator.CHART), "--namespace", operator.NAMESPACE,
            "--skip-crds", "--wait", "--timeout", "120s", "--set", f"namespaces={{{NAMESPACE}}},observeNodes=false",
            *_images(simulation),
        )  # fmt: skip
        with simulation.serving("scoped", rollout=ROLLOUT, qualification=JUDGED) as before:
            simulation.behave("scoped", variant="next")
            simulation.ready("scoped", other_than=before, seconds=90)
        asked = [one for one in audit.requests(simulation.cluster.audit_log, start) if one.user == operator.ACCOUNT]
        assert [one for one in asked if not one.allowed] == []
        # Discovery, of which kopf asks for the kinds that there are, names no resource.
        elsewhere = {(one.verb, one.resource) for one in asked if one.resource and one.namespace != NAMESPACE}
        assert {resource for _, resource in elsewhere} <= {"leases"}, elsewhere
        roles = simulation.cluster.kubectl("get", "clusterroles,clusterrolebindings", "-o", "name")
        assert operator.RELEASE not in roles
    finally:
        operator.uninstall(simulation.cluster)
        simulation.install(PERIODS)


def _images(simulation: Simulation) -> list[str]:
    repository, _, tag = simulation.operator_image.rpartition(":")
    values = {"image.repository": repository, "image.tag": tag, **PERIODS}
    return [part for key, value in values.items() for part in ("--set-string", f"{key}={value}")]
