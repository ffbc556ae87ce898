"""Facts: the few members of Kubernetes objects that the planner may know, parsed once when an event arrives.

What comes from nodes and containers is untrusted text: bounded and stripped here.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from sm70_operator.api import names
from sm70_profiles.report import printable

Raw = Mapping[str, Any]
MANIFESTS_UNPACKED = 128
MESSAGE_LENGTH = 700
"""Longest piece of foreign text that enters a condition."""
MAX_STEPS = 8
NO_IMAGES: Mapping[str, str] = {}
"""One for all of the many pods that mount none."""
_MAIN = (names.CONTAINER, names.JOB_CONTAINER)


@dataclass(frozen=True)
class Exit:
    """How a container ended. `message` is its termination message, bounded but not yet stripped: it may be JSON."""

    code: int
    reason: str
    message: str
    finished: datetime | None = None


@dataclass(frozen=True)
class ContainerFacts:
    """The engine's container, or the one of a Job, or an init container. `started`: the startup probe has passed."""

    name: str = ""
    id: str = ""
    image_id: str = ""
    """The image by its digest, as the node's runtime names it."""
    started: bool = False
    ready: bool = False
    """Its readiness probe passes, by the kubelet's last word."""
    running: bool = False
    restarts: int = 0
    waiting_reason: str = ""
    waiting_message: str = ""
    exit: Exit | None = None
    """The present or the last end."""


@dataclass(frozen=True)
class PodFacts:
    namespace: str
    name: str
    uid: str
    service: str
    revision: str
    created: datetime
    component: str = names.ENGINE_COMPONENT
    job: str = ""
    """The uid of the Job that made it."""
    node: str = ""
    ip: str = ""
    phase: str = ""
    deleting: bool = False
    scheduled: bool = False
    scheduling_message: str = ""
    ready: bool = False
    unready_since: datetime | None = None
    gpus: Mapping[str, int] = field(default_factory=dict)
    """GPUs (any extended resource) that the pod asks for."""
    memory_limit: str = ""
    container: ContainerFacts | None = None
    steps: tuple[ContainerFacts, ...] = ()
    """Init containers that have something to say, in their order."""
    checkpoint_images: Mapping[str, str] = field(default_factory=dict)
    """References of the OCI images that are mounted, by volume (`model`, `draft`)."""
    claims: bool = False
    """GPUs (or other devices) are held by resource claims, which `gpus` does not show."""

    @property
    def downloading(self) -> bool:
        """An init container fills a volume."""
        return any(step.running for step in self.steps)

    @property
    def preparing(self) -> bool:
        """It has a node, which has not started its container yet."""
        box = self.container
        return self.scheduled and (box is None or (not box.running and box.exit is None))

    @property
    def ended(self) -> bool:
        """The pod will never run again; its Deployment has replaced it."""
        return self.phase in ("Failed", "Succeeded")


@dataclass(frozen=True)
class NodeFacts:
    name: str
    product: str = ""
    memory_mebibytes: int | None = None
    schedulable: bool = True
    allocatable: Mapping[str, int] = field(default_factory=dict)
    """Extended resources by name."""


@dataclass(frozen=True)
class ObjectFacts:
    """A child of the service, with its manifest as the API server has it.

    Manifests are kept packed: there are several to a service, and only those of a service that is looked at are read.
    """

    name: str
    uid: str
    version: str
    """The resourceVersion: a change that rests on this state must not meet another one."""
    service: str
    owner: str
    """The uid of the controlling service; empty when none controls it."""
    deleting: bool
    packed: bytes

    @property
    def manifest(self) -> Raw:
        """Not to be changed: it is shared."""
        return _unpacked(self.packed)


def packed(value: Any) -> bytes:
    """JSON, compressed."""
    return zlib.compress(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(), 1)


def unpacked(data: bytes) -> Any:
    """What was packed, made anew each time."""
    return json.loads(zlib.decompress(data))


@lru_cache(maxsize=MANIFESTS_UNPACKED)
def _unpacked(data: bytes) -> Raw:
    found: Raw = unpacked(data)
    return found


def parse_time(text: str | None) -> datetime | None:
    """A time as Kubernetes writes it, None for anything else."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC) if text else None
    except ValueError:
        return None


def parse_object(raw: Raw) -> ObjectFacts:
    """A Deployment, Service or claim; what server-side apply records about managers is left out."""
    metadata = raw.get("metadata", {})
    manifest = {**raw, "metadata": {key: value for key, value in metadata.items() if key != "managedFields"}}
    return ObjectFacts(
        name=metadata.get("name", ""),
        uid=metadata.get("uid", ""),
        version=metadata.get("resourceVersion", ""),
        service=(metadata.get("labels") or {}).get(names.SERVICE_LABEL, ""),
        owner=controller_uid(metadata),
        deleting="deletionTimestamp" in metadata,
        packed=packed(manifest),
    )


def controller_uid(metadata: Raw) -> str:
    """The uid of the Sm70InferenceService that controls an object, or nothing."""
    for reference in metadata.get("ownerReferences") or ():
        if reference.get("controller") and reference.get("kind") == names.KIND:
            return str(reference.get("uid", ""))
    return ""


def parse_pod(raw: Raw) -> PodFacts:
    metadata, spec, status = raw.get("metadata", {}), raw.get("spec", {}), raw.get("status", {})
    labels = metadata.get("labels") or {}
    conditions = {one.get("type"): one for one in status.get("conditions") or ()}
    scheduled, ready = conditions.get("PodScheduled", {}), conditions.get("Ready", {})
    containers = {one.get("name"): one for one in spec.get("containers") or ()}
    limits = (containers.get(names.CONTAINER, {}).get("resources") or {}).get("limits") or {}
    created = parse_time(metadata.get("creationTimestamp")) or datetime.fromtimestamp(0, UTC)
    is_ready = ready.get("status") == "True"
    return PodFacts(
        namespace=metadata.get("namespace", ""),
        name=metadata.get("name", ""),
        uid=metadata.get("uid", ""),
        service=labels.get(names.SERVICE_LABEL, ""),
        revision=labels.get(names.REVISION_LABEL, ""),
        created=created,
        component=labels.get(names.COMPONENT_LABEL, names.ENGINE_COMPONENT),
        job=labels.get(names.JOB_UID_LABEL, ""),
        node=spec.get("nodeName") or "",
        ip=status.get("podIP") or "",
        phase=status.get("phase") or "",
        deleting="deletionTimestamp" in metadata,
        scheduled=scheduled.get("status") == "True" or bool(spec.get("nodeName")),
        scheduling_message=printable(scheduled.get("message") or "", MESSAGE_LENGTH),
        ready=is_ready,
        unready_since=None if is_ready else parse_time(ready.get("lastTransitionTime")) or created,
        gpus=_extended(limits),
        memory_limit=str(limits.get("memory", "")),
        container=next(
            (_container(one) for one in status.get("containerStatuses") or () if one.get("name") in _MAIN), None
        ),
        steps=tuple(_container(one) for one in (status.get("initContainerStatuses") or ())[:MAX_STEPS]),
        checkpoint_images=_image_volumes(spec) or NO_IMAGES,
        claims=bool(spec.get("resourceClaims")),
    )


def _image_volumes(spec: Raw) -> dict[str, str]:
    volumes = (one for one in spec.get("volumes") or () if "image" in one)
    return {one.get("name") or "": str((one["image"] or {}).get("reference") or "") for one in volumes}


def _container(raw: Raw) -> ContainerFacts:
    state, last = raw.get("state") or {}, raw.get("lastState") or {}
    ended = state.get("terminated") or last.get("terminated")
    waiting = state.get("waiting") or {}
    return ContainerFacts(
        name=printable(raw.get("name") or "", 63),
        id=raw.get("containerID") or "",
        image_id=printable(raw.get("imageID") or "", 512),
        started=bool(raw.get("started")),
        ready=bool(raw.get("ready")),
        running="running" in state,
        restarts=int(raw.get("restartCount") or 0),
        waiting_reason=printable(waiting.get("reason") or "", 64),
        waiting_message=printable(waiting.get("message") or "", MESSAGE_LENGTH),
        exit=None if ended is None else _exit(ended),
    )


def _exit(raw: Raw) -> Exit:
    reason = printable(raw.get("reason") or "", 64)
    finished = parse_time(raw.get("finishedAt"))
    return Exit(int(raw.get("exitCode") or 0), reason, raw.get("message") or "", finished)


def parse_node(raw: Raw) -> NodeFacts:
    labels = raw.get("metadata", {}).get("labels") or {}
    conditions = raw.get("status", {}).get("conditions") or ()
    ready = any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)
    memory = labels.get(names.GPU_MEMORY_LABEL, "")
    return NodeFacts(
        name=raw.get("metadata", {}).get("name", ""),
        product=printable(labels.get(names.GPU_PRODUCT_LABEL, ""), 63),
        memory_mebibytes=int(memory) if memory.isdecimal() else None,
        schedulable=ready and not raw.get("spec", {}).get("unschedulable"),
        allocatable=_extended(raw.get("status", {}).get("allocatable") or {}),
    )


def _extended(resources: Raw) -> dict[str, int]:
    """Extended resources (`domain/name`) with their whole-number amounts."""
    return {name: int(amount) for name, amount in resources.items() if "/" in name and str(amount).isdecimal()}
