"""Reads profile documents (YAML from the package, a file or a ConfigMap): here untrusted text becomes a Profile."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml
from pydantic import ValidationError

from sm70_profiles.profile import Profile

MAX_DOCUMENT_BYTES = 256 * 1024


class DocumentError(ValueError):
    """The text is not a profile. The message lists every mistake."""


class _Loader(yaml.SafeLoader):
    """Plain YAML: no alias (they can expand without bound) and no key twice."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise DocumentError("a profile must not use YAML aliases; write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise DocumentError(f"a key must not occur twice; found `{'`, `'.join(twice)}` again")
        return super().construct_mapping(node, deep)


def parse_profile(text: str | bytes) -> Profile:
    """The profile that a YAML document holds. Raises DocumentError."""
    data = text.encode() if isinstance(text, str) else text
    if len(data) > MAX_DOCUMENT_BYTES:
        raise DocumentError(f"a profile must not exceed {MAX_DOCUMENT_BYTES} bytes; found {len(data)}")
    try:
        value = yaml.load(data, _Loader)  # noqa: S506  # a subclass of SafeLoader
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise DocumentError(f"a profile must be YAML in UTF-8: {' '.join(str(error).split())[:300]}") from None
    if not isinstance(value, dict):
        raise DocumentError(f"a profile must be a mapping; found {type(value).__name__}")
    try:
        return Profile.model_validate(value)
    except ValidationError as error:
        raise DocumentError(describe(error)) from None


def describe(error: ValidationError, limit: int = 20) -> str:
    """Every mistake of a validation error on one line, field first."""
    errors = error.errors(include_url=False, include_input=False)
    lines = [f"`{'.'.join(str(part) for part in one['loc']) or 'document'}`: {one['msg']}" for one in errors[:limit]]
    more = [f"and {len(errors) - limit} more"] if len(errors) > limit else []
    return "; ".join([*lines, *more])
