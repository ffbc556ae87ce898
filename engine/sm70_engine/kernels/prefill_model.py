"""What the prefill kernel asks of a V100's units, by the static model of docs/engine/v100_model.md.

Prefill computes where the other kernels read: its budget is not bytes but products. For one step of one CTA (128 rows
by 128 tokens) the cycles of each unit are set against the cycles that those products may take at a given rate.
"""

from __future__ import annotations

from collections import Counter

from . import v100
from .prefill import ROWS, STEP, THREADS
from .sass import Line, opcode, unit

_PANELS_OF_V = STEP // 16


def _blocks(code: list[Line]) -> list[list[Line]]:
    """Basic blocks: a label begins one, a branch ends one."""
    blocks: list[list[Line]] = [[]]
    for line in code:
        if line.label:
            blocks.append([])
        else:
            blocks[-1].append(line)
            if opcode(line) == "BRA":
                blocks.append([])
    return [block for block in blocks if block]


def _loops(code: list[Line]) -> list[tuple[int, int]]:
    """The shortest loops with matrix instructions that do not overlap, as ranges of lines, in their order.

    A jump back from code that the compiler put aside looks like a longer loop.
    """
    position = {line.text: i for i, line in enumerate(code) if line.label}
    found = []
    for i, line in enumerate(code):
        if line.label or opcode(line) != "BRA":
            continue
        start = next((position[name] for name in position if f"`({name})" in line.text), len(code))
        if start < i and any(opcode(x) == "HMMA" for x in code[start:i] if not x.label):
            found.append((start, i + 1))
    chosen: list[tuple[int, int]] = []
    for begin, end in sorted(found, key=lambda x: x[1] - x[0]):
        if all(end <= other[0] or other[1] <= begin for other in chosen):
            chosen.append((begin, end))
    return sorted(chosen)


def _add(total: Counter[str], code: list[Line], times: int) -> None:
    for line in code:
        name, cycles = unit(line)
        total[name] += cycles * times
        total["issue"] += times


def step_cycles(code: list[Line], dim: int) -> dict[str, int]:
    """Cycles of a sub-partition that one step takes of each unit, and issue slots; two warps share a sub-partition.

    The loop over K runs D/32 times, the one over V eight times; a warp makes probabilities twice a step (the blocks of
    that loop with MUFU.EX2). What lies between the loops counts once, masking and rescaling included, which most steps
    skip; the ends of an item do not count.
    """
    loops = _loops(code)
    if len(loops) != 2:
        raise ValueError(f"the prefill kernel must have two innermost loops with HMMA; this code has {len(loops)}")
    (k_begin, k_end), (v_begin, v_end) = loops
    total: Counter[str] = Counter()
    _add(total, [x for x in code[k_begin:k_end] if not x.label], dim // 32)
    for block in _blocks(code[v_begin:v_end]):
        makes = any(line.text.startswith("MUFU.EX2") for line in block)
        _add(total, block, 1 if makes else _PANELS_OF_V)
    _add(total, [x for x in code[k_end:v_begin] if not x.label], 1)
    warps = THREADS // 32 // v100.SUB_PARTITIONS
    return {name: cycles * warps for name, cycles in sorted(total.items()) if name != "control"}


def shares(cycles: dict[str, int], dim: int, tflops: float) -> dict[str, float]:
    """Of the cycles that a step has at `tflops` TFLOP/s of the whole card; above 1 the unit forbids that rate."""
    flops = 4 * ROWS * STEP * dim
    available = flops / (tflops * 1e12 / v100.SMS) * v100.GIGAHERTZ * 1e9
    return {name: round(n / available, 3) for name, n in cycles.items()}
