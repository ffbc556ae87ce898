"""What the doctor looks at, as plain values: findings are made of these alone, so each can be tested without a GPU.

None is "not known", with the reason beside it where there is one.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Gpu:
    """One GPU that this process sees. Bytes."""

    index: int
    name: str
    uuid: str
    capability: tuple[int, int]
    memory_total: int
    memory_free: int
    processes: int | None = None
    """Processes that compute on it, of any container."""
    nvlinks: int | None = None
    """Active links."""
    peers: tuple[int, ...] | None = None
    """Indices of the GPUs whose memory it reads directly."""


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver as NVML sees it."""

    version: str | None = None
    cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver runs."""
    gpus: tuple[Gpu, ...] = ()
    problem: str | None = None


@dataclass(frozen=True)
class Engine:
    """The installed torch and vLLM, looked at in a process of their own, so that a broken one breaks nothing else."""

    torch: str | None = None
    torch_cuda: tuple[int, int] | None = None
    architectures: tuple[str, ...] | None = None
    vllm: str | None = None
    missing_hooks: tuple[str, ...] | None = None
    problem: str | None = None


@dataclass(frozen=True)
class KernelObjects:
    """Our own built kernels."""

    folder: str
    problem: str | None = None
    """Why there are none, or none of this package's sources."""
    families: dict[str, str | None] = field(default_factory=dict)
    """By family: None when it loads, else why not. Empty where nothing could be tried."""


@dataclass(frozen=True)
class Volume:
    """A folder that a server reads or writes."""

    role: str
    """`model`, `draft` or `compile cache`."""
    path: str
    exists: bool
    readable: bool = False
    unreadable: tuple[str, ...] = ()
    """Files in it that may not be read, some of them."""
    writable: bool = False
    free_bytes: int | None = None
    must_write: bool = False


@dataclass(frozen=True)
class Host:
    """Limits of this container or host. Bytes."""

    shm_total: int | None = None
    shm_free: int | None = None
    memlock: int | None = None
    """None is unlimited."""
    memory_limit: int | None = None
    """None is unlimited, or not known."""
    user: int = 0


@dataclass(frozen=True)
class Needs:
    """What the server to be started demands; of a profile, or the least that any does."""

    gpu_engine: bool
    """False for the engine that computes on the CPU."""
    profile: str | None = None
    count: int | None = None
    products: tuple[str, ...] = ()
    capability: tuple[int, int] = (7, 0)
    min_memory: int | None = None
    linked: bool = False
    """The GPUs must have NVLink to each other."""
    shared_memory: int | None = None
    memory: int | None = None
    pretend: bool = False
    """A newer GPU stands in for a V100, for tests."""


@dataclass(frozen=True)
class Facts:
    """Everything."""

    driver: Driver
    engine: Engine | None
    """None: not looked at."""
    kernels: KernelObjects
    host: Host
    volumes: tuple[Volume, ...] = ()
