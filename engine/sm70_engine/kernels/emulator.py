"""Runs the kernels on a CPU: the same sources compiled by g++, one fiber per thread.

cuda/emulator.hpp says what that catches.

Buffers end at a guard page, so that an access past them is an error with block and thread, not a wrong number.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import mmap
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np

from .backend import Array
from .errors import KernelError
from .families import EMULATOR, SOURCES, Family, family
from .plans import Launch
from .toolchain import cache_root

_FLAGS = (
    "-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-DEMULATE",
    # Traps, so that the emulator can report block and thread and needs no runtime library.
    "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error",
)  # fmt: skip
# Calls before every access, of functions in races.hpp.
_RACES = ("-fsanitize=thread", "-DRACES", "-fno-threadsafe-statics")
_HEADERS = (EMULATOR, "races.hpp")
_PAGE = mmap.PAGESIZE
_CANARY = 0xA5


def _flags(races: bool) -> tuple[str, ...]:
    half = "f16c" in Path("/proc/cpuinfo").read_text().split()
    return (*_FLAGS, *(("-mf16c",) if half else ()), *(_RACES if races else ()))


def library(unit: Family, races: bool = False) -> Path:
    """Compiles a family for the CPU unless that was done before; the shared library. `races`: it finds races.

    Raises `KernelError` without a compiler or when the source does not compile.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise KernelError("the emulator needs g++ on the PATH (Debian: apt-get install g++)")
    flags = _flags(races)
    digest = hashlib.sha256(repr((flags, unit.name, unit.defines)).encode())
    for path in (*unit.files, *(SOURCES / name for name in _HEADERS)):
        digest.update(path.read_bytes())
    target = cache_root() / "kernels-emulated" / f"{unit.name}-{digest.hexdigest()[:16]}.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if not target.exists():
            scratch = target.with_suffix(f".{os.getpid()}")
            # Linked apart: the sanitizer's own runtime, which the compiler would add, must not be there.
            unlinked = scratch.with_suffix(".o")
            for command in (
                [*flags, *unit.defines, "-I", str(SOURCES), "-x", "c++", "-c", str(unit.path), "-o", str(unlinked)],
                ["-shared", str(unlinked), "-o", str(scratch)],
            ):
                result = subprocess.run(
                    [compiler, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
                )
                if result.returncode:
                    raise KernelError(f"{unit.source} does not compile for the emulator:\n{result.stdout[:4000]}")
            unlinked.unlink()
            scratch.rename(target)
    return target


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class GuardedBuffer:
    """Memory between two pages that nobody may touch; its end is flush with the second one (to 16 bytes)."""

    def __init__(self, array: Array) -> None:
        self._shape, self._dtype = array.shape, array.dtype
        data = np.ascontiguousarray(array)
        self._bytes = data.nbytes
        self._slack = -self._bytes % 16
        inner = max(1, -(-(self._bytes + self._slack) // _PAGE)) * _PAGE
        self._map = mmap.mmap(-1, inner + 2 * _PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for page in (start, start + _PAGE + inner):
            if _libc.mprotect(page, _PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect of a guard page")
        self._offset = _PAGE + inner - self._bytes - self._slack
        self.address = start + self._offset
        view = np.frombuffer(self._map, np.uint8, self._bytes + self._slack, self._offset)
        view[: self._bytes] = data.reshape(-1).view(np.uint8)
        view[self._bytes :] = _CANARY

    def read(self) -> Array:
        """A copy of the content. Raises `KernelError` when a kernel wrote between it and the guard page."""
        view = np.frombuffer(self._map, np.uint8, self._bytes + self._slack, self._offset)
        if (view[self._bytes :] != _CANARY).any():
            raise KernelError("a kernel wrote past the end of a buffer")
        return view[: self._bytes].copy().view(self._dtype).reshape(self._shape)


class Emulator:
    """The CPU as a device. `order`: 0 runs threads and blocks forwards, 1 backwards, more: shuffled by that seed.

    `races`: a launch fails when no barrier orders two accesses to shared memory, in whatever order they ran; several
    times slower.
    """

    name = "emulator"
    multiprocessors = 3

    def __init__(self, order: int = 0, races: bool = False) -> None:
        self.order, self.races = order, races
        self._libraries: dict[str, ctypes.CDLL] = {}

    def add(self, unit: Family) -> None:
        """Loads a family that is not one of the package's (a test's)."""
        self._libraries[unit.name] = self._open(unit)

    def _load(self, name: str) -> ctypes.CDLL:
        if name not in self._libraries:
            self.add(family(name))
        return self._libraries[name]

    def _open(self, unit: Family) -> ctypes.CDLL:
        loaded = ctypes.CDLL(str(library(unit, self.races)))
        loaded.sm70_emulator_message.restype = ctypes.c_char_p
        loaded.sm70_emulator_kernels.restype = ctypes.c_char_p
        return loaded

    def kernels(self, name: str) -> list[str]:
        """The kernels that a family's library exports."""
        return sorted(str(self._load(name).sm70_emulator_kernels().decode()).split())

    def put(self, array: Array) -> GuardedBuffer:
        """A guarded copy."""
        return GuardedBuffer(array)

    def run(self, launch: Launch) -> None:
        """Runs the launch to its end. Raises `KernelError` with block and thread when a kernel errs."""
        loaded = self._load(launch.family)
        shape = (ctypes.c_int * 7)(
            *launch.grid, launch.threads, launch.shared_bytes, launch.cooperative, launch.waiting
        )
        pointers = (ctypes.c_void_p * len(launch.arguments))(*(ctypes.addressof(x) for x in launch.arguments))
        if loaded.sm70_emulator_launch(launch.kernel.encode(), shape, self.order, pointers):
            raise KernelError(f"{launch.kernel}: {loaded.sm70_emulator_message().decode()}")
