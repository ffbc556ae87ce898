"""Loads fat objects and launches their kernels: the driver takes the cubin on a V100, the PTX on anything newer.

Launches are asynchronous and capture into CUDA graphs: load (`Kernels.get`) every kernel once before a capture, since
loading and raising the shared-memory limit are not allowed inside one.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

from . import driver
from .build import RACECHECK, FamilyFacts, read_export
from .errors import KernelError
from .plans import Launch

OBJECTS_VARIABLE = "SM70_KERNEL_OBJECTS"


def objects_folder() -> Path:
    """Where the built objects are: `$SM70_KERNEL_OBJECTS`, else `objects` beside this file, where a wheel has them."""
    configured = os.environ.get(OBJECTS_VARIABLE)
    return Path(configured) if configured else Path(__file__).resolve().parent / "objects"


class Kernels:
    """The kernels of one folder of objects on one device. Safe to share between threads."""

    def __init__(self, folder: Path, device: int, variant: str = "") -> None:
        """`variant`: a timing build's name, else the objects that ship. Raises `KernelError` on cards before Volta."""
        self.facts: dict[str, FamilyFacts] = read_export(folder)
        self._folder, self._device, self._variant = folder, device, variant
        self._libraries: dict[str, ctypes.c_void_p] = {}
        self._functions: dict[tuple[str, str], tuple[ctypes.c_void_p, int]] = {}
        self._lock = threading.Lock()
        self.capability = tuple(
            driver.attribute(device, x) for x in (driver.COMPUTE_CAPABILITY_MAJOR, driver.COMPUTE_CAPABILITY_MINOR)
        )
        if self.capability < (7, 0):
            raise KernelError(f"the kernels need compute capability 7.0 or newer; this card has {self.capability}")

    def _image(self, family: str) -> Path:
        if self._variant:
            return self._folder / f"{family}.{self._variant}.ptx"
        fat = self._folder / f"{family}.fatbin"
        if fat.exists():
            return fat
        # Apart, as nvcc.py makes them: a cubin for 7.0 runs on 7.x only; everything newer compiles the PTX.
        return self._folder / f"{family}.{'cubin' if self.capability[0] == 7 else 'ptx'}"

    def _load(self, family: str) -> ctypes.c_void_p:
        if family not in self._libraries:
            path = self._image(family)
            if not path.exists():
                what = {"": "", RACECHECK.name: "--racecheck "}.get(self._variant, "--timing ")
                raise KernelError(
                    f"{path} must exist; build the objects with `sm70-kernels build {what}--output {path.parent}`"
                )
            image, library = path.read_bytes(), driver.handle()
            text = ctypes.create_string_buffer(image, len(image) + 1)
            driver.call("cuLibraryLoadData", ctypes.byref(library), text, None, None, 0, None, None, 0)
            self._libraries[family] = library
        return self._libraries[family]

    def get(self, family: str, kernel: str, shared_bytes: int = 0) -> ctypes.c_void_p:
        """The kernel's handle, with at least that much dynamic shared memory allowed (more than 48 KiB: by request)."""
        with self._lock:
            found = self._functions.get((family, kernel))
            if found is None:
                function = driver.handle()
                driver.call("cuLibraryGetKernel", ctypes.byref(function), self._load(family), kernel.encode())
                found = (function, 48 * 1024)
            if shared_bytes > found[1]:
                driver.call("cuKernelSetAttribute", driver.MAX_DYNAMIC_SHARED, shared_bytes, found[0], self._device)
                found = (found[0], shared_bytes)
            self._functions[family, kernel] = found
            return found[0]

    def launch(self, launch: Launch, stream: int = 0, shared_bytes: int | None = None) -> None:
        """Starts it on a CUstream handle. `shared_bytes`: more than it needs, to keep CTAs off a multiprocessor."""
        shared = max(launch.shared_bytes, shared_bytes or 0)
        function = self.get(launch.family, launch.kernel, shared)
        # The driver copies the arguments before it returns.
        pointers = (ctypes.c_void_p * len(launch.arguments))(*(ctypes.addressof(x) for x in launch.arguments))
        shape = (*launch.grid, launch.threads, 1, 1, shared, ctypes.c_void_p(stream), pointers)
        if launch.cooperative:  # refused by the driver unless all CTAs fit
            driver.call("cuLaunchCooperativeKernel", function, *shape)
        else:
            driver.call("cuLaunchKernel", function, *shape, None)
