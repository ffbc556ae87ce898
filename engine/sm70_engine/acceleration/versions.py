"""What is installed, without importing it."""

from __future__ import annotations

import importlib.metadata as metadata


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
