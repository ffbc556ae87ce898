"""Posts events (events.k8s.io/v1) for transitions. One that cannot be posted is logged and lost: nothing needs it."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from datetime import datetime

from sm70_operator.act.client import ApiError, ApiServer, Raw
from sm70_operator.api import names
from sm70_operator.observe.snapshot import Resource
from sm70_operator.plan.plan import Event

logger = logging.getLogger(__name__)
MAX_NOTE_BYTES = 1024


class EventRecorder:
    """`instance` names this process among its replicas."""

    def __init__(self, api: ApiServer, instance: str, may_act: Callable[[], bool]) -> None:
        self._api = api
        self._instance = instance
        self._may_act = may_act

    async def post(self, resource: Resource, event: Event, now: datetime) -> None:
        """Posts one event. Never raises for what the API server says."""
        if not self._may_act():
            return
        try:
            await self._api.create("events.k8s.io/Event", resource.key.namespace, self._body(resource, event, now))
        except ApiError as error:
            logger.warning("%s: the event %s was not posted: %s", resource.key, event.reason, error)

    def _body(self, resource: Resource, event: Event, now: datetime) -> Raw:
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {
                "name": f"{resource.key.name}.{uuid.uuid4().hex[:16]}",
                "namespace": resource.key.namespace,
            },
            "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "reportingController": f"{names.GROUP}/operator",
            "reportingInstance": self._instance[:128],
            "type": str(event.type),
            "reason": event.reason,
            "action": event.action,
            "note": event.note.encode()[:MAX_NOTE_BYTES].decode(errors="ignore"),
            "regarding": {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "namespace": resource.key.namespace,
                "name": resource.key.name,
                "uid": resource.uid,
            },
        }
