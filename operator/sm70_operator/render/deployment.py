"""The Deployment of one revision: how the engine's pod looks, and why.

The pod satisfies the `restricted` pod security standard unless the user mounts a folder of the node.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sm70_operator.api import names
from sm70_operator.api.pod import EnvVar
from sm70_operator.render.fetch_step import downloads, fetch_steps, restricted
from sm70_operator.render.objects import Manifest, Owner
from sm70_operator.render.resource_claim import REQUEST, pod_claims, uses_claims
from sm70_operator.render.revision import MEMORY_TOLERANCE_PERCENT, CacheKind, Revision
from sm70_profiles.base import Document, quantity_bytes
from sm70_profiles.identity import canonical_json
from sm70_profiles.spec import CheckpointSource

UID = 65532
PRE_STOP_SECONDS = 5
"""Endpoints and proxies learn that the pod goes before the server hears of it."""
GRACE_MARGIN_SECONDS = 30
"""After the drain time: for the engine's workers to end and to flush their counters."""
STARTUP_PERIOD_SECONDS = 5
STARTUP_BUDGET_SECONDS = 3600
"""A cold start of a large model takes many minutes; a start that hangs is for the status to tell, not for the probe."""
DEPLOYMENT_DEADLINE_SECONDS = 604_800
"""Only so that the Deployment says whether it was ever complete: the deadline that counts is the operator's."""


def render_deployment(owner: Owner, name: str, revision: Revision, replicas: int) -> Manifest:
    """The Deployment `SERVICE-REVISION`. Only `replicas` is not part of the revision."""
    selector = names.selector(owner.name, name)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": owner.metadata(names.deployment_name(owner.name, name), {**_component(), **selector}),
        "spec": {
            "replicas": replicas,
            # Two pods of one set of GPUs would wait for each other.
            "strategy": {"type": "Recreate"},
            "revisionHistoryLimit": 0,
            "progressDeadlineSeconds": DEPLOYMENT_DEADLINE_SECONDS,
            "selector": {"matchLabels": selector},
            "template": {
                "metadata": _pod_metadata(owner, revision, selector),
                "spec": pod_spec(owner, name, revision),
            },
        },
    }


def _component() -> dict[str, str]:
    return {names.COMPONENT_LABEL: "engine"}


def _pod_metadata(owner: Owner, revision: Revision, selector: dict[str, str]) -> Manifest:
    metadata: Manifest = {
        "labels": {**revision.pod.labels, **names.labels(owner.name), **_component(), **selector},
    }
    annotations = {"kubectl.kubernetes.io/default-container": names.CONTAINER, **revision.pod.annotations}
    return {**metadata, "annotations": annotations}


def pod_spec(owner: Owner, name: str, revision: Revision) -> Manifest:
    """The pod of a revision: the engine's, from which the preflight's is made too."""
    pod = revision.pod
    volumes, mounts = _volumes(revision)
    spec: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": PRE_STOP_SECONDS
        + revision.request.drain_timeout_seconds
        + GRACE_MARGIN_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": UID,
            "runAsGroup": UID,
            "fsGroup": UID,
            # A cache of many files is not chowned again at every start.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(revision, mounts)],
        "volumes": volumes,
    }
    optional: Manifest = {
        "initContainers": fetch_steps(revision, mounts),
        "resourceClaims": pod_claims(owner, name, revision),
        "affinity": _affinity(revision),
        "nodeSelector": dict(pod.node_selector),
        "tolerations": [_plain(toleration) for toleration in pod.tolerations],
        "imagePullSecrets": [_plain(secret) for secret in revision.image_pull_secrets],
        "priorityClassName": pod.priority_class_name,
        "runtimeClassName": pod.runtime_class_name,
        "serviceAccountName": pod.service_account_name,
    }
    return spec | {key: value for key, value in optional.items() if value}


def _container(revision: Revision, mounts: list[Manifest]) -> Manifest:
    container: Manifest = {
        "name": names.CONTAINER,
        "image": revision.image,
        "env": _environment(revision),
        "ports": [{"name": names.PORT_NAME, "containerPort": names.HTTP_PORT, "protocol": "TCP"}],
        "startupProbe": {
            **_http(names.HEALTH_PATH, 5),
            "periodSeconds": STARTUP_PERIOD_SECONDS,
            "failureThreshold": STARTUP_BUDGET_SECONDS // STARTUP_PERIOD_SECONDS,
        },
        # Fails also while an expected acceleration path is disabled: traffic follows proof, even with no operator.
        "readinessProbe": {**_http(names.READY_PATH, 5), "periodSeconds": 5, "failureThreshold": 3},
        # Lenient: a long prefill must never end a server that works.
        "livenessProbe": {**_http(names.HEALTH_PATH, 10), "periodSeconds": 30, "failureThreshold": 10},
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}},
        "terminationMessagePolicy": "File",
        "resources": _resources(revision),
        "securityContext": restricted(),
        "volumeMounts": mounts,
    }
    if revision.image_pull_policy is not None:
        container["imagePullPolicy"] = str(revision.image_pull_policy)
    return container


def _resources(revision: Revision) -> Manifest:
    claims: Manifest = {"claims": [{"name": REQUEST}]} if uses_claims(revision) else {}
    return {"requests": dict(revision.resources.requests), "limits": dict(revision.resources.limits), **claims}


def _http(path: str, timeout: int) -> Manifest:
    return {"httpGet": {"path": path, "port": names.PORT_NAME, "scheme": "HTTP"}, "timeoutSeconds": timeout}


def _environment(revision: Revision) -> list[Manifest]:
    ours = {
        names.SERVE_REQUEST_VARIABLE: canonical_json(revision.request),
        names.ENGINE_IMAGE_VARIABLE: revision.image,
        names.CACHE_HOME_VARIABLE: names.CACHE_MOUNT,
        names.STATUS_PORT_VARIABLE: str(names.STATUS_PORT),
        names.HOME_VARIABLE: "/tmp",  # noqa: S108  # the pod's own, an emptyDir
        **dict(sorted(revision.env.items())),
    }
    variables: list[Manifest] = [{"name": name, "value": value} for name, value in ours.items()]
    if revision.api_key is not None:
        reference = {"name": revision.api_key.name, "key": revision.api_key.key}
        variables.append({"name": names.API_KEY_VARIABLE, "valueFrom": {"secretKeyRef": reference}})
    return variables + [_variable(variable) for variable in revision.user_env]


def _variable(variable: EnvVar) -> Manifest:
    if variable.value_from is None:
        return {"name": variable.name, "value": variable.value or ""}
    return {"name": variable.name, "valueFrom": _plain(variable.value_from)}


def _volumes(revision: Revision) -> tuple[list[Manifest], list[Manifest]]:
    volumes: list[Manifest] = []
    mounts: list[Manifest] = []
    filled = {hub.claim_name for _, _, hub, _ in downloads(revision)}
    for name, source, mount in (
        ("model", revision.model, names.MODEL_MOUNT),
        ("draft", revision.draft, names.DRAFT_MOUNT),
    ):
        if source is None:
            continue
        volume = _checkpoint_volume(source, filled)
        # Kubernetes wants a claim that two mounts share to be one volume.
        known = next((one["name"] for one in volumes if {**one, "name": ""} == {"name": "", **volume}), None)
        if known is None:
            volumes.append({"name": name, **volume})
        mounts.append({"name": known or name, "mountPath": mount, "readOnly": True})
    shared_memory = {"medium": "Memory", "sizeLimit": revision.resources.shared_memory}
    for name, volume, mount in (
        ("cache", _cache_volume(revision), names.CACHE_MOUNT),
        ("shared-memory", {"emptyDir": shared_memory}, "/dev/shm"),  # noqa: S108
        ("tmp", {"emptyDir": {}}, "/tmp"),  # noqa: S108
    ):
        volumes.append({"name": name, **volume})
        mounts.append({"name": name, "mountPath": mount})
    return volumes, mounts


def _checkpoint_volume(source: CheckpointSource, filled: Collection[str]) -> Manifest:
    """The volume of a checkpoint. `filled`: claims that a download is written to, which must be one writable volume."""
    claim = source.persistent_volume_claim or source.hub
    if claim is not None and claim.claim_name in filled:
        return {"persistentVolumeClaim": {"claimName": claim.claim_name}}
    if claim is not None:
        # Read-only at the volume, or fsGroup would change the owner of the user's files.
        return {"persistentVolumeClaim": {"claimName": claim.claim_name, "readOnly": True}}
    if source.host_path is not None:
        return {"hostPath": {"path": source.host_path.path, "type": "Directory"}}
    if source.image is not None:
        return {"image": {"reference": source.image.reference}}
    raise ValueError("a checkpoint must have exactly one source")


def _cache_volume(revision: Revision) -> Manifest:
    cache = revision.cache
    if cache.kind is CacheKind.CLAIM:
        return {"persistentVolumeClaim": {"claimName": cache.name}}
    if cache.kind is CacheKind.HOST_PATH:
        return {"hostPath": {"path": cache.name, "type": "Directory"}}
    return {"emptyDir": {}}


def _affinity(revision: Revision) -> Manifest:
    """The user's wishes, with the GPU's demands added to every node selector term (the terms are alternatives)."""
    affinity: Manifest = {} if revision.pod.affinity is None else _plain(revision.pod.affinity)
    demands = _node_demands(revision)
    if not demands:
        return affinity
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    node = affinity.get("nodeAffinity", {})
    terms = node.get(key, {}).get("nodeSelectorTerms") or [{}]
    joined = [{**term, "matchExpressions": [*term.get("matchExpressions", ()), *demands]} for term in terms]
    return {**affinity, "nodeAffinity": {**node, key: {"nodeSelectorTerms": joined}}}


def _node_demands(revision: Revision) -> list[Manifest]:
    """Node labels of GPU feature discovery; a pod without GPUs goes anywhere."""
    gpus = revision.gpus
    if gpus.count == 0 or uses_claims(revision):
        return []  # a claim selects the devices, and by them the node
    demands: list[Manifest] = []
    if gpus.products:
        demands.append({"key": names.GPU_PRODUCT_LABEL, "operator": "In", "values": list(gpus.products)})
    if gpus.min_memory is not None:
        mebibytes = quantity_bytes(gpus.min_memory) // 2**20 * MEMORY_TOLERANCE_PERCENT // 100
        demands.append({"key": names.GPU_MEMORY_LABEL, "operator": "Gt", "values": [str(max(mebibytes - 1, 0))]})
    return demands


def _plain(document: Document) -> Any:
    """A document as Kubernetes writes it: no unset members, no empty lists or maps."""
    return _without_empty(document.model_dump(mode="json", by_alias=True, exclude_none=True))


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        # A selector whose members are empty stays: `{}` selects everything, an absent one nothing.
        return {key: _without_empty(item) for key, item in value.items() if item not in ({}, [])}
    if isinstance(value, list):
        return [_without_empty(item) for item in value]
    return value
