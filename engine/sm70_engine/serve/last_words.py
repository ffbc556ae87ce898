"""The termination message: where it goes, and what an unexplained end of vLLM is called."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path

from sm70_engine.serve.failure import ServeError
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.report import RouteCount, printable
from sm70_profiles.termination import Termination, TerminationKind

TERMINATION_ENVIRONMENT = "SM70_TERMINATION_LOG"
KUBERNETES_DEFAULT = Path("/dev/termination-log")
TAIL_LINES = 400
"""How much of the server's log is looked at for the cause of its end."""

CAUSES: tuple[tuple[TerminationReason, re.Pattern[str], str], ...] = (
    (
        TerminationReason.ENGINE_UNSUPPORTED,
        re.compile(r"MissingHookError: (.*)"),
        "Use the engine image that belongs to the profile's flavour.",
    ),
    (
        TerminationReason.DRIVER_TOO_OLD,
        re.compile(
            r"driver version is insufficient|NVIDIA driver on your system is too old|cudaErrorInsufficientDriver"
            r"|forward compatibility was attempted|CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
        ),
        "Update the node's driver to the branch that the engine image's CUDA needs.",
    ),
    (
        TerminationReason.NO_KERNEL_IMAGE,
        re.compile(
            r"no kernel image is available|cudaErrorNoKernelImageForDevice|CUDA_ERROR_NO_BINARY_FOR_GPU"
            r"|is not compatible with the current PyTorch installation"
        ),
        "Use the engine image that is built for this GPU's architecture.",
    ),
    (
        TerminationReason.GPU_OUT_OF_MEMORY,
        re.compile(
            r"CUDA out of memory|torch\.(cuda\.)?OutOfMemoryError|CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY"
            r"|cudaErrorMemoryAllocation|No available memory for the cache blocks"
            r"|less than desired GPU memory utilization|KV cache is needed, which is larger than the available KV cache"
        ),
        "Lower `kvCacheMemoryBytes`, `gpuMemoryUtilizationPercent`, `maxNumSeqs` or `maxModelLen`.",
    ),
    (
        TerminationReason.NCCL_FAILURE,
        re.compile(r"NCCL error|nccl(System|Internal|UnhandledCuda|Remote|InvalidUsage)\w*Error|DistBackendError"),
        "Check that all ranks' GPUs are healthy and reach each other (`nvidia-smi topo -m`), and `pod.sharedMemory`.",
    ),
    (
        TerminationReason.OUT_OF_MEMORY,
        re.compile(r"can't allocate memory|Cannot allocate memory|MemoryError|bad_alloc"),
        "Raise the memory limit, or lower `kvCacheMemoryBytes`, `maxNumSeqs` or `maxModelLen`.",
    ),
    (
        TerminationReason.SHARED_MEMORY,
        re.compile(r"No space left on device.*/dev/shm|/dev/shm.*No space left on device|Bus error"),
        "Raise `pod.sharedMemory`.",
    ),
    (
        TerminationReason.PATH_UNREADABLE,
        re.compile(r"PermissionError: .*"),
        "Make files mode 0644 and folders 0755, or set the pod's `fsGroup`.",
    ),
    (
        TerminationReason.MODEL_INVALID,
        re.compile(r"SafetensorError|are not supported for now|not recognize this architecture|AutoWeightsLoader"),
        "Check the checkpoint's files and that the profile is for its architecture.",
    ),
)
ERROR_LINE = re.compile(r"\b(\w+(?:Error|Exception)): .+")
ENGINE_GONE = re.compile(r"EngineDeadError|EngineCore .*(?:died|failed)|Engine core (?:proc|initialization)")


def termination_file(environment: Mapping[str, str]) -> Path | None:
    """Where the message goes: $SM70_TERMINATION_LOG, else where Kubernetes looks, else nowhere."""
    if named := environment.get(TERMINATION_ENVIRONMENT):
        return Path(named)
    return KUBERNETES_DEFAULT if os.access(KUBERNETES_DEFAULT, os.W_OK) else None


def write_termination(path: Path | None, termination: Termination) -> None:
    """Writes the message; a file that cannot be written is said on the log, and changes nothing else."""
    if path is None:
        return
    try:
        path.write_bytes(termination.encode())  # in place: Kubernetes has mounted this very file
    except OSError as error:
        print(f"sm70-serve: the termination message cannot be written: {error}", flush=True)


def failure(error: ServeError, routes: Iterable[RouteCount] = ()) -> Termination:
    """The message of an explained failure."""
    return Termination(
        kind=TerminationKind.FAILURE,
        reason=error.reason,
        message=printable(error.message, 1500),
        remedy=printable(error.remedy, 500),
        routes=_executed(routes),
    )


def shutdown(message: str, routes: Iterable[RouteCount]) -> Termination:
    """The message of a shutdown that was asked for."""
    return Termination(
        kind=TerminationKind.SHUTDOWN, reason=TerminationReason.SHUTDOWN, message=message, routes=_executed(routes)
    )


def _executed(routes: Iterable[RouteCount]) -> tuple[RouteCount, ...]:
    return tuple(row for row in routes if row.dispatches or row.captures)[:256]


def classify(status: int, log: Iterable[str], oom_kills: int) -> ServeError:
    """Why a server ended that nobody asked to end.

    status: of the process, negative for a signal. log: its last lines. oom_kills: how many processes of the container
    the kernel killed for memory while the server ran.
    """
    lines = [printable(line, 400) for line in log][-TAIL_LINES:]
    ended = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    last = next((match[0] for line in reversed(lines) if (match := ERROR_LINE.search(line))), "")
    if oom_kills:
        remedy = next(remedy for reason, _, remedy in CAUSES if reason is TerminationReason.OUT_OF_MEMORY)
        return ServeError(TerminationReason.OUT_OF_MEMORY, f"the kernel killed the engine for memory ({ended})", remedy)
    for reason, pattern, remedy in CAUSES:
        found = next((line for line in lines if pattern.search(line)), None)
        if found is not None:
            return ServeError(reason, f"the engine ended ({ended}): {found.strip()}", remedy)
    if any(ENGINE_GONE.search(line) for line in lines):
        return ServeError(
            TerminationReason.ENGINE_DIED,
            f"the engine process died and the server ended ({ended}): {last or 'it left no message'}",
            "Read the log above the first error.",
        )
    return ServeError(TerminationReason.UNKNOWN, f"the server ended ({ended}): {last or 'it left no message'}")


def oom_kills(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Processes of this container that the kernel has killed for memory so far; 0 where it does not say."""
    for path in (cgroup / "memory.events", cgroup / "memory" / "memory.oom_control"):
        try:
            match = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        if match:
            return int(match[1])
    return 0
