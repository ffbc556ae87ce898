"""Last words: the cause of an end is named, bounded and written where Kubernetes looks."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm70_engine.serve.failure import ServeError
from sm70_engine.serve.last_words import (
    TERMINATION_ENVIRONMENT,
    classify,
    failure,
    oom_kills,
    shutdown,
    termination_file,
    write_termination,
)
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.report import RouteCount
from sm70_profiles.routes import ROUTES, Stage
from sm70_profiles.termination import MAX_BYTES, TerminationKind, parse_termination


@pytest.mark.parametrize(
    ("log", "status", "kills", "reason"),
    [
        (
            ["torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB"],
            1,
            0,
            TerminationReason.GPU_OUT_OF_MEMORY,
        ),
        (["ValueError: No available memory for the cache blocks."], 1, 0, TerminationReason.GPU_OUT_OF_MEMORY),
        (
            ["torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device"],
            1,
            0,
            TerminationReason.NO_KERNEL_IMAGE,
        ),
        (
            ["RuntimeError: The NVIDIA driver on your system is too old (found version 11040)."],
            1,
            0,
            TerminationReason.DRIVER_TOO_OLD,
        ),
        (
            ["torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled system error"],
            1,
            0,
            TerminationReason.NCCL_FAILURE,
        ),
        (["RuntimeError: DefaultCPUAllocator: can't allocate memory: 2 bytes"], 1, 0, TerminationReason.OUT_OF_MEMORY),
        (["nothing of note"], -9, 1, TerminationReason.OUT_OF_MEMORY),
        (["OSError: [Errno 28] No space left on device: '/dev/shm/x'"], 1, 0, TerminationReason.SHARED_MEMORY),
        (["PermissionError: [Errno 13] Permission denied: 'x'"], 1, 0, TerminationReason.PATH_UNREADABLE),
        (["safetensors_rust.SafetensorError: header too large"], 1, 0, TerminationReason.MODEL_INVALID),
        (
            ["sm70_engine.plugin.hooks.MissingHookError: vLLM lacks the hooks x"],
            1,
            0,
            TerminationReason.ENGINE_UNSUPPORTED,
        ),
        (
            ["ERROR EngineCore encountered", "vllm.v1.engine.exceptions.EngineDeadError: x"],
            0,
            0,
            TerminationReason.ENGINE_DIED,
        ),
        (["Engine core proc EngineCore died unexpectedly"], 0, 0, TerminationReason.ENGINE_DIED),
        (["ValueError: something else"], 1, 0, TerminationReason.UNKNOWN),
        ([], 0, 0, TerminationReason.UNKNOWN),
    ],
)
def test_an_end_has_a_name(log: list[str], status: int, kills: int, reason: TerminationReason) -> None:
    error = classify(status, ["INFO fine", *log, "INFO Application shutdown complete."], kills)
    assert error.reason is reason


def test_the_message_holds_the_last_error_and_the_status() -> None:
    error = classify(3, ["ValueError: first", "x TypeError: the last one", "INFO bye"], 0)
    assert "TypeError: the last one" in error.message
    assert "exit status 3" in error.message
    assert "SIGSEGV" in classify(-11, [], 0).message


def test_what_the_engine_prints_cannot_break_the_message() -> None:
    termination = failure(classify(1, ["ValueError: \x1b[31m" + "x" * 10_000], 0))
    assert "\x1b" not in termination.message
    assert len(termination.encode()) <= MAX_BYTES


def counts(number: int = 1) -> tuple[RouteCount, ...]:
    return tuple(RouteCount(route=name, stage=stage, dispatches=number) for name in ROUTES for stage in Stage)


def test_a_shutdown_carries_the_counts_that_are_not_zero(tmp_path: Path) -> None:
    idle = RouteCount(route="gdn_reference", stage=Stage.DRAFT, dispatches=0)
    write_termination(tmp_path / "log", shutdown("ended by SIGTERM", (idle, counts()[0])))
    termination = parse_termination((tmp_path / "log").read_text())
    assert termination is not None
    assert termination.kind is TerminationKind.SHUTDOWN
    assert termination.routes == (counts()[0],)


def test_a_long_message_fits_and_keeps_its_reason(tmp_path: Path) -> None:
    error = ServeError(TerminationReason.REFUSED, "é" * 5000, "r" * 5000)
    write_termination(tmp_path / "log", failure(error, counts(10**12)))
    data = (tmp_path / "log").read_bytes()
    assert len(data) <= MAX_BYTES
    termination = parse_termination(data.decode())
    assert termination is not None
    assert termination.reason is TerminationReason.REFUSED


def test_the_file_is_the_named_one() -> None:
    assert termination_file({TERMINATION_ENVIRONMENT: "/x"}) == Path("/x")


def test_a_message_that_cannot_be_written_stops_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    write_termination(Path("/proc/none/log"), shutdown("x", ()))
    write_termination(None, shutdown("x", ()))
    assert "cannot be written" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("memory.events", "low 0\nhigh 0\nmax 3\noom 2\noom_kill 2\noom_group_kill 0\n"),
        ("memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
    ],
)
def test_kills_for_memory_are_read_from_both_kinds_of_cgroup(tmp_path: Path, name: str, text: str) -> None:
    assert oom_kills(tmp_path) == 0
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    assert oom_kills(tmp_path) == 2
