"""Which operators this process has registered: what may run. Whether it did run is for the route counters to say."""

from __future__ import annotations

from sm70_profiles.profile import EngineFlavour
from sm70_profiles.rules import Capabilities

_operators: set[str] = set()


def provide(operator: str) -> None:
    """Says that the operator of this name (as `sm70_profiles.rules` spells it) is registered."""
    _operators.add(operator)


def capabilities(flavour: EngineFlavour) -> Capabilities:
    """What this process offers now."""
    return Capabilities(flavour=flavour, operators=frozenset(_operators))
