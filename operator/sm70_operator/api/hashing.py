"""Names made of content: the revision's hash."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from sm70_profiles.identity import short

REVISION_LENGTH = 10


def revision_name(document: BaseModel) -> str:
    """Ten hexadecimal digits of the SHA-256 of a document's canonical JSON; equal content, equal name.

    What is absent or empty does not count, so that a new optional field renames no existing revision.
    """
    return short(_pruned(document.model_dump(mode="json", by_alias=True)), REVISION_LENGTH)


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        items = {key: _pruned(item) for key, item in value.items()}
        return {key: item for key, item in items.items() if item not in (None, {}, [])}
    if isinstance(value, list):
        return [_pruned(item) for item in value]
    return value
