"""GPUs by dynamic resource allocation: the ResourceClaimTemplate of a revision, and how its pod refers to it.

A device plugin hands out GPUs by number; a claim selects them by what they are: product, compute capability, memory,
and the very uuids that a user pins. The attributes are those of the `gpu.nvidia.com` driver.
"""

from __future__ import annotations

from collections.abc import Iterator

from sm70_operator.api import names
from sm70_operator.api.schema import cel_list
from sm70_operator.render.objects import Manifest, Owner
from sm70_operator.render.revision import MEMORY_TOLERANCE_PERCENT, Revision
from sm70_profiles.base import quantity_bytes
from sm70_profiles.spec import GpuAllocation

DRIVER = "gpu.nvidia.com"
DEVICE_CLASS = "gpu.nvidia.com"
"""The class that NVIDIA's driver is installed with; it holds whole GPUs only."""
REQUEST = "gpus"
"""The name of the claim in the pod, and of the request in the claim."""


def uses_claims(revision: Revision) -> bool:
    """The pods hold their GPUs by claims."""
    return revision.request.gpus.allocation is GpuAllocation.DRA and revision.gpus.count > 0


def render_claim_template(owner: Owner, name: str, revision: Revision) -> Manifest | None:
    """The ResourceClaimTemplate `SERVICE-gpus-REVISION`, or None where GPUs come from the device plugin.

    It has to exist before the revision's Deployment, and is immutable, as a revision is. Each pod gets a claim of its
    own from it, which goes with the pod.
    """
    if not uses_claims(revision):
        return None
    exactly: Manifest = {
        "deviceClassName": revision.request.gpus.device_class_name or DEVICE_CLASS,
        "allocationMode": "ExactCount",
        "count": revision.gpus.count,
    }
    if conditions := list(device_conditions(revision)):
        exactly["selectors"] = [{"cel": {"expression": " && ".join(conditions)}}]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": owner.metadata(
            names.claim_template_name(owner.name, name),
            {names.COMPONENT_LABEL: names.ENGINE_COMPONENT, names.FOR_REVISION_LABEL: name},
        ),
        "spec": {
            "metadata": {"labels": {**names.labels(owner.name), names.FOR_REVISION_LABEL: name}},
            "spec": {"devices": {"requests": [{"name": REQUEST, "exactly": exactly}]}},
        },
    }


def device_conditions(revision: Revision) -> Iterator[str]:
    """What must hold of each device, in CEL; a device without the attribute does not match."""
    gpus, hardware = revision.gpus, revision.request.profile.hardware
    attributes, capacity = f"device.attributes['{DRIVER}']", f"device.capacity['{DRIVER}']"
    yield f"device.driver == '{DRIVER}'"
    if uuids := revision.request.gpus.uuids:
        yield f"{attributes}.uuid in {cel_list(uuids)}"
    if gpus.products:
        # A profile spells a product as node labels do, with hyphens for the driver's spaces.
        yield f"{attributes}.productName.replace(' ', '-') in {cel_list(gpus.products)}"
    capability = f"{attributes}.cudaComputeCapability.compareTo(semver('{{}}.0'))"
    if hardware.min_compute_capability is not None:
        yield f"{capability.format(hardware.min_compute_capability)} >= 0"
    elif hardware.compute_capability is not None:
        yield f"{capability.format(hardware.compute_capability)} == 0"
    if gpus.min_memory is not None:
        yield f"{capacity}.memory.compareTo(quantity('{_tolerant(gpus.min_memory)}')) >= 0"


def _tolerant(memory: str) -> str:
    """A driver keeps some of a card's memory, so a 16 GiB card offers slightly less."""
    return f"{quantity_bytes(memory) // 2**20 * MEMORY_TOLERANCE_PERCENT // 100}Mi"


def pod_claims(owner: Owner, name: str, revision: Revision) -> list[Manifest]:
    """The pod's `resourceClaims`; empty with a device plugin."""
    if not uses_claims(revision):
        return []
    return [{"name": REQUEST, "resourceClaimTemplateName": names.claim_template_name(owner.name, name)}]
