"""The errors that this package raises for its user."""

from __future__ import annotations

from collections.abc import Sequence


class ClusterError(RuntimeError):
    """Something that the user can mend: what must hold, what was found, what to do."""


class CommandError(ClusterError):
    """A program of the cluster (kubectl, helm, ctr, …) failed; the message has its last words."""

    def __init__(self, words: Sequence[str], code: int, output: str) -> None:
        self.code, self.output = code, output
        super().__init__(f"`{' '.join(words[:6])}{' …' if len(words) > 6 else ''}` ended with {code}: {output.strip()}")
