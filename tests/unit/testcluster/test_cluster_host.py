"""What is asked of the host: options, networks, preflight, and the pure parts of the fakes."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from testcluster import __main__ as command_line
from testcluster import audit, gpus, host, local_provisioner, network, preflight, processes
from testcluster.cluster import Cluster
from testcluster.errors import ClusterError
from testcluster.images import Archive
from testcluster.kubelet_api import DEVICE_PLUGIN, DRA, messages
from testcluster.network import Network
from testcluster.options import GpuSource, Options, check_name


def parse(*words: str) -> argparse.Namespace:
    return command_line.parser().parse_args(words)


def test_the_command_line_becomes_options(tmp_path: Path) -> None:
    archive = tmp_path / "app.tar"
    words = ("up", "--gpu-source", "dra", "--audit-log", "--image", str(archive), "--apiserver-arg=--v=2")
    assert command_line.options(parse(*words)) == Options(
        gpu_source=GpuSource.DRA, audit_log=True, images=(archive,), apiserver_args=("--v=2",)
    )
    assert command_line.options(parse("up")) == Options()


@pytest.mark.parametrize("words", [(), ("up", "--gpu-source", "none"), ("link", "node-1", "sideways"), ("signal",)])
def test_a_wrong_command_line_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*words)
    assert ended.value.code == 2


def test_commands_about_a_cluster_that_is_not_there_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["crash", "hub", "--dir", str(tmp_path)]) == 1
    assert re.search(r"there must be a cluster in .*run `up` first", capsys.readouterr().err)
    assert command_line.main(["status", "--dir", str(tmp_path)]) == 1
    assert "no cluster in" in capsys.readouterr().out


def test_signals_have_names() -> None:
    assert command_line.number("kill") == command_line.number("SIGKILL") == signal.SIGKILL
    with pytest.raises(ClusterError, match="KILL, STOP or CONT"):
        command_line.number("9")


@pytest.mark.parametrize("name", ["", "..", "../x", "A", "a/b", "-a", "x" * 64])
def test_a_name_must_be_a_folder_name(name: str) -> None:
    with pytest.raises(ClusterError, match="a cluster's name must be"):
        check_name(name)


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ClusterError, match="1 to 16 nodes, not 0"):
        Options(nodes=0)
    with pytest.raises(ClusterError, match="0 to 64 GPUs, not 65"):
        Options(gpus=65)


def test_only_images_may_differ_on_a_running_cluster() -> None:
    assert Options().difference(Options(images=(Path("a"),))) == []
    assert Options().difference(Options(nodes=3, gpu_source=GpuSource.DRA)) == ["nodes", "gpu_source"]


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without any cable or cgroup of a cluster."""
    monkeypatch.setattr(network, "links", dict)
    monkeypatch.setattr(network, "cgroup_hierarchies", list)


@pytest.mark.usefixtures("no_links")
def test_a_network_is_kept_until_it_is_released_and_then_free(tmp_path: Path) -> None:
    claims = tmp_path / "networks"
    owners = [tmp_path / name for name in ("a", "b")]
    for owner in owners:
        owner.mkdir()
        (owner / network.STATE).touch()
    first, second = (network.claim(owner, claims) for owner in owners)
    assert first != second
    assert network.claim(owners[0], claims) == first
    assert network.claimants(claims) == set(owners)
    network.release(owners[0], claims)
    third = tmp_path / "c"
    assert network.claim(third, claims) == first
    assert network.claim(owners[0], claims) == first  # for a claim without a cluster does not count
    assert network.claim(owners[1], claims) == second


def test_a_network_of_an_unknown_cluster_is_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hierarchy = tmp_path / "cgroup"
    (hierarchy / f"{network.PREFIX}1-node-1").mkdir(parents=True)
    monkeypatch.setattr(network, "links", lambda: {f"{network.PREFIX}0": "its folder", "lo": ""})
    monkeypatch.setattr(network, "cgroup_hierarchies", lambda: [hierarchy])
    assert network.claim(tmp_path, tmp_path / "networks") == Network(2)


def test_only_cgroups_without_a_cable_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("0-node-1/kubepods", "1-hub", "1-node-1/kubepods/pod", "-loader"):
        (tmp_path / f"{network.PREFIX}{name}").mkdir(parents=True)
    (tmp_path / "others").mkdir()
    monkeypatch.setattr(host, "links", lambda: {f"{network.PREFIX}0": "its folder"})
    monkeypatch.setattr(network, "unguard", lambda: None)
    monkeypatch.setattr(host, "cgroup_hierarchies", lambda: [tmp_path])
    assert len(host.sweep()) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["others", f"{network.PREFIX}0-node-1"]


@pytest.mark.usefixtures("no_links")
def test_when_every_network_is_taken_the_error_says_what_to_do(tmp_path: Path) -> None:
    owners = [tmp_path / str(number) for number in range(network.COUNT)]
    for owner in owners:
        owner.mkdir()
        (owner / network.STATE).touch()
        network.claim(owner, tmp_path / "networks")
    with pytest.raises(ClusterError, match=r"all 8 test networks .* `down` one"):
        network.claim(tmp_path / "one-more", tmp_path / "networks")


def test_networks_do_not_overlap() -> None:
    one = Network(2)
    assert (one.hub, one.node(1), one.node_pods(1)) == ("10.202.0.2", "10.202.0.11", "10.202.65.0/24")
    bases = {Network(index).base for index in range(network.COUNT)}
    assert len(bases) == network.COUNT


def test_labels_say_how_many_gpus_there_are_and_nothing_where_there_are_none() -> None:
    found = gpus.labels(4)
    assert (found["nvidia.com/gpu.count"], found["nvidia.com/gpu.product"]) == ("4", "Tesla-V100-SXM2-16GB")
    assert all(re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", value) for value in found.values())
    assert gpus.labels(0) == {}


def test_gpu_uuids_are_stable_and_different() -> None:
    uuids = [gpus.gpu_uuid(node, index) for node in ("node-1", "node-2") for index in range(4)]
    assert len(set(uuids)) == 8
    assert uuids[0] == gpus.gpu_uuid("node-1", 0)
    assert re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", uuids[0])


def claim(**changes: Any) -> dict[str, Any]:
    spec = {
        "storageClassName": "local",
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}},
    }
    annotations = changes.pop("annotations", {local_provisioner.SELECTED_NODE: "node-2"})
    metadata = {"name": "data", "namespace": "ns", "uid": "u-1", "annotations": annotations}
    return {"metadata": metadata, "spec": spec | changes}


def test_a_claim_gets_a_volume_on_the_node_that_the_scheduler_chose() -> None:
    found = local_provisioner.volume_for(claim())
    assert found is not None
    node, volume = found
    assert node == "node-2"
    assert volume["spec"]["local"] == {"path": "/var/lib/volumes/pvc-u-1"}
    assert volume["spec"]["claimRef"]["uid"] == "u-1"
    assert local_provisioner.released_from(volume) is None
    assert local_provisioner.released_from(volume | {"status": {"phase": "Released"}}) == "node-2"


@pytest.mark.parametrize("changes", [{"annotations": {}}, {"volumeName": "bound"}, {"storageClassName": "other"}])
def test_a_claim_that_waits_for_nobody_or_another_gets_none(changes: dict[str, Any]) -> None:
    assert local_provisioner.volume_for(claim(**changes)) is None


def test_messages_survive_the_wire() -> None:
    types = messages("v1beta1", DEVICE_PLUGIN)
    reply = types["ContainerAllocateResponse"](envs={"NVIDIA_VISIBLE_DEVICES": "GPU-1"})
    sent = types["AllocateResponse"](container_responses=[reply]).SerializeToString()
    # Field 1, length-delimited, in it field 1, a map's entry with key 1 and value 2: the kubelet's own encoding.
    assert sent == b"\n\x21\n\x1f\n\x16NVIDIA_VISIBLE_DEVICES\x12\x05GPU-1"
    claims = messages("dra", DRA)["NodePrepareResourcesResponse"].FromString(b"\n\x09\n\x01u\x12\x04\x12\x02no")
    assert claims.claims["u"].error == "no"


def test_the_audit_log_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    line = (
        '{"stage": "%s", "verb": "%s", "user": {"username": "u"}, "requestURI": "/x", "stageTimestamp": "t",'
        ' "objectRef": {"resource": "pods", "subresource": "status", "name": "p"}, "responseStatus": {"code": 200},'
        ' "annotations": {"authorization.k8s.io/decision": "allow"}}\n'
    )
    log.write_text(line % ("ResponseComplete", "patch") + line % ("ResponseStarted", "watch"))
    (first,) = audit.requests(log)
    assert (first.user, first.resource, first.write, first.allowed, first.code) == ("u", "pods/status", True, True, 200)
    start = audit.position(log)
    with log.open("a") as file:
        file.write(line % ("ResponseComplete", "get") + '{"stage": "Resp')
    assert [(request.verb, request.write) for request in audit.requests(log, start)] == [("get", False)]
    assert audit.position(tmp_path / "none") == 0


def test_folders_that_a_machine_hides_are_refused() -> None:
    (problem,) = preflight.hidden(Path("/var/lib/cluster"))
    assert "must not lie under /var/lib" in problem
    assert "SM70_CACHE" in problem
    assert list(preflight.hidden(Path("/srv/cluster"))) == []


def test_missing_programs_are_named_with_their_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert any("runc must be in PATH; install Debian's runc" in problem for problem in preflight.commands())


def test_without_root_only_root_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError) as error:
        Cluster(tmp_path / "c").up()
    assert "it needs root" in str(error.value)
    assert not (tmp_path / "c").exists()


def test_missing_cgroups_come_with_the_commands_that_mount_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "CGROUPS", tmp_path)
    (problem,) = preflight.cgroups()
    assert "cpu, cpuacct, cpuset" in problem
    assert "mount --rbind" in problem
    v1 = preflight.mount_advice(["pids"], "#subsys_name\thierarchy\npids\t5\t1\t1\n")
    assert f"for c in pids; do mkdir -p {tmp_path}/$c; mount -t cgroup -o $c" in v1
    assert "mount -t cgroup2" in preflight.mount_advice(["pids"], "pids\t0\t1\t1\n")
    (tmp_path / "cgroup.controllers").write_text("cpu io memory\n")
    (problem,) = preflight.cgroups()
    assert "must have the controllers cpuset, pids" in problem


def test_the_budget_has_what_is_missing_only(tmp_path: Path) -> None:
    archive = Archive(Path("a.tar"), "sha256:a", ("a",), 2_000_000_000)
    cold = {need.what: need.gigabytes for need in preflight.budget(tmp_path, [archive])}
    assert set(cold) == {"programs", "Go's module cache", "Go's build cache", "images", "reserve"}
    assert cold["images"] == pytest.approx(4.0)
    (tmp_path / "go" / "build").mkdir(parents=True)
    assert "Go's build cache" not in {need.what for need in preflight.budget(tmp_path, [])}


def test_a_full_disk_is_refused_with_the_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preflight.check_disk(tmp_path, [preflight.Need("programs", 0.0)])
    assert "disk: programs 0.0 GB; together 0.0 GB of" in capsys.readouterr().err
    with pytest.raises(ClusterError, match=r"1000000\.0 GB must be free in .* set SM70_CACHE"):
        preflight.check_disk(tmp_path, [preflight.Need("images", 1e6)])


def test_processes_are_found_by_their_mark_and_ended() -> None:
    name, value = "SM70_TEST_MARK", f"mark-{os.getpid()}"
    with subprocess.Popen(["sleep", "60"], env={name: value}) as process:
        processes.until(lambda: processes.marked(name, value) == [process.pid], "the process is marked")
        assert processes.marked(name, "another") == []
        processes.kill(process.pid, 2**22 + 1)  # one that is not there does not matter
        assert process.wait() == -signal.SIGKILL


def test_logs_of_the_newest_dead_clusters_stay_and_living_ones_always(tmp_path: Path) -> None:
    for number in range(4):
        folder = tmp_path / f"c{number}"
        folder.mkdir()
        (folder / "lock").touch()
        os.utime(folder, (number, number))
    (tmp_path / "c0" / network.STATE).touch()
    os.utime(tmp_path / "c0", (0, 0))
    host.forget(tmp_path, kept=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c0", "c2", "c3"]


def test_waiting_in_vain_says_for_what() -> None:
    with pytest.raises(TimeoutError, match="not within 0 s: the impossible"):
        processes.until(lambda: False, "the impossible", seconds=0)
