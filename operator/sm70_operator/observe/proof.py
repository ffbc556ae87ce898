"""What is known of the Jobs that judge a revision. What they leave behind is `api.qualification.Evidence`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from sm70_operator.api import names
from sm70_operator.observe.facts import MESSAGE_LENGTH, ObjectFacts, Raw, parse_object, parse_time
from sm70_profiles.report import printable


@dataclass(frozen=True)
class JobFacts:
    """A preflight or qualification Job of the service. Exactly one of `succeeded` and `failed` holds once it ended."""

    object: ObjectFacts
    component: str
    """`names.PREFLIGHT_COMPONENT` or `names.QUALIFICATION_COMPONENT`."""
    revision: str
    """The revision that it judges."""
    succeeded: bool = False
    failed: bool = False
    message: str = ""
    """Why it failed, by the Job controller's word."""
    ended_at: datetime | None = None
    created: datetime | None = None

    @property
    def ended(self) -> bool:
        return self.succeeded or self.failed


def parse_job(raw: Raw) -> JobFacts:
    metadata, status = raw.get("metadata", {}), raw.get("status") or {}
    labels: Mapping[str, str] = metadata.get("labels") or {}
    conditions = {one.get("type"): one for one in status.get("conditions") or () if one.get("status") == "True"}
    failed, complete = conditions.get("Failed"), conditions.get("Complete")
    ended = failed or complete or {}
    return JobFacts(
        object=parse_object(raw),
        component=labels.get(names.COMPONENT_LABEL, ""),
        revision=labels.get(names.FOR_REVISION_LABEL, ""),
        succeeded=complete is not None and failed is None,
        failed=failed is not None,
        message=printable((failed or {}).get("message") or "", MESSAGE_LENGTH),
        created=parse_time(metadata.get("creationTimestamp")),
        ended_at=parse_time(ended.get("lastTransitionTime")),
    )
