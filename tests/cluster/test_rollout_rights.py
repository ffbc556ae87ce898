"""The operator's rights are exactly what it uses: the chart's rules against the API server's audit log, both ways.

Named so that it runs after the stories of rollouts, whose requests it reads too; what they may not have done, it does
itself.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.harness import NAMESPACE
from cluster.simulation import MODELS, Simulation
from stack import operator
from testcluster import audit

pytestmark = [pytest.mark.cluster, pytest.mark.full]
ROLLOUT = {"strategy": "InPlace", "drainTimeoutSeconds": 5, "progressDeadlineSeconds": 60, "bakeSeconds": 1}
RARE = {
    (
        "inference.sm70.io",
        "sm70inferenceservices/finalizers",
        "update",
    ): "checked by an admission plugin, not asked for",
    ("inference.sm70.io", "sm70inferenceservices", "get"): "for a person who looks with the operator's account",
    **{
        ("resource.k8s.io", "resourceclaimtemplates", verb): "only with `gpus.allocation: DRA`, as in test_pinning.py"
        for verb in ("get", "create", "patch", "delete")
    },
    ("", "events", "list"): "only for a pod that does not get going",
}
"""Rights that leave no request in a log, or only rarely, and why they are there."""
Right = tuple[str, str, str]


def granted(simulation: Simulation) -> set[Right]:
    """Group, resource and verb of every rule of the chart."""
    listed = simulation.cluster.kubectl(
        "get", "clusterroles,roles", "-A", "-l", f"app.kubernetes.io/name={operator.RELEASE}", "-o", "json"
    )  # fmt: skip
    return {
        (group, resource, verb)
        for role in json.loads(listed)["items"]
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.fixture(scope="module")
def asked(simulation: Simulation) -> list[audit.Request]:
    """Everything that the operator asked the API server, after a service has used all that there is to use."""
    profile = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "own-profile"}, "data": {"profile": "{}"}}
    simulation.cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=json.dumps(profile))
    spec: dict[str, Any] = {
        "rollout": {**ROLLOUT, "revisionHistoryLimit": 1},
        "qualification": {"suite": "smoke", "when": "During"},
        "compileCache": {"size": "1Gi"},
    }
    with simulation.serving("rights", **spec) as before:
        simulation.says("rights", "Progressing", "Settled")
        for variant in ("b", "c", "d"):
            simulation.patch("rights", env=[{"name": "SIMULATED_ENGINE", "value": json.dumps({"variant": variant})}])
            before = simulation.ready("rights", other_than=before, seconds=120)["status"]["revisions"]["active"]
        simulation.says("rights", "Progressing", "Settled")
        simulation.patch("rights", model={"hostPath": {"path": f"{MODELS}/not-there"}, "servedName": "tiny"})
        simulation.says("rights", "Progressing", "RolledBack")
        simulation.patch("rights", profile=None, profileRef={"configMap": {"name": "own-profile", "key": "profile"}})
        simulation.says("rights", "Accepted", "ProfileInvalid")
    return [one for one in audit.requests(simulation.cluster.audit_log) if one.user == operator.ACCOUNT]


def test_nothing_is_asked_in_vain(asked: list[audit.Request]) -> None:
    refused = {(one.verb, one.group, one.resource) for one in asked if not one.allowed}
    assert refused == set()


def test_everything_that_is_asked_is_granted_by_the_chart(simulation: Simulation, asked: list[audit.Request]) -> None:
    """By its own rules, not by what every account may do."""
    discovery = {one for one in asked if not one.resource}
    assert {one.verb for one in discovery} <= {"get"}
    used = {(one.group, one.resource, one.verb) for one in asked if one.resource}
    assert used - granted(simulation) == set()


def test_every_right_is_used(simulation: Simulation, asked: list[audit.Request]) -> None:
    used = {(one.group, one.resource, one.verb) for one in asked}
    # A server-side apply that makes its object is one patch in the log, and needs the right to create as well.
    within = {(group, resource, "create") for group, resource, verb in used if verb == "patch"}
    idle = granted(simulation) - used - within - set(RARE)
    assert idle == set()


def test_no_secret_no_command_no_log(simulation: Simulation, asked: list[audit.Request]) -> None:
    forbidden = {"secrets", "pods/exec", "pods/attach", "pods/log", "pods/portforward", "serviceaccounts/token"}
    assert {one.resource for one in asked} & forbidden == set()
    assert {resource for _, resource, _ in granted(simulation)} & forbidden == set()
