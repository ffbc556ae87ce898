"""The compiler and the disassembler, from package wheels: Debian packages no CUDA toolkit, and it would be large.

NVRTC 12.8 is the last line that still compiles for sm_70 and the first PTX a driver of CUDA 12.8 reads. cuobjdump,
nvdisasm and ptxas come out of the triton wheel, the only package with builds of them that still know sm_70.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .errors import KernelError

REPOSITORY = Path(__file__).resolve().parents[3]
LOCK = REPOSITORY / "requirements" / "kernels.lock"
# Where the wheels put the files, below their installation folder.
_FILES = (
    "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
    "nvidia/cuda_nvrtc/lib/libnvrtc-builtins.so.12.8",
    "triton/backends/nvidia/bin/cuobjdump",
    "triton/backends/nvidia/bin/nvdisasm",
    "triton/backends/nvidia/bin/ptxas",
)
# Packs fat objects. Not in the lock: it compiles nothing, so another version of it need not build everything again.
_FATBIN = (
    "nvidia-nvfatbin-cu12==12.8.90 --hash=sha256:90292d3c8d234dfad7cb6eb5f7d219ad1bd024eb62e07d13a0d244e4b7fa9b61\n"
)
_FATBIN_FILE = "nvidia/nvfatbin/lib/libnvfatbin.so.12"


@dataclass(frozen=True)
class Toolchain:
    """The folder that holds the compiler's libraries and the tools, and the key of what is in it."""

    folder: Path
    key: str

    @property
    def nvrtc(self) -> Path:
        """The compiler library; its builtins lie beside it, where it looks for them."""
        return self.folder / "libnvrtc.so.12"

    def tool(self, name: str) -> Path:
        """The path of `cuobjdump`, `nvdisasm` or `ptxas`."""
        return self.folder / name


def cache_root() -> Path:
    """The folder for everything that is made once and used again: `$SM70_CACHE`, by default ~/.cache/sm70."""
    configured = os.environ.get("SM70_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "sm70"


def _locked() -> Toolchain:
    if not LOCK.exists():
        raise KernelError(
            f"kernels are built in a checkout of the repository, and {LOCK} does not exist; "
            "an installed package loads the objects that it came with"
        )
    key = hashlib.sha256(LOCK.read_bytes() + "\n".join(_FILES).encode()).hexdigest()[:16]
    return Toolchain(cache_root() / f"kernels-toolchain-{key}", key)


def installed() -> Toolchain | None:
    """The locked toolchain when it is installed, else None."""
    toolchain = _locked()
    return toolchain if (toolchain.folder / "complete").exists() else None


def install() -> Toolchain:
    """Installs the locked toolchain unless it is there (about 240 MB to download, 150 MB on disk).

    Raises `KernelError` when neither uv nor pip is there, or the installation fails.
    """
    toolchain = _locked()
    _provide(toolchain.folder, LOCK, _FILES)
    return toolchain


def fatbin_library() -> Path:
    """The library that packs fat objects, installed on first use (1 MB). Raises `KernelError`."""
    folder = cache_root() / f"kernels-fatbin-{hashlib.sha256(_FATBIN.encode()).hexdigest()[:16]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as lock:
        lock.write(_FATBIN)
        lock.flush()
        _provide(folder, Path(lock.name), (_FATBIN_FILE,))
    return folder / Path(_FATBIN_FILE).name


def _provide(folder: Path, lock: Path, files: tuple[str, ...]) -> None:
    """Puts the named files of the locked wheels into the folder, unless that was done; one process at a time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if (folder / "complete").exists():
            return
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            target = Path(scratch) / "wheels"
            _install_wheels(target, lock)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for name in files:
                shutil.move(str(target / name), folder / Path(name).name)
                (folder / Path(name).name).chmod(0o755)
        (folder / "complete").touch()


def _install_wheels(target: Path, lock: Path) -> None:
    # The wheels are for CPython 3.11 on x86-64; nothing of them is imported, so any interpreter may fetch them.
    uv = cache_root() / "uv" / "bin" / "uv"
    program = str(uv) if uv.exists() else shutil.which("uv")
    if program:
        command = [program, "pip", "install", "-q", "--no-config", "--python", sys.executable]
        command += ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28", "--no-build"]
    else:
        command = [sys.executable, "-m", "pip", "install", "-q", "--python-version", "3.11", "--only-binary=:all:"]
    command += ["--no-deps", "--require-hashes", "--target", str(target), "-r", str(lock)]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode:
        raise KernelError(
            f"the kernel toolchain could not be installed: `{' '.join(command)}` said:\n{result.stdout[-2000:].strip()}"
        )
