"""What a user is told when a start fails, on a real kubelet and scheduler: one reason, in the condition it is about.

All services fail at the same time. Ends that take an hour of patience (probes) are left to the unit tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cluster.harness import NAMESPACE, ROOT
from cluster.simulation import MODELS, Simulation
from sm70_profiles.reasons import TerminationReason
from stack.services import condition, wait_gone
from testcluster.gpus import PRODUCT

pytestmark = [pytest.mark.cluster, pytest.mark.full]
IN_PLACE = {"strategy": "InPlace", "drainTimeoutSeconds": 5, "progressDeadlineSeconds": 600}
NO_GPU = {"gpus": {"count": 0}}
V100 = {"profile": "custom", "overrides": {"maxModelLen": 4096}}
"""A server that says of itself that it computes on a V100, unless told otherwise."""


def ends(reason: TerminationReason | None, **more: Any) -> dict[str, Any]:
    """A server that ends with these last words at each start; None: without any."""
    return {**NO_GPU, "behaviour": {"dies": {"at": "Start", "reason": reason, "message": "simulated", **more}}}


CASES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "shared-memory": (ends(TerminationReason.SHARED_MEMORY), "EngineStarted", "SharedMemoryTooSmall", "sharedMemory"),
    "no-kernel": (ends(TerminationReason.NO_KERNEL_IMAGE), "EngineStarted", "NoKernelImage", ""),
    "driver": (ends(TerminationReason.DRIVER_TOO_OLD), "EngineStarted", "DriverTooOld", "node-"),
    "nccl": (ends(TerminationReason.NCCL_FAILURE), "EngineStarted", "NCCLFailure", ""),
    "gpu-memory": (ends(TerminationReason.GPU_OUT_OF_MEMORY), "EngineStarted", "GPUOutOfMemory", ""),
    "host-memory": (ends(None, mebibytes=2000), "EngineStarted", "OutOfMemory", "256Mi"),
    "silent": (ends(None, exitCode=3), "EngineStarted", "CrashLooping", "exit code 3"),
    "checksum": (ends(TerminationReason.CHECKSUM_MISMATCH), "ModelAvailable", "ChecksumMismatch", ""),
    "model": (ends(TerminationReason.MODEL_INVALID), "ModelAvailable", "ModelInvalid", ""),
    "folder": (
        {**NO_GPU, "model": {"hostPath": {"path": f"{MODELS}/absent"}}},
        "ModelAvailable", "PathNotFound", f"{MODELS}/absent",
    ),
    "claim": (
        {**NO_GPU, "model": {"persistentVolumeClaim": {"claimName": "absent"}}},
        "ModelAvailable", "VolumeNotFound", "absent",
    ),
    "secret": (
        {**NO_GPU, "auth": {"apiKeySecretRef": {"name": "absent", "key": "key"}}},
        "EngineStarted", "ContainerRefused", "absent",
    ),
    "priority": (
        {**NO_GPU, "pod": {"priorityClassName": "absent"}},
        "EngineStarted", "PodsRefused", "absent",
    ),
    "image": (
        {**NO_GPU, "engine": {"image": "sm70.test/absent:1", "imagePullPolicy": "Never"}},
        "EngineStarted", "PullingImage", "sm70.test/absent:1",
    ),
    "product": (
        {"gpus": {"count": 1, "products": ["Tesla-P100-PCIE-16GB"]}},
        "GPUsAllocated", "GPUMismatch", "Tesla-V100-SXM2-16GB",
    ),
    "device": (
        {**V100, "gpus": {"count": 1, "products": [PRODUCT]}, "behaviour": {"device": {"name": "Tesla P40"}}},
        "GPUsAllocated",
        "GPUMismatch",
        "Tesla P40",
    ),
    "capability": (
        {**V100, "gpus": {"count": 1}, "behaviour": {"device": {"computeCapability": "6.1"}}},
        "GPUsAllocated",
        "GPUMismatch",
        "6.1",
    ),
    "links": (
        {
            "profile": "custom",
            "overrides": {"maxModelLen": 4096, "tensorParallelSize": 2},
            "gpus": {"count": 2, "interconnect": "NVLink"},
            "behaviour": {"device": {"count": 2, "nvlink": False}},
        },
        "GPUsAllocated",
        "TopologyUnsuitable",
        "NVLink",
    ),
    "selector": (
        {**NO_GPU, "pod": {"nodeSelector": {"no-node-has": "this"}}},
        "GPUsAllocated", "Unschedulable", "selector",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def failing(simulation: Simulation) -> Iterator[Simulation]:
    """A service for each case; all are gone afterwards."""
    try:
        for name, (spec, *_) in CASES.items():
            simulation.apply(simulation.service(name, **{"rollout": IN_PLACE, **spec}))
        yield simulation
    finally:
        simulation.cluster.kubectl("delete", "sm70", *CASES, "-n", NAMESPACE, "--ignore-not-found", "--wait=false")
        for name in CASES:
            wait_gone(simulation.cluster, name, NAMESPACE, seconds=90)


@pytest.mark.parametrize("name", CASES)
def test_a_failed_start_is_told_by_one_reason_and_a_next_step(failing: Simulation, name: str) -> None:
    _, kind, reason, words = CASES[name]
    said = failing.says(name, kind, reason, seconds=90)
    print(f"\n{said}")
    assert said.status == "False"
    assert words in said.message
    assert (ROOT / "docs" / "runbooks" / f"{reason}.md").is_file()
    first = failing.until(name, lambda one: condition(one, "Ready").reason == reason)
    assert condition(first, "Ready").status == "False"
