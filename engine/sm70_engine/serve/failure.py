"""A fatal end that `sm70-serve` can explain."""

from __future__ import annotations

from sm70_profiles.reasons import TerminationReason


class ServeError(Exception):
    """What happened and what to do; becomes the termination message."""

    def __init__(self, reason: TerminationReason, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.reason, self.message, self.remedy = reason, message, remedy
