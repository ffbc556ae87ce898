"""Reads and awaits `Sm70InferenceService` resources."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stack.kubernetes import Kubernetes

KIND = "sm70inferenceservices.inference.sm70.io"


@dataclass(frozen=True)
class Condition:
    """One condition of a service; `Unknown` with an empty reason while the service has none of this type."""

    type: str
    status: str
    reason: str
    message: str

    def __str__(self) -> str:
        return f"{self.type}={self.status} {self.reason}: {self.message}"


class NotReachedError(TimeoutError):
    """A service did not get where it was expected; the message shows all its conditions."""


def conditions(service: dict[str, Any] | None) -> dict[str, Condition]:
    """The conditions of a service by type."""
    found = ((service or {}).get("status") or {}).get("conditions", [])
    return {
        item["type"]: Condition(item["type"], item["status"], item.get("reason", ""), item.get("message", ""))
        for item in found
    }


def condition(service: dict[str, Any] | None, kind: str) -> Condition:
    return conditions(service).get(kind, Condition(kind, "Unknown", "", ""))


def current(service: dict[str, Any] | None) -> bool:
    """True once the operator has seen the newest spec."""
    if service is None:
        return False
    return bool((service.get("status") or {}).get("observedGeneration") == service["metadata"]["generation"])


def wait(
    cluster: Kubernetes,
    name: str,
    reached: Callable[[dict[str, Any]], bool],
    *,
    namespace: str = "default",
    seconds: float = 180,
    seen: Callable[[dict[str, Any]], None] = lambda _service: None,
    pause: float = 0.5,
) -> dict[str, Any]:
    """Waits until a service whose status is current satisfies `reached`, and returns it. Raises NotReachedError."""
    deadline = time.monotonic() + seconds
    while True:
        service = cluster.get(KIND, name, namespace)
        if service is not None:
            seen(service)
            if current(service) and reached(service):
                return service
        if time.monotonic() > deadline:
            words = "\n".join(f"  {one}" for one in conditions(service).values()) or "  (no conditions)"
            raise NotReachedError(f"{namespace}/{name}: not reached within {seconds:.0f} s; conditions:\n{words}")
        time.sleep(pause)


def wait_ready(cluster: Kubernetes, name: str, **options: Any) -> dict[str, Any]:
    """Waits for `Ready=True`; options as for `wait`."""
    return wait(cluster, name, lambda service: condition(service, "Ready").status == "True", **options)


def wait_gone(cluster: Kubernetes, name: str, namespace: str = "default", seconds: float = 60) -> None:
    """Waits until a service and all that carries its label are gone."""
    kinds = "deployments,replicasets,pods,services,persistentvolumeclaims,controllerrevisions.apps"
    deadline = time.monotonic() + seconds
    while True:
        rest = cluster.kubectl(
            "get", kinds, "-n", namespace, "-l", f"inference.sm70.io/service={name}", "-o", "name"
        ).split()  # fmt: skip
        if cluster.get(KIND, name, namespace) is None and not rest:
            return
        if time.monotonic() > deadline:
            raise NotReachedError(f"{namespace}/{name}: still there after {seconds:.0f} s: {', '.join(rest) or KIND}")
        time.sleep(0.3)
