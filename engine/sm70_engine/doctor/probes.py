"""Looks at the machine: NVML, limits, folders, and torch, vLLM and kernels in a process of their own.

Nothing here judges. What cannot be looked at becomes a problem in the facts, never an exception.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sm70_engine.acceleration.versions import version_of
from sm70_engine.doctor.facts import Driver, Engine, Facts, Gpu, Host, KernelObjects, Volume
from sm70_profiles.base import printable

INSIDE_SECONDS = 240
MAX_INSIDE_BYTES = 1 << 20
FILES_LOOKED_AT = 2000


def gather(
    *,
    model: Path | None,
    draft: Path | None,
    cache: Path,
    look_inside: bool,
    flavour: str,
    nvml: Callable[[], Any] | None = None,
    inside: Callable[[str], Mapping[str, Any]] | None = None,
) -> Facts:
    """Everything. `nvml` gives the NVML binding (raises ImportError), `inside` what torch and vLLM say."""
    driver = read_driver(nvml or load_nvml)
    engine, kernels = None, KernelObjects("", problem="not looked at")
    if look_inside:
        engine, kernels = read_inside((inside or run_inside)(flavour))
    volumes = [read_volume("model", model)] if model else []
    volumes += [read_volume("draft", draft)] if draft else []
    volumes.append(read_volume("compile cache", cache, must_write=True))
    return Facts(driver, engine, kernels, read_host(), tuple(volumes))


def load_nvml() -> Any:
    """NVML's binding: the package, else the copy that vLLM ships. Raises ImportError."""
    try:
        import pynvml

        return pynvml
    except ImportError:
        found = importlib.util.find_spec("vllm")  # does not import it
    for folder in (found.submodule_search_locations or ()) if found else ():
        file = Path(folder) / "third_party/pynvml.py"
        spec = importlib.util.spec_from_file_location("sm70_pynvml", file) if file.is_file() else None
        if spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # it looks itself up there
            spec.loader.exec_module(module)
            return module
    raise ImportError("neither pynvml nor vLLM is installed", name="pynvml")


def read_driver(load: Callable[[], Any]) -> Driver:
    """Driver and GPUs by NVML."""
    try:
        nvml = load()
    except ImportError as error:
        return Driver(problem=str(error))
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Driver(problem=printable(str(error), 120))
    try:
        version = _text(nvml.nvmlSystemGetDriverVersion())
        number = _optional(nvml, nvml.nvmlSystemGetCudaDriverVersion)
        cuda = (number // 1000, number % 1000 // 10) if number else None
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        gpus = tuple(_gpu(nvml, index, handle, handles) for index, handle in enumerate(handles))
        return Driver(version, cuda, gpus)
    except nvml.NVMLError as error:
        return Driver(problem=printable(str(error), 120))
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int, handle: Any, handles: list[Any]) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    processes = _optional(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return Gpu(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        memory_total=int(memory.total),
        memory_free=int(memory.free),
        processes=None if processes is None else len(processes),
        nvlinks=_links(nvml, handle),
        peers=_peers(nvml, index, handles),
    )


def _links(nvml: Any, handle: Any) -> int | None:
    active = known = 0
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        state = _optional(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is not None:
            known += 1
            active += bool(state)
    return active if known else None


def _peers(nvml: Any, index: int, handles: list[Any]) -> tuple[int, ...] | None:
    which = getattr(nvml, "NVML_P2P_CAPS_INDEX_READ", 0)
    found: list[int] = []
    for other, handle in enumerate(handles):
        if other == index:
            continue
        status = _optional(nvml, nvml.nvmlDeviceGetP2PStatus, handles[index], handle, which)
        if status is None:
            return None
        if status == 0:
            found.append(other)
    return tuple(found)


def _optional(nvml: Any, ask: Callable[..., Any], *arguments: Any) -> Any:
    """What not every driver or card answers."""
    try:
        return ask(*arguments)
    except nvml.NVMLError:
        return None


def read_host() -> Host:
    """Limits of this process."""
    shm = None
    if os.path.ismount("/dev/shm"):  # noqa: S108
        shm = shutil.disk_usage("/dev/shm")  # noqa: S108
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Host(
        shm_total=shm.total if shm else None,
        shm_free=shm.free if shm else None,
        memlock=None if soft == resource.RLIM_INFINITY else soft,
        memory_limit=_memory_limit(),
        user=os.geteuid(),
    )


def _memory_limit() -> int | None:
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text().strip()
        except OSError:
            continue
        # "max", and a number near 2^63 in version 1, mean none.
        return int(text) if text.isdecimal() and int(text) < 1 << 60 else None
    return None


def read_volume(role: str, path: Path, *, must_write: bool = False) -> Volume:
    """Whether a folder's files may be read, or it be written to. A folder that is to be made counts by its parent."""
    place = path
    if must_write:
        while not place.exists() and place != place.parent:
            place = place.parent
    exists = path.is_dir()
    readable = exists and os.access(path, os.R_OK | os.X_OK)
    unreadable: list[str] = []
    if readable and not must_write:
        for number, file in enumerate(path.rglob("*")):
            if number >= FILES_LOOKED_AT or len(unreadable) >= 3:
                break
            needed = os.R_OK | os.X_OK if file.is_dir() else os.R_OK
            if not os.access(file, needed):
                unreadable.append(printable(str(file.relative_to(path)), 80))
    try:
        free = shutil.disk_usage(place).free
    except OSError:
        free = None
    writable = os.access(place, os.W_OK | os.X_OK)
    return Volume(role, str(path), exists, readable, tuple(unreadable), writable, free, must_write)


def run_inside(flavour: str) -> Mapping[str, Any]:
    """What `sm70_engine.doctor.inside` prints; a problem when it dies, hangs or prints something else."""
    command = [sys.executable, "-m", "sm70_engine.doctor.inside", flavour]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSIDE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"problem": f"importing torch and vLLM took more than {INSIDE_SECONDS} s"}
    last = done.stdout[-MAX_INSIDE_BYTES:].strip().rpartition("\n")[2]
    try:
        found = json.loads(last)
    except ValueError:
        found = None
    if isinstance(found, dict):
        return found
    said = done.stderr.strip().rpartition("\n")[2]
    return {"problem": printable(f"the process that imports them ended with {done.returncode}: {said}", 300)}


def read_inside(found: Mapping[str, Any]) -> tuple[Engine, KernelObjects]:
    """The parts of what `inside` found."""
    architectures, hooks = found.get("architectures"), found.get("missing_hooks")
    engine = Engine(
        torch=found.get("torch"),
        torch_cuda=_cuda(found.get("torch_cuda")),
        architectures=None if architectures is None else tuple(architectures),
        vllm=found.get("vllm"),
        missing_hooks=None if hooks is None else tuple(hooks),
        problem=found.get("problem"),
    )
    kernels = found.get("kernels") or {}
    objects = KernelObjects(
        folder=str(kernels.get("folder", "")),
        problem=kernels.get("problem") if kernels else found.get("problem", "not looked at"),
        families=dict(kernels.get("families") or {}),
    )
    return engine, objects


def _cuda(version: str | None) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(match[1]), int(match[2])) if match else None


def _text(value: str | bytes) -> str:
    return printable(value.decode(errors="replace") if isinstance(value, bytes) else value, 120)


def installed_vllm() -> str | None:
    """The installed vLLM's version, without importing it; None without one."""
    return version_of("vllm")
