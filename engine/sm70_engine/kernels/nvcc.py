"""Compiles the families with the nvcc of a CUDA toolkit, for those who have one: `make kernels-nvcc`.

NVRTC makes what is shipped (build.py); this shows that the sources are plain CUDA C++, and what another compiler makes
of them. CUDA 13 no longer knows sm_70.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import build, nvrtc, sass, toolchain
from .errors import KernelError
from .families import FAMILIES, Family


def commands(nvcc: str, family: Family, target: Path) -> tuple[tuple[str, ...], ...]:
    """What makes a family's cubin and PTX in the folder `target`."""
    # NVRTC takes a function without a qualifier for a device function; nvcc lets kernels call constexpr ones only.
    common = (nvcc, "-std=c++17", "-O3", "--expt-relaxed-constexpr", *family.defines)
    cubin, ptx = target / f"{family.name}.cubin", target / f"{family.name}.ptx"
    return (
        (*common, "-arch=sm_70", "-cubin", "-Xptxas", "-v", str(family.path), "-o", str(cubin)),
        (*common, "-arch=compute_70", "-ptx", str(family.path), "-o", str(ptx)),
    )


def compile_family(nvcc: str, family: Family, target: Path) -> dict[str, nvrtc.Usage]:
    """The kernels' registers and spills. Raises `KernelError` with the compiler's words."""
    said = ""
    for command in commands(nvcc, family, target):
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if result.returncode:
            raise KernelError(f"{family.source} does not compile: {' '.join(command)}\n{result.stdout[-2000:]}")
        said += result.stdout
    return nvrtc.parse_usage(said)


def compare(usages: Mapping[str, Mapping[str, nvrtc.Usage]], target: Path) -> str:
    """A table: registers, spills, HMMA.884 and instructions of every kernel by nvcc and by NVRTC (built if missing)."""
    tools = toolchain.install()
    lines = [
        "| kernel | registers, nvcc / NVRTC | bytes of spills | HMMA.884 | instructions |",
        "|---|---|---|---|---|",
    ]
    for (name, _), path in build.build().items():
        code = sass.disassemble(tools.tool("nvdisasm"), target / f"{name}.cubin")
        for kernel, facts in build.read_facts(path).kernels.items():
            usage, text = usages[name][kernel], code[kernel]
            pairs = (
                (usage.registers, facts.registers),
                (usage.spill_stores + usage.spill_loads, facts.spills),
                (sass.opcodes(text).get("HMMA.884", 0), facts.opcodes.get("HMMA.884", 0)),
                (sum(not line.label for line in text), facts.instructions),
            )
            lines.append(f"| `{kernel}` | " + " | ".join(f"{a} / {b}" for a, b in pairs) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m sm70_engine.kernels.nvcc FOLDER [NVCC] [--compare]`. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m sm70_engine.kernels.nvcc", description=__doc__)
    parser.add_argument("folder", type=Path, help="for the cubins and PTX")
    parser.add_argument("nvcc", nargs="?", default=shutil.which("nvcc"), help="by default the one on the PATH")
    parser.add_argument("--compare", action="store_true", help="print registers and spills beside NVRTC's")
    options = parser.parse_args(arguments)
    try:
        if options.nvcc is None:
            raise KernelError("nvcc must be on the PATH, of CUDA 11.8 to 12.9 (13 dropped sm_70); name it otherwise")
        options.folder.mkdir(parents=True, exist_ok=True)
        usages = {}
        for family in FAMILIES:
            usages[family.name] = compile_family(options.nvcc, family, options.folder)
            print(f"{family.name}: cubin and PTX in {options.folder}")
        if options.compare:
            print(compare(usages, options.folder))
    except (KernelError, OSError) as error:
        print(f"nvcc: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
