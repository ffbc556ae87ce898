"""How many prompt tokens fit into a step that also decodes, so that it takes no longer than a bound.

A long prompt that shares its steps with running answers makes every one of their tokens wait for a whole chunk. With a
bound, the chunk is cut to what the machine was seen to do in that time. The estimate follows the running average of the
steps before: a constant share for a step that only decodes, and a share for each prompt token.
"""

from __future__ import annotations

FIRST_CHUNK = 256
"""Prompt tokens of a mixed step before any was measured."""
LEAST_CHUNK = 16
"""A prompt always advances, however small the bound."""
WEIGHT = 0.2
"""Of the newest step in the averages."""


class Pace:
    """The estimate of one scheduler. Times are in seconds."""

    def __init__(self, bound: float) -> None:
        """bound: seconds that a mixed step may take."""
        self._bound = bound
        self._decode: float | None = None
        self._per_token: float | None = None

    def observe(self, seconds: float, prompt_tokens: int, decodes: bool) -> None:
        """Learns from a step that is over. Steps that do not decode say nothing about mixed ones."""
        if not decodes or seconds <= 0:
            return
        if prompt_tokens == 0:
            self._decode = _average(self._decode, seconds)
        else:
            extra = max(seconds - (self._decode or 0.0), 0.0)
            self._per_token = _average(self._per_token, extra / prompt_tokens)

    def chunk(self) -> int:
        """Prompt tokens that a mixed step may hold now."""
        if self._per_token is None:
            return FIRST_CHUNK
        if self._per_token == 0:
            return 1 << 30
        room = self._bound - (self._decode or 0.0)
        return max(LEAST_CHUNK, int(room / self._per_token))


def step_budget(full: int, decode_tokens: int, chunk: int, block: int) -> int:
    """Tokens that a mixed step may hold.

    full: the configured budget. block: tokens of the blocks at whose ends a hybrid model keeps its state. The scheduler
    cuts a chunk at such an end when the budget admits a whole block, and would cut a smaller chunk to nothing; with a
    budget below one block it advances inside of it.
    """
    budget = min(full, decode_tokens + chunk)
    if chunk < block <= budget:
        budget = block - 1
    return full if budget <= decode_tokens else budget


def _average(before: float | None, newest: float) -> float:
    return newest if before is None else (1 - WEIGHT) * before + WEIGHT * newest
