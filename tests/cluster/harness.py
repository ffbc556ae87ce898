"""The product on the session's cluster, as the end-to-end tests see it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from sm70_operator.render.resource_claim import DEVICE_CLASS, DRIVER
from stack import operator, services
from testcluster.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = "serving"
# A second is a resync period here, so that thirty of them fit into a test.
SHORT_PERIODS = {"settings.pollSeconds": "1", "settings.resyncSeconds": "1"}
POD_SELECTOR = "app.kubernetes.io/name=sm70-operator"


def gpu_device_class() -> dict[str, Any]:
    """The class that NVIDIA's driver makes where GPUs are offered as claims."""
    selector = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == 'gpu'"
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": DEVICE_CLASS},
        "spec": {"selectors": [{"cel": {"expression": selector}}]},
    }


@dataclass(frozen=True)
class Stack:
    """Operator installed, models made, an API key at hand."""

    cluster: Cluster
    api_key: str = field(repr=False)  # a failing assertion shows this object
    answers: dict[str, dict[str, Any]] = field(repr=False)
    """What the tiny model must answer, by kind of request."""
    operator_image: str
    engine_image: str

    def install(self, values: Mapping[str, str] | None = None) -> None:
        """Installs the operator, or gives it other values; without any, it has its own defaults."""
        operator.install(
            self.cluster, operator_image=self.operator_image, engine_cpu_image=self.engine_image, values=values or {}
        )

    def example(self, name: str) -> dict[str, Any]:
        """A resource of examples/, ready to be changed and applied."""
        document: dict[str, Any] = yaml.safe_load((ROOT / "examples" / f"{name}.yaml").read_text())
        return document

    def service(self, name: str, **spec: Any) -> dict[str, Any]:
        """The example's service under another name, with some members of its spec replaced; None removes one."""
        document = self.example("tiny")
        document["metadata"]["name"] = name
        document["spec"].update(spec)
        document["spec"] = {key: value for key, value in document["spec"].items() if value is not None}
        return document

    def apply(self, document: dict[str, Any]) -> str:
        return self.cluster.kubectl(
            "apply", "--server-side", "--validate=strict", "-n", NAMESPACE, "-f", "-", stdin=json.dumps(document)
        )  # fmt: skip

    def service_url(self, name: str) -> str:
        service = self.cluster.get("service", name, NAMESPACE)
        assert service is not None
        return f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}"

    def right_answer(self, kind: str) -> str:
        return str(self.answers[kind]["expected"]["content"])

    def operator_pods(self) -> list[dict[str, Any]]:
        listed = self.cluster.kubectl("get", "pods", "-n", operator.NAMESPACE, "-l", POD_SELECTOR, "-o", "json")
        items: list[dict[str, Any]] = json.loads(listed)["items"]
        return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]

    def operator_metric(self, name: str) -> float:
        """The sum of a series over its labels, from the operator's /metrics; 0 while it does not answer."""
        total = 0.0
        for pod in self.operator_pods():
            try:
                text = httpx.get(f"http://{pod['status'].get('podIP')}:8080/metrics", timeout=5).text
            except httpx.HTTPError:
                continue
            total += sum(
                float(line.split()[-1]) for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))
            )
        return total

    def kill_operator(self) -> None:
        """Ends the operator as a crash would (no grace), and waits until its successor is ready."""
        before = {pod["metadata"]["uid"] for pod in self.operator_pods()}
        self.cluster.kubectl(
            "delete", "pod", "-n", operator.NAMESPACE, "-l", POD_SELECTOR, "--grace-period=0", "--force"
        )  # fmt: skip
        deadline = time.monotonic() + 90
        while True:
            pods = [pod for pod in self.operator_pods() if pod["metadata"]["uid"] not in before]
            ready = [
                one
                for pod in pods
                for one in pod["status"].get("conditions", [])
                if one["type"] == "Ready" and one["status"] == "True"
            ]
            if ready:
                return
            assert time.monotonic() < deadline, "no operator came back"
            time.sleep(0.2)

    def rest(self, name: str, seconds: float) -> None:
        """Waits until a service's object has not changed for 20 s."""
        deadline = time.monotonic() + seconds
        version, since = self._version(name), time.monotonic()
        while time.monotonic() < since + 20:
            assert time.monotonic() < deadline, f"{name} does not come to rest"
            time.sleep(0.5)
            if self._version(name) != version:
                version, since = self._version(name), time.monotonic()

    def settle(self, name: str, seconds: float = 60) -> None:
        """Waits until the operator has gone over everything five times without changing the service's object."""
        deadline = time.monotonic() + seconds
        while True:
            version = self._version(name)
            rounds = self.operator_metric("sm70_operator_reconciles_total")
            while self.operator_metric("sm70_operator_reconciles_total") < rounds + 5:
                assert time.monotonic() < deadline, "the operator does not resync"
                time.sleep(0.3)
            if self._version(name) == version:
                return
            assert time.monotonic() < deadline, f"{name} does not come to rest"

    def _version(self, name: str) -> str:
        found = self.cluster.get(services.KIND, name, NAMESPACE)
        assert found is not None
        return str(found["metadata"]["resourceVersion"])
