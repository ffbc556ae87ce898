"""What is known of the Jobs that judge a revision. What they leave behind is `api.qualification.Evidence`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sm70_operator.api import names
from sm70_operator.observe.facts import MESSAGE_LENGTH, ObjectFacts, PodFacts, Raw, parse_object, parse_time
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


def pods_of(job: JobFacts, pods: Sequence[PodFacts]) -> list[PodFacts]:
    """A Job's pods among others, the oldest first."""
    uid, prefix = job.object.uid, f"{job.object.name}-"
    found = [pod for pod in pods if (pod.job == uid if pod.job else pod.name.startswith(prefix))]
    return sorted(found, key=lambda pod: (pod.created, pod.name))


def last_words(job: JobFacts, pods: Sequence[PodFacts]) -> list[str]:
    """Termination messages of a Job's pods, the newest last."""
    ends = [pod.container.exit for pod in pods_of(job, pods) if pod.container is not None]
    return [end.message for end in ends if end is not None and end.message.strip()]
