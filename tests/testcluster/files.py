"""The files of a cluster's folder: certificates, kubeconfigs, configuration from the templates in config/."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from testcluster.audit import POLICY
from testcluster.machine import Machine
from testcluster.network import Network
from testcluster.paths import SOURCE
from testcluster.pki import Authority


@dataclass(frozen=True)
class Node(Machine):
    address: str
    pods: str


@dataclass(frozen=True)
class Files:
    folder: Path  # the cluster's

    @property
    def pki(self) -> Path:
        return self.folder / "pki"

    @property
    def conf(self) -> Path:
        return self.folder / "conf"

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    @property
    def audit_log(self) -> Path:
        return self.folder / "logs" / "audit.log"

    def write(self, network: Network, nodes: Sequence[Node], programs: Path, helm: Path) -> None:
        """Writes what is missing; certificates that exist are kept, for running daemons use them."""
        self._certificates(network, nodes)
        values = {"conf": str(self.conf), "pki": str(self.pki), "bin": str(programs), "hub": network.hub}
        for name in ("Corefile", "kube-proxy.yaml", "containerd.toml"):
            render(name, self.conf / name, **values, pods=network.pods)
        for node in nodes:
            render("kubelet.yaml", self.conf / f"{node.name}.yaml", **values, name=node.name, cgroup=node.cgroup)
            render("cni.conflist", node.disk / "lib/cni/net.d/10-pods.conflist", pods=node.pods)
        (self.conf / "audit-policy.json").write_text(json.dumps(POLICY))
        for name, program in (("kubectl", programs / "kubenode"), ("helm", helm / "helm")):
            link(self.bin / name, program)

    def _certificates(self, network: Network, nodes: Sequence[Node]) -> None:
        authority = Authority(self.pki)
        hosts = (network.hub, network.kubernetes_service, "127.0.0.1", "localhost", "kubernetes.default.svc")
        authority.issue("apiserver", "kube-apiserver", hosts=hosts)
        authority.issue("service-accounts", "service-accounts")
        # As an administrator, the controllers need not wait for a service account each, which takes 4 s.
        for name in ("admin", "coredns", "kube-controller-manager", "volumes", "gpu-plugin"):
            authority.issue(name, f"system:{name}", ["system:masters"])
        for name in ("kube-scheduler", "kube-proxy"):
            authority.issue(name, f"system:{name}")
        for node in nodes:
            authority.issue(node.name, f"system:node:{node.name}", ["system:nodes"], [node.name, node.address])
        for path in authority.folder.glob("*.crt"):
            if path.stem not in ("ca", "apiserver", "service-accounts"):
                authority.kubeconfig(self.conf / f"{path.stem}.kubeconfig", network.server, path.stem)
        authority.kubeconfig(self.kubeconfig, network.server, "admin")


def render(source: str, target: Path, **values: str) -> None:
    """Fills a template of config/; a name without a value is an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(string.Template((SOURCE / "config" / source).read_text()).substitute(values))


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)
