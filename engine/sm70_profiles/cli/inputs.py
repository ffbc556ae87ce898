"""What the commands read: profiles by name or file, overrides from the command line, facts from files and folders."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sm70_profiles.catalog import load_profile, profile_names
from sm70_profiles.checkpoints import read_checkpoint
from sm70_profiles.documents import MAX_DOCUMENT_BYTES, describe, parse_document, parse_profile
from sm70_profiles.facts import Facts, GpuFacts
from sm70_profiles.profile import Profile
from sm70_profiles.reasons import Refusal
from sm70_profiles.resolver import ServeRequest
from sm70_profiles.settings import Overrides, merge
from sm70_profiles.typed import read_options

MAX_INPUT = 1 << 20


class InputError(ValueError):
    """An argument or a file cannot be read. The message says what must hold."""


def read_bytes(path: Path, limit: int = MAX_INPUT) -> bytes:
    """A file's bytes, or standard input for `-`; one byte more than the limit at most. Raises InputError."""
    try:
        if str(path) == "-":
            return sys.stdin.buffer.read(limit + 1)
        with path.open("rb") as file:
            return file.read(limit + 1)
    except OSError as error:
        raise InputError(f"{path} must be readable; {error.strerror or error}") from None


def profile_of(name: str) -> Profile:
    """A built-in profile, or the document in a file. Raises InputError, DocumentError or ProfileNotFoundError."""
    if name in profile_names():
        return load_profile(name)
    path = Path(name)
    if path.suffix in (".yaml", ".yml", ".toml", ".json") or path.exists():
        return parse_profile(read_bytes(path, MAX_DOCUMENT_BYTES))
    return load_profile(name)


def overrides_of(assignments: list[str], words: list[str]) -> tuple[Overrides, tuple[str, ...], tuple[Refusal, ...]]:
    """Overrides from `FIELD=VALUE` and from options of vLLM, and what is left of these. Raises InputError."""
    tree: dict[str, Any] = {}
    for assignment in assignments:
        field, given, text = assignment.partition("=")
        if not given:
            raise InputError(f"an override must be FIELD=VALUE; found `{assignment}`")
        section = tree
        *path, last = field.split(".")
        for part in path:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise InputError(f"`{field}` must not be a part of a value that is set as well")
        section[last] = _value(text)
    try:
        settings = Overrides.model_validate(tree)
    except ValidationError as error:
        raise InputError(describe(error)) from None
    typed = read_options(words, "options")
    return merge(settings, typed.settings), typed.rest, typed.refusals


def _value(text: str) -> Any:
    """Numbers, true, false and lists as JSON has them; all else is a word."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, float) else value


def read_facts(path: Path) -> Facts:
    """Facts from a YAML file. Raises InputError or DocumentError."""
    try:
        return Facts.model_validate(parse_document(read_bytes(path, MAX_DOCUMENT_BYTES), "facts"))
    except ValidationError as error:
        raise InputError(describe(error)) from None


def facts_of(options: argparse.Namespace) -> Facts:
    """Facts from a file, from `--gpu`, and from checkpoint folders that are at hand. Raises InputError."""
    facts = Facts() if options.facts is None else read_facts(options.facts)
    if getattr(options, "gpu", None):
        gpu = facts.gpu or GpuFacts()
        facts = facts.model_copy(update={"gpu": gpu.model_copy(update={"product": options.gpu})})
    for name in ("model", "draft"):
        folder = getattr(options, name, None)
        if folder and getattr(facts, name) is None and (Path(folder) / "config.json").is_file():
            facts = facts.model_copy(update={name: read_checkpoint(Path(folder))})
    return facts


def request_of(options: argparse.Namespace) -> tuple[ServeRequest, Facts, tuple[Refusal, ...]]:
    """The request that the arguments describe. Raises InputError."""
    profile = profile_of(options.profile)
    overrides, rest, refusals = overrides_of(options.set, options.options)
    draft = options.draft
    pinned = profile.draft.checkpoint and profile.draft.checkpoint.hugging_face
    if draft is None and profile.draft.required and not pinned and _drafts(profile, overrides):
        draft = "/models/draft"
    try:
        request = ServeRequest.model_validate(
            {
                "profile": profile,
                "model_path": _absolute(options.model),
                "draft_path": _absolute(draft) if draft else None,
                "served_name": options.served_name,
                "overrides": overrides,
                "extra_args": rest,
                "gpus": {"count": _ranks(profile, overrides)},
            }
        )
    except ValidationError as error:
        raise InputError(describe(error)) from None
    return request, facts_of(options), refusals


def _absolute(path: str) -> str:
    return str(Path(path).absolute())


def _ranks(profile: Profile, overrides: Overrides) -> int | None:
    """As many GPUs as the overrides split over, where they say so; else the profile's own count."""
    if overrides.tensor_parallel_size is None and overrides.pipeline_parallel_size is None:
        return None
    settings = merge(profile.settings, overrides)
    return (settings.tensor_parallel_size or 1) * (settings.pipeline_parallel_size or 1)


def _drafts(profile: Profile, overrides: Overrides) -> bool:
    speculation = merge(profile.settings, overrides).speculation
    return speculation is not None and speculation.method not in (None, "None", "mtp", "ngram")
