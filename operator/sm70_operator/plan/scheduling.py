"""Why a pod has no node: no matching GPU, not enough on any node, all taken (by whom), or something else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from sm70_operator.api.conditions import Finding, Reason, with_remedy
from sm70_operator.observe.facts import NodeFacts, PodFacts
from sm70_operator.render.revision import MEMORY_TOLERANCE_PERCENT
from sm70_profiles.base import quantity_bytes
from sm70_profiles.resolver import ResolvedGpus

MAX_NAMED = 6
_CLAIM = re.compile(r'persistentvolumeclaim "([^"]{1,253})" not found')
_CLAIM_WAITS = ("cannot allocate all claims", "cannot allocate", "resourceclaim not created yet")
_UNBOUND = "unbound immediate PersistentVolumeClaims"


def missing_volume(pod: PodFacts) -> str | None:
    """What the scheduler says of a claim that keeps the pod from being placed; None when no claim does."""
    if match := _CLAIM.search(pod.scheduling_message):
        return f"The PersistentVolumeClaim `{match[1]}` does not exist in namespace `{pod.namespace}`."
    if _UNBOUND in pod.scheduling_message:
        return "A PersistentVolumeClaim of the spec is not bound to a volume."
    return None


def explain_waiting(
    pod: PodFacts, gpus: ResolvedGpus | None, nodes: Sequence[NodeFacts] | None, holders: Sequence[PodFacts]
) -> Finding:
    """The finding for `GPUsAllocated` while the pod has no node."""
    words = pod.scheduling_message
    if not words:
        return Finding.unknown(message="The pod waits for the scheduler.")
    if missing_volume(pod) is not None:
        return Finding.unknown(message="The pod waits for its volumes.")
    if gpus is None or gpus.count == 0:
        return _false(Reason.UNSCHEDULABLE, f"The scheduler says: {words}")
    if pod.claims:
        return _claims(pod, gpus, holders)
    if nodes is not None:
        suitable = [node for node in nodes if suits(node, gpus)]
        if not suitable:
            return _mismatch(gpus, nodes)
        largest = max(suitable, key=lambda node: (node.allocatable.get(gpus.resource_name, 0), node.name))
        most = largest.allocatable.get(gpus.resource_name, 0)
        if most < gpus.count:
            return _false(
                Reason.TOPOLOGY_UNSUITABLE,
                f"One replica needs {gpus.count} GPUs of one node; the largest suitable node, `{largest.name}`,"
                f" has {most}.",
            )
        if gpus.resource_name in words:
            return _false(Reason.WAITING_FOR_GPU, _who_holds(pod, gpus, suitable, holders))
    if gpus.resource_name in words:
        return _false(Reason.WAITING_FOR_GPU, f"The scheduler says: {words}")
    return _false(Reason.UNSCHEDULABLE, f"The scheduler says: {words}")


def _claims(pod: PodFacts, gpus: ResolvedGpus, holders: Sequence[PodFacts]) -> Finding:
    """Devices are not seen here, so a claim that nothing can ever satisfy looks like one that has to wait."""
    words = pod.scheduling_message
    if not any(phrase in words for phrase in _CLAIM_WAITS):
        return _false(Reason.UNSCHEDULABLE, f"The scheduler says: {words}")
    wanted = " or ".join(f"`{product}`" for product in gpus.products) or "GPUs"
    held = [
        f"`{one.namespace}/{one.service}` on `{one.node}`"
        for one in sorted(holders, key=lambda one: (one.node, one.namespace, one.name))
        if one.claims and one.node and one.uid != pod.uid and not one.ended
    ]
    parts = [f"No node has {gpus.count} free devices that the claim selects ({wanted})"]
    parts += [f"holders of claims: {_listed(held)}"] if held else []
    return _false(Reason.WAITING_FOR_GPU, f"{'; '.join(parts)}. The scheduler says: {words}")


def suits(node: NodeFacts, gpus: ResolvedGpus) -> bool:
    if gpus.products and node.product not in gpus.products:
        return False
    if gpus.min_memory is not None and node.memory_mebibytes is not None:
        needed = quantity_bytes(gpus.min_memory) // 2**20 * MEMORY_TOLERANCE_PERCENT // 100
        if node.memory_mebibytes < needed:
            return False
    return node.allocatable.get(gpus.resource_name, 0) > 0


def _mismatch(gpus: ResolvedGpus, nodes: Sequence[NodeFacts]) -> Finding:
    found = sorted({node.product for node in nodes if node.product and node.allocatable.get(gpus.resource_name, 0)})
    wanted = " or ".join(f"`{product}`" for product in gpus.products) or f"with `{gpus.resource_name}`"
    memory = f" with at least {gpus.min_memory} of memory" if gpus.min_memory is not None else ""
    there = f"found {_listed(f'`{product}`' for product in found)}" if found else "no node offers any"
    return _false(Reason.GPU_MISMATCH, f"No node has a GPU {wanted}{memory}; {there}.")


def _who_holds(pod: PodFacts, gpus: ResolvedGpus, suitable: Sequence[NodeFacts], holders: Sequence[PodFacts]) -> str:
    names = {node.name for node in suitable}
    total = sum(node.allocatable.get(gpus.resource_name, 0) for node in suitable)
    held = [
        (f"`{one.namespace}/{one.service}` holds {amount} on `{one.node}`", amount)
        for one in sorted(holders, key=lambda one: (one.node, one.namespace, one.name))
        if one.node in names and one.uid != pod.uid and not one.ended
        if (amount := one.gpus.get(gpus.resource_name, 0))
    ]
    known = sum(amount for _, amount in held)
    parts = [f"One replica needs {gpus.count} free GPUs of one node; suitable nodes have {total} in all"]
    parts += [_listed(text for text, _ in held)] if held else []
    if known < total:
        parts.append(f"the other {total - known} are free on nodes with too few, or held outside of this operator")
    if away := sorted(node.name for node in suitable if not node.schedulable):
        parts.append(f"cordoned or not ready: {_listed(f'`{name}`' for name in away)}")
    return "; ".join(parts) + "."


def _listed(texts: Iterable[str]) -> str:
    items = list(texts)
    more = [f"{len(items) - MAX_NAMED} more"] if len(items) > MAX_NAMED else []
    return ", ".join([*items[:MAX_NAMED], *more])


def _false(reason: Reason, found: str) -> Finding:
    return Finding.false(reason, with_remedy(reason, found if found.endswith(".") else f"{found}."))
