"""In place, or beside: is a second matching set of GPUs free at this moment? Said before it is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sm70_operator.api.types import RolloutStatus, RolloutStrategy
from sm70_operator.observe.facts import NodeFacts, ObjectFacts, PodFacts
from sm70_operator.plan.scheduling import suits
from sm70_operator.render.resource_claim import uses_claims
from sm70_operator.render.revision import CacheKind, Revision
from sm70_profiles.resolver import ResolvedGpus

_SHARED = "ReadWriteMany"


@dataclass(frozen=True)
class Choice:
    """`strategy` None: neither can be begun now, and `because` says what it waits for."""

    strategy: RolloutStrategy | None
    because: str


@dataclass(frozen=True)
class Supply:
    """Nodes and whoever holds their GPUs, as far as the operator sees them. `nodes` None: it sees none."""

    nodes: Sequence[NodeFacts] | None
    holders: Sequence[PodFacts]
    claim: ObjectFacts | None
    alone: str = ""
    """What a preflight found of volumes that cannot be mounted twice."""


def choose(
    wanted: RolloutStrategy, name: str, revision: Revision, replicas: int, supply: Supply, earlier: RolloutStatus | None
) -> Choice:
    """The strategy of a rollout that has not begun."""
    if wanted is RolloutStrategy.IN_PLACE:
        return Choice(RolloutStrategy.IN_PLACE, "`rollout.strategy` is InPlace.")
    told = earlier.strategy if earlier is not None and earlier.revision == name else ""
    if wanted is RolloutStrategy.AUTO and earlier is not None and told == RolloutStrategy.IN_PLACE:
        return Choice(RolloutStrategy.IN_PLACE, earlier.because)  # perhaps because there was no room beside
    obstacle = _mounted_once(revision, supply) or _no_room(revision, replicas, supply)
    if not obstacle:
        why = "no GPU is needed" if revision.gpus.count == 0 else f"{_sets(revision.gpus, replicas)} free now"
        return Choice(RolloutStrategy.SURGE, f"{why[0].upper()}{why[1:]}, so the earlier revision serves meanwhile.")
    if wanted is RolloutStrategy.SURGE:
        return Choice(None, f"`rollout.strategy` is Surge, but {obstacle}.")
    because = f"{obstacle[0].upper()}{obstacle[1:]}, so the earlier revision stops first."
    return Choice(RolloutStrategy.IN_PLACE, because)


def _sets(gpus: ResolvedGpus, replicas: int) -> str:
    return f"{replicas} x {gpus.count} matching GPUs are"


def _mounted_once(revision: Revision, supply: Supply) -> str:
    """A volume that only one pod or node may mount keeps a second pod from starting."""
    claim = supply.claim
    if supply.alone:
        return supply.alone[0].lower() + supply.alone[1:].rstrip(".")
    if revision.cache.kind is not CacheKind.CLAIM:
        return ""
    modes = () if claim is None else (claim.manifest.get("spec") or {}).get("accessModes") or ()
    return "" if _SHARED in modes else f"the compile cache `{revision.cache.name}` can be mounted by one node only"


def _no_room(revision: Revision, replicas: int, supply: Supply) -> str:
    gpus = revision.gpus
    if gpus.count == 0:
        return ""
    if uses_claims(revision):
        return "GPUs that are given by claims cannot be counted beforehand"
    if supply.nodes is None:
        return "the operator may not see nodes, and cannot tell whether GPUs are free"
    free = sum(_free(node, gpus.resource_name, supply.holders) // gpus.count for node in _nodes(gpus, supply.nodes))
    if free >= replicas:
        return ""
    return f"{replicas} x {gpus.count} matching GPUs are not free now, only {free} such sets"


def _nodes(gpus: ResolvedGpus, nodes: Sequence[NodeFacts]) -> list[NodeFacts]:
    return [node for node in nodes if node.schedulable and suits(node, gpus)]


def _free(node: NodeFacts, resource: str, holders: Sequence[PodFacts]) -> int:
    held = sum(one.gpus.get(resource, 0) for one in holders if one.node == node.name and not one.ended)
    return max(node.allocatable.get(resource, 0) - held, 0)
