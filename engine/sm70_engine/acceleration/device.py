"""The devices that a server holds: by NVML where a GPU computes, else as the environment says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sm70_profiles.report import DeviceFacts, UuidSource

UUID = re.compile(r"^(GPU|MIG)-[0-9A-Za-z-]{1,100}$")
MAX_DEVICES = 64


def environment_uuids(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The uuids in `NVIDIA_VISIBLE_DEVICES`; indices and the words all, none and void name no device."""
    listed = environment.get("NVIDIA_VISIBLE_DEVICES", "").split(",")
    return tuple(entry for entry in (item.strip() for item in listed) if UUID.match(entry))[:MAX_DEVICES]


def cpu_device(environment: Mapping[str, str]) -> DeviceFacts:
    """The CPU lane: it computes on the CPU, and holds the GPUs that were allotted to it without touching them."""
    uuids = environment_uuids(environment)
    return DeviceFacts(
        name="CPU", count=len(uuids), uuids=uuids, uuid_source=UuidSource.ENVIRONMENT if uuids else UuidSource.NONE
    )


def nvml_device() -> DeviceFacts | None:
    """The GPUs as NVML sees them; None without NVML or without a GPU."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return _nvml_facts(pynvml)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _nvml_facts(nvml: Any) -> DeviceFacts | None:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    if not handles:
        return None
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handles[0])
    return DeviceFacts(
        name=_text(nvml.nvmlDeviceGetName(handles[0])),
        compute_capability=f"{major}.{minor}",
        count=len(handles),
        memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handles[0]).total,
        driver=_text(nvml.nvmlSystemGetDriverVersion()),
        uuids=tuple(_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles[:MAX_DEVICES]),
        uuid_source=UuidSource.NVML,
    )


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
