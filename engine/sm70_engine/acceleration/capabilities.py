"""Which operators this process has registered: what may run. Whether it did run is for the route counters to say."""

from __future__ import annotations

from collections.abc import Mapping

from sm70_engine.session import Session
from sm70_profiles.rules import Capabilities

_operators: set[str] = set()


def provide(operator: str) -> None:
    """Says that the operator of this name (as `sm70_profiles.rules` spells it) is registered."""
    _operators.add(operator)


def capabilities(session: Session, environment: Mapping[str, str]) -> Capabilities:
    """What this process offers now, for this session's checkpoints and under these variables."""
    return Capabilities(
        flavour=session.flavour,
        operators=frozenset(_operators),
        model=session.facts.model,
        draft=session.facts.draft,
        environment=environment,
    )
