"""Files and command lines that the daemons get: certificates, kubeconfigs, templates."""

from __future__ import annotations

import base64
import json
import stat
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from testcluster import daemons
from testcluster.files import Files, render
from testcluster.layout import Layout
from testcluster.network import Network
from testcluster.options import GpuSource, Options
from testcluster.pki import Authority


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "cluster", Network(3), Options(audit_log=True), tmp_path / "programs", {})


@pytest.fixture
def written(layout: Layout) -> Files:
    layout.files.write(layout.network, layout.nodes, layout.programs, layout.programs)
    return layout.files


def certificate(files: Files, name: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate((files.pki / f"{name}.crt").read_bytes())


def test_every_certificate_is_signed_by_the_authority(written: Files) -> None:
    key = certificate(written, "ca").public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    for path in written.pki.glob("*.crt"):
        found = certificate(written, path.stem)
        assert found.signature_hash_algorithm is not None
        key.verify(found.signature, found.tbs_certificate_bytes, ec.ECDSA(found.signature_hash_algorithm))


def test_a_node_is_in_its_group_and_known_by_its_address(written: Files) -> None:
    node = certificate(written, "node-2")
    names = {attribute.oid: attribute.value for attribute in node.subject}
    assert names == {NameOID.COMMON_NAME: "system:node:node-2", NameOID.ORGANIZATION_NAME: "system:nodes"}
    hosts = node.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(host) for host in hosts.get_values_for_type(x509.IPAddress)] == ["10.203.0.12"]


def test_keys_are_private_and_in_the_form_that_the_api_server_takes(written: Files) -> None:
    for path in [*written.pki.glob("*.key"), written.kubeconfig, *written.conf.glob("*.kubeconfig")]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert "BEGIN EC PRIVATE KEY" in (written.pki / "service-accounts.key").read_text()


def test_what_exists_is_kept_for_the_daemons_that_use_it(layout: Layout, written: Files) -> None:
    before = {path: path.read_bytes() for path in written.pki.iterdir()}
    layout.files.write(layout.network, layout.nodes, layout.programs, layout.programs)
    assert {path: path.read_bytes() for path in written.pki.iterdir()} == before


def test_the_kubeconfig_names_the_server_and_carries_the_certificate(written: Files) -> None:
    config = json.loads(written.kubeconfig.read_text())
    assert config["clusters"][0]["cluster"]["server"] == "https://10.203.0.2:6443"
    user = base64.b64decode(config["users"][0]["user"]["client-certificate-data"])
    assert user == (written.pki / "admin.crt").read_bytes()


def test_a_host_name_and_an_address_become_different_kinds_of_names(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.issue("server", "server", hosts=["localhost", "127.0.0.1"])
    found = x509.load_pem_x509_certificate((tmp_path / "server.crt").read_bytes())
    hosts = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert hosts.get_values_for_type(x509.DNSName) == ["localhost"]
    assert [str(address) for address in hosts.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]


def test_each_node_has_its_own_cgroup_and_addresses(layout: Layout, written: Files) -> None:
    kubelets = [yaml.safe_load((written.conf / f"node-{n}.yaml").read_text()) for n in (1, 2)]
    assert [kubelet["cgroupRoot"] for kubelet in kubelets] == ["/sm70-test3-node-1", "/sm70-test3-node-2"]
    assert kubelets[0]["clusterDNS"] == ["10.203.0.2"]
    conflist = json.loads((layout.nodes[1].disk / "lib/cni/net.d/10-pods.conflist").read_text())
    assert conflist["plugins"][0]["ipam"]["ranges"] == [[{"subnet": "10.203.66.0/24"}]]
    assert str(layout.programs) in (written.conf / "containerd.toml").read_text()
    assert json.loads((written.conf / "audit-policy.json").read_text())["rules"] == [{"level": "Metadata"}]


def test_a_template_must_get_every_value(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="pods"):
        render("cni.conflist", tmp_path / "out")


def test_the_api_server_logs_requests_only_when_asked(layout: Layout) -> None:
    quiet = Options(apiserver_args=("--min-request-timeout=2",))
    with_log = daemons.api_server(layout.programs, layout.files, layout.network, layout.options)
    without = daemons.api_server(layout.programs, layout.files, layout.network, quiet)
    assert f"--audit-log-path={layout.folder}/logs/audit.log" in with_log
    assert not [word for word in without if "audit" in word]
    assert without[-1] == "--min-request-timeout=2"


def test_gpus_come_from_a_device_plugin_or_a_driver_or_not_at_all(layout: Layout) -> None:
    node = layout.nodes[0]
    plugin = daemons.gpu_plugin(layout.files, node, Options(gpus=2))
    driver = daemons.gpu_plugin(layout.files, node, Options(gpu_source=GpuSource.DRA))
    assert plugin[-3:] == ["testcluster.fake_device_plugin", "node-1", "2"]
    assert driver[3] == "testcluster.fake_dra_driver"
    assert "gpu-plugin" not in daemons.node_daemons(Options(gpus=0))
    assert daemons.kubelet(layout.programs, layout.files, node, Options(gpus=0))[-1] == "--node-labels="


def test_the_state_of_a_cluster_survives_its_file(layout: Layout) -> None:
    layout.folder.mkdir()
    layout.write(layout.folder / "cluster.json")
    assert Layout.read(layout.folder / "cluster.json") == layout
