"""What a command line of the judge or the benchmark points at: the server, its key, and files. Every error is usage."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import httpx

from sm70_profiles.base import printable
from sm70_profiles.catalog import load_profile, profile_names
from sm70_profiles.documents import DocumentError, parse_profile
from sm70_profiles.profile import Profile
from sm70_profiles.qualification import Suite, load_suite, parse_suite, suite_names
from sm70_qualify.client import Endpoint, EndpointError

KEY_VARIABLE = "VLLM_API_KEY"
USAGE_STATUS = 64
MAX_FILE_BYTES = 1 << 20


class UsageError(ValueError):
    """The command line, or something that it names, cannot be used."""


def api_key(file: Path | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The key: of the file, else of the environment; None when neither is there. Raises UsageError."""
    if file is None:
        return environment.get(KEY_VARIABLE) or None
    key = read(file).decode(errors="replace").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise UsageError(f"`{file}` must hold one key in printable ASCII")
    return key


def read(file: Path) -> bytes:
    """A small file. Raises UsageError."""
    try:
        with file.open("rb") as source:
            data = source.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"`{file}` cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"`{file}` must not exceed {MAX_FILE_BYTES} bytes")
    return data


def suite(name: str) -> Suite:
    """A built-in suite, or the file of one. Raises UsageError or QualificationError."""
    return load_suite(name) if name in suite_names() else parse_suite(_document(name, "suite", suite_names()))


def profile(name: str | None) -> Profile | None:
    """A built-in profile, or the file of one. Raises UsageError."""
    if name is None:
        return None
    if name in profile_names():
        return load_profile(name)
    try:
        return parse_profile(_document(name, "profile", profile_names()))
    except DocumentError as error:
        raise UsageError(f"`{printable(name, 120)}` is no profile: {error}") from None


def _document(name: str, what: str, built_in: tuple[str, ...]) -> bytes:
    file = Path(name)
    if not file.is_file():
        raise UsageError(
            f"`{printable(name, 120)}` is neither a built-in {what} nor a file; built in are {', '.join(built_in)}"
        )
    return read(file)


def root(url: str) -> str:
    """The server's root. Raises UsageError for what is no http address; a trailing `/v1` is taken off."""
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        raise UsageError(f"`--url` must be an http or https address, found `{printable(url, 80)}`") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UsageError(f"`--url` must be an http or https address, found `{printable(url, 80)}`")
    if parsed.userinfo:
        raise UsageError("`--url` must not hold a password: other users of this machine can read the command line")
    return url.rstrip("/").removesuffix("/v1")


def only_model(endpoint: Endpoint) -> str:
    """The name of the one model that the endpoint serves. Raises one of ASKING_ERRORS."""
    served = tuple(endpoint.models())
    if len(served) != 1:
        raise EndpointError(f"name the model by `--model`; the endpoint serves {', '.join(served) or 'none'}")
    return served[0]
