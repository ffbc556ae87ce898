"""The V100 in figures, and what they say about a kernel's machine code (text: docs/engine/v100_model.md).

Frozen: these figures and rules were written down before the kernels that they judge were tuned. No V100 was measured.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass

from . import sass
from .build import KernelFacts

SMS = 80
GIGAHERTZ = 1.53
MEMORY_GBS = 900.0
SUB_PARTITIONS = 4
REGISTERS, THREADS, SHARED, MAX_CTAS = 65536, 2048, 96 * 1024, 32
REGISTER_UNIT = 256  # registers of a warp are handed out in pieces of this many
# m8n8k4 on a sub-partition: cycles from one to the next, and from one to one that needs its result.
MATRIX_CYCLES, MATRIX_LATENCY = 8.4, 8.7


def fingerprint() -> str:
    """12 hexadecimal digits of the model: its figures, the cycles of each instruction and how they are added up."""
    figures = (SMS, GIGAHERTZ, MEMORY_GBS, SUB_PARTITIONS, REGISTERS, THREADS, SHARED, MAX_CTAS, REGISTER_UNIT)
    rules = "".join(inspect.getsource(x) for x in (ctas_per_sm, keep_ctas_off, loop_budget, sass.weigh_loop))
    return hashlib.sha256((repr(figures) + rules).encode()).hexdigest()[:12]


def proxy_error(calibration: Mapping[str, float]) -> dict[str, float]:
    """What a run's set-up gives over what a V100 has, less 1: `memory` rate, and cycles of `matrix` time and `latency`.

    These three are all of the proxy's error that can be measured without a V100.
    """
    useful = calibration["useful_read_gbs"] * GIGAHERTZ / calibration["gigahertz"]
    return {
        "memory": useful / MEMORY_GBS - 1,
        "matrix": calibration["mma_cycles_independent"] / MATRIX_CYCLES - 1,
        "latency": calibration["mma_cycles_dependent"] / MATRIX_LATENCY - 1,
    }


def ctas_per_sm(registers: int, threads: int, shared_bytes: int) -> int:
    """How many CTAs of a kernel a multiprocessor holds at a time."""
    warps = -(-threads // 32)
    per_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    limits = [MAX_CTAS, THREADS // threads, REGISTERS // (per_warp * warps)]
    if shared_bytes:
        limits.append(SHARED // shared_bytes)
    return max(0, min(limits))


def keep_ctas_off(registers: int, threads: int, shared_bytes: int, available: int = 227 * 1024) -> int:
    """Shared memory per CTA with which a newer multiprocessor (`available` bytes) holds no more CTAs than a V100's."""
    ctas = ctas_per_sm(registers, threads, shared_bytes)
    if not ctas or ctas >= MAX_CTAS:
        return shared_bytes
    return max(shared_bytes, (available // ctas - 1024) // 128 * 128)


@dataclass(frozen=True)
class Budget:
    """Shares of a sub-partition's cycles while memory delivers a loop's bytes at 900 GB/s; above 1 binds."""

    issue: float
    units: dict[str, float]

    @property
    def binds(self) -> str:
        """What the model expects to be the limit."""
        name, share = max((*self.units.items(), ("issue", self.issue)), key=lambda item: item[1])
        return name if share > 1 else "memory"


def loop_budget(facts: KernelFacts, bytes_per_warp: int) -> Budget:
    """The main loop of a kernel whose every warp consumes `bytes_per_warp` of weights or KV in one pass of it."""
    per_cycle = MEMORY_GBS / SMS / GIGAHERTZ
    cycles = bytes_per_warp * SUB_PARTITIONS / per_cycle
    units = {name: n / cycles for name, n in facts.loop_cycles.items() if name != "control"}
    return Budget(facts.loop_instructions / cycles, units)


def loop_bytes(kernel: str) -> int:
    """Bytes of weights or KV that one warp consumes in one pass of the main loop; 0 where that is not defined."""
    parts = kernel.split("_")
    if parts[0] in ("linear", "swiglu", "chain"):  # a unit of 1,152 bytes for each column tile
        return 1152 * int(parts[2])
    if parts[0] == "verify" and parts[1] != "combine":  # a step of 64 tokens for the four sub-partitions
        return 2 * int(parts[2][1:]) * (2 if parts[1] == "f16" else 1) * 16
    if parts[0] == "decode" and len(parts) == 4:
        dim = int(parts[2][1:])
        width = 2 if parts[1] == "f16" else 1
        tokens = 8 if dim == 256 or (width == 2 and dim > 64) else 16
        return 2 * dim * width * tokens
    return 0


@dataclass(frozen=True)
class Cost:
    """What one token of KV (all query heads of a KV head) or 2,048 weights (a unit) cost in the main loop."""

    bytes: int
    """Read from memory."""
    instructions: float
    """Of a warp, over all warps that work on it."""


def cost(kernel: str, facts: KernelFacts) -> Cost | None:
    """From the machine code; none where a loop's bytes are not defined."""
    parts, in_a_pass = kernel.split("_"), loop_bytes(kernel)
    if not in_a_pass:
        return None
    one = 1152 if parts[0] in ("linear", "swiglu", "chain") else 2 * int(parts[2][1:]) * (2 if parts[1] == "f16" else 1)
    return Cost(one, facts.loop_instructions * one / in_a_pass)
