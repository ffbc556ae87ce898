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


class Termination(ReportPart):
    """Why the server ended: what happened and what to do about it."""

    schema_version: int = 1
    kind: TerminationKind
    reason: TerminationReason
    message: Annotated[str, StringConstraints(max_length=1500)]
    remedy: Annotated[str, StringConstraints(max_length=500)] = ""
    routes: tuple[RouteCount, ...] = Field(default=(), max_length=256)

    def encode(self) -> bytes:
        """JSON of at most `MAX_BYTES`; the last route counts go first when it would be longer."""
        routes = list(self.routes)
        while True:
            data = self.model_copy(update={"routes": tuple(routes)}).model_dump_json(by_alias=True).encode()
            if len(data) <= MAX_BYTES:
                return data
            if not routes:
                return self.model_copy(update={"message": self.message[:300], "remedy": self.remedy[:200]}).encode()
            routes.pop()


def parse_termination(text: str) -> Termination | None:
    """The message if it is one of ours, None otherwise (a crash without last words, another program's text)."""
    try:
        return Termination.model_validate_json(text[: 2 * MAX_BYTES])
    except ValidationError:
        return None
