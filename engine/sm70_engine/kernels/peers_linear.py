"""Ways to compute one linear on the same weights: our NVFP4 kernels, and torch with the same values in FP16 (cuBLAS).

torch has no NVFP4 product for Volta, so its weights are unpacked beforehand and take 3.6 times the bytes: its time
says what a user has without these kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from . import plans
from .bench import LinearBench
from .device import Device
from .peers_attention import ROTATE_BYTES, Way
from .torch_reference import unpack_nvfp4
from .torch_weights import PackedWeights, pack

# E4M3 codes of scales between 2^-6 and 1.
_SCALES = range(0x08, 0x39)


def weights(n: int, k: int, gated: bool, device: str = "cuda") -> PackedWeights:
    """Random NVFP4 weights, packed; `n` columns of one of gate and up when gated."""
    generator = torch.Generator(device=device).manual_seed(0)
    rows = 2 * n if gated else n
    codes = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, device=device, generator=generator)
    scales = torch.randint(
        _SCALES.start, _SCALES.stop, (rows, k // 16), dtype=torch.uint8, device=device, generator=generator
    )
    return pack(codes, scales, torch.tensor([2.0**-5], device=device), gated=gated)


def dense(packed: PackedWeights) -> torch.Tensor:
    """FP16 [n, k], or [2 n, k] with all of gate before all of up; the global scale is in them, exactly."""
    if packed.up_scale is None:
        return (unpack_nvfp4(packed.words, packed.n, packed.k) * packed.scale).half()
    tiles = packed.words.view(-(-packed.n // 32), 2, -1)
    halves = [unpack_nvfp4(tiles[:, i].reshape(-1), packed.n, packed.k) for i in (0, 1)]
    return (torch.cat(halves) * packed.scale).half()


def ways(
    device: Device, stand_in: Device | None, case: LinearBench, ours: str, second: str
) -> tuple[int, Iterator[tuple[str, Callable[[], Way]]]]:
    """How many copies of our weights there are, and the ways."""
    packed = weights(case.n, case.k, case.gated)
    size = packed.words.numel() * 4
    copies = max(1, ROTATE_BYTES // size)
    words = packed.words.repeat(copies)
    generator = torch.Generator(device="cuda").manual_seed(1)
    x = torch.randn(case.m, case.k, dtype=torch.float16, device="cuda", generator=generator)
    out = torch.empty(case.m, case.n, dtype=torch.float16, device="cuda")

    def own(loaded: Device, name: str) -> Way:
        def call(i: int) -> torch.Tensor | None:
            launch = plans.linear(
                m=case.m, n=case.n, k=case.k, weight=words.data_ptr() + i * size, a=x.data_ptr(), out=out.data_ptr(),
                scale=packed.scale, a_stride=case.k, out_stride=case.n, up_scale=packed.up_scale,
            )  # fmt: skip
            loaded.kernels.launch(launch, torch.cuda.current_stream().cuda_stream)
            return None if loaded is stand_in else out

        return Way(name, size, call)

    def cublas() -> Way:
        one = dense(packed)
        # As many copies as of ours would not fit; enough that none stays in the L2.
        many = one.repeat(max(2, ROTATE_BYTES // (one.numel() * 2)), 1, 1)
        linear = torch.nn.functional.linear

        def call(i: int) -> torch.Tensor:
            product = linear(x, many[i % len(many)])
            if not case.gated:
                return product
            return torch.nn.functional.silu(product[:, : case.n]) * product[:, case.n :]

        return Way("torch linear, FP16 weights (cuBLAS)", one.numel() * 2, call)

    def everything() -> Iterator[tuple[str, Callable[[], Way]]]:
        yield ours, lambda: own(device, ours)
        if stand_in is not None:
            yield second, lambda: own(stand_in, second)
        yield "torch", cublas

    return copies, everything()
