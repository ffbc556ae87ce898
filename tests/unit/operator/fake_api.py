"""An API server in a dictionary, for the edge of the operator: requests are noted, answers can be scripted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from sm70_operator.act.client import ApiError, ApiServer

Raw = dict[str, Any]


class FakeApi(ApiServer):
    """`fail` may raise in place of an answer; `calls` are (verb, kind, name, body)."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Raw] = {}
        self.calls: list[tuple[str, str, str, Raw]] = []
        self.fail: Callable[[str, str, str], None] = lambda verb, kind, name: None
        self.version = 0

    @property
    def writes(self) -> list[tuple[str, str, str]]:
        return [(verb, kind, name) for verb, kind, name, _ in self.calls if verb not in ("get", "list")]

    def put(self, kind: str, name: str, body: Raw) -> None:
        """As somebody else would: no call is noted."""
        self.version += 1
        stored = copy.deepcopy(body)
        stored["metadata"] = {"name": name, "resourceVersion": str(self.version), **body.get("metadata", {})}
        self.objects[kind, name] = stored

    async def get(self, kind: str, namespace: str, name: str) -> Raw | None:
        self._note("get", kind, name, {})
        return copy.deepcopy(self.objects.get((kind, name)))

    async def list(self, kind: str, namespace: str, **selectors: str) -> list[Raw]:
        self._note("list", kind, "", {})
        return [copy.deepcopy(body) for (found, _), body in self.objects.items() if found == kind]

    async def create(self, kind: str, namespace: str, body: Raw) -> Raw:
        name = body["metadata"]["name"]
        self._note("create", kind, name, body)
        if (kind, name) in self.objects:
            raise ApiError(409, "already exists")
        self.put(kind, name, body)
        return self.objects[kind, name]

    async def replace(self, kind: str, namespace: str, name: str, body: Raw) -> Raw:
        self._note("replace", kind, name, body)
        if self.objects[kind, name]["metadata"]["resourceVersion"] != body["metadata"].get("resourceVersion"):
            raise ApiError(409, "the object has been modified")
        body = copy.deepcopy(body)
        del body["metadata"]["resourceVersion"]
        self.put(kind, name, body)
        return self.objects[kind, name]

    async def apply(self, kind: str, namespace: str, name: str, body: Raw, manager: str, subresource: str = "") -> Raw:
        self._note(f"apply/{subresource}" if subresource else "apply", kind, name, body)
        return body

    async def merge(self, kind: str, namespace: str, name: str, body: Raw, manager: str) -> Raw:
        self._note("merge", kind, name, body)
        return body

    async def delete(self, kind: str, namespace: str, name: str, uid: str, version: str) -> None:
        self._note("delete", kind, name, {"uid": uid, "resourceVersion": version})

    def _note(self, verb: str, kind: str, name: str, body: Raw) -> None:
        self.calls.append((verb, kind, name, body))
        self.fail(verb, kind, name)
