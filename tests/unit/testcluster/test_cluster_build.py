"""Building: what the key depends on, which Go is good enough, which results are removed."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest

from testcluster import build, golang
from testcluster.errors import ClusterError
from testcluster.paths import SOURCE


@pytest.fixture
def module(tmp_path: Path) -> Path:
    folder = tmp_path / "module"
    (folder / "tool").mkdir(parents=True)
    (folder / "go.mod").write_text("module test\n\ngo 1.26.8\n\nrequire (\n\tk8s.io/kubernetes v1.37.2\n)\n")
    (folder / "tool" / "main.go").write_text("package main\n")
    return folder


def recipe(module: Path) -> build.Recipe:
    return build.Recipe("tools", module, ("./tool",), (("main.version", "v1"),))


def test_the_key_follows_the_sources_and_the_recipe_but_not_the_place(module: Path, tmp_path: Path) -> None:
    first = recipe(module)
    copy = tmp_path / "elsewhere"
    shutil.copytree(module, copy)
    assert recipe(copy).key() == first.key()
    assert dataclasses.replace(first, stamps=(("main.version", "v2"),)).key() != first.key()
    before = first.key()
    (module / "tool" / "main.go").write_text("package main // changed\n")
    assert first.key() != before


def test_versions_are_those_of_the_go_modules() -> None:
    kubernetes, helm = build.kubernetes(), build.helm()
    assert "-X k8s.io/component-base/version.gitVersion=v1.37.2" in kubernetes.flags
    assert "-X helm.sh/helm/v4/internal/version.version=v4.3.1" in helm.flags
    with pytest.raises(ValueError, match="does not require"):
        build.module_version(SOURCE / "go", "k8s.io/nothing")


def test_newest_results_and_running_programs_stay(module: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for age in range(4):
        folder = cache / f"tools-{age}"
        folder.mkdir(parents=True)
        os.utime(folder, (1000 - age, 1000 - age))
    (cache / "other-1").mkdir()
    assert build.outdated(recipe(module), cache) == [cache / "tools-2", cache / "tools-3"]
    sleep = cache / "tools-3" / "sleep"
    shutil.copy("/bin/sleep", sleep)
    os.utime(cache / "tools-3", (1, 1))
    pid = os.posix_spawn(sleep, ["sleep", "60"], {})
    try:
        assert build.outdated(recipe(module), cache) == [cache / "tools-2"]
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("text", "version"),
    [("go1.26.8", (1, 26, 8)), ("1.26", (1, 26, 0)), ("go 1.27.3\n", (1, 27, 3)), ("go1.27rc1", (1, 27, -1))],
)
def test_go_versions_are_read(text: str, version: tuple[int, ...]) -> None:
    assert golang.parse(text) == version


def test_go_of_the_lock_satisfies_every_module() -> None:
    pinned = golang.parse(golang.pinned(golang.LOCK.read_text()))
    assert all(pinned >= golang.required(SOURCE / name) for name in ("go", "helm"))


def machine_go(folder: Path, version: str) -> None:
    folder.mkdir()
    go = folder / "go"
    go.write_text(f"#!/bin/sh\necho {version}\n")
    go.chmod(0o755)


def test_a_new_enough_go_of_the_machine_is_used(module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_go(tmp_path / "bin", "go1.26.8")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert golang.find(module, tmp_path) == tmp_path / "bin" / "go"


@pytest.mark.parametrize("version", ["go1.26.7", "go1.26.8rc1", "devel"])
def test_for_an_older_go_the_package_index_is_asked(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    machine_go(tmp_path / "bin", version)
    uv = tmp_path / "uv" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    # Stands for uv: it is asked for exactly what the lock names, by hash, and makes the folder it is told.
    uv.write_text('#!/bin/sh\nset -e\necho "$@" >"$(dirname "$0")/asked"\nmkdir -p "$8/go/bin"; touch "$8/go/bin/go"\n')
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    release = golang.pinned(golang.LOCK.read_text())
    assert golang.find(module, tmp_path) == tmp_path / "go" / release / "go" / "bin" / "go"
    assert f"--require-hashes -r {golang.LOCK}" in (uv.parent / "asked").read_text()
    uv.write_text("#!/bin/sh\nexit 1\n")  # a second time nobody asks
    assert golang.find(module, tmp_path).exists()


def test_without_any_go_the_error_says_what_to_do(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = tmp_path / "uv" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.write_text("#!/bin/sh\necho no network >&2\nexit 2\n")
    uv.chmod(0o755)
    machine_go(tmp_path / "bin", "go1.20")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with pytest.raises(ClusterError, match=r"must be built with Go 1\.26\.8 or newer.*no network.*install Go"):
        golang.find(module, tmp_path)
    assert list((tmp_path / "go").iterdir()) == []


def test_go_never_fetches_another_go_and_keeps_the_callers_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOPROXY", "https://modules.invalid")
    monkeypatch.setenv("GOTOOLCHAIN", "auto")
    monkeypatch.delenv("GOCACHE", raising=False)
    found = golang.environment(tmp_path)
    assert (found["GOTOOLCHAIN"], found["GOPROXY"]) == ("local", "https://modules.invalid")
    assert found["GOCACHE"] == f"{tmp_path}/go/build"
    monkeypatch.setenv("GOCACHE", "/elsewhere")
    assert golang.environment(tmp_path)["GOCACHE"] == "/elsewhere"
