"""The GPUs that the nodes pretend to have: what GPU feature discovery would say about them, and their UUIDs."""

from __future__ import annotations

import uuid

RESOURCE = "nvidia.com/gpu"
PRODUCT = "Tesla-V100-SXM2-16GB"
LABELS = {  # as discovered on a machine with V100 cards, without `nvidia.com/`
    "gpu.present": "true",
    "gpu.product": PRODUCT,
    "gpu.family": "volta",
    "gpu.memory": "16384",
    "gpu.compute.major": "7",
    "gpu.compute.minor": "0",
    "gpu.replicas": "1",
    "gpu.sharing-strategy": "none",
    "gpu.mode": "compute",
    "mig.capable": "false",
    "mps.capable": "false",
    "cuda.driver-version.full": "570.124.06",
    "cuda.driver-version.major": "570",
    "cuda.driver-version.minor": "124",
    "cuda.driver-version.revision": "06",
    "cuda.runtime-version.full": "12.8",
    "cuda.runtime-version.major": "12",
    "cuda.runtime-version.minor": "8",
}


def labels(count: int) -> dict[str, str]:
    """The labels of a node with this many GPUs; a node without any has none of them."""
    found = LABELS | {"gpu.count": str(count)} if count else {}
    return {f"nvidia.com/{key}": value for key, value in found.items()}


def gpu_uuid(node: str, index: int) -> str:
    """A UUID of NVIDIA's form that is the same at every start."""
    return f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{node}.gpu-{index}.sm70.test')}"
