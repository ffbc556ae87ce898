"""The CUDA driver API through ctypes: one library that every machine with a GPU has, and nothing to pin.

Kernels are loaded as libraries (`cuLibrary`, CUDA 12.0 and later), which belong to no context: one load serves the
primary context, which torch uses as well, and every part of the card.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from .errors import KernelError

COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR, MULTIPROCESSORS = 75, 76, 16
MAX_DYNAMIC_SHARED = 8


@functools.cache
def library() -> ctypes.CDLL:
    """The initialised driver. Raises `KernelError` on a machine without one, or without a GPU."""
    try:
        loaded = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise KernelError(f"no CUDA driver on this machine (libcuda.so.1): {error}") from error
    check("cuInit", loaded.cuInit(0), loaded)
    return loaded


def check(what: str, status: int, loaded: ctypes.CDLL | None = None) -> None:
    """Raises `KernelError` with the driver's own name for a status that is not success."""
    if status:
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        cuda = loaded or library()
        cuda.cuGetErrorName(status, ctypes.byref(name))
        cuda.cuGetErrorString(status, ctypes.byref(text))
        raise KernelError(f"{what}: {(name.value or b'?').decode()} ({(text.value or b'').decode()})")


def call(name: str, *arguments: Any) -> None:
    """Calls a driver function; raises `KernelError` unless it succeeds."""
    check(name, getattr(library(), name)(*arguments))


def handle() -> ctypes.c_void_p:
    """An empty handle for the driver to fill."""
    return ctypes.c_void_p()


def attribute(device: int, which: int) -> int:
    """A device attribute."""
    value = ctypes.c_int()
    call("cuDeviceGetAttribute", ctypes.byref(value), which, device)
    return value.value


def device_name(device: int) -> str:
    """The card's name."""
    text = ctypes.create_string_buffer(128)
    call("cuDeviceGetName", text, len(text), device)
    return text.value.decode()


def primary_context(ordinal: int) -> tuple[int, ctypes.c_void_p]:
    """The device number and its primary context, retained and current. torch works in the same one."""
    device, context = ctypes.c_int(), handle()
    call("cuDeviceGet", ctypes.byref(device), ordinal)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    return device.value, context
