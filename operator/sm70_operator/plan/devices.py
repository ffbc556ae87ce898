"""GPUs that are pinned and GPUs that are there: who wants the same one, and whether what runs is what was asked for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from sm70_operator.api.conditions import Reason
from sm70_operator.render.revision import MEMORY_TOLERANCE_PERCENT
from sm70_profiles.base import printable, quantity_bytes
from sm70_profiles.facts import Interconnect
from sm70_profiles.profile import Hardware
from sm70_profiles.report import DeviceFacts
from sm70_profiles.resolver import ResolvedGpus

MAX_NAMED = 6


def pinning_conflicts(pinned: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """What to tell each service that pins a GPU which another one pins too.

    pinned: the uuids of every service that wants any pod at all, by `namespace/name`. A uuid in two lists is a conflict
    of both, whoever came first: which of them gets the GPU is chance.
    """
    wanted: dict[str, list[str]] = {}
    for service in sorted(pinned):
        for uuid in dict.fromkeys(pinned[service]):
            wanted.setdefault(uuid, []).append(service)
    told: dict[str, list[str]] = {}
    for uuid, services in sorted(wanted.items()):
        for service in services if len(services) > 1 else ():
            others = ", ".join(f"`{other}`" for other in services if other != service)
            told.setdefault(service, []).append(f"GPU `{uuid}` is named by `{service}` and by {others}")
    return {service: _sentence(texts) for service, texts in told.items()}


def _sentence(texts: Sequence[str]) -> str:
    more = [f"{len(texts) - MAX_NAMED} more GPUs are"] if len(texts) > MAX_NAMED else []
    return f"{'; '.join([*texts[:MAX_NAMED], *more])}."


def device_problem(device: DeviceFacts, gpus: ResolvedGpus, hardware: Hardware | None) -> tuple[Reason, str] | None:
    """What is wrong with the GPUs of a running server, by its own word; None if nothing is, or nothing is known.

    A server that computes on no GPU (the CPU lane) says nothing about GPUs, so nothing can be wrong with them.
    """
    if gpus.count == 0 or (device.compute_capability is None and device.driver is None):
        return None
    name = printable(device.name, 128)
    if gpus.products and name.replace(" ", "-") not in gpus.products:
        wanted = " or ".join(f"`{product}`" for product in gpus.products)
        return Reason.GPU_MISMATCH, f"GPU `{name}`, where {wanted} is asked for."
    if device.count != gpus.count:
        return Reason.GPU_MISMATCH, f"{device.count} GPUs, where {gpus.count} are asked for."
    if (why := _capability(device, hardware)) is not None:
        return Reason.GPU_MISMATCH, why
    if gpus.min_memory is not None and device.memory_bytes is not None:
        needed = quantity_bytes(gpus.min_memory) * MEMORY_TOLERANCE_PERCENT // 100
        if device.memory_bytes < needed:
            found = f"{device.memory_bytes >> 20} MiB of memory"
            return Reason.GPU_MISMATCH, f"{found} on `{name}`, where at least {gpus.min_memory} is asked for."
    linked = gpus.interconnect in (Interconnect.NVLINK, Interconnect.NVLINK_MESH)
    if linked and gpus.count > 1 and device.nvlink is False:
        return Reason.TOPOLOGY_UNSUITABLE, f"no NVLink between its GPUs, where `{gpus.interconnect}` is asked for."
    return None


def _capability(device: DeviceFacts, hardware: Hardware | None) -> str | None:
    found = _numbers(device.compute_capability)
    if hardware is None or found is None:
        return None
    least, exact = _numbers(hardware.min_compute_capability), _numbers(hardware.compute_capability)
    if least is not None:
        wanted = f"at least {hardware.min_compute_capability}" if found < least else ""
    else:
        wanted = str(hardware.compute_capability) if exact is not None and found != exact else ""
    if not wanted:
        return None
    shown = f"{found[0]}.{found[1]}"
    return f"compute capability {shown}, where the profile's kernels are for {wanted}."


def _numbers(text: str | None) -> tuple[int, int] | None:
    match = re.fullmatch(r"(\d{1,2})\.(\d{1,2})", text or "")
    return (int(match[1]), int(match[2])) if match else None
