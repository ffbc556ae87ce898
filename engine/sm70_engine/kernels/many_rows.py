"""What NVFP4 weights cost at many rows, where the operators unpack them for cuBLAS: each part, and torch beside it.

The product itself is torch's; what is ours is the unpacking, so both are timed apart, and the operator as a whole.
128 rows and fewer go to the kernels of few rows, whose matrix instruction is a subroutine on a newer card. torch's own
product takes FP16 weights that were never packed. On a card newer than Volta these are its figures, not predictions:
unpacking runs on all its multiprocessors, and cuBLAS has other kernels there.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import loader, plans
from .bench import TP4_SHAPES
from .device import Device
from .peers import time_graph

ROWS = (128, 512, 2048, 8192)


@dataclass(frozen=True)
class ManyRows:
    """Microseconds of one linear [m, k] x [k, n]: the operator, its two parts alone, torch with FP16 weights.

    unpack, product: 0 where the operator takes the kernels of few rows instead (128 rows). TFLOP/s: 2 m n k over time.
    """

    m: int
    n: int
    k: int
    total: float
    unpack: float
    product: float
    torch: float

    @property
    def tflops(self) -> float:
        """Of the operator."""
        return 2e-6 * self.m * self.n * self.k / self.total

    @property
    def torch_tflops(self) -> float:
        """Of torch's product."""
        return 2e-6 * self.m * self.n * self.k / self.torch

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rates = {"tflops": round(self.tflops, 1), "torch_tflops": round(self.torch_tflops, 1)}
        return asdict(self) | rates


def _microseconds(work: Callable[[], Any]) -> float:
    """Of a call in a CUDA graph: what the host needs to start it is not in it."""
    return float(round(statistics.median(time_graph(lambda _: work(), 5)), 2))


def measure(device: Device, objects: Path) -> Iterator[ManyRows]:
    """Every shape at every number of rows. Needs torch and a GPU; `objects`: the folder of the device's kernels."""
    import torch

    from . import torch_ops
    from .peers_linear import dense, weights

    os.environ.setdefault(loader.OBJECTS_VARIABLE, str(objects))
    for n, k in TP4_SHAPES:
        packed = weights(n, k, gated=False)
        unpacked = dense(packed)
        space = torch.zeros(
            torch_ops.linear_workspace_bytes(max(ROWS), [(n, k, False)]), dtype=torch.uint8, device="cuda"
        )
        tiles = -(-n // 32)
        scratch = torch.empty(tiles * 32, k, dtype=torch.float16, device="cuda")
        expand = plans.expand(weight=packed.words.data_ptr(), out=scratch.data_ptr(), k=k, tiles=tiles)
        for m in ROWS:
            x = torch.randn(m, k, dtype=torch.float16, device="cuda") * 0.1
            out = torch.empty(m, n, dtype=torch.float16, device="cuda")
            total = _microseconds(lambda: torch_ops.nvfp4_packed_linear(x, packed.words, space, n, packed.scale))  # noqa: B023
            unpack = product = 0.0
            if m > torch_ops.MANY_ROWS:
                unpack = _microseconds(
                    lambda: device.kernels.launch(expand, torch.cuda.current_stream().cuda_stream)  # noqa: B023
                )
                product = _microseconds(
                    lambda: torch.addmm(out, x, unpacked.t(), beta=0, alpha=packed.scale, out=out)  # noqa: B023
                )
            beside = _microseconds(lambda: torch.nn.functional.linear(x, unpacked))  # noqa: B023
            yield ManyRows(m, n, k, total, unpack, product, beside)


def markdown(rows: list[ManyRows]) -> str:
    """The rows as a table."""
    lines = [
        "| M | N x K | operator, us | unpacking | cuBLAS product | TFLOP/s | torch, FP16 weights, us | TFLOP/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        parts = f"{row.unpack:.1f} | {row.product:.1f}" if row.unpack else "two launches of few rows |"
        lines.append(
            f"| {row.m} | {row.n} x {row.k} | {row.total:.1f} | {parts} | {row.tflops:.0f} | {row.torch:.1f} "
            f"| {row.torch_tflops:.0f} |"
        )
    return "\n".join(lines) + "\n"
