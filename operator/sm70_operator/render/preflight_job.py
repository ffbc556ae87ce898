"""The preflight: a Job that looks at a revision with the very image, volumes and variables of its pods, without a GPU.

What it refuses never stops a server that serves. Its pod is the engine's with another argument and without GPUs, so
what it finds is what the engine would find. Downloads of a hub are part of it: they are over before anything stops.
Only a claim of the compile cache is not mounted: it says nothing of a start, and often can be mounted once only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sm70_operator.api import names
from sm70_operator.render.deployment import pod_spec
from sm70_operator.render.fetch_step import downloads
from sm70_operator.render.objects import Manifest, Owner
from sm70_operator.render.qualification_job import TRIES, job_pod, render_job
from sm70_operator.render.revision import CacheKind, CacheVolume, Revision, quantity

ARGUMENT = "--preflight"
SECONDS = 3600
"""With the pull of a large image."""
DOWNLOAD_SECONDS = 86_400
DOWNLOAD_TRIES = 7
"""A hub may be away for ten minutes: the Job's controller doubles its pause from 10 s on."""
HOPELESS_DOWNLOADS = (3, 4, 5, 64)
"""Exit statuses of `sm70-fetch` that another try does not mend: absent or gated, wrong bytes, the volume, its usage."""
MEMORY_LIMIT = "4Gi"
"""Enough for vLLM's argument parser; weights are not loaded."""
RESOURCES: Manifest = {"requests": {"cpu": "250m", "memory": "512Mi"}}
ALONE = "ReadWriteOncePod"
ONE_NODE = "ReadWriteOnce"


@dataclass(frozen=True)
class ClaimFacts:
    """A PersistentVolumeClaim that a revision mounts."""

    access_modes: tuple[str, ...]
    bound: bool


@dataclass(frozen=True)
class Look:
    """Whether a preflight can look, and where. `skip`: why it cannot; empty when it can."""

    skip: str = ""
    node: str = ""
    """The node of the server that serves; empty for any. There the image and the files are needed soon."""
    required: bool = False
    """A volume is on that node and cannot be mounted elsewhere; otherwise another node will do."""


def preflight_look(revision: Revision, claims: Mapping[str, ClaimFacts], node: str = "") -> Look:
    """Whether the revision's volumes can be mounted beside the pods that run now.

    claims: what is known of claims, by name; nothing is assumed of an unknown one. node: where the pods of the revision
    that serves run; empty when none runs.
    """
    required = False
    for name in claim_names(revision):
        facts = claims.get(name)
        if facts is None:
            continue
        if not facts.bound:
            # The first pod that mounts it decides where it is: that has to be the one with the GPU.
            return Look(
                skip=f"The claim `{name}` is not bound yet: the server's own pod has to be the first to mount it."
            )
        if facts.access_modes == (ALONE,) and node:
            return Look(
                skip=f"The claim `{name}` is {ALONE} and the running server has it: it cannot be mounted twice."
            )
        if set(facts.access_modes) <= {ONE_NODE, ALONE}:
            required = bool(node)
    return Look(node=node, required=required)


def claim_names(revision: Revision) -> tuple[str, ...]:
    """The claims that a revision's checkpoints are in."""
    sources = [source for source in (revision.model, revision.draft) if source is not None]
    found = [source.persistent_volume_claim or source.hub for source in sources]
    return tuple(dict.fromkeys(claim.claim_name for claim in found if claim is not None))


def render_preflight_job(owner: Owner, name: str, revision: Revision, look: Look = Look()) -> Manifest:
    """The Job `SERVICE-pREVISION`. What it pulls and downloads is then where a change in place starts."""
    if revision.cache.kind is CacheKind.CLAIM:
        revision = revision.model_copy(update={"cache": CacheVolume(kind=CacheKind.EMPTY)})
    spec = pod_spec(owner, name, revision)
    (engine,) = spec["containers"]
    limits = {key: value for key, value in revision.resources.limits.items() if "/" not in key}
    if (quantity(limits.get("memory", "")) or 0) > (quantity(MEMORY_LIMIT) or 0):
        limits["memory"] = MEMORY_LIMIT
    limits.pop("cpu", None)
    requests = dict(RESOURCES["requests"])
    if "memory" in limits and (quantity(limits["memory"]) or 0) < (quantity(requests["memory"]) or 0):
        requests["memory"] = limits["memory"]  # a request above the limit is no pod at all
    container: Manifest = {
        "name": names.JOB_CONTAINER,
        "image": engine["image"],
        "args": [ARGUMENT],
        # The key is for those who ask the server; nobody asks a preflight.
        "env": [one for one in engine["env"] if one["name"] != names.API_KEY_VARIABLE],
        "terminationMessagePolicy": "File",
        "resources": {"requests": requests, "limits": limits},
        "securityContext": engine["securityContext"],
        "volumeMounts": engine["volumeMounts"],
    }
    if "imagePullPolicy" in engine:
        container["imagePullPolicy"] = engine["imagePullPolicy"]
    kept = ("initContainers", "affinity", "nodeSelector", "tolerations", "imagePullSecrets", "priorityClassName")
    pod: Manifest = {
        **job_pod(),
        "containers": [container],
        "volumes": spec["volumes"],
        **{key: spec[key] for key in kept if key in spec},
    }
    if look.node:
        affinity = pod.get("affinity", {})
        pod["affinity"] = _on(affinity, look.node) if look.required else _towards(affinity, look.node)
    fetched = downloads(revision)
    return render_job(
        owner,
        name=names.preflight_name(owner.name, name),
        component=names.PREFLIGHT_COMPONENT,
        revision=name,
        pod=pod,
        seconds=DOWNLOAD_SECONDS if fetched else SECONDS,
        tries=DOWNLOAD_TRIES if fetched else TRIES,
        hopeless={names.fetch_container(what): HOPELESS_DOWNLOADS for what, _, _, _ in fetched},
    )


def _on(affinity: Manifest, node: str) -> Manifest:
    """The affinity, narrowed to one node (terms are alternatives, so each gets the demand)."""
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    demand = _named(node)
    of_nodes = affinity.get("nodeAffinity", {})
    terms = of_nodes.get(key, {}).get("nodeSelectorTerms") or [{}]
    narrowed = [{**term, "matchFields": [*term.get("matchFields", ()), demand]} for term in terms]
    return {**affinity, "nodeAffinity": {**of_nodes, key: {"nodeSelectorTerms": narrowed}}}


def _towards(affinity: Manifest, node: str) -> Manifest:
    """The affinity, with one node preferred to all others."""
    key = "preferredDuringSchedulingIgnoredDuringExecution"
    of_nodes = affinity.get("nodeAffinity", {})
    wish = {"weight": 100, "preference": {"matchFields": [_named(node)]}}
    return {**affinity, "nodeAffinity": {**of_nodes, key: [*of_nodes.get(key, ()), wish]}}


def _named(node: str) -> Manifest:
    return {"key": "metadata.name", "operator": "In", "values": [node]}
