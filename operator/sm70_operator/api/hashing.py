"""Names made of content: the revision's hash."""

from __future__ import annotations

from pydantic import BaseModel

from sm70_profiles.identity import short

REVISION_LENGTH = 10


def revision_name(document: BaseModel) -> str:
    """Ten hexadecimal digits of the SHA-256 of a document's canonical JSON; equal content, equal name."""
    return short(document, REVISION_LENGTH)
