"""Makes the tiny model inside the cluster, with the generator of the engine image."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from stack.kubernetes import Kubernetes

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class ModelError(RuntimeError):
    """The generator's job failed; the message holds its last lines."""


def make(
    cluster: Kubernetes,
    *,
    image: str,
    namespace: str = "default",
    arguments: tuple[str, ...] = (),
    job: str = "tiny-model",
    seconds: float = 180,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Runs the generator as a job that writes to the claim `models`, and waits for it. Raises ModelError."""
    documents: list[dict[str, Any]] = list(yaml.safe_load_all((EXAMPLES / "tiny-model.yaml").read_text()))
    for document in documents:
        if document["kind"] == "Job":
            document["metadata"]["name"] = job
            container = document["spec"]["template"]["spec"]["containers"][0]
            container["image"] = image
            container["imagePullPolicy"] = "IfNotPresent"
            if arguments:
                container["command"] = ["sm70-tiny-model", *arguments]
    if _finished(cluster, job, namespace):
        return
    cluster.kubectl(
        "apply", "-n", namespace, "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": documents})
    )
    deadline = time.monotonic() + seconds
    while not _finished(cluster, job, namespace):
        if time.monotonic() > deadline:
            raise ModelError(f"job {job} did not finish within {seconds:.0f} s")
        tick()
        time.sleep(0.5)


def _finished(cluster: Kubernetes, job: str, namespace: str) -> bool:
    status = (cluster.get("job", job, namespace) or {}).get("status", {})
    if status.get("failed"):
        words = cluster.kubectl("logs", "-n", namespace, f"job/{job}", "--tail=10")
        raise ModelError(f"job {job} failed:\n{words}")
    return bool(status.get("succeeded"))
