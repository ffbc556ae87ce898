"""The test cluster itself: that it is a real one, that its faults are, and that it leaves nothing behind.

It has a cluster of its own, so that no fault here reaches the product's tests.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testcluster import audit, build
from testcluster.cluster import Cluster, all_clusters
from testcluster.errors import CommandError
from testcluster.gpus import RESOURCE, gpu_uuid, labels
from testcluster.images import read_archive, write_binary_image
from testcluster.options import GpuSource, Options
from testcluster.paths import SOURCE, cache
from testcluster.processes import until
from testcluster.store import Content, Stores
from testcluster.witness import Witness

pytestmark = pytest.mark.cluster

PROBE = build.IMAGES["probe"]
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "readOnlyRootFilesystem": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
NAMESPACE = "probes"
V100_SELECTOR = (
    "device.attributes['gpu.nvidia.com'].cudaComputeCapability.compareTo(semver('7.0.0')) == 0"
    " && device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('16Gi')) >= 0"
)


def probe_archive() -> Path:
    return build.build(build.kubernetes(), cache()) / "probe.tar"


@pytest.fixture(scope="module")
def own() -> Iterator[Cluster]:
    cluster = Cluster.named(f"test-{os.getpid()}", Options(audit_log=True, images=(probe_archive(),)))
    try:
        cluster.up()
        enforce = {"pod-security.kubernetes.io/enforce": "restricted"}
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": enforce}})
        yield cluster
    finally:
        cluster.down()


def pod(name: str, gpus: int = 0, **spec: Any) -> dict[str, Any]:
    """A pod that the restricted profile admits, serving its name on port 8080."""
    container = {
        "name": "probe",
        "image": PROBE,
        "imagePullPolicy": "Never",
        "args": ["serve", ":8080"],
        "securityContext": RESTRICTED,
        "resources": {"limits": {"memory": "64Mi"} | ({RESOURCE: str(gpus)} if gpus else {})},
        "readinessProbe": {"httpGet": {"port": 8080}, "periodSeconds": 1},
        "volumeMounts": spec.pop("mounts", []),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"app": name}},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 1, **spec},
    }


def service(name: str) -> dict[str, Any]:
    """The Service in front of the pod of this name, on port 80."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"selector": {"app": name}, "ports": [{"port": 80, "targetPort": 8080}]},
    }


def start(cluster: Cluster, *pods: dict[str, Any]) -> None:
    cluster.apply(*pods)
    names = [f"pod/{item['metadata']['name']}" for item in pods]
    cluster.kubectl("wait", "-n", NAMESPACE, "--for=condition=Ready", "--timeout=30s", *names)


def delete(cluster: Cluster, *names: str) -> None:
    cluster.kubectl("delete", "pod", "-n", NAMESPACE, "--wait", *names)


def probe(cluster: Cluster, name: str, *words: str) -> str:
    return cluster.kubectl("exec", "-n", NAMESPACE, name, "--", "/probe", *words).strip()


def gpus_of(cluster: Cluster, name: str) -> set[str]:
    return set(probe(cluster, name, "env", "NVIDIA_VISIBLE_DEVICES").split(","))


def condition(cluster: Cluster, node: str) -> str:
    """The status of the node's condition Ready."""
    found = cluster.get("node", node) or {}
    return next(str(c["status"]) for c in found["status"]["conditions"] if c["type"] == "Ready")


def allocatable(cluster: Cluster, node: str) -> tuple[int, int]:
    """How many GPUs a node has, and how many of them are well."""
    status = (cluster.get("node", node) or {})["status"]
    return int(status["capacity"][RESOURCE]), int(status["allocatable"][RESOURCE])


def test_nodes_are_ready_with_gpus_and_the_labels_of_gpu_discovery(own: Cluster) -> None:
    nodes = {node["metadata"]["name"]: node for node in own.items("nodes")}
    assert set(nodes) == {"node-1", "node-2"}
    for name, node in nodes.items():
        assert node["status"]["nodeInfo"]["kubeletVersion"] == "v1.37.2"
        assert labels(4).items() <= node["metadata"]["labels"].items()
        assert (condition(own, name), allocatable(own, name)) == ("True", (4, 4))
    assert all(all(daemons.values()) for daemons in own.status().values())


def test_the_clients_know_their_versions(own: Cluster) -> None:
    assert "Server Version: v1.37.2" in own.kubectl("version")
    assert "v4.3.1" in own.helm("version")
    with pytest.raises(CommandError, match="doesn't have a resource type"):
        own.kubectl("get", "nonsense")


def test_pods_get_whole_gpus_and_the_next_one_waits(own: Cluster) -> None:
    start(own, pod("first", gpus=4), pod("second", gpus=3))
    uuids = {node: {gpu_uuid(node, index) for index in range(4)} for node in own.nodes}
    placed = {name: (own.get("pod", name, NAMESPACE) or {})["spec"]["nodeName"] for name in ("first", "second")}
    assert gpus_of(own, "first") == uuids[placed["first"]]
    assert gpus_of(own, "second") < uuids[placed["second"]]
    assert set(placed.values()) == {"node-1", "node-2"}

    own.apply(pod("third", gpus=2))

    def reason() -> str:
        conditions = (own.get("pod", "third", NAMESPACE) or {})["status"].get("conditions", [])
        return next((c.get("message", "") for c in conditions if c["type"] == "PodScheduled"), "")

    until(lambda: "2 Insufficient nvidia.com/gpu" in reason(), "the scheduler says what the pod waits for")
    delete(own, "second")
    own.kubectl("wait", "-n", NAMESPACE, "--for=condition=Ready", "--timeout=30s", "pod/third")
    delete(own, "first", "third")


def test_a_sick_gpu_can_not_be_allocated_until_it_is_well(own: Cluster) -> None:
    own.break_gpus("node-1", 0, 2)
    until(lambda: allocatable(own, "node-1") == (4, 2), "two GPUs of node-1 not allocatable")
    start(own, pod("on-well-ones", gpus=2, nodeSelector={"kubernetes.io/hostname": "node-1"}))
    assert gpus_of(own, "on-well-ones") == {gpu_uuid("node-1", 1), gpu_uuid("node-1", 3)}
    own.break_gpus("node-1")
    until(lambda: allocatable(own, "node-1") == (4, 4), "all GPUs of node-1 allocatable")
    assert allocatable(own, "node-2") == (4, 4)
    delete(own, "on-well-ones")


def test_a_claim_of_the_default_class_becomes_a_folder_of_the_node(own: Cluster) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "data", "namespace": NAMESPACE},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}},
    }
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    security = {"fsGroup": 70, "runAsUser": 70}
    mounts = [{"name": "data", "mountPath": "/data"}]
    own.apply(claim)
    start(own, pod("writer", volumes=volumes, securityContext=security, mounts=mounts))
    probe(own, "writer", "write", "/data/word", "kept")
    node = (own.get("pod", "writer", NAMESPACE) or {})["spec"]["nodeName"]
    volume = (own.get("pvc", "data", NAMESPACE) or {})["spec"]["volumeName"]
    folder = own.node_folder(node) / "volumes" / volume
    assert (folder / "word").read_text() == "kept"
    delete(own, "writer")
    own.kubectl("delete", "pvc", "-n", NAMESPACE, "data")
    until(lambda: not folder.exists(), "the folder of a deleted claim is gone")


def test_services_have_names_and_reach_pods_on_other_nodes(own: Cluster) -> None:
    far, near = ({"kubernetes.io/hostname": node} for node in own.nodes)
    own.apply(service("server"))
    start(own, pod("server", nodeSelector=far), pod("client", nodeSelector=near))
    assert probe(own, "client", "get", f"http://server.{NAMESPACE}.svc.cluster.local") == "server"
    with pytest.raises(CommandError, match="no such host"):
        probe(own, "client", "get", "http://registry.invalid")
    address = (own.get("service", "server", NAMESPACE) or {})["spec"]["clusterIP"]
    assert urllib.request.urlopen(f"http://{address}", timeout=10).read() == b"server"  # from this machine
    delete(own, "server", "client")


def test_the_audit_log_says_who_wrote_what(own: Cluster) -> None:
    start_at = audit.position(own.audit_log)
    own.kubectl("create", "configmap", "-n", NAMESPACE, "noted", "--from-literal=word=hidden")

    def found() -> list[audit.Request]:
        return [r for r in audit.requests(own.audit_log, start_at) if r.write and r.resource == "configmaps"]

    until(lambda: bool(found()), "the audit log has the request")
    (request,) = found()
    assert (request.user, request.verb, request.name, request.code) == ("system:admin", "create", "noted", 201)
    assert request.allowed
    assert "hidden" not in own.audit_log.read_text()


def test_a_frozen_api_server_answers_nobody_and_goes_on_when_thawed(own: Cluster) -> None:
    own.freeze("hub", "kube-apiserver")
    with pytest.raises(CommandError, match="imeout"):
        own.kubectl("get", "nodes", "--request-timeout=1s")
    own.thaw("hub", "kube-apiserver")
    until(lambda: own.raw("/readyz") is not None, "the API server answers again")


def test_killed_daemons_are_started_again_and_pods_do_not_notice(own: Cluster) -> None:
    start(own, pod("steady", nodeSelector={"kubernetes.io/hostname": "node-1"}))
    before = [("node-1", "kubelet"), ("node-1", "containerd"), ("hub", "etcd")]
    for machine, daemon in before:
        own.kill(machine, daemon)
        until(lambda m=machine, d=daemon: not own.status()[m][d], f"{daemon} is dead")  # type: ignore[misc]
    own.up()
    assert all(own.status()[machine][daemon] for machine, daemon in before)
    status = (own.get("pod", "steady", NAMESPACE) or {})["status"]
    assert status["containerStatuses"][0]["restartCount"] == 0
    assert urllib.request.urlopen(f"http://{status['podIP']}:8080", timeout=10).read() == b"steady"
    delete(own, "steady")


def test_a_crashed_hub_comes_back_with_its_data_and_the_nodes_follow_it(own: Cluster) -> None:
    start(own, pod("survivor"))
    own.crash("hub")
    assert own.raw("/readyz") is None
    own.up()
    own.apply(service("survivor"))

    def answer() -> bytes:
        address = (own.get("service", "survivor", NAMESPACE) or {})["spec"]["clusterIP"]
        try:
            found: bytes = urllib.request.urlopen(f"http://{address}", timeout=2).read()
        except OSError:
            return b""
        return found

    until(lambda: answer() == b"survivor", "kube-proxy follows the new hub", seconds=30)
    status = (own.get("pod", "survivor", NAMESPACE) or {})["status"]
    assert status["containerStatuses"][0]["restartCount"] == 0
    delete(own, "survivor")


def test_a_cut_cable_and_a_cut_power_supply_are_noticed_and_heal(own: Cluster) -> None:
    start(own, pod("on-node-1", nodeSelector={"kubernetes.io/hostname": "node-1"}))
    own.partition("node-2")
    own.crash("node-1")
    until(lambda: {condition(own, node) for node in own.nodes} == {"Unknown"}, "both nodes are unknown", seconds=60)
    own.heal("node-2")
    until(lambda: condition(own, "node-2") == "True", "node-2 is ready again", seconds=60)
    assert condition(own, "node-1") == "Unknown"
    own.up()
    assert condition(own, "node-1") == "True"
    restarts = "jsonpath={.status.containerStatuses[0].restartCount}"
    until(
        lambda: own.kubectl("get", "pod", "-n", NAMESPACE, "on-node-1", "-o", restarts) == "1",
        "the pod of the crashed node was started again",
    )
    delete(own, "on-node-1")


def test_a_new_set_of_images_takes_over_what_is_unpacked(own: Cluster) -> None:
    programs, folder = probe_archive().parent, cache() / f"test-stores-{os.getpid()}"
    (folder / "nodes").mkdir(parents=True)
    path = {"PATH": f"{programs}:{os.environ['PATH']}"}
    stores = Stores(folder, programs, own.files.conf / "containerd.toml", path)
    write_binary_image(folder / "other.tar", "sm70.test/other:1", programs / "pause")
    sets = [["probe.tar"], ["probe.tar", "other.tar"], ["other.tar"]]
    archives = {path.name: read_archive(path) for path in (programs / "probe.tar", folder / "other.tar")}
    try:
        for number, names in enumerate(sets):
            stores.provide([archives[name] for name in names], [folder / "nodes" / str(number)])
        files = [unpacked(folder / "nodes" / str(number)) for number in range(3)]
        assert [sorted(found) for found in files] == [["probe"], ["pause", "probe"], ["pause"]]
        assert files[0]["probe"].samefile(files[1]["probe"])  # one unpacking, hard links
        assert files[1]["pause"].samefile(files[2]["pause"])
        kept = list(Stores.contents(folder).values())
        assert all(Content.of(archives[name] for name in names) in kept for names in sets)
        assert stores.loader.pid() is None
    finally:
        stores.loader.halt()
        shutil.rmtree(folder)


def unpacked(containerd: Path) -> dict[str, Path]:
    """The files of a containerd's snapshots, by name."""
    return {path.name: path for path in containerd.glob("*/snapshots/*/fs/*")}


def test_a_second_cluster_offers_gpus_by_claims_and_leaves_nothing(own: Cluster) -> None:
    second = Cluster.named(
        f"test-dra-{os.getpid()}", Options(nodes=1, gpu_source=GpuSource.DRA, images=(probe_archive(),))
    )
    try:
        second.up()
        uid = "jsonpath={.metadata.uid}"
        assert own.kubectl("get", "ns", "default", "-o", uid) != second.kubectl("get", "ns", "default", "-o", uid)
        second.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        selectors = [{"cel": {"expression": V100_SELECTOR}}]
        request = {"name": "gpu", "exactly": {"deviceClassName": "v100", "count": 4}}
        claim = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": "four", "namespace": NAMESPACE},
            "spec": {"devices": {"requests": [request]}},
        }
        device_class = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceClass",
            "metadata": {"name": "v100"},
            "spec": {"selectors": selectors},
        }
        claiming = pod("claiming", resourceClaims=[{"name": "gpus", "resourceClaimName": "four"}])
        claiming["spec"]["containers"][0]["resources"]["claims"] = [{"name": "gpus"}]
        second.apply(device_class, claim)
        start(second, claiming)
        assert gpus_of(second, "claiming") == {gpu_uuid("node-1", index) for index in range(4)}
        witness = Witness.of(second)
        assert {trace.split()[0] for trace in witness.traces()} == {"process", "cgroup", "link", "route", "cluster"}
    finally:
        second.down()
    assert witness.traces() == []
    assert sorted(path.name for path in second.folder.iterdir()) == ["lock", "logs"]
    assert own.raw("/readyz") is not None
    second.down()  # and again


def test_a_launcher_that_is_killed_leaves_nothing_that_down_does_not_find() -> None:
    name = f"test-killed-{os.getpid()}"
    cluster = Cluster.named(name)
    words = [sys.executable, "-m", "testcluster", "up", "--name", name]
    environment = os.environ | {"PYTHONPATH": str(SOURCE.parent)}
    with subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL, start_new_session=True) as launcher:
        try:
            until(lambda: cluster.status().get("hub", {}).get("etcd", False), "the launcher has started etcd")
        finally:
            launcher.send_signal(signal.SIGKILL)
    witness = Witness.of(cluster)
    assert cluster.folder in [found.folder for found in all_clusters()]
    cluster.down()
    assert witness.traces() == []
