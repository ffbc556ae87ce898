"""GPUs by claims, with the operator running: its claims are admitted and held, and two who want one GPU are told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.harness import NAMESPACE, gpu_device_class
from cluster.simulation import Simulation, simulated_cluster
from stack import operator
from stack.services import condition
from testcluster import audit
from testcluster.gpus import gpu_uuid
from testcluster.options import GpuSource

pytestmark = [pytest.mark.cluster, pytest.mark.full]
PINNED = gpu_uuid("node-2", 2)
IN_PLACE = {"strategy": "InPlace", "drainTimeoutSeconds": 5, "progressDeadlineSeconds": 60, "bakeSeconds": 1}


@pytest.fixture(scope="module")
def claims(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulation]:
    """A cluster whose GPUs are offered by a DRA driver, with the class that NVIDIA's driver makes."""
    folder = tmp_path_factory.mktemp("claims")
    with simulated_cluster(folder, f"pinning-{os.getpid()}", keep=False, gpu_source=GpuSource.DRA) as found:
        found.cluster.apply(gpu_device_class())
        yield found


def pinned(*uuids: str) -> dict[str, Any]:
    return {"count": len(uuids), "allocation": "DRA", "uuids": list(uuids)}


def test_one_gpu_is_pinned_by_two_and_both_are_told(claims: Simulation) -> None:
    with claims.serving("first", gpus=pinned(PINNED), rollout=IN_PLACE) as before:
        (pod,) = claims.pods("first")
        assert pod["spec"]["nodeName"] == "node-2"

        # In place, the claim of the earlier revision is given back before the next one's is made.
        claims.behave("first", variant="next")
        claims.ready("first", other_than=before, seconds=90)

        claims.apply(claims.service("second", gpus=pinned(PINNED), rollout=IN_PLACE))
        try:
            waits = claims.says("second", "GPUsAllocated", "GPUConflict")
            for words in (PINNED, f"`{NAMESPACE}/first`"):
                assert words in waits.message
            holds = claims.until("first", lambda one: "second" in condition(one, "GPUsAllocated").message)
            said = condition(holds, "GPUsAllocated")
            assert (said.status, said.reason) == ("True", "Allocated")
            assert PINNED in said.message
            print(f"\n{waits}\n{said}")
            assert claims.get("second")["status"]["revisions"].get("active") is None

            # Another pin ends it for both.
            claims.patch("second", gpus=pinned(gpu_uuid("node-1", 0)))
            claims.ready("second", seconds=90)
            claims.until("first", lambda one: "second" not in condition(one, "GPUsAllocated").message)
        finally:
            claims.remove("second")
    assert claims.cluster.items("resourceclaims", NAMESPACE) == []
    assert claims.cluster.items("resourceclaimtemplates", NAMESPACE) == []


def test_the_chart_grants_what_claims_need(claims: Simulation) -> None:
    """Runs after the story above, whose requests it reads."""
    asked = [one for one in audit.requests(claims.cluster.audit_log) if one.user == operator.ACCOUNT]
    assert {one.verb for one in asked if one.resource == "resourceclaimtemplates"}
    assert {(one.verb, one.resource) for one in asked if not one.allowed} == set()
