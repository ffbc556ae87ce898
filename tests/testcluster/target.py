"""One face for the three clusters that the demonstration and its tests can run on.

`embedded` is the one of this package. `kind` is for people with Docker; it was written without
the means to try it. `current` is whatever the current kubeconfig names; nothing is made or removed there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from testcluster import gpus
from testcluster.client import Client
from testcluster.cluster import Cluster
from testcluster.errors import ClusterError, CommandError
from testcluster.images import read_archive
from testcluster.options import Options, check_name
from testcluster.paths import cache
from testcluster.progress import step


class ClusterKind(StrEnum):
    EMBEDDED = "embedded"
    KIND = "kind"
    CURRENT = "current"


class Capability(StrEnum):
    """What a test may ask of a cluster before it relies on it."""

    LOAD_IMAGE = "load-image"  # archives of this machine can be brought onto the nodes
    GPU_UUIDS = "gpu-uuids"  # a pod with GPUs finds their UUIDs in NVIDIA_VISIBLE_DEVICES
    HOST_ROUTES = "host-routes"  # this machine reaches the addresses of pods and Services
    FAULTS = "faults"  # the cluster is a testcluster.cluster.Cluster, with all its methods
    AUDIT_LOG = "audit-log"


class TargetCluster(Protocol):
    @property
    def target(self) -> ClusterKind: ...
    @property
    def capabilities(self) -> frozenset[Capability]: ...
    @property
    def kubeconfig(self) -> Path: ...
    @property
    def kubectl_path(self) -> Path: ...
    @property
    def helm_path(self) -> Path: ...
    def up(self) -> None: ...
    def down(self) -> None: ...
    def load_image(self, archive: Path) -> None: ...
    def environment(self) -> dict[str, str]: ...
    def kubectl(self, *words: str, stdin: str | None = None) -> str: ...
    def helm(self, *words: str, stdin: str | None = None) -> str: ...
    def apply(self, *objects: Mapping[str, Any], manager: str = "test") -> None: ...
    def get(self, kind: str, name: str, namespace: str = "default") -> dict[str, Any] | None: ...
    def items(self, kind: str, namespace: str | None = "default", selector: str = "") -> list[dict[str, Any]]: ...
    def raw(self, path: str) -> str | None: ...


class Embedded(Cluster):
    """The cluster of this package."""

    target = ClusterKind.EMBEDDED
    capabilities = frozenset(Capability)


class PathClient(Client):
    """Uses the kubectl and helm that the user has."""

    @property
    def kubectl_path(self) -> Path:
        return program("kubectl")

    @property
    def helm_path(self) -> Path:
        return program("helm")


class Kind(PathClient):
    """A cluster made by `kind` in Docker, with one control plane and as many workers as the options say.

    Never tried: the machine that this was written on has no Docker. The GPUs are less than the
    embedded cluster's: no plugin offers them. The workers get the labels, and the extended
    resource by a patch of the node's status; so the scheduler counts GPUs, but a pod gets no
    UUIDs, and nothing can be made sick. Audit log, DRA and API server arguments are not offered.
    """

    target = ClusterKind.KIND
    capabilities = frozenset({Capability.LOAD_IMAGE})

    def __init__(self, name: str, options: Options) -> None:
        self.name, self.options = check_name(name), options

    @property
    def kubeconfig(self) -> Path:
        return cache() / "kind" / self.name / "kubeconfig"

    def up(self) -> None:
        self.kubeconfig.parent.mkdir(parents=True, exist_ok=True)
        if self.name not in self._kind("get", "clusters").split():
            with step(f"kind cluster {self.name} made"):
                self._kind(
                    "create", "cluster", "--config", "-", "--wait", "180s", stdin=kind_config(self.options.nodes)
                )
        else:
            self._kind("export", "kubeconfig")
        for node in self.items("nodes", None, "!node-role.kubernetes.io/control-plane"):
            self._pretend_gpus(node["metadata"]["name"])
        for archive in self.options.images:
            self.load_image(archive)

    def down(self) -> None:
        self._kind("delete", "cluster")
        shutil.rmtree(self.kubeconfig.parent, ignore_errors=True)

    def load_image(self, archive: Path) -> None:
        names = ", ".join(read_archive(archive).names)
        with step(f"loaded {names} by kind"):
            self._kind("load", "image-archive", str(archive))

    def _pretend_gpus(self, node: str) -> None:
        labels = [f"{key}={value}" for key, value in gpus.labels(self.options.gpus).items()]
        if labels:
            self.kubectl("label", "node", node, "--overwrite", *labels)
            # The kubelet takes over an extended resource that it does not know, and derives what is allocatable.
            patch = {"status": {"capacity": {gpus.RESOURCE: str(self.options.gpus)}}}
            self.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", json.dumps(patch))

    def _kind(self, *words: str, stdin: str | None = None) -> str:
        command = [str(program("kind")), *words]
        if words[0] != "get":
            command += ["--name", self.name]
        environment = os.environ | {"KUBECONFIG": str(self.kubeconfig)}
        done = subprocess.run(command, input=stdin, text=True, capture_output=True, check=False, env=environment)
        if done.returncode:
            raise CommandError(["kind", *words], done.returncode, done.stderr)
        return done.stdout


class Current(PathClient):
    """The cluster of the current kubeconfig. `up` only looks whether it answers; `down` does nothing."""

    target = ClusterKind.CURRENT
    capabilities: frozenset[Capability] = frozenset()

    @property
    def kubeconfig(self) -> Path:
        """The first file of $KUBECONFIG, or ~/.kube/config."""
        named = os.environ.get("KUBECONFIG", "").split(":")[0]
        return Path(named) if named else Path.home() / ".kube" / "config"

    def environment(self) -> dict[str, str]:
        return dict(os.environ)  # kubectl merges several files of $KUBECONFIG

    def up(self) -> None:
        try:
            self.kubectl("version")
        except CommandError as error:
            raise ClusterError(
                f"the cluster of the current kubeconfig ({self.kubeconfig}) must answer, but: {error.output.strip()};"
                " set KUBECONFIG, or use CLUSTER=embedded"
            ) from None

    def down(self) -> None:
        """Nothing: it is not ours."""

    def load_image(self, archive: Path) -> None:
        raise ClusterError(
            f"images of the current cluster must come from a registry that it can pull from, so {archive.name} is not"
            " loaded; push it (`buildah push` or `docker push`) and give the chart its name there"
        )


def target_cluster(kind: ClusterKind, name: str, options: Options) -> Embedded | Kind | Current:
    """The cluster that `CLUSTER=` names; it need not exist yet."""
    if kind is ClusterKind.EMBEDDED:
        return Embedded.named(name, options)
    return Kind(name, options) if kind is ClusterKind.KIND else Current()


def parse_kind(text: str | None) -> ClusterKind:
    """The value of `CLUSTER`; unset or empty is `embedded`."""
    try:
        return ClusterKind(text or ClusterKind.EMBEDDED)
    except ValueError:
        raise ClusterError(f"CLUSTER must be one of {', '.join(ClusterKind)}, not {text!r}") from None


def kind_config(workers: int) -> str:
    """A configuration of kind (JSON is YAML too)."""
    roles: Sequence[dict[str, str]] = [{"role": "control-plane"}, *({"role": "worker"} for _ in range(workers))]
    return json.dumps({"kind": "Cluster", "apiVersion": "kind.x-k8s.io/v1alpha4", "nodes": roles})


def program(name: str) -> Path:
    found = shutil.which(name)
    if found is None:
        raise ClusterError(f"`{name}` must be in PATH for this kind of cluster, but is not; install it")
    return Path(found)
