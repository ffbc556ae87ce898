"""Reads profile documents (YAML or TOML; from the package, a file, a ConfigMap): untrusted text becomes a Profile.

The text is bounded before it is read and plain after it: no alias (they expand without bound), no key twice, no float
that is not a number, no nesting beyond what a profile needs. Every mistake is one line of one error.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Hashable
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from sm70_profiles.base import printable
from sm70_profiles.profile import Profile

MAX_DOCUMENT_BYTES = 256 * 1024
MAX_STREAM_BYTES = 1 << 20
MAX_DOCUMENTS = 64
MAX_DEPTH = 24
MAX_NODES = 20_000
_TOML_START = re.compile(r"""[A-Za-z0-9_."'-]+\s*=|\[[A-Za-z0-9_."'-]+\]\s*$""")


class DocumentError(ValueError):
    """The text is not a profile. The message lists every mistake."""


class _Loader(yaml.SafeLoader):
    """Plain YAML: no alias, no key twice, bounded depth and size."""

    def __init__(self, stream: bytes) -> None:
        super().__init__(stream)
        self._depth = 0
        self._nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise DocumentError("a document must not use YAML aliases; write the value out")
        self._depth += 1
        self._nodes += 1
        if self._depth > MAX_DEPTH:
            raise DocumentError(f"a document must not nest deeper than {MAX_DEPTH} levels")
        if self._nodes > MAX_NODES:
            raise DocumentError(f"a document must not hold more than {MAX_NODES} values")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if any(isinstance(key, list | dict) for key in keys):
            raise DocumentError("a key must be a word, not a list or a mapping")
        names = [str(key) for key in keys]
        twice = sorted({name for name in names if names.count(name) > 1})[:5] if len(set(names)) < len(names) else []
        if twice:
            raise DocumentError(f"a key must not occur twice; found `{'`, `'.join(map(printable, twice))}` again")
        return super().construct_mapping(node, deep)


def parse_profile(text: str | bytes) -> Profile:
    """The profile that a YAML, JSON or TOML document holds. Raises DocumentError."""
    value = parse_document(text, "a profile")
    return _validated(Profile, value)


def parse_documents(data: bytes, what: str = "a file") -> list[dict[str, Any]]:
    """The mappings of a YAML stream, `---` between them; empty documents are passed over. Raises DocumentError."""
    parts = re.split(rb"^---[ \t]*(?:#.*)?$", data, flags=re.MULTILINE)
    if len(data) > MAX_STREAM_BYTES or len(parts) > MAX_DOCUMENTS:
        raise DocumentError(f"{what} must not exceed {MAX_STREAM_BYTES} bytes or {MAX_DOCUMENTS} documents")
    blank = re.compile(rb"(?:\s|#[^\n]*(?:\n|$))*\Z")
    return [parse_document(part, what) for part in parts if not blank.match(part)]


def parse_document(text: str | bytes, what: str = "a document") -> dict[str, Any]:
    """The mapping that a YAML, JSON or TOML text holds. `what` names it in errors. Raises DocumentError."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if len(data) > MAX_DOCUMENT_BYTES:
        raise DocumentError(f"{what} must not exceed {MAX_DOCUMENT_BYTES} bytes; found {len(data)}")
    try:
        decoded = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DocumentError(f"{what} must be text in UTF-8; byte {error.start} is not") from None
    value = _toml(decoded, what) if _looks_like_toml(decoded) else _yaml(data, what)
    if not isinstance(value, dict):
        raise DocumentError(f"{what} must be a mapping; found {type(value).__name__}")
    if any(not isinstance(key, str) for key in value):
        raise DocumentError(f"{what} must have words as keys")
    return value


def _looks_like_toml(text: str) -> bool:
    for line in text.splitlines():
        bare = line.strip()
        if bare and not bare.startswith("#"):
            return _TOML_START.match(bare) is not None
    return False


def _yaml(data: bytes, what: str) -> Any:
    loader = None
    try:
        loader = _Loader(data)
        value = loader.get_single_data()
    except DocumentError:
        raise
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, OverflowError, RecursionError) as error:
        reason = printable(" ".join(str(error).split()), 300)
        raise DocumentError(f"{what} must be YAML in UTF-8: {reason}") from None
    finally:
        if loader is not None:
            loader.dispose()
    return value


def _toml(text: str, what: str) -> Any:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{what} must be TOML: {printable(str(error), 300)}") from None


def _validated(model: type[Profile], value: dict[str, Any]) -> Profile:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise DocumentError(describe(error)) from None


def describe(error: ValidationError, limit: int = 20) -> str:
    """Every mistake of a validation error on one line, field first."""
    errors = error.errors(include_url=False, include_input=False)
    lines = [
        f"`{printable('.'.join(str(part) for part in one['loc']), 200) or 'document'}`: {printable(one['msg'], 300)}"
        for one in errors[:limit]
    ]
    more = [f"and {len(errors) - limit} more"] if len(errors) > limit else []
    return "; ".join([*lines, *more])


def write_document(value: BaseModel | dict[str, Any]) -> str:
    """YAML that these readers take back: keys in the order of the schema, no alias, nothing that is not set."""
    data = (
        json.loads(value.model_dump_json(by_alias=True, exclude_none=True)) if isinstance(value, BaseModel) else value
    )
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """YAML without anchors: the same value may stand in two places."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
