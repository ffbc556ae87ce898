"""The devices that a server holds: by NVML where a GPU computes, else as the environment says."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from sm70_profiles.facts import GpuFacts, Interconnect
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


@cache
def nvml_device() -> DeviceFacts | None:
    """The GPUs that this process may use, as NVML sees them; None without NVML or without a GPU.

    Asked once a process: neither driver nor devices change under it.
    """
    nvml = _nvml()
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        return nvml_facts(nvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def nvml_facts(nvml: Any, visible: str | None) -> DeviceFacts | None:
    """The facts by an NVML that is initialised. visible: CUDA's list of indices or uuids; None is all."""
    handles = _visible(nvml, visible)
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
        nvlink=_meshed(nvml, handles),
    )


def gpu_facts(device: DeviceFacts, pretend: bool) -> GpuFacts | None:
    """The device as the rules want it; None where no GPU computes.

    pretend: the server was told to take this GPU for one of compute capability 7.0, so its own is not held against it.
    """
    if device.compute_capability is None:
        return None
    mesh = {True: Interconnect.NVLINK_MESH, False: Interconnect.ANY, None: None}[device.nvlink]
    return GpuFacts(
        product=re.sub(r"[^A-Za-z0-9._-]+", "-", device.name).strip("-") or None,
        count=device.count,
        memory_mib=device.memory_bytes >> 20 if device.memory_bytes else None,
        compute_capability=None if pretend else device.compute_capability,
        interconnect=mesh,
        driver=device.driver,
    )


def _nvml() -> Any:
    """NVML's binding: the usual package, or the copy that vLLM brings, by its file, since vLLM takes long to import."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        pass
    vllm = importlib.util.find_spec("vllm")
    for place in (vllm.submodule_search_locations or ()) if vllm is not None else ():
        file = Path(place) / "third_party/pynvml.py"
        spec = importlib.util.spec_from_file_location("sm70_engine_pynvml", file)
        if file.is_file() and spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    return None


def _visible(nvml: Any, visible: str | None) -> list[Any]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    if visible is None:
        return handles
    chosen = []
    for word in (word.strip() for word in visible.split(",")):
        if word.isdigit() and int(word) < len(handles):
            chosen.append(handles[int(word)])
        elif UUID.match(word):
            chosen += [handle for handle in handles if _text(nvml.nvmlDeviceGetUUID(handle)).startswith(word)][:1]
        else:
            break  # as CUDA does: what follows a wrong word is not seen
    return chosen


def _meshed(nvml: Any, handles: list[Any]) -> bool | None:
    """Whether each pair of GPUs reaches the other over NVLink; None for a single one, or where NVML cannot say."""
    if len(handles) < 2:
        return None
    try:
        status = [
            nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            for one, other in combinations(handles, 2)
        ]
    except (nvml.NVMLError, AttributeError):
        return None
    return all(value == nvml.NVML_P2P_STATUS_OK for value in status)


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
