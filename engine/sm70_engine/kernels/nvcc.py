"""Compiles the families with the nvcc of a CUDA 12 toolkit, for those who have one: `make kernels-nvcc`.

NVRTC makes what is shipped (build.py); this shows that the sources are plain CUDA C++. CUDA 13 no longer knows sm_70.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .errors import KernelError
from .families import FAMILIES, Family


def commands(nvcc: str, family: Family, target: Path) -> tuple[tuple[str, ...], ...]:
    """What makes a family's cubin and PTX in the folder `target`."""
    common = (nvcc, "-std=c++17", "-O3", *family.defines)
    cubin, ptx = target / f"{family.name}.cubin", target / f"{family.name}.ptx"
    return (
        (*common, "-arch=sm_70", "-cubin", "-Xptxas", "-v", str(family.path), "-o", str(cubin)),
        (*common, "-arch=compute_70", "-ptx", str(family.path), "-o", str(ptx)),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m sm70_engine.kernels.nvcc FOLDER [NVCC]`. Returns the exit status."""
    folder, *rest = sys.argv[1:] if arguments is None else arguments
    try:
        nvcc = rest[0] if rest else shutil.which("nvcc")
        if nvcc is None:
            raise KernelError("nvcc must be on the PATH, of CUDA 12.0 to 12.9 (13 dropped sm_70); name it otherwise")
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        for family in FAMILIES:
            for command in commands(nvcc, family, target):
                result = subprocess.run(
                    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
                )
                if result.returncode:
                    raise KernelError(f"{family.source} does not compile: {' '.join(command)}\n{result.stdout[-2000:]}")
            print(f"{family.name}: cubin and PTX in {target}")
    except (KernelError, OSError) as error:
        print(f"nvcc: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
