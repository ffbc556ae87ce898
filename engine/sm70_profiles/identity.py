"""Canonical JSON and the hashes made of it: the same content has the same name everywhere and always.

Four things are named. What enters each, and what must not, is part of the contract (`docs/reference/identity.md`):

- a profile: the whole document, members that are None left out;
- a resolution: what decides how the server computes and answers; not where it listens, what it is called, or how it
  logs (`VOLATILE_OPTIONS`);
- a compile cache: what compiled code depends on (`CompileCacheIdentity`); not the pod, its ports, the GPUs' uuids, the
  model's weights or its sampling defaults;
- a qualification: what a measurement is valid for (`QualificationIdentity`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, Field, StringConstraints

from sm70_profiles.base import Document

VOLATILE_OPTIONS = frozenset(
    {
        "--host",
        "--port",
        "--uds",
        "--served-model-name",
        "--shutdown-timeout",
        "--api-key",
        "--log-level",
        "--uvicorn-log-level",
        "--log-config-file",
        "--logging-config",
        "--max-log-len",
        "--otlp-traces-endpoint",
    }
)
"""Options with one value that change neither what is computed nor what is answered."""
VOLATILE_SWITCHES = frozenset(
    {
        "--disable-uvicorn-access-log",
        "--no-disable-uvicorn-access-log",
        "--enable-log-requests",
        "--no-enable-log-requests",
        "--enable-log-outputs",
        "--no-enable-log-outputs",
        "--disable-log-stats",
        "--aggregate-engine-logging",
    }
)

Known = Annotated[str, StringConstraints(min_length=1, max_length=256)]


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no white space: the same value gives the same bytes on every machine.

    Models are written by alias and without members that are None, so that adding an optional member changes no existing
    hash. Raises ValueError for NaN and infinities.
    """
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def compact_json(value: Any) -> str:
    """JSON without white space that keeps the order of members, for an option whose reader sees it."""
    return json.dumps(_plain(value), separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: Any) -> str:
    """SHA-256 of the canonical JSON, 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def short(value: Any, length: int = 10) -> str:
    """The first digits of `digest`, enough to name an object within one service."""
    return digest(value)[:length]


class CompileCacheIdentity(Document):
    """What compiled code depends on. None is unknown, and then there is no key."""

    engine_build: Known | None = None
    torch: Known | None = None
    cuda: Known | None = None
    driver_branch: Known | None = None
    gpu_product: Known | None = None
    tensor_parallel_size: int = Field(ge=1, le=64)
    pipeline_parallel_size: int = Field(ge=1, le=64)
    model_shape: Known | None = None
    configuration: Known

    @property
    def missing(self) -> tuple[str, ...]:
        """What must be known before there is a key."""
        return tuple(name for name in type(self).model_fields if getattr(self, name) is None)

    @property
    def key(self) -> str | None:
        """The name of the cache's folder, or None while something is unknown."""
        return None if self.missing else digest(self)


class QualificationIdentity(Document):
    """What a measurement is valid for: change one of these and it must be measured again."""

    image_digest: Known
    model: Known
    draft: Known | None = None
    profile_hash: Known
    resolution_hash: Known
    tensor_parallel_size: int = Field(ge=1, le=64)
    pipeline_parallel_size: int = Field(ge=1, le=64)
    gpu_product: Known
    driver_branch: Known

    @property
    def key(self) -> str:
        return digest(self)


def driver_branch(driver: str) -> str:
    """The branch of a driver version: `580.159.04` is of `580`. Compiled code is kept within a branch."""
    return driver.partition(".")[0]


def stable_arguments(argv: Iterable[str]) -> tuple[str, ...]:
    """The options without those that name the server, say where it listens or how it logs."""
    kept: list[str] = []
    skip = False
    for word in argv:
        option, given, _ = word.partition("=")
        if skip:
            skip = False
        elif option in VOLATILE_SWITCHES:
            continue
        elif option in VOLATILE_OPTIONS:
            skip = not given
        else:
            kept.append(word)
    return tuple(kept)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True, exclude_none=True)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(_plain(item) for item in value)
    return value
