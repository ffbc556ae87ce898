"""Writes the status, and only when it differs beyond timestamps: an idle service causes no write at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sm70_operator.act.client import ApiError, ApiServer, Raw
from sm70_operator.api import names
from sm70_operator.api.types import Status
from sm70_operator.observe.snapshot import Key, Resource

_TIMES = frozenset({"lastTransitionTime", "observedTime"})


@dataclass(frozen=True)
class _Written:
    uid: str
    before: str
    status: Raw


class StatusWriter:
    """Remembers its last write of each service until the cache shows it."""

    def __init__(self, api: ApiServer) -> None:
        self._api = api
        self._written: dict[Key, _Written] = {}

    def current(self, resource: Resource) -> Resource:
        """The resource with the status that it has by our knowledge, which may be newer than the cache."""
        written = self._written.get(resource.key)
        if written is None:
            return resource
        if written.uid != resource.uid or written.before != resource.version:
            del self._written[resource.key]
            return resource
        return Resource(
            resource.key,
            resource.uid,
            resource.generation,
            resource.deleting,
            resource.spec,
            written.status,
            resource.version,
        )

    def forget(self, key: Key) -> None:
        """The service is gone."""
        self._written.pop(key, None)

    async def write(self, resource: Resource, status: Status) -> bool:
        """Writes if needed; True if it did. Raises ApiError; a service that is gone is no error."""
        wanted = status.model_dump(mode="json", by_alias=True, exclude_none=True)
        if without_times(wanted) == without_times(resource.status):
            return False
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            # With the uid, a new service of the same name is never given the status of the old one.
            "metadata": {"name": resource.key.name, "namespace": resource.key.namespace, "uid": resource.uid},
            "status": wanted,
        }
        try:
            await self._api.apply(
                names.KIND, resource.key.namespace, resource.key.name, body, names.STATUS_FIELD_MANAGER, "status"
            )
        except ApiError as error:
            if error.code in (404, 409):
                return False
            raise
        self._written[resource.key] = _Written(resource.uid, resource.version, wanted)
        return True


def without_times(value: Any) -> Any:
    """The value without the members that only say when."""
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in _TIMES}
    if isinstance(value, list):
        return [without_times(item) for item in value]
    return value
