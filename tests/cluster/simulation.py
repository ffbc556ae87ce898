"""A small cluster with the operator and simulated engines: rollouts take seconds, and anything may be broken."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

import images
from cluster.harness import NAMESPACE, Stack
from simulated_engine import image
from sm70_qualify.client import Endpoint, EndpointError
from stack.services import Condition, condition, wait, wait_gone
from testcluster.cluster import Cluster
from testcluster.options import GpuSource, Options

PERIODS = {
    "settings.pollSeconds": "1",
    "settings.resyncSeconds": "5",
    "settings.reportGraceSeconds": "3",
    "settings.routesSeconds": "1",
    "settings.backoffLimitSeconds": "2",
    "settings.leaseSeconds": "3",
    "settings.watchTimeoutSeconds": "10",
}
"""What takes minutes with an operator of production takes seconds."""
MODELS = "/var/lib/sm70-models"
"""On every node: `tiny`, `draft` and `draft-mismatch`."""
OVERLAY = "SM70_TEST_OVERLAY"
"""For work on the operator: a checkout whose sources lie over its packages, in the place of the image that ships."""
SMALL = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}}


@dataclass(frozen=True)
class Simulation(Stack):
    """The stack with simulated engines."""

    def service(self, name: str, behaviour: Mapping[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
        """A service whose engine behaves like this; members of its spec replaced by those given."""
        body: dict[str, Any] = {
            "profile": "tiny_hybrid_reference",
            "model": {"hostPath": {"path": f"{MODELS}/tiny"}, "servedName": "tiny"},
            "gpus": {"count": 1},
            "auth": {"allowAnonymous": True},
            "engine": {"image": self.engine_image, "imagePullPolicy": "IfNotPresent"},
            "pod": {"resources": SMALL, "sharedMemory": "16Mi"},
            "rollout": {"drainTimeoutSeconds": 10, "progressDeadlineSeconds": 60},
            "env": [variable(behaviour or {})],
            **spec,
        }
        body = {key: value for key, value in body.items() if value is not None}
        kind = {"apiVersion": "inference.sm70.io/v1alpha1", "kind": "Sm70InferenceService"}
        return {**kind, "metadata": {"name": name}, "spec": body}

    def patch(self, name: str, **spec: Any) -> None:
        self.cluster.kubectl(
            "patch", "sm70", name, "-n", NAMESPACE, "--type=merge", "-p", json.dumps({"spec": spec})
        )  # fmt: skip

    def behave(self, name: str, **behaviour: Any) -> None:
        """Asks for an engine that behaves like this: another revision."""
        self.patch(name, env=[variable(behaviour)])

    def disturb(self, name: str, **behaviour: Any) -> None:
        """Changes how the running engines behave, without a new revision."""
        for pod in self.pods(name):
            address = f"http://{pod['status']['podIP']}:8000/simulated"
            assert httpx.post(address, json=behaviour, timeout=5).status_code == 200

    def get(self, name: str) -> dict[str, Any]:
        found = self.cluster.get("sm70inferenceservices.inference.sm70.io", name, NAMESPACE)
        assert found is not None
        return found

    def active(self, name: str) -> str:
        return str(self.get(name)["status"]["revisions"].get("active"))

    def pods(self, name: str) -> list[dict[str, Any]]:
        """The engines' pods that run."""
        selector = f"inference.sm70.io/service={name},inference.sm70.io/revision"
        found = self.cluster.items("pods", NAMESPACE, selector)
        return [pod for pod in found if pod["status"].get("phase") == "Running" and pod["status"].get("podIP")]

    def selected(self, name: str) -> str:
        """The revision that has the public traffic, by the Service itself."""
        service = self.cluster.get("service", name, NAMESPACE)
        return str((service or {}).get("spec", {}).get("selector", {}).get("inference.sm70.io/revision", ""))

    def until(self, name: str, reached: Callable[[dict[str, Any]], bool], seconds: float = 60) -> dict[str, Any]:
        return wait(self.cluster, name, reached, namespace=NAMESPACE, seconds=seconds, pause=0.1)

    def ready(self, name: str, seconds: float = 60, other_than: str = "") -> dict[str, Any]:
        """Waits until it is Ready, with another active revision than this one."""

        def reached(service: dict[str, Any]) -> bool:
            active = service["status"].get("revisions", {}).get("active")
            return condition(service, "Ready").status == "True" and active not in (None, other_than)

        return self.until(name, reached, seconds)

    def says(self, name: str, kind: str, reason: str, seconds: float = 60) -> Condition:
        """Waits until a condition has this reason."""
        service = self.until(name, lambda one: condition(one, kind).reason == reason, seconds)
        return condition(service, kind)

    @contextmanager
    def serving(self, name: str, behaviour: Mapping[str, Any] | None = None, **spec: Any) -> Iterator[str]:
        """A service that is Ready, and gone afterwards; yields its active revision."""
        self.apply(self.service(name, behaviour, **spec))
        try:
            yield str(self.ready(name, seconds=120)["status"]["revisions"]["active"])
        finally:
            self.remove(name)

    def remove(self, name: str) -> None:
        self.cluster.kubectl("delete", "sm70", name, "-n", NAMESPACE, "--ignore-not-found", "--wait")
        wait_gone(self.cluster, name, NAMESPACE, seconds=90)


def variable(behaviour: Mapping[str, Any]) -> dict[str, str]:
    return {"name": "SIMULATED_ENGINE", "value": json.dumps(dict(behaviour), sort_keys=True)}


@dataclass
class Traffic:
    """Clients that ask through one address without a pause, and what became of each request."""

    url: str
    clients: int = 3
    finished: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of each complete answer, on the monotonic clock."""
    refused: list[float] = field(default_factory=list)
    """When nobody listened."""
    wrong: list[tuple[float, str]] = field(default_factory=list)
    """Answers with an error status, streams that were cut, texts that are not the right one."""
    expected: str = ""
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Traffic:
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(self.clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=30)

    def more(self, count: int, seconds: float = 60) -> None:
        """Waits for so many answers to requests that are begun from now on."""
        begin = time.monotonic()
        while sum(one > begin for one, _ in self.finished) < count:
            assert time.monotonic() < begin + seconds, f"no answers: {self.wrong[-3:]}, refused {len(self.refused)}"
            time.sleep(0.05)

    def _ask(self) -> None:
        while not self._stop.is_set():
            begin = time.monotonic()
            try:
                with Endpoint(self.url, model="tiny", timeout_seconds=10) as endpoint:
                    text = endpoint.ask("Recite.").text
            except (httpx.ConnectError, httpx.ConnectTimeout):
                self.refused.append(begin)
                self._stop.wait(0.02)
            except (httpx.TransportError, EndpointError) as error:
                self.wrong.append((begin, f"{type(error).__name__} {error} after {time.monotonic() - begin:.2f} s"))
            else:
                if self.expected and text != self.expected:
                    self.wrong.append((begin, f"another text: {text[:80]}"))
                self.finished.append((begin, time.monotonic()))

    def outage(self) -> float:
        """The longest time in which no request that was then begun succeeded, in seconds."""
        begins = sorted(begin for begin, _ in self.finished)
        return max((later - earlier for earlier, later in itertools.pairwise(begins)), default=0.0)


@contextmanager
def simulated_cluster(
    folder: Path, name: str, keep: bool, gpu_source: GpuSource = GpuSource.DEVICE_PLUGIN
) -> Iterator[Simulation]:
    """Two nodes with four GPUs each, the operator and the models on them; nothing of it stays unless it is kept."""
    operator, engine, archives = _images(folder)
    cluster = Cluster.named(name, Options(images=archives, audit_log=True, gpu_source=gpu_source))
    try:
        cluster.up()
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        _place_models(cluster, folder)
        simulation = Simulation(cluster, api_key="", answers={}, operator_image=operator, engine_image=engine)
        simulation.install(PERIODS)
        yield simulation
    finally:
        if not keep:
            cluster.down()


def _images(folder: Path) -> tuple[str, str, tuple[Path, ...]]:
    """References of operator and engine, and the archives that hold them."""
    if root := os.environ.get(OVERLAY):
        lower = images.ImageInfo.read(images.folder() / "operator.json").archives[0]
        operator, above = image.operator_overlay(lower, folder, Path(root))
        archives = [lower, above]
    else:
        built = images.image_archives(["operator"])["operator"]
        operator, lower, archives = built.reference, built.archives[0], list(built.archives)
    engine, archive = image.write(lower, folder)
    return operator, engine, (*archives, archive)


def _place_models(cluster: Cluster, folder: Path) -> None:
    generator = Path(sys.executable).with_name("sm70-tiny-model")
    made = folder / "models"
    for words in (
        ("--out", "tiny", "--draft", "dflash", "--draft-out", "draft"),
        ("--draft", "dflash", "--draft-out", "draft-mismatch", "--mismatched"),
    ):
        paths = [str(made / word) if not word.startswith("--") and word != "dflash" else word for word in words]
        subprocess.run([str(generator), *paths], check=True, stdout=subprocess.DEVNULL, timeout=120)
    for node in cluster.nodes:
        target = cluster.node_folder(node) / Path(MODELS).name
        shutil.copytree(made, target, dirs_exist_ok=True)
        for path in (target, *target.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
