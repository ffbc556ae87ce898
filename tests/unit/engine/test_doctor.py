"""Every finding of the doctor from facts alone, the probes against a stand-in for NVML, and the command line."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sm70_engine.doctor import inside, probes
from sm70_engine.doctor.cli import main, needs_of
from sm70_engine.doctor.facts import Driver, Engine, Facts, Gpu, Host, KernelObjects, Needs, Volume
from sm70_engine.doctor.findings import GIB, Finding, Reason, Severity, examine, gravest
from sm70_engine.plugin import hooks as plugin_hooks
from sm70_profiles.catalog import load_profile

REPOSITORY = Path(__file__).resolve().parents[3]
PROFILE = load_profile("qwen38_27b_nvfp4_dflash2")
NEEDS = replace(needs_of(PROFILE, "sm70", {}), linked=True)
LEAST = Needs(gpu_engine=True)
CPU = Needs(gpu_engine=False)


def gpu(index: int, **fields: Any) -> Gpu:
    others = tuple(other for other in range(4) if other != index)
    values: dict[str, Any] = {
        "index": index,
        "name": "Tesla V100-SXM2-16GB",
        "uuid": f"GPU-{index}",
        "capability": (7, 0),
        "memory_total": 16 * GIB,
        "memory_free": 15 * GIB + GIB // 2,
        "processes": 0,
        "nvlinks": 6,
        "peers": others,
    }
    return Gpu(**{**values, **fields})


SOUND = Facts(
    driver=Driver("580.95.05", (13, 0), tuple(gpu(index) for index in range(4))),
    engine=Engine("2.10.0", (12, 8), ("sm_70", "sm_75", "sm_80"), "0.32.0+empty", (), None),
    kernels=KernelObjects("/objects", None, {"attention": None, "nvfp4": None}),
    host=Host(shm_total=64 * GIB, shm_free=64 * GIB, memlock=None, memory_limit=None, user=65532),
    volumes=(
        Volume("model", "/models/target", True, True, (), False, 100 * GIB),
        Volume("compile cache", "/cache", True, True, (), True, 20 * GIB, must_write=True),
    ),
)


def changed_gpu(**fields: Any) -> Facts:
    gpus = (gpu(0, **fields), *(gpu(index) for index in (1, 2, 3)))
    return replace(SOUND, driver=replace(SOUND.driver, gpus=gpus))


def driver(**fields: Any) -> Facts:
    return replace(SOUND, driver=replace(SOUND.driver, **fields))


def engine(**fields: Any) -> Facts:
    assert SOUND.engine is not None
    return replace(SOUND, engine=replace(SOUND.engine, **fields))


def host(**fields: Any) -> Facts:
    return replace(SOUND, host=replace(SOUND.host, **fields))


def volume(role: str, **fields: Any) -> Facts:
    return replace(SOUND, volumes=tuple(replace(one, **fields) if one.role == role else one for one in SOUND.volumes))


def wrong(facts: Facts, needs: Needs) -> list[Finding]:
    return [found for found in examine(facts, needs) if found.severity in (Severity.WARNING, Severity.ERROR)]


@pytest.mark.parametrize("needs", [NEEDS, LEAST, CPU], ids=["profile", "no profile", "cpu"])
def test_nothing_is_wrong_with_a_sound_machine(needs: Needs) -> None:
    assert wrong(SOUND, needs) == []
    assert gravest(examine(SOUND, needs)).exit_status == 0


WARNING, ERROR = Severity.WARNING, Severity.ERROR
CASES: list[tuple[str, Facts, Needs, str, Severity, Reason, str]] = [
    (
        "no driver",
        driver(version=None, cuda=None, gpus=(), problem="Driver Not Loaded"),
        NEEDS,
        "driver",
        ERROR,
        Reason.DRIVER_TOO_OLD,
        "Driver Not Loaded",
    ),
    (
        "CUDA of another major",
        driver(version="470.1", cuda=(11, 4)),
        LEAST,
        "driver",
        ERROR,
        Reason.DRIVER_TOO_OLD,
        "11.4",
    ),
    ("older CUDA", driver(version="535.1", cuda=(12, 2)), LEAST, "driver", WARNING, Reason.DRIVER_TOO_OLD, "12.2"),
    ("no GPU", driver(gpus=()), LEAST, "GPUs", ERROR, Reason.GPU_MISMATCH, "found none"),
    ("too few GPUs", driver(gpus=(gpu(0, peers=()),)), NEEDS, "GPUs", ERROR, Reason.GPU_MISMATCH, "4 GPUs; 1"),
    (
        "another architecture",
        changed_gpu(name="NVIDIA A100", capability=(8, 0)),
        NEEDS,
        "GPU 0",
        ERROR,
        Reason.GPU_MISMATCH,
        "8.0",
    ),
    ("another product", changed_gpu(name="Quadro GV100"), NEEDS, "GPU 0", WARNING, Reason.GPU_MISMATCH, "Quadro"),
    (
        "less memory",
        SOUND,
        replace(NEEDS, min_memory=32 * GIB),
        "GPU 0",
        ERROR,
        Reason.GPU_MISMATCH,
        "32.0 GiB; it has 16.0 GiB",
    ),
    (
        "memory held",
        changed_gpu(memory_free=3 * GIB, processes=2),
        NEEDS,
        "GPU 0",
        WARNING,
        Reason.MEMORY_NOT_RELEASED,
        "3.0 GiB of 16.0 GiB are free (2 processes",
    ),
    ("no NVLink", changed_gpu(nvlinks=0), NEEDS, "topology", ERROR, Reason.TOPOLOGY_UNSUITABLE, "GPU 0 has no active"),
    (
        "no peer access",
        changed_gpu(peers=(1, 2)),
        LEAST,
        "topology",
        WARNING,
        Reason.TOPOLOGY_UNSUITABLE,
        "GPU 0 without 3",
    ),
    ("no shared memory", host(shm_total=None), LEAST, "/dev/shm", ERROR, Reason.SHARED_MEMORY_TOO_SMALL, "none"),
    (
        "small shared memory",
        host(shm_total=64 << 20),
        NEEDS,
        "/dev/shm",
        ERROR,
        Reason.SHARED_MEMORY_TOO_SMALL,
        "64 MiB",
    ),
    (
        "docker's shared memory",
        host(shm_total=64 << 20),
        LEAST,
        "/dev/shm",
        WARNING,
        Reason.SHARED_MEMORY_TOO_SMALL,
        "64 MiB",
    ),
    ("locked memory", host(memlock=8 << 20), NEEDS, "locked memory", WARNING, Reason.NCCL_FAILURE, "8 MiB"),
    ("memory limit", host(memory_limit=GIB), NEEDS, "memory", WARNING, Reason.OUT_OF_MEMORY, "1.0 GiB"),
    ("model absent", volume("model", exists=False), NEEDS, "model", ERROR, Reason.PATH_NOT_FOUND, "/models/target"),
    ("model closed", volume("model", readable=False), NEEDS, "model", ERROR, Reason.PATH_UNREADABLE, "user 65532"),
    (
        "a closed shard",
        volume("model", unreadable=("a.safetensors",)),
        NEEDS,
        "model",
        ERROR,
        Reason.PATH_UNREADABLE,
        "a.safetensors",
    ),
    (
        "cache read-only",
        volume("compile cache", writable=False),
        NEEDS,
        "compile cache",
        WARNING,
        Reason.UNWRITABLE,
        "/cache",
    ),
    (
        "cache full",
        volume("compile cache", free_bytes=1 << 20),
        NEEDS,
        "compile cache",
        WARNING,
        Reason.DISK_FULL,
        "1 MiB",
    ),
    (
        "no torch",
        engine(torch=None, problem="No module named torch"),
        LEAST,
        "torch",
        ERROR,
        Reason.ENGINE_UNSUPPORTED,
        "No module",
    ),
    (
        "torch for the CPU",
        engine(torch="2.13.0+cpu", torch_cuda=None, architectures=()),
        LEAST,
        "torch",
        ERROR,
        Reason.ENGINE_UNSUPPORTED,
        "CPU only",
    ),
    (
        "torch without Volta",
        engine(torch="2.11.0", architectures=("sm_75",)),
        LEAST,
        "torch",
        ERROR,
        Reason.NO_KERNEL_IMAGE,
        "sm_70",
    ),
    ("no vLLM", engine(vllm=None), LEAST, "vLLM", ERROR, Reason.ENGINE_UNSUPPORTED, "must be installed"),
    (
        "a hook is gone",
        engine(missing_hooks=("vllm.x.y (the worker)",)),
        LEAST,
        "vLLM",
        ERROR,
        Reason.ENGINE_UNSUPPORTED,
        "vllm.x.y",
    ),
    (
        "hooks not seen",
        engine(missing_hooks=None, problem="ImportError: libnuma"),
        LEAST,
        "vLLM",
        WARNING,
        Reason.ENGINE_UNSUPPORTED,
        "libnuma",
    ),
    (
        "kernels not built",
        replace(SOUND, kernels=KernelObjects("/objects", "no manifest")),
        LEAST,
        "kernels",
        ERROR,
        Reason.NO_KERNEL_IMAGE,
        "no manifest",
    ),
    (
        "a kernel that does not load",
        replace(SOUND, kernels=KernelObjects("/objects", None, {"a": None, "b": "CUDA_ERROR_NO_BINARY_FOR_GPU"})),
        LEAST,
        "kernels",
        ERROR,
        Reason.NO_KERNEL_IMAGE,
        "1 of 2 families do not load; b: CUDA_ERROR_NO_BINARY_FOR_GPU",
    ),
]


@pytest.mark.parametrize(
    ("facts", "needs", "subject", "severity", "reason", "words"),
    [case[1:] for case in CASES],
    ids=[c[0] for c in CASES],
)
def test_each_fault_is_found_and_named(
    facts: Facts, needs: Needs, subject: str, severity: Severity, reason: Reason, words: str
) -> None:
    found = [one for one in wrong(facts, needs) if one.subject == subject and one.reason is reason]
    assert found, examine(facts, needs)
    assert found[0].severity is severity
    assert words in found[0].message
    assert found[0].remedy
    assert gravest(examine(facts, needs)).exit_status >= severity.exit_status > 0


def test_every_reason_is_tested_and_has_its_page() -> None:
    assert {case[5] for case in CASES} == set(Reason)
    assert [reason for reason in Reason if not (REPOSITORY / reason.runbook).is_file()] == []


def test_the_cpu_engine_needs_no_gpu() -> None:
    facts = replace(SOUND, driver=Driver(problem="neither"), kernels=KernelObjects("", "not looked at"))
    found = examine(facts, CPU)
    assert wrong(facts, CPU) == []
    assert {one.subject: one.severity for one in found}["driver"] is Severity.NOTE


def test_a_newer_gpu_may_stand_in() -> None:
    facts = replace(
        changed_gpu(name="NVIDIA H200", capability=(9, 0)),
        engine=Engine("2.11.0", (12, 8), ("sm_80", "sm_90"), "0.32.0+empty", ()),
    )
    assert wrong(facts, replace(LEAST, pretend=True)) == []
    assert {one.reason for one in wrong(facts, LEAST)} == {Reason.GPU_MISMATCH, Reason.NO_KERNEL_IMAGE}


class NvmlError(Exception):
    """What NVML's binding raises."""


def nvml(**changes: Callable[..., Any]) -> SimpleNamespace:
    """A binding that sees two V100s with a link between them."""

    def link(_handle: int, number: int) -> int:
        if number > 3:
            raise NvmlError("Invalid Argument")
        return 1 if number < 2 else 0

    values: dict[str, Any] = {
        "NVMLError": NvmlError,
        "NVML_NVLINK_MAX_LINKS": 6,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: b"580.95.05",
        "nvmlSystemGetCudaDriverVersion": lambda: 13000,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda _handle: "Tesla V100-SXM2-16GB",
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetCudaComputeCapability": lambda _handle: (7, 0),
        "nvmlDeviceGetMemoryInfo": lambda _handle: SimpleNamespace(total=16 * GIB, free=15 * GIB),
        "nvmlDeviceGetComputeRunningProcesses": lambda _handle: [object()],
        "nvmlDeviceGetNvLinkState": link,
        "nvmlDeviceGetP2PStatus": lambda _one, _other, _which: 0,
    }
    return SimpleNamespace(**{**values, **changes})


def refuse(*_: object) -> Any:
    raise NvmlError("Not Supported")


def test_the_driver_is_read_by_nvml() -> None:
    found = probes.read_driver(nvml)
    assert (found.version, found.cuda, found.problem) == ("580.95.05", (13, 0), None)
    assert found.gpus[1] == Gpu(
        1, "Tesla V100-SXM2-16GB", "GPU-1", (7, 0), 16 * GIB, 15 * GIB, processes=1, nvlinks=2, peers=(0,)
    )


def test_what_a_card_does_not_answer_is_not_known() -> None:
    asked = ("nvmlDeviceGetNvLinkState", "nvmlDeviceGetP2PStatus", "nvmlDeviceGetComputeRunningProcesses")
    found = probes.read_driver(lambda: nvml(**dict.fromkeys(asked, refuse)))
    assert (found.gpus[0].nvlinks, found.gpus[0].peers, found.gpus[0].processes) == (None, None, None)


def test_no_driver_and_no_binding_are_problems_and_no_exceptions() -> None:
    def absent() -> Any:
        raise ImportError("neither pynvml nor vLLM is installed")

    assert probes.read_driver(absent).problem == "neither pynvml nor vLLM is installed"
    assert probes.read_driver(lambda: nvml(nvmlInit=refuse)).problem == "Not Supported"
    assert probes.read_driver(lambda: nvml(nvmlDeviceGetCount=refuse)).problem == "Not Supported"


def test_volumes_are_read_as_they_are(tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "sub").mkdir(parents=True)
    (model / "sub/config.json").write_text("{}")
    found = probes.read_volume("model", model)
    assert (found.exists, found.readable, found.unreadable) == (True, True, ())
    assert not probes.read_volume("model", tmp_path / "absent").exists
    cache = probes.read_volume("compile cache", tmp_path / "a/b/c", must_write=True)
    assert (cache.exists, cache.writable) == (False, True)
    assert cache.free_bytes


def test_a_process_that_dies_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    engine_found, kernels = probes.read_inside(probes.run_inside("sm70"))
    assert "ended with 1" in str(engine_found.problem)
    assert kernels.problem


def test_what_is_installed_here_is_looked_at_for_real() -> None:
    """This environment has neither torch nor vLLM, and no kernel objects or some: it says so, whatever it is."""
    engine_found, kernels = probes.read_inside(probes.run_inside("sm70"))
    assert engine_found.torch or engine_found.problem
    assert kernels.folder.endswith("objects")


def run(
    facts: Facts, *arguments: str, environment: dict[str, str] | None = None, seen: dict[str, Any] | None = None
) -> int:
    def gather(**asked: Any) -> Facts:
        (seen if seen is not None else {}).update(asked)
        return facts

    return main(list(arguments), environment or {}, gather)


def test_the_exit_status_is_the_severity(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(SOUND, "--engine", "sm70") == 0
    assert run(changed_gpu(memory_free=GIB), "--engine", "sm70") == 1
    assert run(driver(gpus=()), "--engine", "sm70") == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert "docs/runbooks/MemoryNotReleased.md" in shown
    assert "ERROR GPUs" in shown


def test_json_is_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(driver(gpus=()), "--engine", "sm70", "--json") == 2
    document = json.loads(capsys.readouterr().out)
    assert document["severity"] == "error"
    assert document["findings"][0]["reason"] == "GPUMismatch"
    assert document["findings"][0]["runbook"] == "docs/runbooks/GPUMismatch.md"
    assert document["facts"]["driver"]["version"] == "580.95.05"


def test_in_a_pod_the_request_says_what_is_to_be_served() -> None:
    request = {
        "profile": load_profile("tiny_hybrid_reference").model_dump(mode="json", by_alias=True, exclude_none=True),
        "modelPath": "/models/target",
        "servedName": "tiny",
    }
    seen: dict[str, Any] = {}
    environment = {"SM70_SERVE_REQUEST": json.dumps(request), "XDG_CACHE_HOME": "/cache"}
    assert run(replace(SOUND, driver=Driver(problem="none")), environment=environment, seen=seen) == 0
    assert (seen["flavour"], seen["model"], seen["cache"]) == ("cpu", Path("/models/target"), Path("/cache"))


def test_a_profile_says_what_it_needs() -> None:
    assert (NEEDS.count, NEEDS.capability, NEEDS.gpu_engine) == (PROFILE.hardware.count, (7, 0), True)
    assert NEEDS.products == PROFILE.hardware.products


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["--profile", "other"], {}, "neither a built-in profile"),
        ([], {"SM70_SERVE_REQUEST": "{"}, "SM70_SERVE_REQUEST"),
        (["--engine", "tpu"], {}, "--engine"),
    ],
)
def test_usage(
    arguments: list[str], environment: dict[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(SOUND, *arguments, environment=environment) == 64
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("extensions", "first"), [(False, "stand-ins"), (True, "hook")])
def test_without_vllms_extensions_their_stand_ins_come_before_the_hooks(
    monkeypatch: pytest.MonkeyPatch, extensions: bool, first: str
) -> None:
    """Else nothing of vLLM's CUDA platform can be imported, and a good installation is called a wrong one."""
    seen: list[str] = []

    def exists(_: plugin_hooks.Hook) -> bool:
        seen.append("hook")
        return True

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if extensions else None)
    monkeypatch.setattr(plugin_hooks, "stand_in", lambda: seen.append("stand-ins"))
    monkeypatch.setattr(plugin_hooks.Hook, "exists", exists)
    assert inside.hooks("sm70") == {"missing_hooks": []}
    assert seen[0] == first
