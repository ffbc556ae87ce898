"""What the stack needs of a cluster: kubectl and helm against it. Every target cluster of `testcluster` provides it."""

from __future__ import annotations

from typing import Any, Protocol


class Kubernetes(Protocol):
    """A cluster that one can type commands at. Failing commands raise an exception with the command's own words."""

    def kubectl(self, *words: str, stdin: str | None = None) -> str: ...

    def helm(self, *words: str, stdin: str | None = None) -> str: ...

    def get(self, kind: str, name: str, namespace: str = "default") -> dict[str, Any] | None: ...
