"""The operator's own Prometheus series, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

disable_created_metrics()  # type: ignore[no-untyped-call]
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    """Every series has the prefix `sm70_operator_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconciles = Counter(
            "sm70_operator_reconciles",
            "Looks at one service: planned, acted where needed. `result`: success, waiting, obstacle or error.",
            ("result",),
            registry=self.registry,
        )
        self.reconcile_seconds = Histogram(
            "sm70_operator_reconcile_seconds",
            "Duration of one look at one service, requests included.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.actions = Counter(
            "sm70_operator_actions", "Changes made to objects of services.", ("action",), registry=self.registry
        )
        self.status_writes = Counter("sm70_operator_status_writes", "Statuses written.", registry=self.registry)
        self.api_requests = Counter(
            "sm70_operator_api_requests",
            "Requests to the API server, watches aside. `code` 0: no answer.",
            ("verb", "kind", "code"),
            registry=self.registry,
        )
        self.polls = Counter(
            "sm70_operator_engine_polls",
            "Reads of acceleration reports. `result`: report or none.",
            ("result",),
            registry=self.registry,
        )

    def gauge(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        """A series `sm70_operator_NAME` that is read when it is asked for."""
        Gauge(f"sm70_operator_{name}", help_text, registry=self.registry).set_function(value)

    def labelled_gauge(self, name: str, help_text: str, label: str) -> Gauge:
        """A series `sm70_operator_NAME` with one label."""
        return Gauge(f"sm70_operator_{name}", help_text, (label,), registry=self.registry)

    def render(self) -> bytes:
        """The text format."""
        return generate_latest(self.registry)
