"""The cache's key: the resolver's identity, completed by what only this installation and this machine know."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Mapping
from pathlib import Path

from sm70_engine.acceleration.device import nvml_device
from sm70_engine.acceleration.versions import version_of
from sm70_engine.plugin.settings import read_settings
from sm70_profiles.identity import CompileCacheIdentity, digest, driver_branch
from sm70_profiles.profile import EngineFlavour
from sm70_profiles.report import DeviceFacts

NO_GPU = "none"
PACKAGE = Path(__file__).parents[1]
SHAPING = ("attention", "kernels", "ops", "plugin", "quantization")


def complete(
    identity: CompileCacheIdentity,
    flavour: EngineFlavour,
    environment: Mapping[str, str],
    installed: Callable[[str], str | None] = version_of,
    device: Callable[[], DeviceFacts | None] = nvml_device,
) -> CompileCacheIdentity:
    """The identity of what this process will compile; what stays unknown is `missing` in it."""
    ours, vllm, torch = installed("sm70"), installed("vllm"), installed("torch")
    known = {
        "engine_build": f"sm70 {ours} {source_digest()}, vllm {vllm}" if ours and vllm else None,
        "torch": torch,
        "configuration": digest([identity.configuration, read_settings(environment).key()]),
    }
    if flavour is EngineFlavour.CPU:
        known |= {"cuda": NO_GPU, "driver_branch": NO_GPU, "gpu_product": cpu_product()}
    else:
        gpu = device()
        known["cuda"] = cuda_of(torch, installed)
        known["gpu_product"] = gpu.name if gpu is not None else None
        known["driver_branch"] = driver_branch(gpu.driver) if gpu is not None and gpu.driver else None
    return identity.model_copy(update=known)


def source_digest(package: Path = PACKAGE) -> str:
    """12 digits of our code that compiled code calls or is made by: builds of one version may differ in it."""
    found = hashlib.sha256()
    for part in SHAPING:
        for path in sorted((package / part).rglob("*.py")):
            found.update(path.relative_to(package).as_posix().encode())
            found.update(path.read_bytes())
    return found.hexdigest()[:12]


def cuda_of(torch: str | None, installed: Callable[[str], str | None]) -> str | None:
    """The CUDA version that torch was built with: its local version says it, or the runtime that came along."""
    local = (torch or "").partition("+")[2]
    if local.startswith("cu"):
        return local
    return installed("nvidia-cuda-runtime-cu12") or installed("nvidia-cuda-runtime")


def cpu_product(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The instruction set of this CPU: code that was compiled for a larger one does not run here."""
    flags = ""
    try:
        for line in cpuinfo.read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags = " ".join(sorted(line.partition(":")[2].split()))
                break
    except OSError:
        flags = "unknown"
    return f"cpu {platform.machine()} {hashlib.sha256(flags.encode()).hexdigest()[:12]}"
