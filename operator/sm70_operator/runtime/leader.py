"""Leadership by a Lease: two replicas give a warm standby, and one that lost the Lease does not act any more.

Only intervals on the own monotonic clock count; the times written into the Lease are for people. A rival's Lease has
expired when it was not renewed for its whole duration *while we watched*.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime

from sm70_operator.act.client import ApiError, ApiServer, Raw

logger = logging.getLogger(__name__)


class Leadership:
    """One candidate. `leads()` is a promise that holds now: it ends by itself if the Lease cannot be renewed."""

    def __init__(
        self,
        api: ApiServer,
        namespace: str,
        name: str,
        identity: str,
        seconds: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._namespace, self._name = namespace, name
        self.identity = identity
        self._seconds = seconds
        self._clock = clock
        self._held_until = float("-inf")
        self._seen: tuple[str, float] | None = None
        self.heard: float | None = None
        """When the API server last answered."""

    @property
    def pause(self) -> float:
        """Seconds between two attempts."""
        return self._seconds / 3

    def leads(self) -> bool:
        """True while this process may act. It stops a little before a rival may start."""
        return self._clock() < self._held_until

    async def acquire(self) -> None:
        """Returns once the Lease is ours."""
        while True:
            if await self.attempt():
                break
            await asyncio.sleep(self.pause)
        logger.info("%s holds the lease %s/%s", self.identity, self._namespace, self._name)

    async def hold(self) -> None:
        """Renews until the Lease is lost, then returns."""
        while True:
            await asyncio.sleep(self.pause)
            await self.attempt()
            if not self.leads():
                logger.error("%s has lost the lease %s/%s", self.identity, self._namespace, self._name)
                return

    async def attempt(self) -> bool:
        """Takes or renews the Lease if that can be done now. Never raises."""
        started = self._clock()
        try:
            found = await self._api.get("Lease", self._namespace, self._name)
            self.heard = self._clock()
            if found is None:
                await self._api.create("Lease", self._namespace, self._lease(None))
            elif self._free(found):
                await self._api.replace("Lease", self._namespace, self._name, self._lease(found))
            else:
                self._held_until = float("-inf")
                return False
        except ApiError as error:
            if error.code != 409:  # somebody was faster
                logger.warning("the lease %s/%s: %s", self._namespace, self._name, error)
            return False
        # Counted from before the request: by then at the latest a rival's count has begun.
        self._held_until = started + self._seconds * 0.9
        return True

    async def release(self) -> None:
        """Gives the Lease back, so that a standby need not wait for its end. Never raises."""
        if not self.leads():
            return
        self._held_until = float("-inf")
        try:
            found = await self._api.get("Lease", self._namespace, self._name)
            if found is not None and found["spec"].get("holderIdentity") == self.identity:
                found["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                await self._api.replace("Lease", self._namespace, self._name, found)
        except ApiError as error:
            logger.warning("the lease %s/%s was not given back: %s", self._namespace, self._name, error)

    def _free(self, lease: Raw) -> bool:
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        version = str(lease.get("metadata", {}).get("resourceVersion"))
        if self._seen is None or self._seen[0] != version:
            self._seen = (version, self._clock())
        expired = self._clock() - self._seen[1] >= float(spec.get("leaseDurationSeconds") or self._seconds)
        return holder in ("", self.identity) or expired

    def _lease(self, found: Raw | None) -> Raw:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = dict((found or {}).get("spec") or {})
        if spec.get("holderIdentity") != self.identity:
            changes = int(spec.get("leaseTransitions") or 0) + (1 if found is not None else 0)
            spec |= {"holderIdentity": self.identity, "acquireTime": now, "leaseTransitions": changes}
        spec |= {"leaseDurationSeconds": self._seconds, "renewTime": now}
        metadata = (found or {}).get("metadata") or {"name": self._name, "namespace": self._namespace}
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
