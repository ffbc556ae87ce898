"""What checks need of a machine: memory, launches, and a wait. The emulator and a GPU both provide it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .plans import Launch

Array = NDArray[Any]


class Buffer(Protocol):
    """Memory that kernels can reach."""

    @property
    def address(self) -> int:
        """Where it begins, as a kernel sees it; a multiple of 16."""

    def read(self) -> Array:
        """Its content, in the shape and type that it was made with."""


class Backend(Protocol):
    """A machine that runs launches."""

    @property
    def name(self) -> str:
        """`emulator`, or the device's name."""

    @property
    def multiprocessors(self) -> int:
        """How many CTAs a cooperative launch may have, one on each."""

    def put(self, array: Array) -> Buffer:
        """A copy of the array in the machine's memory."""

    def run(self, launch: Launch) -> None:
        """Starts a launch; `read` of a buffer waits for it. Raises `KernelError`."""


def poison(shape: int | tuple[int, ...], dtype: type[np.generic] = np.float16) -> Array:
    """An output filled with NaN, so that an element that nothing writes shows."""
    return np.full(shape, np.nan, dtype=dtype)
