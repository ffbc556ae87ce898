"""Spec and status of an Sm70Qualification: the evidence that one way to serve was judged, and how it was judged.

One object is one run of one suite against one identity. Its spec is written once and never changes, so what it says
cannot be turned into evidence for something else; its status is the judge's report. What the key holds is decided in
`sm70_profiles.identity`, what a report is in `sm70_profiles.qualification`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, StringConstraints, ValidationError

from sm70_operator.api import names
from sm70_operator.api.conditions import ConditionStatus
from sm70_operator.api.types import StatusPart, Text, Word, list_map
from sm70_profiles.base import Document, Figure, Name, ProfileName
from sm70_profiles.identity import QualificationIdentity, short
from sm70_profiles.qualification import Bound, Digest, GateName, QualificationReport, Verdict

MAX_GATES = 64
KEY_LENGTH = 10
"""Digits of the key's hash in an object's name."""


class ServiceReference(Document):
    """The Sm70InferenceService of the same namespace whose candidate is judged."""

    name: Name


class QualificationSpec(Document):
    """What was to be judged. It never changes."""

    service_ref: ServiceReference
    revision: Annotated[str, StringConstraints(min_length=1, max_length=16, pattern=r"^[a-z0-9]+$")]
    key: QualificationIdentity
    suite: ProfileName
    suite_digest: Digest | None = Field(
        default=None, description="SHA-256 of the suite's document where it is the user's own; a built-in one has none."
    )
    thresholds: dict[GateName, Figure] = Field(
        default_factory=dict, max_length=32, description="Floors that were demanded in place of the suite's."
    )
    attempt: int = Field(ge=1, le=10_000, description="Counts the runs of one suite against one key.")


class GateStatus(StatusPart):
    """One question of the suite and its answer. `measured` and `threshold` are decimal figures in `unit`."""

    name: Annotated[str, StringConstraints(max_length=63)]
    verdict: Verdict
    bound: Bound = Bound.AT_MOST
    measured: Annotated[str, StringConstraints(max_length=40)] | None = None
    threshold: Annotated[str, StringConstraints(max_length=40)] | None = None
    unit: Annotated[str, StringConstraints(max_length=32)] = ""
    samples: int = Field(default=0, ge=0, le=2**53)
    message: Annotated[str, StringConstraints(max_length=600)] = ""


class SkippedGate(StatusPart):
    """A question of the suite that does not concern this server."""

    name: Annotated[str, StringConstraints(max_length=63)]
    because: Annotated[str, StringConstraints(max_length=600)] = ""


class EvidenceConditionType(StrEnum):
    COMPLETE = "Complete"


class EvidenceCondition(StatusPart):
    """In the form of metav1.Condition. `Complete` is True with the verdict as reason once the run has ended."""

    type: EvidenceConditionType
    status: ConditionStatus
    reason: Word
    message: Text = ""
    observed_generation: int = Field(default=1, ge=0, le=2**53)
    last_transition_time: datetime


class QualificationStatus(StatusPart):
    """How the run ended. Without `verdict` it has not ended."""

    verdict: Verdict | None = None
    message: Text = Field(default="", description="The first thing that is wrong, or why nothing was measured.")
    gates: tuple[GateStatus, ...] = Field(default=(), max_length=MAX_GATES, json_schema_extra=list_map("name"))
    skipped: tuple[SkippedGate, ...] = Field(default=(), max_length=MAX_GATES, json_schema_extra=list_map("name"))
    omitted_gates: int = Field(
        default=0, ge=0, le=MAX_GATES, description="Passed gates that did not fit into the report."
    )
    summary: Word = Field(default="", description="Passed over all gates, `12/12`.")
    suite_version: int | None = Field(default=None, ge=1, le=1_000_000)
    suite_digest: Word | None = None
    tool_version: Word | None = None
    raw_digest: Word | None = Field(default=None, description="SHA-256 of everything that was measured.")
    started_at: datetime | None = None
    finished_at: datetime | None = None
    conditions: tuple[EvidenceCondition, ...] = Field(default=(), max_length=8, json_schema_extra=list_map("type"))


def finished_status(report: QualificationReport, now: datetime) -> QualificationStatus:
    """The status that a judge's report becomes."""
    passed = sum(gate.verdict is Verdict.PASSED for gate in report.gates) + report.omitted_gates
    return QualificationStatus(
        verdict=report.verdict,
        message=report.message,
        gates=tuple(GateStatus.model_validate(gate.model_dump()) for gate in report.gates),
        skipped=tuple(SkippedGate(name=one.name, because=one.because) for one in report.skipped),
        omitted_gates=report.omitted_gates,
        summary=f"{passed}/{len(report.gates) + report.omitted_gates}",
        suite_version=report.suite.version,
        suite_digest=report.suite.digest,
        tool_version=report.tool_version,
        raw_digest=report.raw_digest,
        started_at=datetime.fromisoformat(report.started_at),
        finished_at=datetime.fromisoformat(report.finished_at),
        conditions=(_complete(report.verdict, report.message, now),),
    )


def broken_status(why: str, now: datetime) -> QualificationStatus:
    """The status of a run that left no report: the verdict is Error, because nothing is known."""
    return QualificationStatus(
        verdict=Verdict.ERROR, message=why[:1024], finished_at=now, conditions=(_complete(Verdict.ERROR, why, now),)
    )


def _complete(verdict: Verdict, message: str, now: datetime) -> EvidenceCondition:
    return EvidenceCondition(
        type=EvidenceConditionType.COMPLETE,
        status=ConditionStatus.TRUE,
        reason=str(verdict),
        message=message[:1024],
        last_transition_time=now,
    )


@dataclass(frozen=True)
class Evidence:
    """An Sm70Qualification as the planner knows it."""

    name: str
    uid: str
    version: str
    owner: str
    """The uid of the controlling service; empty when none controls it."""
    spec: QualificationSpec
    status: QualificationStatus
    created: datetime | None = None
    deleting: bool = False

    @property
    def finished(self) -> bool:
        return self.status.verdict is not None


def parse_evidence(raw: Mapping[str, Any]) -> Evidence | None:
    """An Sm70Qualification of the API server; None where spec or status were written for another version.

    Unreadable evidence proves nothing, so it counts as absent.
    """
    metadata = raw.get("metadata") or {}
    try:
        spec = QualificationSpec.model_validate(raw.get("spec") or {})
        status = QualificationStatus.model_validate(raw.get("status") or {})
    except ValidationError:
        return None
    owners = [one for one in metadata.get("ownerReferences") or () if one.get("controller")]
    created = metadata.get("creationTimestamp")
    return Evidence(
        name=str(metadata.get("name", "")),
        uid=str(metadata.get("uid", "")),
        version=str(metadata.get("resourceVersion", "")),
        owner=next((str(one.get("uid", "")) for one in owners if one.get("kind") == names.KIND), ""),
        spec=spec,
        status=status,
        created=datetime.fromisoformat(created) if isinstance(created, str) else None,
        deleting="deletionTimestamp" in metadata,
    )


def qualification_name(service: str, spec: QualificationSpec) -> str:
    """The name of the evidence and of the Job that makes it: the same run has the same name, also after a crash."""
    judged = {"key": spec.key, "suite": spec.suite, "thresholds": dict(spec.thresholds)}
    judged |= {"suiteDigest": spec.suite_digest} if spec.suite_digest else {}
    return f"{service}-q{short(judged, KEY_LENGTH)}-{spec.attempt}"
