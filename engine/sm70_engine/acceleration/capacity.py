"""What the KV cache holds, computed from the facts that a worker states."""

from __future__ import annotations

from collections.abc import Mapping

from sm70_profiles.report import CapacityReport


def capacity_of(facts: Mapping[str, str | int | None]) -> CapacityReport | None:
    """The capacity by a worker's `sm70_facts`; None while they are unknown or lack a member.

    `kv_tokens` and `residents` are the engine's own figures for requests of `max_model_len` tokens: a model whose
    layers keep different things (pages, recurrent states) has no simpler size.
    """
    names = ("kv_tokens", "block_size", "max_model_len", "residents")
    tokens, block, longest, residents = (facts.get(name) for name in names)
    if not (isinstance(tokens, int) and isinstance(block, int) and isinstance(longest, int)):
        return None
    if not isinstance(residents, int) or block < 1 or longest < 1:
        return None
    return CapacityReport(
        kv_tokens=max(tokens, 0), block_size=block, max_model_len=longest, residents_at_max_len=max(residents, 0)
    )
