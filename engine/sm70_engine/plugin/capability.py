"""Which GPU this process will compute on, asked of NVML: that starts no CUDA context, which no fork could inherit."""

from __future__ import annotations

import ctypes
import os

VOLTA = (7, 0)


def device_capability() -> tuple[int, int] | None:
    """The compute capability of the first GPU that this process may use; None without a driver or a GPU."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    try:
        return _first(nvml)
    finally:
        nvml.nvmlShutdown()


def _first(nvml: ctypes.CDLL) -> tuple[int, int] | None:
    device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if wanted.startswith(("GPU-", "MIG-")):
        status = nvml.nvmlDeviceGetHandleByUUID(wanted.encode(), ctypes.byref(device))
    else:
        number = int(wanted) if wanted.isdigit() else 0
        status = nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device))
    if status or nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)):
        return None
    return major.value, minor.value


def serves(capability: tuple[int, int] | None, pretend: bool) -> bool:
    """Whether the SM70 platform is for this GPU: 7.0, and 8.x or 9.x where the user asks to pretend."""
    return capability == VOLTA or (pretend and capability is not None and capability[0] in (8, 9))
