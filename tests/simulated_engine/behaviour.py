"""What a simulated engine does otherwise than a good one: given in the environment, or changed while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import Field

from sm70_profiles.base import Document
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.report import StartupPhase

VARIABLE = "SIMULATED_ENGINE"
"""A JSON document of `Behaviour`. In a service's `spec.env` it makes a revision of its own."""
KEPT_VARIABLE, KEPT = "SIMULATED_ENGINE_KEPT", "/tmp/simulated-engine.json"
"""Where what was changed at run time is kept for the container's next start; it ends with the pod."""


class Answers(StrEnum):
    RIGHT = "Right"
    WRONG = "Wrong"
    """The same wrong words each time."""
    VARYING = "Varying"
    """Other words each time, as after silent numerical damage."""
    BRIEF = "Brief"
    """Right, but silent after a long prompt: too little to measure a rate by, so the judge cannot decide."""


class ReportFault(StrEnum):
    NONE = "None"
    ABSENT = "Absent"
    """404 on every report."""
    GARBAGE = "Garbage"
    OTHER_PROFILE = "OtherProfile"
    """Well-formed, and of another profile's hash."""


class Moment(StrEnum):
    START = "Start"
    """Before anything listens."""
    SERVING = "Serving"


class Death(Document):
    """An end that nobody asked for."""

    at: Moment = Moment.START
    after_seconds: float = 0.0
    reason: TerminationReason | None = None
    """None: it leaves no last words."""
    message: str = "simulated"
    exit_code: int = 1
    mebibytes: int = 0
    """More than 0: it does not exit but takes this much memory, for the kernel to end it."""


class Behaviour(Document):
    """All of it has the value of a good engine by default. Times are in seconds."""

    variant: str = ""
    """Nothing but a difference: two revisions that behave alike."""
    start_seconds: float = Field(default=0.0, ge=0)
    """Until the server listens; the phases of a start share it."""
    stuck_in: StartupPhase | None = None
    """The phase that never ends."""
    health_status: int = 200
    never_ready: bool = False
    """`/sm70/ready` says no while everything else is well."""
    disabled: dict[str, str] = Field(default_factory=dict)
    """Acceleration paths that are off, with the reason."""
    fallbacks: dict[str, int] = Field(default_factory=dict)
    """Dispatches of fallback routes that each request adds."""
    report: ReportFault = ReportFault.NONE
    answers: Answers = Answers.RIGHT
    token_seconds: float = Field(default=0.002, ge=0)
    drain_seconds: float = Field(default=0.0, ge=0)
    """How long it takes to end after its last request."""
    deaf: bool = False
    """It ignores SIGTERM."""
    dies: Death | None = None
    cache_files: int = Field(default=3, ge=0, le=1000)
    """Files that a start adds to an empty compile cache, where the settings compile anything."""
    device: dict[str, Any] = Field(default_factory=dict)
    """Members of the report's `device` that differ."""

    @classmethod
    def load(cls, environment: Mapping[str, str]) -> Behaviour:
        """From the environment, with what was changed at run time over it."""
        found = cls.model_validate_json(environment.get(VARIABLE) or "{}")
        kept = kept_file(environment)
        return found.changed(kept.read_bytes()) if kept.is_file() else found

    def changed(self, members: bytes | str) -> Behaviour:
        """With these members (a JSON object) in the place of its own. Raises ValidationError."""
        update = Behaviour.model_validate_json(members).model_dump(exclude_unset=True)
        return Behaviour.model_validate(self.model_dump() | update)

    def keep(self, environment: Mapping[str, str]) -> None:
        """For the container's next start."""
        kept_file(environment).write_text(self.model_dump_json(by_alias=True))


def kept_file(environment: Mapping[str, str]) -> Path:
    """Where a container's successor looks."""
    return Path(environment.get(KEPT_VARIABLE, KEPT))
