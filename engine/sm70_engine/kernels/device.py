"""A GPU as a backend of checks and benchmarks, without torch: memory, launches, graphs, parts of the card."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np

from . import driver
from .backend import Array
from .loader import Kernels
from .plans import Launch


class DeviceBuffer:
    """A piece of device memory, freed when it is forgotten."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype) -> None:  # type: ignore[type-arg]
        self._shape, self._dtype = shape, dtype
        self.bytes = int(np.prod(shape)) * dtype.itemsize
        pointer = ctypes.c_uint64()
        driver.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(self.bytes, 16)))
        self.address = pointer.value
        self._free = weakref.finalize(self, driver.library().cuMemFree_v2, pointer)

    def write(self, array: Array) -> None:
        """Copies an array of the buffer's size into it."""
        data = np.ascontiguousarray(array)
        driver.call(
            "cuMemcpyHtoD_v2",
            ctypes.c_uint64(self.address),
            ctypes.c_void_p(data.ctypes.data),
            ctypes.c_size_t(data.nbytes),
        )

    def read(self) -> Array:
        """Waits for the device and copies the content."""
        out = np.empty(self._shape, self._dtype)
        driver.call("cuCtxSynchronize")
        driver.call(
            "cuMemcpyDtoH_v2",
            ctypes.c_void_p(out.ctypes.data),
            ctypes.c_uint64(self.address),
            ctypes.c_size_t(self.bytes),
        )
        return out


class Device:
    """One GPU with one folder of kernel objects."""

    def __init__(self, objects: Path, variant: str = "", ordinal: int = 0) -> None:
        self.number, self.context = driver.primary_context(ordinal)
        self.name = driver.device_name(self.number)
        self.multiprocessors = driver.attribute(self.number, driver.MULTIPROCESSORS)
        self.kernels = Kernels(objects, self.number, variant)

    def put(self, array: Array) -> DeviceBuffer:
        """A copy of the array."""
        buffer = DeviceBuffer(array.shape, array.dtype)
        if array.size:
            buffer.write(array)
        return buffer

    def fill(self, piece: Array, total: int) -> DeviceBuffer:
        """`total` bytes that repeat `piece`."""
        buffer = DeviceBuffer((total,), np.dtype(np.uint8))
        data = np.ascontiguousarray(piece).view(np.uint8).reshape(-1)[:total]
        driver.call(
            "cuMemcpyHtoD_v2",
            ctypes.c_uint64(buffer.address),
            ctypes.c_void_p(data.ctypes.data),
            ctypes.c_size_t(data.nbytes),
        )
        done = data.nbytes
        while done < total:
            n = min(done, total - done)
            driver.call(
                "cuMemcpyDtoD_v2",
                ctypes.c_uint64(buffer.address + done),
                ctypes.c_uint64(buffer.address),
                ctypes.c_size_t(n),
            )
            done += n
        return buffer

    def run(self, launch: Launch) -> None:
        """Starts a launch on the default stream."""
        self.kernels.launch(launch)


class Partition:
    """All multiprocessors of a card, or a number of them (a green context), with a stream of its own."""

    def __init__(self, device: Device, multiprocessors: int = 0) -> None:
        self._device, self._stream, self._context = device, driver.handle(), device.context
        self.multiprocessors = device.multiprocessors
        if multiprocessors and multiprocessors < device.multiprocessors:
            self._split(multiprocessors)
        else:
            driver.call("cuStreamCreate", ctypes.byref(self._stream), 1)
        self._events = (driver.handle(), driver.handle())
        driver.call("cuCtxSetCurrent", self._context)
        for event in self._events:
            driver.call("cuEventCreate", ctypes.byref(event), 0)
        driver.call("cuCtxSetCurrent", device.context)

    def _split(self, wanted: int) -> None:
        # CUdevResource: 96 bytes in, the SM count lies at byte 96 (a union behind type and padding); 576 is ample.
        whole, part, rest = (ctypes.create_string_buffer(576) for _ in range(3))
        count, description, green = ctypes.c_uint(1), driver.handle(), driver.handle()
        number = self._device.number
        driver.call("cuDeviceGetDevResource", number, whole, 1)
        driver.call("cuDevSmResourceSplitByCount", part, ctypes.byref(count), whole, rest, 0, wanted)
        self.multiprocessors = int.from_bytes(part.raw[96:100], "little")
        driver.call("cuDevResourceGenerateDesc", ctypes.byref(description), part, 1)
        driver.call("cuGreenCtxCreate", ctypes.byref(green), description, number, 1)
        self._context = driver.handle()
        driver.call("cuCtxFromGreenCtx", ctypes.byref(self._context), green)
        driver.call("cuGreenCtxStreamCreate", ctypes.byref(self._stream), green, 1, 0)

    def time(self, make: Callable[[int], list[tuple[Launch, int]]], launches: int, repeats: int = 7) -> list[float]:
        """Milliseconds of each replay of a graph; `make(i)`: the launches of step i, each with its shared memory."""
        graph, executable, elapsed, times = driver.handle(), driver.handle(), ctypes.c_float(), []
        driver.call("cuCtxSynchronize")
        driver.call("cuCtxSetCurrent", self._context)
        stream, kernels = self._stream, self._device.kernels
        try:
            for launch, shared in make(0):
                kernels.launch(launch, stream.value or 0, shared)
            driver.call("cuStreamSynchronize", stream)
            driver.call("cuStreamBeginCapture_v2", stream, 1)
            try:
                for i in range(launches):
                    for launch, shared in make(i):
                        kernels.launch(launch, stream.value or 0, shared)
            finally:
                status = driver.library().cuStreamEndCapture(stream, ctypes.byref(graph))
            driver.check("cuStreamEndCapture", status)
            driver.call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
            for _ in range(repeats + 1):
                driver.call("cuEventRecord", self._events[0], stream)
                driver.call("cuGraphLaunch", executable, stream)
                driver.call("cuEventRecord", self._events[1], stream)
                driver.call("cuStreamSynchronize", stream)
                driver.call("cuEventElapsedTime", ctypes.byref(elapsed), *self._events)
                times.append(elapsed.value)
            driver.call("cuGraphExecDestroy", executable)
            driver.call("cuGraphDestroy", graph)
        finally:
            driver.call("cuCtxSetCurrent", self._device.context)
        return times[1:]

    def gigahertz(self, scratch: DeviceBuffer) -> float:
        """The clock of a busy multiprocessor, now. `scratch`: 16 bytes or more."""
        cycles = ctypes.c_uint32(200_000)
        spin = Launch("calibration", "spin", (1, 1, 1), 32, 0, (ctypes.c_void_p(scratch.address), cycles))
        driver.call("cuCtxSetCurrent", self._context)
        try:
            self._device.kernels.launch(spin, self._stream.value or 0)
            driver.call("cuStreamSynchronize", self._stream)
        finally:
            driver.call("cuCtxSetCurrent", self._device.context)
        measured = scratch.read().reshape(-1).view(np.uint64)[:2]
        return float(measured[0]) / max(float(measured[1]), 1.0)
