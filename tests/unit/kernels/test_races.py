"""The emulator's race check: that it finds races, whatever the result, and that the kernels have none."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from sm70_engine.kernels import checks, grid
from sm70_engine.kernels.checks import LinearCase, Size
from sm70_engine.kernels.emulator import Emulator
from sm70_engine.kernels.errors import KernelError
from sm70_engine.kernels.families import Family
from sm70_engine.kernels.plans import Launch

RACY = Family("racy", str(Path(__file__).with_name("racy.cu")), "", ())


@pytest.fixture(scope="module")
def backend() -> Emulator:
    emulator = Emulator(races=True)
    emulator.add(RACY)
    return emulator


def run(backend: Emulator, kernel: str, threads: int) -> None:
    out = backend.put(np.zeros(threads, np.float32))
    backend.run(Launch("racy", kernel, (1, 1, 1), threads, 512, (ctypes.c_void_p(out.address),)))


@pytest.mark.parametrize(
    ("kernel", "threads"),
    [("with_barrier", 64), ("flag_that_all_raise", 64), ("groups_meet_unequally_often", 128)],
)
def test_ordered_accesses_and_equal_writes_are_no_race(backend: Emulator, kernel: str, threads: int) -> None:
    run(backend, kernel, threads)


@pytest.mark.parametrize(
    ("kernel", "threads", "text"),
    [
        ("missing_barrier", 64, "the read by thread .* with the write by thread"),
        ("reuse_too_early", 64, "thread .* with the"),
        ("shuffle_is_no_barrier", 32, "the read by thread .* with the write by thread"),
        ("half_a_barrier", 128, "the read by thread .* with the write by thread"),
        ("flag_that_all_set", 64, "the write by thread .* with the write by thread"),
    ],
)
def test_a_race_is_found(backend: Emulator, kernel: str, threads: int, text: str) -> None:
    with pytest.raises(KernelError, match=f"race in shared memory at byte .*{text}"):
        run(backend, kernel, threads)


def test_slices_of_unequal_length_do_not_race(backend: Emulator) -> None:
    """K=576 and K=128 leave the warps of a CTA unequal numbers of units: some reach its barrier early."""
    for case in (LinearCase(1, 64, 576), LinearCase(16, 64, 128)):
        assert checks.check_linear(backend, case).passed


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_no_kernel_races(backend: Emulator) -> None:
    failed = [result.name for result in grid.run_all(backend, Size.SMALL) if not result.passed]
    assert not failed
