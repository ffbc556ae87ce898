"""Rollouts with the real engine and the real judge: the three stories that no simulation can vouch for.

They take minutes, because every step starts vLLM. `-s` prints what clients saw.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.harness import NAMESPACE, Stack
from cluster.simulation import Traffic
from sm70_engine.tinymodel.chains import TEXT
from stack import models, services
from stack.services import condition, wait, wait_gone

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(2400)]
NAME = "proven"
JUDGED = {"suite": "smoke", "when": "During", "repeats": 1}
ROLLOUT = {"strategy": "InPlace", "drainTimeoutSeconds": 20, "progressDeadlineSeconds": 300, "bakeSeconds": 5}


def revisions(service: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = service["status"]["revisions"]
    return found


def settled(service: dict[str, Any]) -> bool:
    """The revision of the present spec has the traffic and has proved good."""
    found = revisions(service)
    return bool(found.get("active") == found.get("target") == found.get("lastGood"))


def rolled_back(service: dict[str, Any]) -> bool:
    return condition(service, "Progressing").reason == "RolledBack" and condition(service, "Ready").status == "True"


@pytest.fixture(scope="module")
def proven(stack: Stack) -> Iterator[None]:
    """A service that its judge has passed."""
    models.make(
        stack.cluster, image=stack.engine_image, namespace=NAMESPACE, job="bad",
        arguments=("--out", "/models/tiny-bad", "--bad"),
    )  # fmt: skip
    stack.apply(stack.service(NAME, auth={"allowAnonymous": True}, qualification=JUDGED, rollout=ROLLOUT))
    wait(stack.cluster, NAME, settled, namespace=NAMESPACE, seconds=900)
    yield
    stack.cluster.kubectl("delete", "sm70", NAME, "-n", NAMESPACE, "--ignore-not-found", "--wait")
    wait_gone(stack.cluster, NAME, NAMESPACE)


def present(stack: Stack) -> dict[str, Any]:
    found = stack.cluster.get(services.KIND, NAME, NAMESPACE)
    assert found is not None
    return found


def edit(stack: Stack, **spec: Any) -> None:
    stack.cluster.kubectl("patch", "sm70", NAME, "-n", NAMESPACE, "--type=merge", "-p", json.dumps({"spec": spec}))


def refused(stack: Stack, before: str) -> dict[str, Any]:
    """Waits until the change was rejected and the earlier revision serves again; what the status says of it."""
    service = wait(stack.cluster, NAME, rolled_back, namespace=NAMESPACE, seconds=900)
    found = revisions(service)
    assert found["active"] == before != found["target"]
    entry: dict[str, Any] = next(one for one in found["rejected"] if one["revision"] == found["target"])
    return entry


def test_a_change_in_place_under_traffic(stack: Stack, proven: None) -> None:
    before = revisions(present(stack))["active"]
    with Traffic(stack.service_url(NAME), clients=1, expected=TEXT) as traffic:
        traffic.more(1, seconds=120)
        edit(stack, overrides={"maxNumSeqs": 4})
        wait(stack.cluster, NAME, settled, namespace=NAMESPACE, seconds=900)
        promoted = time.monotonic()
        traffic.more(1, seconds=120)
    print(f"\noutage of an in-place change with the real engine and a judge: {traffic.outage():.0f} s")
    service = present(stack)
    assert revisions(service)["active"] != before
    assert service["status"]["qualification"]["verdict"] == "Passed"
    assert service["status"]["acceleration"]["summary"] == "3/3"
    assert [words for begin, words in traffic.wrong if begin > promoted] == []
    assert [begin for begin in traffic.refused if begin > promoted] == []


def test_a_change_that_disables_an_expected_path_returns(stack: Stack, proven: None) -> None:
    before = revisions(present(stack))["active"]
    edit(stack, overrides={"kvCacheDtype": "fp8_e5m2"})
    entry = refused(stack, before)
    assert entry["reason"] == "RouteDisabled", entry
    assert "reference_attention_e4m3" in entry["message"]
    edit(stack, overrides={"kvCacheDtype": None})
    wait(stack.cluster, NAME, settled, namespace=NAMESPACE, seconds=60)


def test_a_model_whose_answers_are_wrong_returns(stack: Stack, proven: None) -> None:
    before = revisions(present(stack))["active"]
    edit(stack, model={"persistentVolumeClaim": {"claimName": "models", "path": "tiny-bad"}})
    entry = refused(stack, before)
    assert entry["reason"] == "GateFailed", entry
