"""From facts to findings: pure. Each says what must hold, what was found, what to do, and which page says more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from sm70_engine.doctor.facts import Facts, Gpu, Needs, Volume

GIB = 1 << 30
MIB = 1 << 20
SHM = "/dev/shm"  # noqa: S108  (the mount, not a file in it)
LEAST_SHARED_MEMORY = 1 * GIB
LEAST_LOCKED_MEMORY = 64 * MIB
LEAST_FREE = 1 * GIB
FREE_SHARE = 0.9
"""Of a GPU's memory; an idle V100 with a context has 97% free."""


class Severity(StrEnum):
    """How grave a finding is. The exit status follows the gravest."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"

    @property
    def exit_status(self) -> int:
        return {Severity.WARNING: 1, Severity.ERROR: 2}.get(self, 0)


class Reason(StrEnum):
    """The words of the service's status, each with a page under docs/runbooks."""

    DISK_FULL = "DiskFull"
    DRIVER_TOO_OLD = "DriverTooOld"
    ENGINE_UNSUPPORTED = "EngineUnsupported"
    GPU_MISMATCH = "GPUMismatch"
    MEMORY_NOT_RELEASED = "MemoryNotReleased"
    NCCL_FAILURE = "NCCLFailure"
    NO_KERNEL_IMAGE = "NoKernelImage"
    OUT_OF_MEMORY = "OutOfMemory"
    PATH_NOT_FOUND = "PathNotFound"
    PATH_UNREADABLE = "PathUnreadable"
    SHARED_MEMORY_TOO_SMALL = "SharedMemoryTooSmall"
    TOPOLOGY_UNSUITABLE = "TopologyUnsuitable"
    UNWRITABLE = "Unwritable"

    @property
    def runbook(self) -> str:
        return f"docs/runbooks/{self}.md"


@dataclass(frozen=True)
class Finding:
    """One line of the screen."""

    subject: str
    severity: Severity
    message: str
    reason: Reason | None = None
    remedy: str = ""


Found = Iterator[Finding]


def examine(facts: Facts, needs: Needs) -> list[Finding]:
    """Every finding, the gravest first; subjects keep their order otherwise."""
    found = [finding for look in LOOKS for finding in look(facts, needs)]
    return sorted(found, key=lambda finding: -list(Severity).index(finding.severity))


def gravest(findings: list[Finding]) -> Severity:
    return max((finding.severity for finding in findings), key=list(Severity).index, default=Severity.OK)


def _ok(subject: str, message: str) -> Finding:
    return Finding(subject, Severity.OK, message)


def _note(subject: str, message: str) -> Finding:
    return Finding(subject, Severity.NOTE, message)


def _warning(subject: str, reason: Reason, message: str, remedy: str) -> Finding:
    return Finding(subject, Severity.WARNING, message, reason, remedy)


def _error(subject: str, reason: Reason, message: str, remedy: str) -> Finding:
    return Finding(subject, Severity.ERROR, message, reason, remedy)


def _driver(facts: Facts, needs: Needs) -> Found:
    driver, engine = facts.driver, facts.engine
    if driver.version is None:
        if not needs.gpu_engine:
            yield _note("driver", f"no NVIDIA driver here ({driver.problem}); the CPU engine needs none")
            return
        yield _error(
            "driver",
            Reason.DRIVER_TOO_OLD,
            f"a driver must answer; found none: {driver.problem}",
            "In a pod: ask for GPUs and use the nvidia runtime class. On a host: install the driver (branch 580 is the "
            "last one with Volta).",
        )
        return
    cuda = f", CUDA {driver.cuda[0]}.{driver.cuda[1]}" if driver.cuda else ""
    needed = engine.torch_cuda if engine else None
    if driver.cuda is None or needed is None or driver.cuda >= needed:
        yield _ok("driver", f"{driver.version}{cuda}")
        return
    words = f"torch is built for CUDA {needed[0]}.{needed[1]}; the driver {driver.version} runs {cuda[7:]}"
    if driver.cuda[0] < needed[0]:
        yield _error("driver", Reason.DRIVER_TOO_OLD, words, "Install a newer driver, at most of branch 580.")
    else:
        yield _warning(
            "driver",
            Reason.DRIVER_TOO_OLD,
            f"{words}: compiled code runs, PTX is not compiled",
            "Install a newer driver, at most of branch 580.",
        )


def _gpus(facts: Facts, needs: Needs) -> Found:
    gpus = facts.driver.gpus
    if not gpus:
        if facts.driver.version is not None and needs.gpu_engine:
            yield _error(
                "GPUs",
                Reason.GPU_MISMATCH,
                "a GPU must be visible; found none",
                "In a pod: ask for `nvidia.com/gpu`. A driver newer than branch 580 does not see a V100.",
            )
        elif not needs.gpu_engine:
            yield _note("GPUs", "no GPU here; the CPU engine needs none")
        return
    if needs.count is not None and len(gpus) < needs.count:
        yield _error(
            "GPUs",
            Reason.GPU_MISMATCH,
            f"{needs.profile} needs {needs.count} GPUs; {len(gpus)} are visible",
            "Set `gpus.count`, or tensor and pipeline parallel sizes that fit.",
        )
    else:
        yield _ok("GPUs", ", ".join(f"{gpu.index} {gpu.name} {_size(gpu.memory_total)}" for gpu in gpus))
    for gpu in gpus:
        yield from _fitness(gpu, needs)


def _fitness(gpu: Gpu, needs: Needs) -> Found:
    subject = f"GPU {gpu.index}"
    if needs.gpu_engine and gpu.capability != needs.capability:
        found = f"compute capability {_version(gpu.capability)} ({gpu.name})"
        if needs.pretend and gpu.capability[0] in (8, 9):
            yield _note(subject, f"{found} stands in for a V100 (SM70_PRETEND)")
        else:
            yield _error(
                subject,
                Reason.GPU_MISMATCH,
                f"it must have compute capability {_version(needs.capability)}; found {found}",
                "Select nodes with the profile's products (`gpus.products`), or another profile.",
            )
    elif needs.products and gpu.name.replace(" ", "-") not in needs.products:
        yield _warning(
            subject,
            Reason.GPU_MISMATCH,
            f"{needs.profile} is for {', '.join(needs.products)}; found {gpu.name}",
            "Its figures and memory plan may not hold here.",
        )
    if needs.min_memory is not None and gpu.memory_total < needs.min_memory:
        yield _error(
            subject,
            Reason.GPU_MISMATCH,
            f"{needs.profile} needs {_size(needs.min_memory)}; it has {_size(gpu.memory_total)}",
            "Use GPUs with more memory, or another profile.",
        )
    if gpu.memory_free < FREE_SHARE * gpu.memory_total:
        by = "" if gpu.processes is None else f" ({gpu.processes} processes compute on it)"
        yield _warning(
            subject,
            Reason.MEMORY_NOT_RELEASED,
            f"{_size(gpu.memory_free)} of {_size(gpu.memory_total)} are free{by}",
            "If no server runs here, end what holds the memory (`nvidia-smi`).",
        )


def _topology(facts: Facts, needs: Needs) -> Found:
    gpus = facts.driver.gpus
    if len(gpus) < 2 or not needs.gpu_engine:
        return
    everybody = {gpu.index for gpu in gpus}
    known = [gpu for gpu in gpus if gpu.peers is not None]
    alone = [
        f"{gpu.index} without {', '.join(map(str, sorted(everybody - {gpu.index} - set(gpu.peers or ()))))}"
        for gpu in known
        if not everybody - {gpu.index} <= set(gpu.peers or ())
    ]
    unlinked = [str(gpu.index) for gpu in gpus if gpu.nvlinks == 0]
    if unlinked and needs.linked:
        yield _error(
            "topology",
            Reason.TOPOLOGY_UNSUITABLE,
            f"{needs.profile} needs NVLink between its GPUs; GPU {', '.join(unlinked)} has no active link",
            "Use a machine with NVLink, or set `gpus.interconnect: Any` and accept slower collectives.",
        )
    elif alone:
        yield _warning(
            "topology",
            Reason.TOPOLOGY_UNSUITABLE,
            f"GPUs must read each other's memory; GPU {'; GPU '.join(alone)}",
            "Collectives go through host memory: see `nvidia-smi topo -p2p r`, ACS and IOMMU settings.",
        )
    elif known:
        links = "" if any(gpu.nvlinks is None for gpu in gpus) else f", {sum(gpu.nvlinks or 0 for gpu in gpus)} NVLinks"
        yield _ok("topology", f"{len(gpus)} GPUs read each other's memory{links}")
    else:
        yield _note("topology", "how the GPUs reach each other is not known")


def _shared_memory(facts: Facts, needs: Needs) -> Found:
    total = facts.host.shm_total
    if total is None:
        yield _error(
            SHM,
            Reason.SHARED_MEMORY_TOO_SMALL,
            "shared memory must be mounted at /dev/shm; found none",
            "Mount an emptyDir with `medium: Memory` there; the operator does (`pod.sharedMemory`).",
        )
    elif needs.shared_memory is not None and total < needs.shared_memory:
        yield _error(
            SHM,
            Reason.SHARED_MEMORY_TOO_SMALL,
            f"{needs.profile} needs {_size(needs.shared_memory)}; it has {_size(total)}",
            "Raise `pod.sharedMemory`, or `--shm-size` of docker.",
        )
    elif needs.shared_memory is None and total < LEAST_SHARED_MEMORY:
        yield _warning(
            SHM,
            Reason.SHARED_MEMORY_TOO_SMALL,
            f"it has {_size(total)}; several workers need {_size(LEAST_SHARED_MEMORY)} or more",
            "Raise `pod.sharedMemory`, or `--shm-size` of docker.",
        )
    else:
        yield _ok(SHM, f"{_size(total)}, {_size(facts.host.shm_free or 0)} free")


def _limits(facts: Facts, needs: Needs) -> Found:
    host = facts.host
    if host.memlock is not None and host.memlock < LEAST_LOCKED_MEMORY and needs.gpu_engine:
        several = len(facts.driver.gpus) > 1
        words = (
            f"{_size(host.memlock)} may be locked; pinned buffers and NCCL want {_size(LEAST_LOCKED_MEMORY)} or more"
        )
        remedy = "Raise the limit of the container runtime (`LimitMEMLOCK`), or `ulimit -l`."
        if several:
            yield _warning("locked memory", Reason.NCCL_FAILURE, words, remedy)
        else:
            yield _note("locked memory", f"{words}. {remedy}")
    else:
        yield _ok("locked memory", "unlimited" if host.memlock is None else _size(host.memlock))
    if needs.memory is not None and host.memory_limit is not None and host.memory_limit < needs.memory:
        yield _warning(
            "memory",
            Reason.OUT_OF_MEMORY,
            f"{needs.profile} asks for a limit of {_size(needs.memory)}; the container has {_size(host.memory_limit)}",
            "Raise `pod.resources.limits.memory`.",
        )


def _volumes(facts: Facts, _needs: Needs) -> Found:
    for volume in facts.volumes:
        yield from _volume(volume, facts.host.user)


def _volume(volume: Volume, user: int) -> Found:
    subject, path = volume.role, f"`{volume.path}`"
    if volume.must_write:
        # A cache that cannot be used costs time, never service.
        if not volume.writable:
            yield _warning(
                subject,
                Reason.UNWRITABLE,
                f"user {user} must be able to write to {path}",
                "Set the pod's `fsGroup`, or mount the claim read-write: without it every start compiles again.",
            )
        elif volume.free_bytes is not None and volume.free_bytes < LEAST_FREE:
            yield _warning(
                subject, Reason.DISK_FULL, f"{path} has {_size(volume.free_bytes)} free", "Enlarge or empty the volume."
            )
        else:
            yield _ok(subject, f"{path} is writable, {_size(volume.free_bytes or 0)} free")
    elif not volume.exists:
        yield _error(
            subject, Reason.PATH_NOT_FOUND, f"{path} must exist", "Check the claim and the path inside the volume."
        )
    elif not volume.readable or volume.unreadable:
        files = f"; not readable: {', '.join(volume.unreadable)}" if volume.unreadable else ""
        yield _error(
            subject,
            Reason.PATH_UNREADABLE,
            f"user {user} must be able to read {path}{files}",
            "Make files 0644 and folders 0755, or set the pod's `fsGroup`.",
        )
    else:
        yield _ok(subject, f"{path} is readable")


def _torch(facts: Facts, needs: Needs) -> Found:
    engine = facts.engine
    if engine is None:
        yield _note("torch", "not looked at")
        return
    if engine.torch is None:
        yield _error(
            "torch",
            Reason.ENGINE_UNSUPPORTED,
            f"torch must be installed; {engine.problem or 'it is not'}",
            "Use the engine image of the profile's flavour.",
        )
        return
    if not needs.gpu_engine:
        yield _ok("torch", engine.torch)
        return
    built = ", ".join(engine.architectures or ()) or "no GPU"
    wanted = f"sm_{needs.capability[0]}{needs.capability[1]}"
    if engine.torch_cuda is None:
        yield _error(
            "torch",
            Reason.ENGINE_UNSUPPORTED,
            f"torch must be built for CUDA; {engine.torch} is for the CPU only",
            "Use the engine image of the profile's flavour.",
        )
    elif wanted not in (engine.architectures or ()) and not needs.pretend:
        yield _error(
            "torch",
            Reason.NO_KERNEL_IMAGE,
            f"torch must hold code for {wanted}; {engine.torch} is built for {built}",
            "Use torch 2.10 for CUDA 12.8, as the engine image does: 2.11 has no code for Volta.",
        )
    else:
        yield _ok("torch", f"{engine.torch}, for {built}")


def _vllm(facts: Facts, _needs: Needs) -> Found:
    engine = facts.engine
    if engine is None or engine.torch is None:
        return
    if engine.vllm is None:
        yield _error(
            "vLLM",
            Reason.ENGINE_UNSUPPORTED,
            f"vLLM must be installed; {engine.problem or 'it is not'}",
            "Use the engine image of the profile's flavour.",
        )
    elif engine.missing_hooks is None:
        yield _warning(
            "vLLM",
            Reason.ENGINE_UNSUPPORTED,
            f"the hooks of vLLM {engine.vllm} could not be looked at: {engine.problem or 'unknown'}",
            "Start `sm70-serve` once: it names what is missing.",
        )
    elif engine.missing_hooks:
        yield _error(
            "vLLM",
            Reason.ENGINE_UNSUPPORTED,
            f"vLLM {engine.vllm} must have every hook; it lacks {', '.join(engine.missing_hooks[:6])}",
            "Use the vLLM that the engine was made for.",
        )
    else:
        yield _ok("vLLM", f"{engine.vllm}, every hook is there")


def _kernels(facts: Facts, needs: Needs) -> Found:
    if not needs.gpu_engine:
        return
    kernels = facts.kernels
    broken = {family: why for family, why in kernels.families.items() if why is not None}
    if kernels.problem is not None:
        yield _error(
            "kernels",
            Reason.NO_KERNEL_IMAGE,
            f"kernel objects must be in `{kernels.folder}`: {kernels.problem}",
            "Use the engine image, or build them: `sm70-kernels build --output FOLDER`.",
        )
    elif broken:
        first = next(iter(broken.items()))
        yield _error(
            "kernels",
            Reason.NO_KERNEL_IMAGE,
            f"{len(broken)} of {len(kernels.families)} families do not load; {first[0]}: {first[1]}",
            "A V100 loads the cubin, a newer GPU needs a driver of CUDA 12.8 or newer for the PTX.",
        )
    elif kernels.families:
        yield _ok("kernels", f"{len(kernels.families)} families load")
    else:
        yield _note("kernels", f"built in `{kernels.folder}`; without a GPU they cannot be loaded")


LOOKS: tuple[Callable[[Facts, Needs], Found], ...] = (
    _driver,
    _gpus,
    _topology,
    _torch,
    _vllm,
    _kernels,
    _shared_memory,
    _limits,
    _volumes,
)


def _size(amount: int) -> str:
    return f"{amount / GIB:.1f} GiB" if amount >= GIB else f"{amount / MIB:.0f} MiB"


def _version(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
