"""A fatal end that `sm70-serve` can explain."""

from __future__ import annotations

from collections.abc import Sequence

from sm70_profiles.reasons import Refusal, RefusalCode, TerminationReason


class ServeError(Exception):
    """What happened and what to do; becomes the termination message."""

    def __init__(self, reason: TerminationReason, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.reason, self.message, self.remedy = reason, message, remedy


def refused(refusals: Sequence[Refusal]) -> ServeError:
    """All refusals as one end. A draft that does not fit has a reason of its own when nothing else is wrong."""
    codes = {refusal.code for refusal in refusals}
    only_draft = codes == {RefusalCode.DRAFT_INCOMPATIBLE}
    message = "; ".join(
        f"{refusal.code}: `{refusal.field}` {refusal.must}; found {refusal.found}" for refusal in refusals
    )
    remedy = " ".join(dict.fromkeys(refusal.remedy for refusal in refusals))
    return ServeError(
        TerminationReason.DRAFT_INCOMPATIBLE if only_draft else TerminationReason.REFUSED, message, remedy
    )
