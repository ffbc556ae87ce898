"""The product on a real cluster with the real engine: a resource becomes a server, and its status tells the truth."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cluster.harness import NAMESPACE, Stack
from sm70_qualify.client import Endpoint
from stack import operator, services
from stack.services import condition, wait, wait_gone, wait_ready
from testcluster import audit

pytestmark = pytest.mark.cluster

OPERATOR = operator.ACCOUNT


def answer(stack: Stack, url: str) -> str:
    with Endpoint(url, model="tiny", api_key=stack.api_key) as server:
        return server.ask("Tell me about this server.").text


def promoted(service: dict[str, Any]) -> bool:
    """The revision of the present spec has the public traffic."""
    revisions = service["status"]["revisions"]
    return bool(revisions.get("active") == revisions.get("target"))


@pytest.fixture(scope="module")
def tiny(stack: Stack) -> Iterator[dict[str, Any]]:
    """The example's service, served by the real engine."""
    stack.apply(stack.example("tiny"))
    yield wait_ready(stack.cluster, "tiny", namespace=NAMESPACE, seconds=240)
    stack.cluster.kubectl("delete", "sm70", "tiny", "-n", NAMESPACE, "--ignore-not-found", "--wait")
    wait_gone(stack.cluster, "tiny", NAMESPACE)


def test_ready_with_proof(stack: Stack, tiny: dict[str, Any]) -> None:
    acceleration = tiny["status"]["acceleration"]
    assert acceleration["summary"] == "3/3"
    states = {path["name"]: path["state"] for path in acceleration["paths"] if path["expected"]}
    assert set(states.values()) == {"Enabled"}
    assert condition(tiny, "AccelerationComplete").status == "True"
    assert condition(tiny, "Qualified").reason == "NotRequired"
    row = stack.cluster.kubectl("get", "sm70", "tiny", "-n", NAMESPACE).splitlines()
    assert row[0].split()[:4] == ["NAME", "READY", "REASON", "ACCEL"]
    assert "True" in row[1]
    assert "3/3" in row[1]


def test_placement_names_the_gpu_that_the_kubelet_gave(stack: Stack, tiny: dict[str, Any]) -> None:
    (place,) = tiny["status"]["placement"]
    pod = stack.cluster.get("pod", place["pod"], NAMESPACE)
    assert pod is not None
    assert place["node"] == pod["spec"]["nodeName"]
    given = stack.cluster.kubectl("exec", "-n", NAMESPACE, place["pod"], "--", "printenv", "NVIDIA_VISIBLE_DEVICES")
    assert place["gpuUUIDs"] == given.strip().split(",")
    assert place["source"] == "NVIDIA_VISIBLE_DEVICES"


def test_streams_the_right_answer_through_the_public_service(stack: Stack, tiny: dict[str, Any]) -> None:
    assert answer(stack, stack.service_url("tiny")) == stack.right_answer("text")


def test_the_api_key_guards_what_it_should(stack: Stack, tiny: dict[str, Any]) -> None:
    url = stack.service_url("tiny")
    key = {"Authorization": f"Bearer {stack.api_key}"}
    assert httpx.get(f"{url}/v1/sm70/acceleration").status_code == 401
    assert httpx.get(f"{url}/v1/sm70/acceleration", headers=key).status_code == 200
    assert httpx.get(f"{url}/sm70/ready").status_code == 200
    assert stack.api_key not in json.dumps(stack.cluster.get(services.KIND, "tiny", NAMESPACE))


def test_counters_reach_the_status(stack: Stack, tiny: dict[str, Any]) -> None:
    def counted(service: dict[str, Any]) -> bool:
        items = service["status"].get("routes", {}).get("items", [])
        return any(item["route"] == "nvfp4_linear_reference" and item["dispatches"] > 0 for item in items)

    answer(stack, stack.service_url("tiny"))
    service = wait(stack.cluster, "tiny", counted, namespace=NAMESPACE, seconds=90)
    assert condition(service, "RoutesHealthy").status == "True"


def test_an_idle_service_causes_no_write(stack: Stack, tiny: dict[str, Any]) -> None:
    """Over 30 shortened resync periods; by the API server's audit log, not by trust."""
    stack.settle("tiny")
    start = audit.position(stack.cluster.audit_log)
    resyncs = stack.operator_metric("sm70_operator_reconciles_total")
    deadline = time.monotonic() + 120
    while stack.operator_metric("sm70_operator_reconciles_total") < resyncs + 30:
        assert time.monotonic() < deadline, "the operator does not resync"
        time.sleep(0.5)
    seen = list(audit.requests(stack.cluster.audit_log, start))
    by_operator = [one for one in seen if one.write and one.user == OPERATOR and one.resource != "leases"]
    assert by_operator == []
    to_service = [
        one
        for one in seen
        if one.write and one.namespace == NAMESPACE and one.name.startswith("tiny") and one.resource != "leases"
    ]
    assert to_service == []


def test_a_deleted_pod_comes_back_and_the_status_tells_the_truth_in_between(stack: Stack, tiny: dict[str, Any]) -> None:
    (place,) = tiny["status"]["placement"]
    stack.cluster.kubectl("delete", "pod", place["pod"], "-n", NAMESPACE, "--wait=false")
    between = wait(stack.cluster, "tiny", lambda one: condition(one, "Ready").status == "False", namespace=NAMESPACE)
    assert condition(between, "Ready").reason
    assert condition(between, "Ready").message
    assert (between["status"].get("readyReplicas") or 0) == 0
    again = wait_ready(stack.cluster, "tiny", namespace=NAMESPACE, seconds=240)
    assert again["status"]["placement"][0]["pod"] != place["pod"]
    assert answer(stack, stack.service_url("tiny")) == stack.right_answer("text")


def test_an_operator_killed_midway_changes_nothing(stack: Stack, tiny: dict[str, Any]) -> None:
    """Killed right after an edit was seen, the next operator goes on where the world stands; a spec edit is one set."""
    before = wait_ready(stack.cluster, "tiny", namespace=NAMESPACE)["status"]["revisions"]["active"]
    edit = {"spec": {"overrides": {"maxNumSeqs": 4}}}
    stack.cluster.kubectl("patch", "sm70", "tiny", "-n", NAMESPACE, "--type=merge", "-p", json.dumps(edit))
    wait(stack.cluster, "tiny", lambda one: one["status"]["revisions"]["target"] != before, namespace=NAMESPACE)
    stack.kill_operator()
    # `Ready` stays True for as long as the earlier revision serves: the end is when the new one has the traffic.
    after = wait(
        stack.cluster, "tiny", lambda one: promoted(one) and condition(one, "Ready").status == "True",
        namespace=NAMESPACE, seconds=300,
    )  # fmt: skip
    assert after["status"]["revisions"]["active"] != before
    selector = "inference.sm70.io/service=tiny"
    listed = stack.cluster.kubectl("get", "deployments", "-n", NAMESPACE, "-l", selector, "-o", "json")
    deployments = json.loads(listed)["items"]
    assert [one["spec"]["replicas"] for one in deployments if one["spec"]["replicas"]] == [1]
    # and once more with nothing to do: a restart of the operator alone writes nothing to the service's objects
    stack.settle("tiny")
    start = audit.position(stack.cluster.audit_log)
    stack.kill_operator()
    stack.settle("tiny")
    writes = [
        one
        for one in audit.requests(stack.cluster.audit_log, start)
        if one.write and one.user == OPERATOR and one.namespace == NAMESPACE
    ]
    assert writes == []


def test_deleting_leaves_nothing(stack: Stack, tiny: dict[str, Any]) -> None:
    stack.cluster.kubectl("delete", "sm70", "tiny", "-n", NAMESPACE, "--wait")
    wait_gone(stack.cluster, "tiny", NAMESPACE)
