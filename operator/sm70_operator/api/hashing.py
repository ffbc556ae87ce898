"""Names made of content: the revision's hash."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from sm70_profiles.identity import short

REVISION_LENGTH = 10
SOURCE_LENGTH = 16
PROFILE_PROSE = ("title", "tier", "description", "gates", "unknown", "measured", "sources")
"""Members of a profile that tell people about it and change no pod."""
_NEVER_A_REVISION = ("replicas", "qualification")
_ROLLOUT_IN_THE_POD = "drainTimeoutSeconds"


def revision_name(document: BaseModel) -> str:
    """Ten hexadecimal digits of the SHA-256 of a document's canonical JSON; equal content, equal name.

    What is absent or empty does not count, so that a new optional field renames no existing revision; nor does the
    prose of the profile, so that an edited description restarts nothing.
    """
    value = document.model_dump(mode="json", by_alias=True)
    profile = (value.get("request") or {}).get("profile")
    if profile is not None:
        value["request"]["profile"] = without_prose(profile)
    return short(_pruned(value), REVISION_LENGTH)


def source_name(spec: Mapping[str, Any], profile: BaseModel | None) -> str:
    """What of a spec, as the user wrote it, a revision is made from.

    The same text is the same revision, whatever the operator's version and its defaults. `profile` is the document that
    a `profileRef` names; a built-in one is named by the spec.
    """
    value = {name: item for name, item in spec.items() if name not in _NEVER_A_REVISION}
    value["rollout"] = {_ROLLOUT_IN_THE_POD: (spec.get("rollout") or {}).get(_ROLLOUT_IN_THE_POD)}
    if profile is not None:
        value["profileRef"] = without_prose(profile.model_dump(mode="json", by_alias=True))
    return short(_pruned(value), SOURCE_LENGTH)


def attempt_name(spec: Mapping[str, Any], source: str) -> str:
    """The spec that a rejection holds for: everything in it but the replicas, which autoscalers change, and a pause."""
    value = {name: item for name, item in spec.items() if name != "replicas"}
    value["rollout"] = {name: item for name, item in (spec.get("rollout") or {}).items() if name != "paused"}
    return short([_pruned(value), source], SOURCE_LENGTH)


def without_prose(profile: dict[str, Any]) -> dict[str, Any]:
    """A profile's document without what is written for people only."""
    return {name: item for name, item in profile.items() if name not in PROFILE_PROSE}


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        items = {key: _pruned(item) for key, item in value.items()}
        return {key: item for key, item in items.items() if item not in (None, {}, [])}
    if isinstance(value, list):
        return [_pruned(item) for item in value]
    return value
