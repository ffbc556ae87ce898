"""What is recorded of revisions: their documents, and what was decided about each.

ControllerRevisions and the public Service's selector are the only memory of a rollout. The status repeats them and is
never needed to decide.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache

from pydantic import ValidationError

from sm70_operator.api import names
from sm70_operator.observe.facts import ObjectFacts, Raw, packed, parse_object, parse_time
from sm70_operator.render.revision import Revision
from sm70_profiles.report import printable
from sm70_profiles.resolver import Resolution, resolve

DOCUMENTS_KEPT = 64
"""Of those that were looked at last, read and resolved: one service is looked at several times in a row."""


@dataclass(frozen=True)
class Rejection:
    """Why a revision is not tried again, and the spec (its hash) for which that holds; none: it may be tried again."""

    reason: str
    message: str
    time: datetime
    spec: str = ""

    def encode(self) -> str:
        """The annotation's value."""
        body = {"reason": self.reason, "message": self.message, "time": self.time.isoformat(), "spec": self.spec}
        return json.dumps(body, ensure_ascii=False, sort_keys=True)


@dataclass(frozen=True)
class RevisionFacts:
    """One ControllerRevision. Its document is kept packed: there are several to a service, and few are looked at."""

    name: str
    """The hash, as in labels and in the status."""
    object: ObjectFacts
    number: int
    """Counts up with every new revision of the service."""
    created: datetime | None
    source: str = ""
    """The hash of what the spec said when this was resolved."""
    packed: bytes = b""
    good_since: datetime | None = None
    """When it last proved itself: promoted, and its bake time ended well."""
    rejection: Rejection | None = None

    @property
    def document(self) -> Revision | None:
        """What its pods are rendered from; None where this version of the operator cannot read it."""
        return _unpacked(self.packed)

    @property
    def resolution(self) -> Resolution | None:
        """What its document resolves to; None where there is none."""
        return _resolved(self.packed)


@lru_cache(maxsize=DOCUMENTS_KEPT)
def _unpacked(packed: bytes) -> Revision | None:
    try:
        return Revision.model_validate_json(zlib.decompress(packed))
    except (ValidationError, zlib.error):
        return None


@lru_cache(maxsize=DOCUMENTS_KEPT)
def _resolved(packed: bytes) -> Resolution | None:
    document = _unpacked(packed)
    return None if document is None else resolve(document.request)


def parse_revision(raw: Raw) -> RevisionFacts:
    """A ControllerRevision; annotations that cannot be read count as absent."""
    found = parse_object({key: value for key, value in raw.items() if key != "data"})
    metadata = raw.get("metadata", {})
    annotations = metadata.get("annotations") or {}
    return RevisionFacts(
        name=(metadata.get("labels") or {}).get(names.REVISION_LABEL, ""),
        object=found,
        number=int(raw.get("revision") or 0),
        created=parse_time(metadata.get("creationTimestamp")),
        source=annotations.get(names.SOURCE_ANNOTATION, ""),
        packed=packed(raw.get("data")),
        good_since=parse_time(annotations.get(names.GOOD_ANNOTATION)),
        rejection=_rejection(annotations.get(names.REJECTED_ANNOTATION)),
    )


def _rejection(text: str | None) -> Rejection | None:
    if not text:
        return None
    try:
        body = json.loads(text)
        time = parse_time(str(body["time"]))
        reason, message, spec = str(body["reason"]), str(body["message"]), str(body.get("spec") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if time is None:
        return None
    return Rejection(printable(reason, 64), printable(message, 1024), time, printable(spec, 64))
