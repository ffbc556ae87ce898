"""Starts what does not run of a cluster. Every step looks first, so that it also heals."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testcluster import daemons, network
from testcluster.errors import ClusterError
from testcluster.files import Node
from testcluster.gpus import RESOURCE
from testcluster.images import Archive, read_archive
from testcluster.layout import Layout
from testcluster.machine import Machine
from testcluster.options import GpuSource
from testcluster.paths import SOURCE
from testcluster.processes import until
from testcluster.progress import step
from testcluster.store import Stores, import_archive, start_containerd

READY_SECONDS = 120
# After a crash of the hub, the others' idle connections to it look healthy until they ask; the default is after 45 s.
KEEPALIVE = {"HTTP2_READ_IDLE_TIMEOUT_SECONDS": "3", "HTTP2_PING_TIMEOUT_SECONDS": "2"}


@dataclass(frozen=True)
class Launcher:
    layout: Layout
    helm: Path
    stores: Path

    def start(self, archives: Sequence[Archive], fresh: bool) -> None:
        """Returns when all nodes are Ready with their GPUs. `fresh` says that the hub's network is new."""
        layout = self.layout
        layout.files.write(layout.network, layout.nodes, layout.programs, self.helm)
        # Asked before the images are there: nodes that have their disk already get new images one by one.
        old = [node for node in layout.nodes if _containerd_folder(node).exists()]
        with ThreadPoolExecutor() as pool:
            control = pool.submit(self._start_control_plane)
            self._provide_images(archives, old)
            _all([control, *(pool.submit(self._start_runtime, node, fresh) for node in layout.nodes)])
            starts = [pool.submit(self._start_node, node) for node in layout.nodes]
            _all([*starts, *(pool.submit(self._add_images, node, archives) for node in old)])
        with step("nodes Ready"):
            try:
                until(self._ready, "the cluster is ready", seconds=READY_SECONDS)
            except TimeoutError as error:
                raise ClusterError(f"{error}; still awaited: {', '.join(self._pending())}") from None

    def _start(self, machine: Machine, name: str, command: Sequence[str]) -> None:
        machine.start(name, command, self._path | KEEPALIVE | {"PYTHONPATH": str(SOURCE.parent)})

    def _start_control_plane(self) -> None:
        layout, hub = self.layout, self.layout.hub
        programs, files = layout.programs, layout.files
        with step("control plane ready"):
            self._start(hub, "etcd", daemons.etcd(programs))
            api_server = daemons.api_server(programs, files, layout.network, layout.options)
            self._start(hub, "kube-apiserver", api_server)
            until(
                lambda: hub.alive("kube-apiserver") and layout.api.get("/readyz") is not None,
                "API server ready",
                seconds=READY_SECONDS,
            )
            self._start(hub, "kube-controller-manager", daemons.controller_manager(programs, files))
            self._start(hub, "kube-scheduler", daemons.scheduler(programs, files))
            self._start(hub, "volumes", daemons.volumes(files))
            self._start(hub, "coredns", daemons.coredns(programs, files))

    def _start_runtime(self, node: Node, fresh: bool) -> None:
        layout = self.layout
        if node.boot() or fresh or not network.wired(layout.hub, node):
            others = {other.pods: other.address for other in layout.nodes if other != node}
            network.wire(layout.network, layout.hub, node, node.address, others)
        start_containerd(node, layout.programs, layout.files.conf / "containerd.toml", self._path)

    @property
    def _path(self) -> dict[str, str]:
        return {"PATH": f"{self.layout.programs}:{os.environ['PATH']}"}

    def _start_node(self, node: Node) -> None:
        programs, files, options = self.layout.programs, self.layout.files, self.layout.options
        self._start(node, "kubelet", daemons.kubelet(programs, files, node, options))
        self._start(node, "kube-proxy", daemons.kube_proxy(programs, files))
        if options.gpus:
            self._start(node, daemons.GPU_PLUGIN, daemons.gpu_plugin(files, node, options))

    def _provide_images(self, archives: Sequence[Archive], old: Sequence[Node]) -> None:
        """Gives new nodes the images, which are unpacked once and then shared by all nodes of all clusters."""
        new = [_containerd_folder(node) for node in self.layout.nodes if node not in old]
        if new:
            for folder in new:
                folder.parent.mkdir(parents=True, exist_ok=True)
            pause = read_archive(self.layout.programs / "pause.tar")
            config = self.layout.files.conf / "containerd.toml"
            Stores(self.stores, self.layout.programs, config, self._path).provide([pause, *archives], new)

    def _add_images(self, node: Node, archives: Sequence[Archive]) -> None:
        for archive in archives:
            if self.layout.images.get(str(archive.path)) != archive.digest:
                with step(f"{node.name}: unpacked {', '.join(archive.names)}"):
                    import_archive(node, self.layout.programs, archive)

    def _ready(self) -> bool:
        return next(self._pending(), None) is None

    def _pending(self) -> Iterator[str]:
        """What is not ready yet, in the user's words."""
        api, nodes = self.layout.api, self.layout.nodes
        for node in nodes:
            for daemon in daemons.node_daemons(self.layout.options):
                node.alive(daemon)
        statuses = {node["metadata"]["name"]: node["status"] for node in self._items("/api/v1/nodes")}
        for node in nodes:
            if not self._usable(statuses.get(node.name, {})):
                yield f"{node.name} is Ready with its GPUs"
            # A rebooted node's last status is still Ready; that its kubelet answers is news.
            elif api.get(f"/api/v1/nodes/{node.name}/proxy/healthz") is None:
                yield f"the kubelet of {node.name} answers"
        if api.get("/api/v1/namespaces/default/serviceaccounts/default") is None:
            yield "there is a default service account"
        if self._dra and len(self._items("/apis/resource.k8s.io/v1/resourceslices")) < len(nodes):
            yield "every node has a ResourceSlice"
        if not _dns_ready(self.layout.network.hub):
            yield "DNS is ready"

    @property
    def _dra(self) -> bool:
        return bool(self.layout.options.gpus) and self.layout.options.gpu_source is GpuSource.DRA

    def _items(self, path: str) -> list[dict[str, Any]]:
        body = self.layout.api.get(path)
        found: list[dict[str, Any]] = json.loads(body)["items"] if body else []
        return found

    def _usable(self, status: dict[str, Any]) -> bool:
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", []))
        # Of sick GPUs only the capacity tells, and a cluster with sick GPUs is up.
        return ready and int(status["capacity"].get(RESOURCE, 0)) >= (0 if self._dra else self.layout.options.gpus)


def _containerd_folder(node: Node) -> Path:
    return node.disk / "lib" / "containerd"


def _dns_ready(address: str) -> bool:
    connection = http.client.HTTPConnection(address, 8181, timeout=2)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _all(steps: Iterable[Future[Any]]) -> None:
    for future in list(steps):
        future.result()
