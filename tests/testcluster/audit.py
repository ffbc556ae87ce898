"""Reads the API server's audit log: who asked for what, and whether it was allowed.

It is the proof of what the code under test did, whoever claims what: each line is one finished
request at level Metadata, without any object's content (and so without secrets).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})
POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}


@dataclass(frozen=True)
class Request:
    """One request; `time` is when it ended, in RFC 3339 (UTC) as the API server wrote it."""

    user: str
    verb: str
    group: str
    resource: str  # with its subresource: `deployments/status`
    namespace: str
    name: str
    code: int
    allowed: bool
    time: str
    agent: str
    uri: str

    @property
    def write(self) -> bool:
        return self.verb in WRITES

    @classmethod
    def parse(cls, event: dict[str, Any]) -> Request:
        target = event.get("objectRef", {})
        parts = (target.get("resource", ""), target.get("subresource", ""))
        return cls(
            user=event.get("user", {}).get("username", ""),
            verb=event["verb"],
            group=target.get("apiGroup", ""),
            resource="/".join(part for part in parts if part),
            namespace=target.get("namespace", ""),
            name=target.get("name", ""),
            code=event.get("responseStatus", {}).get("code", 0),
            allowed=event.get("annotations", {}).get("authorization.k8s.io/decision") == "allow",
            time=event["stageTimestamp"],
            agent=event.get("userAgent", ""),
            uri=event["requestURI"],
        )


def position(log: Path) -> int:
    """The log's present end, to read on from later."""
    return log.stat().st_size if log.exists() else 0


def requests(log: Path, start: int = 0) -> Iterator[Request]:
    """The finished requests after a position, without the last line if it is still being written."""
    with log.open("rb") as file:
        file.seek(max(0, start - 1))
        if start and file.read(1) != b"\n":
            file.readline()  # it was being written when the position was taken
        for line in file:
            if line.endswith(b"\n"):
                event = json.loads(line)
                if event["stage"] in ("ResponseComplete", "Panic"):
                    yield Request.parse(event)
