"""The termination message: the last words of `sm70-serve`, which Kubernetes keeps in the container's last state.

At most 4096 bytes of JSON; the operator folds it into the status. Detail is dropped before the reason is.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints, ValidationError

from sm70_profiles.reasons import TerminationReason
from sm70_profiles.report import ReportPart, RouteCount

MAX_BYTES = 4096


class TerminationKind(StrEnum):
    FAILURE = "failure"
    SHUTDOWN = "shutdown"
    PREFLIGHT = "preflight"


class FindingSeverity(StrEnum):
    ERROR = "error"
    """The server would not start, or not serve."""
    WARNING = "warning"
    """It would serve, and something would be missing."""


class PreflightFinding(ReportPart):
    """One thing that a preflight found: what must hold, what was found, what to do."""

    severity: FindingSeverity
    reason: TerminationReason
    subject: Annotated[str, StringConstraints(max_length=32)]
    """What was looked at: `request`, `model`, `draft`, `tokenizer`, `arguments`, `engine`, `disk`."""
    message: Annotated[str, StringConstraints(max_length=800)]
    remedy: Annotated[str, StringConstraints(max_length=300)] = ""


class Termination(ReportPart):
    """Why the server ended: what happened and what to do about it.

    A preflight passed when its reason is `Passed`; otherwise `findings` holds every error, the gravest first.
    """

    schema_version: int = 1
    kind: TerminationKind
    reason: TerminationReason
    message: Annotated[str, StringConstraints(max_length=1500)]
    remedy: Annotated[str, StringConstraints(max_length=500)] = ""
    routes: tuple[RouteCount, ...] = Field(default=(), max_length=256)
    findings: tuple[PreflightFinding, ...] = Field(default=(), max_length=32)

    def encode(self) -> bytes:
        """JSON of at most `MAX_BYTES`. When it would be longer, detail goes: the last route counts, then the last
        findings, then the ends of the texts."""
        routes, findings = list(self.routes), list(self.findings)
        while True:
            kept = self.model_copy(update={"routes": tuple(routes), "findings": tuple(findings)})
            data = kept.model_dump_json(by_alias=True).encode()
            if len(data) <= MAX_BYTES:
                return data
            if routes:
                routes.pop()
            elif findings:
                findings.pop()
            else:
                return self.model_copy(
                    update={"message": self.message[:300], "remedy": self.remedy[:200], "routes": (), "findings": ()}
                ).encode()


def parse_termination(text: str) -> Termination | None:
    """The message if it is one of ours, None otherwise (a crash without last words, another program's text)."""
    try:
        return Termination.model_validate_json(text[: 2 * MAX_BYTES])
    except ValidationError:
        return None
