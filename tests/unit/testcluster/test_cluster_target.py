"""The three kinds of clusters behind one face; scripts that note their arguments stand in for kind and kubectl."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from testcluster.errors import ClusterError, CommandError
from testcluster.images import write_image
from testcluster.options import Options
from testcluster.target import (
    Capability,
    ClusterKind,
    Current,
    Embedded,
    Kind,
    TargetCluster,
    parse_kind,
    target_cluster,
)

NODES = {"items": [{"metadata": {"name": "sm70-worker"}}]}


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in PATH with `kind`, `kubectl` and `helm` that write what they were called with to `calls`."""
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / "nodes.json").write_text(json.dumps(NODES))
    for name in ("kind", "kubectl", "helm"):
        script = folder / name
        script.write_text(
            f'#!/bin/sh\necho "{name} $*" >>{folder}/calls\n'
            f'case "$*" in "get nodes"*) cat {folder}/nodes.json;; *refused*) echo no >&2; exit 3;; esac\n'
        )
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SM70_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    return folder


def calls(tools: Path) -> list[str]:
    return (tools / "calls").read_text().splitlines()


@pytest.mark.parametrize("kind", list(ClusterKind))
def test_all_kinds_have_the_same_face(kind: ClusterKind, tools: Path) -> None:
    made: TargetCluster = target_cluster(kind, "demo", Options())
    assert made.target is kind
    assert (Capability.FAULTS in made.capabilities) == (kind is ClusterKind.EMBEDDED) == isinstance(made, Embedded)


def test_the_variable_cluster_is_checked() -> None:
    assert parse_kind(None) is parse_kind("") is ClusterKind.EMBEDDED
    with pytest.raises(ClusterError, match="CLUSTER must be one of embedded, kind, current, not 'minikube'"):
        parse_kind("minikube")


def test_kind_makes_a_cluster_and_pretends_gpus_on_its_workers(tools: Path, tmp_path: Path) -> None:
    archive = tmp_path / "app.tar"
    write_image(archive, "test/app:1", [], {})
    Kind("sm70", Options(images=(archive,))).up()
    made, listed, labelled, patched, loaded = calls(tools)[1:]
    assert made == "kind create cluster --config - --wait 180s --name sm70"
    assert listed.startswith("kubectl get nodes -A -l !node-role.kubernetes.io/control-plane")
    assert labelled.startswith("kubectl label node sm70-worker --overwrite nvidia.com/gpu.present=true")
    assert '--subresource=status --type=merge -p {"status": {"capacity": {"nvidia.com/gpu": "4"}}}' in patched
    assert loaded == f"kind load image-archive {archive} --name sm70"


def test_kind_takes_down_its_own_cluster_only(tools: Path) -> None:
    Kind("sm70", Options()).down()
    assert calls(tools) == ["kind delete cluster --name sm70"]


def test_the_current_cluster_is_used_as_it_is(tools: Path, tmp_path: Path) -> None:
    current = Current()
    current.up()
    current.helm("list")
    current.down()
    assert calls(tools) == ["kubectl version", "helm list"]
    assert current.environment()["KUBECONFIG"] == str(tmp_path / "kubeconfig")
    with pytest.raises(ClusterError, match=r"app\.tar is not loaded; push it"):
        current.load_image(Path("app.tar"))


def test_a_command_that_fails_gives_its_words_and_code(tools: Path) -> None:
    with pytest.raises(CommandError, match="`kubectl refused` ended with 3: no") as error:
        Current().kubectl("refused")
    assert error.value.code == 3
    assert Current().raw("/refused") is None


def test_a_missing_program_is_named(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ClusterError, match="`kind` must be in PATH"):
        Kind("sm70", Options()).down()
