"""Debian's Prometheus, unpacked from its package, with the chart's PodMonitors as its configuration.

Debian builds it without the discovery of pods in Kubernetes, so that part is played here: all ports of all pods of the
cluster go into a file with the labels that the discovery would give them. What is scraped, and under which labels, the
PodMonitors decide.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from testcluster.cluster import Cluster
from testcluster.paths import cache, locked


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query. Raises AssertionError for one that is not valid."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=10).json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def targets(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = httpx.get(f"{self.url}/api/v1/targets", timeout=10).json()["data"][
            "activeTargets"
        ]
        return found

    def until(self, expression: str, seconds: float = 60) -> list[dict[str, Any]]:
        """Waits for samples."""
        deadline = time.monotonic() + seconds
        while not (found := self.query(expression)):
            assert time.monotonic() < deadline, f"no samples of {expression}; targets: {self.targets()}"
            time.sleep(0.2)
        return found


def program() -> Path:
    """The program of Debian's package `prometheus`, fetched by apt, which checks its signature, and unpacked once."""
    policy = subprocess.run(["apt-cache", "policy", "prometheus"], capture_output=True, text=True, check=True).stdout
    version = next(line.split()[1] for line in policy.splitlines() if line.strip().startswith("Candidate:"))
    folder = cache() / f"prometheus-{version.replace(':', '_')}"
    with locked(cache() / "prometheus.lock"):
        if not folder.exists():
            partial = folder.with_suffix(".partial")
            partial.mkdir(parents=True, exist_ok=True)
            words = ["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", "prometheus"]
            subprocess.run(words, cwd=partial, check=True, capture_output=True)
            (package,) = partial.glob("*.deb")
            subprocess.run(["dpkg", "-x", str(package), str(partial)], check=True)
            package.unlink()
            partial.rename(folder)
    return folder / "usr" / "bin" / "prometheus"


def scrape_config(monitor: dict[str, Any], targets: Path) -> dict[str, Any]:
    """What the Prometheus operator makes of a PodMonitor, as far as ours use it."""
    spec = monitor["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    namespaces = spec["namespaceSelector"].get("matchNames")
    relabelings: list[dict[str, Any]] = []
    for name, value in (spec["selector"].get("matchLabels") or {}).items():
        source = f"__meta_kubernetes_pod_label_{_label(name)}"
        relabelings.append({"action": "keep", "source_labels": [source], "regex": value})
    for one in spec["selector"].get("matchExpressions") or ():
        assert one["operator"] == "Exists"
        source = f"__meta_kubernetes_pod_labelpresent_{_label(one['key'])}"
        relabelings.append({"action": "keep", "source_labels": [source], "regex": "true"})
    port = "__meta_kubernetes_pod_container_port_name"
    relabelings.append({"action": "keep", "source_labels": [port], "regex": endpoint["port"]})
    for name in ("namespace", "pod"):
        source = "__meta_kubernetes_namespace" if name == "namespace" else "__meta_kubernetes_pod_name"
        relabelings.append({"source_labels": [source], "target_label": name})
    relabelings += [
        {"source_labels": one["sourceLabels"], "target_label": one["targetLabel"]}
        for one in endpoint.get("relabelings") or ()
    ]
    if namespaces:
        regex = "|".join(namespaces)
        relabelings.append({"action": "keep", "source_labels": ["__meta_kubernetes_namespace"], "regex": regex})
    return {
        "job_name": f"{monitor['metadata']['namespace']}/{monitor['metadata']['name']}",
        "metrics_path": endpoint["path"],
        "scrape_interval": "1s",
        "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "1s"}],
        "relabel_configs": relabelings,
    }


def _label(name: str) -> str:
    return "".join(character if character.isalnum() else "_" for character in name)


def discover(cluster: Cluster) -> list[dict[str, Any]]:
    """Every port of every running pod, as the discovery with the role `pod` tells of it."""
    found = []
    for pod in cluster.items("pods", namespace=None):
        address = pod["status"].get("podIP")
        metadata = pod["metadata"]
        labels = {"__meta_kubernetes_namespace": metadata["namespace"], "__meta_kubernetes_pod_name": metadata["name"]}
        for name, value in (metadata.get("labels") or {}).items():
            labels[f"__meta_kubernetes_pod_label_{_label(name)}"] = value
            labels[f"__meta_kubernetes_pod_labelpresent_{_label(name)}"] = "true"
        ports = [port for one in pod["spec"]["containers"] for port in one.get("ports") or ()]
        for port in ports if address and pod["status"].get("phase") == "Running" else ():
            named = {"__meta_kubernetes_pod_container_port_name": port.get("name", "")}
            found.append({"targets": [f"{address}:{port['containerPort']}"], "labels": labels | named})
    return found


@contextmanager
def running(cluster: Cluster, monitors: list[dict[str, Any]], folder: Path) -> Iterator[Prometheus]:
    """A Prometheus that scrapes what the monitors select among the pods that now run."""
    targets = folder / "targets.json"
    targets.write_text(json.dumps(discover(cluster)))
    config = {"scrape_configs": [scrape_config(one, targets) for one in monitors]}
    file = folder / "prometheus.yml"
    file.write_text(json.dumps(config))  # JSON is YAML
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    words = [str(program()), f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [*words, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log, cwd=folder
        )
    found = Prometheus(f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + 30
        while True:
            assert process.poll() is None, (folder / "prometheus.log").read_text()[-3000:]
            try:
                if httpx.get(f"{found.url}/-/ready", timeout=2).status_code == 200:
                    break
            except httpx.TransportError:
                assert time.monotonic() < deadline, "Prometheus does not start"
            time.sleep(0.1)
        yield found
    finally:
        process.terminate()
        process.wait(timeout=20)
