"""The command lines of the cluster's daemons."""

from __future__ import annotations

import sys
from pathlib import Path

from testcluster import gpus
from testcluster.files import Files, Node
from testcluster.network import Network
from testcluster.options import GpuSource, Options

HUB = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "volumes", "coredns")
GPU_PLUGIN = "gpu-plugin"


def node_daemons(options: Options) -> tuple[str, ...]:
    return ("containerd", "kubelet", "kube-proxy", *([GPU_PLUGIN] if options.gpus else []))


def component(programs: Path, name: str, *arguments: str) -> list[str]:
    return [str(programs / "kubenode"), name, *arguments]


def python(module: str, *arguments: str) -> list[str]:
    """A daemon of this package; PYTHONPATH must name the folder that holds it."""
    return [sys.executable, "-B", "-m", f"testcluster.{module}", *arguments]


def etcd(programs: Path) -> list[str]:
    return component(programs, "etcd", "--data-dir=/var/lib/etcd", "--unsafe-no-fsync", "--log-level=warn")


def api_server(programs: Path, files: Files, network: Network, options: Options) -> list[str]:
    pki = files.pki
    audit = [
        f"--audit-policy-file={files.conf}/audit-policy.json",
        f"--audit-log-path={files.audit_log}",
        "--audit-log-maxsize=4000",  # MB; a log that is turned over would lose its reader's position
    ]
    return component(
        programs,
        "kube-apiserver",
        "--etcd-servers=http://127.0.0.1:2379",
        f"--advertise-address={network.hub}",
        f"--service-cluster-ip-range={network.services}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged",
        f"--client-ca-file={pki}/ca.crt",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--kubelet-client-certificate={pki}/admin.crt",
        f"--kubelet-client-key={pki}/admin.key",
        f"--kubelet-certificate-authority={pki}/ca.crt",
        "--kubelet-preferred-address-types=InternalIP",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={pki}/service-accounts.key",
        f"--service-account-signing-key-file={pki}/service-accounts.key",
        *(audit if options.audit_log else []),
        *options.apiserver_args,
    )


def controller_manager(programs: Path, files: Files) -> list[str]:
    return component(
        programs,
        "kube-controller-manager",
        f"--kubeconfig={files.conf}/kube-controller-manager.kubeconfig",
        f"--service-account-private-key-file={files.pki}/service-accounts.key",
        f"--root-ca-file={files.pki}/ca.crt",
        "--leader-elect=false",
        "--node-monitor-period=1s",
        "--node-monitor-grace-period=12s",
    )


def scheduler(programs: Path, files: Files) -> list[str]:
    config = f"--kubeconfig={files.conf}/kube-scheduler.kubeconfig"
    return component(programs, "kube-scheduler", config, "--leader-elect=false")


def volumes(files: Files) -> list[str]:
    return python("local_provisioner", str(files.folder), f"{files.conf}/volumes.kubeconfig")


def coredns(programs: Path, files: Files) -> list[str]:
    return [str(programs / "coredns"), "-conf", f"{files.conf}/Corefile"]


def kubelet(programs: Path, files: Files, node: Node, options: Options) -> list[str]:
    labels = ",".join(f"{key}={value}" for key, value in gpus.labels(options.gpus).items())
    return component(
        programs,
        "kubelet",
        f"--kubeconfig={files.conf}/{node.name}.kubeconfig",
        f"--config={files.conf}/{node.name}.yaml",
        f"--node-ip={node.address}",
        f"--node-labels={labels}",
    )


def kube_proxy(programs: Path, files: Files) -> list[str]:
    return component(programs, "kube-proxy", f"--config={files.conf}/kube-proxy.yaml")


def gpu_plugin(files: Files, node: Node, options: Options) -> list[str]:
    if options.gpu_source is GpuSource.DRA:
        kubeconfig = f"{files.conf}/{GPU_PLUGIN}.kubeconfig"
        return python("fake_dra_driver", node.name, str(options.gpus), kubeconfig)
    return python("fake_device_plugin", node.name, str(options.gpus))
