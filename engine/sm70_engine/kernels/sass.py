"""Reads sm_70 machine code: what a kernel consists of, and what its main loop asks of each unit of a V100.

The figures of the units are the model of docs/engine/v100_model.md.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from .errors import KernelError


@dataclass(frozen=True)
class Line:
    """An instruction, or a label when `label` is set."""

    text: str
    label: bool = False


@dataclass(frozen=True)
class Loop:
    """The main loop of a kernel: its instructions, and how many cycles each unit of a sub-partition is busy."""

    instructions: int
    cycles: dict[str, int]


_SECTION = re.compile(r"\s*\.section\s+\.text\.(\S+?),")
_LABEL = re.compile(r"^(\.L_\S+):")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,5}\*/\s+(.*?);")
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
_TARGET = re.compile(r"`\((\.L_\S+?)\)")


def disassemble(nvdisasm: Path, cubin: Path) -> dict[str, list[Line]]:
    """The code of every kernel in a cubin. Raises `KernelError` when the disassembler fails."""
    result = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=False)
    if result.returncode:
        raise KernelError(f"nvdisasm cannot read {cubin}: {result.stderr.strip()[-500:]}")
    return parse(result.stdout)


def parse(text: str) -> dict[str, list[Line]]:
    """The kernels in the disassembler's text."""
    kernels: dict[str, list[Line]] = {}
    current: list[Line] | None = None
    for line in text.split("\n"):
        if match := _SECTION.match(line):
            current = kernels.setdefault(match[1], [])
        elif current is None:
            continue
        elif match := _LABEL.match(line):
            current.append(Line(match[1], label=True))
        elif match := _INSTRUCTION.match(line):
            current.append(Line(_PREDICATE.sub("", match[1].strip())))
    return kernels


def opcode(line: Line) -> str:
    """The instruction's name without modifiers: `HMMA.884.F32.F32.STEP0` is `HMMA`."""
    return line.text.split()[0].split(".")[0]


def opcodes(code: list[Line]) -> Counter[str]:
    """How often each instruction stands in the code; HMMA.884 is counted beside HMMA."""
    counts = Counter(opcode(line) for line in code if not line.label)
    counts["HMMA.884"] = sum(line.text.startswith("HMMA.884.") for line in code if not line.label)
    return +counts


def loops(code: list[Line]) -> list[list[Line]]:
    """The bodies of the backward branches that load from global memory, best first, none inside or around another.

    Best: the most HMMA, and among those the shortest; without any HMMA the longest.
    """
    position = {line.text: i for i, line in enumerate(code) if line.label}
    found: list[tuple[tuple[int, int], range]] = []
    for i, line in enumerate(code):
        match = None if line.label or not line.text.startswith("BRA") else _TARGET.search(line.text)
        start = position.get(match[1], len(code)) if match else len(code)
        if start >= i:
            continue
        body = [x for x in code[start : i + 1] if not x.label]
        if not any(opcode(x) == "LDG" for x in body):
            continue
        matrix = sum(opcode(x) == "HMMA" for x in body)
        found.append(((matrix, -len(body) if matrix else len(body)), range(start, i + 1)))
    chosen: list[range] = []
    for _, span in sorted(found, key=lambda item: item[0], reverse=True):
        if all(span.stop <= other.start or other.stop <= span.start for other in chosen):
            chosen.append(span)
    return [[x for x in code[span.start : span.stop] if not x.label] for span in chosen]


_CONTROL = frozenset(
    [
        "BRA",
        "EXIT",
        "BAR",
        "BSSY",
        "BSYNC",
        "NOP",
        "WARPSYNC",
        "DEPBAR",
        "YIELD",
        "BREAK",
        "CALL",
        "RET",
        "VOTE",
        "S2R",
        "B2R",
        "BMOV",
        "MEMBAR",
    ]
)
_FMA = frozenset({"FFMA", "FMUL", "FADD", "IMAD", "IMUL"})
_HALF = frozenset({"HADD2", "HMUL2", "HFMA2", "HSET2", "HSETP2", "HMNMX2"})
_SLOW = frozenset({"MUFU", "I2F", "F2I", "F2F", "I2I", "POPC", "FLO"})
_MEMORY = frozenset({"LDS", "STS", "LDG", "STG", "LDL", "STL", "ATOM", "RED"})


def unit(line: Line) -> tuple[str, int]:
    """The unit that executes an instruction of one warp and the cycles of its sub-partition that it takes there.

    Volta has 16 lanes per sub-partition for FP32, INT and FP16; what the four sub-partitions share counts four times.
    """
    name, whole = opcode(line), line.text.split()[0]
    if name == "HMMA":
        return "tensor", 2
    if name == "SHFL":
        return "lsu", 4
    if name in _MEMORY:
        return "lsu", 16 if ".128" in whole else 8 if ".64" in whole else 4
    for names, result in ((_HALF, ("fp16", 2)), (_FMA, ("fma", 2)), (_SLOW, ("xu", 8)), (_CONTROL, ("control", 1))):
        if name in names:
            return result
    return "alu", 2


def weigh_loop(code: list[Line], roles: tuple[int, ...] = (1,)) -> Loop:
    """The main loop of a kernel in figures; zero instructions when there is none.

    `roles`: how many warps of a sub-partition run the best loop, the second best, and so on; their sum is weighed.
    """
    total, cycles = 0, Counter[str]()
    for body, warps in zip(loops(code), roles, strict=False):
        total += warps * len(body)
        for line in body:
            name, n = unit(line)
            cycles[name] += warps * n
    return Loop(total, dict(sorted(cycles.items())))
