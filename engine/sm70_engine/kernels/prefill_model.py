"""What the prefill kernel asks of a V100's units, by the static model of docs/engine/v100_model.md.

Prefill computes where the other kernels read: its budget is not bytes but products. For one step of one CTA (128 rows
by 128 tokens) the cycles of each unit are set against the cycles that those products may take at a given rate.
"""

from __future__ import annotations

import re
from collections import Counter

from . import v100
from .prefill import ROWS, STEP, THREADS
from .sass import Line, opcode, unit

PANEL = 256
"""Matrix instructions of a warp for a panel of K."""
_TARGET = re.compile(r"`\((\.L_\S+?)\)")


def _loops(code: list[Line]) -> list[tuple[int, int]]:
    """Loops with matrix instructions, as ranges of lines, the shortest first."""
    position = {line.text: i for i, line in enumerate(code) if line.label}
    found = []
    for i, line in enumerate(code):
        match = None if line.label or opcode(line) != "BRA" else _TARGET.search(line.text)
        start = position.get(match[1], i) if match else i
        if start < i and _matrix(code[start:i]):
            found.append((start, i + 1))
    return sorted(found, key=lambda x: x[1] - x[0])


def _matrix(code: list[Line]) -> int:
    return sum(opcode(line) == "HMMA" for line in code if not line.label)


def step_cycles(code: list[Line], dim: int) -> dict[str, int]:
    """Cycles of a sub-partition that one step takes of each unit, and issue slots; two warps share a sub-partition.

    All but the last two of K's D/32 panels are a loop (unless the compiler has unrolled it); the rest of the loop over
    steps counts once, masking and rescaling included, which most steps skip. The ends of an item do not count. Raises
    `ValueError` for code of another shape.
    """
    loops = _loops(code)
    whole = [x for x in loops if _matrix(code[x[0] : x[1]]) == _matrix(code)]
    if not whole:
        raise ValueError("the prefill kernel must have one loop over steps with all its matrix instructions")
    outer, counted = whole[0], code[whole[0][0] : whole[0][1]]
    if loops[0] != outer:
        panels = code[loops[0][0] : loops[0][1]]
        counted = [*counted, *panels * ((dim // 32 - 2) * PANEL // _matrix(panels) - 1)]
    expected = (dim // 32 * PANEL) + STEP // 16 * PANEL * dim // 256
    if _matrix(counted) != expected:
        raise ValueError(f"a step must take {expected} matrix instructions of a warp; this code has {_matrix(counted)}")
    total: Counter[str] = Counter()
    for line in counted:
        if not line.label:
            name, cycles = unit(line)
            total[name] += cycles
            total["issue"] += 1
    warps = THREADS // 32 // v100.SUB_PARTITIONS
    return {name: cycles * warps for name, cycles in sorted(total.items()) if name != "control"}


def shares(cycles: dict[str, int], dim: int, tflops: float) -> dict[str, float]:
    """Of the cycles that a step has at `tflops` TFLOP/s of the whole card; above 1 the unit forbids that rate."""
    flops = 4 * ROWS * STEP * dim
    available = flops / (tflops * 1e12 / v100.SMS) * v100.GIGAHERTZ * 1e9
    return {name: round(n / available, 3) for name, n in cycles.items()}
