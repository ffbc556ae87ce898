"""Builds the cluster's programs from their Go modules, once for each content of those.

The result lies in CACHE/KIND-KEY; the key covers the Go sources, go.mod, go.sum and the
recipe, not the Go that compiles them, so that finding it needs no Go at all.
"""

from __future__ import annotations

import hashlib
import platform
import re
import shutil
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from testcluster import golang
from testcluster.errors import ClusterError
from testcluster.images import write_binary_image
from testcluster.paths import SOURCE, locked
from testcluster.processes import running
from testcluster.progress import say, step

IMAGES = {"pause": "sm70.test/pause:1", "probe": "sm70.test/probe:1"}  # by the one program that is in them
CONTAINERD, CNI = "github.com/containerd/containerd/v2/cmd", "github.com/containernetworking/plugins/plugins"
KEPT = 2  # results of a recipe, so that going back and forth between two sources builds nothing
HEARTBEAT = 15.0  # seconds between two lines while Go compiles


@dataclass(frozen=True)
class Recipe:
    """What is built from one module, and how every program is told its version."""

    kind: str
    module: Path
    packages: tuple[str, ...]
    stamps: tuple[tuple[str, str], ...]
    images: tuple[str, ...] = ()  # programs that become PROGRAM.tar, an image archive, too

    def key(self) -> str:
        """Changes with anything that may change the programs, but neither with Go nor with the folder's place."""
        digest = hashlib.sha256(repr((self.packages, self.flags, platform.machine(), self.images)).encode())
        for path in sorted([*self.module.glob("go.*"), *self.module.glob("**/*.go")]):
            digest.update(path.relative_to(self.module).as_posix().encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()[:16]

    @property
    def flags(self) -> str:
        return " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in self.stamps)])

    def target(self, cache: Path) -> Path:
        return cache / f"{self.kind}-{self.key()}"


def module_version(module: Path, name: str) -> str:
    """The version of a module that a go.mod requires, for example `v1.37.2`."""
    match = re.search(rf"^(?:require |\t){re.escape(name)} (v\S+)", (module / "go.mod").read_text(), re.MULTILINE)
    if match is None:
        raise ValueError(f"{module / 'go.mod'} does not require {name}")
    return match[1]


def kubernetes() -> Recipe:
    module = SOURCE / "go"
    version = module_version(module, "k8s.io/kubernetes")
    major, minor, _ = version.removeprefix("v").split(".")
    base = "k8s.io/component-base/version"
    return Recipe(
        kind="programs",
        module=module,
        packages=(
            *(".", "./pause", "./probe", "./coredns"),
            *(f"{CONTAINERD}/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr")),
            *(f"{CNI}/{name}" for name in ("main/ptp", "main/loopback", "ipam/host-local", "meta/portmap")),
        ),
        # A module build does not know its version, and kubectl would print a placeholder.
        stamps=(
            (f"{base}.gitVersion", version),
            (f"{base}.gitMajor", major),
            (f"{base}.gitMinor", minor),
            ("k8s.io/client-go/pkg/version.gitVersion", version),
        ),
        images=tuple(IMAGES),
    )


def helm() -> Recipe:
    """In a module of its own: a shared dependency that helm raises would recompile all of Kubernetes."""
    module = SOURCE / "helm"
    version = module_version(module, "helm.sh/helm/v4")
    return Recipe(
        kind="helm",
        module=module,
        packages=("helm.sh/helm/v4/cmd/helm",),
        stamps=(("helm.sh/helm/v4/internal/version.version", version),),
    )


def missing(cache: Path) -> list[Recipe]:
    return [recipe for recipe in (kubernetes(), helm()) if not recipe.target(cache).exists()]


def build(recipe: Recipe, cache: Path) -> Path:
    """The folder with the recipe's programs; they are built only if their source changed.

    Cold, Kubernetes takes two cores 6 to 8 minutes, 3.3 GB of memory and 5.5 GB of disk; helm 2 minutes.
    Raises ClusterError with the compiler's words.
    """
    target = recipe.target(cache)
    if target.exists():
        return target
    with locked(cache / "build.lock"), tempfile.TemporaryDirectory(dir=cache, prefix="building-") as scratch:
        if not target.exists():  # another process may have built it meanwhile
            go = golang.find(recipe.module, cache)
            partial = Path(scratch) / "programs"  # a build cut short leaves nothing half done
            words = [str(go), "build", "-v", "-trimpath", "-ldflags", recipe.flags, "-o", f"{partial}/"]
            with step(f"{recipe.kind} compiled from Go modules"):
                _run([*words, *recipe.packages], recipe, cache)
            for name in recipe.images:
                write_binary_image(partial / f"{name}.tar", IMAGES[name], partial / name)
            partial.rename(target)
            for old in outdated(recipe, cache):
                shutil.rmtree(old)
    return target


def outdated(recipe: Recipe, cache: Path) -> list[Path]:
    """Earlier results of a recipe (300 MB each), without the newest ones and those whose programs run."""
    results = sorted(cache.glob(f"{recipe.kind}-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    return [path for path in results[KEPT:] if not running(path)]


def _run(words: list[str], recipe: Recipe, cache: Path) -> None:
    """Runs Go and says every few seconds how far it is; `go build -v` names each package when it is done."""
    start, counts = time.monotonic(), {"downloaded": 0, "compiled": 0}
    other: list[str] = []
    done = threading.Event()

    def beat() -> None:
        while not done.wait(HEARTBEAT):
            say(
                f"{time.monotonic() - start:6.1f} s  {recipe.kind}: {counts['downloaded']} modules downloaded,"
                f" {counts['compiled']} packages compiled"
            )

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        with subprocess.Popen(
            words,
            cwd=recipe.module,
            env=golang.environment(cache),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stderr is not None
            for line in process.stderr:
                if line.startswith("go: downloading"):
                    counts["downloaded"] += 1
                elif re.fullmatch(r"[\w.~/-]+\n", line):
                    counts["compiled"] += 1
                else:
                    other.append(line)
    finally:
        done.set()
        thread.join()
    if process.returncode:
        raise ClusterError(
            f"the test cluster's {recipe.kind} did not build ({words[0]} build):\n{''.join(other[-40:])}"
        )
