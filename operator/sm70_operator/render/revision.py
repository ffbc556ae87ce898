"""The revision: everything that changes a pod, as one document. Its hash is its name, manifests are its function."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from sm70_operator.api import names
from sm70_operator.api.pod import EnvVar, KeyReference, LocalReference, PodSettings
from sm70_operator.api.types import ImagePullPolicy, Spec
from sm70_profiles.base import Document
from sm70_profiles.resolver import Resolution, ResolvedGpus, ServeRequest
from sm70_profiles.spec import CheckpointSource, DraftSource, GpuAllocation, ModelSource

RENDER_VERSION = 1
"""Raised when the same revision is to render to another pod; every service is then replaced."""

MEMORY_TOLERANCE_PERCENT = 95
"""A driver keeps some of a card's memory, so a 16 GiB card is labelled with slightly less."""


class CacheKind(StrEnum):
    EMPTY = "Empty"
    CLAIM = "Claim"
    HOST_PATH = "HostPath"


class CacheVolume(Document):
    """What is mounted as compile cache; `name` is the claim's name or the node's folder."""

    kind: CacheKind
    name: str = ""


class PodResources(Document):
    """Requests and limits of the engine's container, and the size of /dev/shm."""

    requests: dict[str, str]
    limits: dict[str, str]
    shared_memory: str


class Revision(Document):
    """One way to serve. Two equal documents are the same revision."""

    render_version: int = RENDER_VERSION
    request: ServeRequest
    args: tuple[str, ...] = Field(description="The resolver's answer, so that another answer is another revision.")
    env: dict[str, str]
    user_env: tuple[EnvVar, ...] = ()
    api_key: KeyReference | None = None
    image: str
    image_pull_policy: ImagePullPolicy | None = None
    image_pull_secrets: tuple[LocalReference, ...] = ()
    model: ModelSource
    draft: DraftSource | None = None
    cache: CacheVolume
    gpus: ResolvedGpus
    resources: PodResources
    pod: PodSettings = PodSettings()


def checkpoint_path(source: CheckpointSource, mount: str) -> str:
    """Where the pod finds the checkpoint: the mount, and the folder inside the volume."""
    volume = source.persistent_volume_claim or source.image
    inside = source.hub.folder if source.hub is not None else volume.path if volume is not None else None
    return f"{mount}/{inside}" if inside else mount


def cache_volume(service: str, spec: Spec) -> CacheVolume:
    """The volume of the compile cache; without `compileCache` a folder that ends with the pod."""
    cache = spec.compile_cache
    if cache is None:
        return CacheVolume(kind=CacheKind.EMPTY)
    if cache.host_path is not None:
        return CacheVolume(kind=CacheKind.HOST_PATH, name=cache.host_path)
    return CacheVolume(kind=CacheKind.CLAIM, name=cache.existing_claim or names.compile_cache_name(service))


def pod_resources(spec: Spec, resolution: Resolution) -> PodResources:
    """The profile's resources with the user's put over them; GPUs are limits, as Kubernetes demands."""
    ours, theirs = resolution.resources, spec.pod.resources
    requests = {"cpu": ours.cpu_request, "memory": ours.memory_request}
    limits = {"memory": ours.memory_limit}
    if theirs is not None:
        requests |= {name: str(amount) for name, amount in theirs.requests.items()}
        limits |= {name: str(amount) for name, amount in theirs.limits.items()}
        # A user who lowers the limit alone does not mean to have a pod refused for its profile's request.
        requests |= {
            name: limits[name]
            for name in theirs.limits
            if name in requests and name not in theirs.requests and _exceeds(requests[name], limits[name])
        }
    if resolution.gpus.count and spec.gpus.allocation is GpuAllocation.DEVICE_PLUGIN:
        limits[resolution.gpus.resource_name] = str(resolution.gpus.count)
    return PodResources(
        requests=requests, limits=limits, shared_memory=spec.pod.shared_memory or resolution.resources.shared_memory
    )


def _exceeds(request: str, limit: str) -> bool:
    one, other = quantity(request), quantity(limit)
    return one is not None and other is not None and one > other


_UNITS: dict[str, int] = {
    "": 1000,
    "m": 1,
    "k": 10**6,
    "M": 10**9,
    "G": 10**12,
    "T": 10**15,
    "P": 10**18,
    "E": 10**21,
} | {unit: 1000 * 2**power for unit, power in (("Ki", 10), ("Mi", 20), ("Gi", 30), ("Ti", 40), ("Pi", 50), ("Ei", 60))}


def quantity(text: str) -> int | None:
    """A Kubernetes quantity in thousandths, None if the text is none. Digits beyond a thousandth are dropped."""
    digits = text.rstrip("mkMGTPEi")
    unit = _UNITS.get(text[len(digits) :])
    whole, _, fraction = digits.partition(".")
    if unit is None or not whole.isdecimal() or (fraction and not fraction.isdecimal()):
        return None
    return int(whole + fraction) * unit // int(10 ** len(fraction))
