"""Which kernels exist: a family is one source compiled with one set of definitions, and what its code must hold."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .plans import CHAIN_TILES, LINEAR_TILES, VERIFY_TILES, KvFormat, VerifyPlan
from .prefill import PREFILL_DIMS

SOURCES = Path(__file__).resolve().parent / "cuda"
EMULATOR = "emulator.hpp"
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Kernel:
    """One entry point. `tensor_cores`: its machine code must hold HMMA.884. `roles`: sass.weigh_loop."""

    name: str
    threads: int
    tensor_cores: bool = True
    roles: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class Family:
    """One source file with its definitions, its kernels and its contract in words."""

    name: str
    source: str
    contract: str
    kernels: tuple[Kernel, ...]
    defines: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """The source file."""
        return SOURCES / self.source

    @property
    def files(self) -> tuple[Path, ...]:
        """The source and the headers that it includes, directly or not, without the emulator's."""
        found, waiting = [self.path], [self.path]
        while waiting:
            for name in _INCLUDE.findall(waiting.pop().read_text()):
                header = SOURCES / name
                if name != EMULATOR and header not in found:
                    found.append(header)
                    waiting.append(header)
        return tuple(found)


def _decode(kv_format: KvFormat) -> Family:
    return Family(
        f"attention_decode_{kv_format}",
        "attention_decode.cu",
        f"one query token per sequence, {kv_format.upper()} pages of a multiple of 16 tokens, D 64/128/256, "
        "1..16 query heads per KV head, optional sliding window, FP32 state and partials, ordered combine",
        tuple(Kernel(f"decode_{kv_format}_d{d}_r{r}", 256) for d in (64, 128, 256) for r in (1, 2)),
        (f"-DFORMAT={kv_format.upper()}", f"-DNAME={kv_format}"),
    )


def _verify(kv_format: KvFormat) -> Family:
    return Family(
        f"attention_verify_{kv_format}",
        "attention_verify.cu",
        f"a few query tokens per sequence, causal or not, {kv_format.upper()} pages of a multiple of 16 tokens, "
        "D 128/256, heads per KV head times tokens at most 64 (D 256: 48), optional sliding window, ordered combine",
        (
            # One warp of a sub-partition multiplies with V, two score.
            *(
                Kernel(f"verify_{kv_format}_d{d}_r{r}", VerifyPlan.THREADS, roles=(1, 2))
                for d, tiles in VERIFY_TILES.items()
                for r in tiles
            ),
            *(Kernel(f"verify_combine_{kv_format}_d{d}", 512, tensor_cores=False) for d in VERIFY_TILES),
        ),
        (f"-DFORMAT={kv_format.upper()}", f"-DNAME={kv_format}"),
    )


def _prefill(kv_format: KvFormat) -> Family:
    bridges = () if kv_format is KvFormat.F16 else ("-DBRIDGED",)
    return Family(
        f"attention_prefill_{kv_format}",
        "attention_prefill.cu",
        f"any number of query tokens per sequence, causal or not, {kv_format.upper()} pages of a multiple of 16 tokens"
        f"{' (or FP16 copies of them)' if bridges else ' or rows'}, D 128/256, 1..16 query heads per KV head, optional "
        "sliding window, FP32 state and sums, ordered combine of cut row tiles",
        (
            *(Kernel(f"prefill_{kv_format}_d{d}", 256) for d in PREFILL_DIMS),
            *(Kernel(f"prefill_combine_{kv_format}_d{d}", 256, tensor_cores=False) for d in PREFILL_DIMS),
            *(Kernel(f"prefill_bridge_{kv_format}_d{d}", d, tensor_cores=False) for d in PREFILL_DIMS if bridges),
        ),
        (f"-DFORMAT={kv_format.upper()}", f"-DNAME={kv_format}", *bridges),
    )


FAMILIES: tuple[Family, ...] = (
    Family(
        "kv_cache",
        "kv_cache.cu",
        "writes new tokens into pages (E4M3, E5M2 saturating to nearest even; FP16), slot < 0 ignored; "
        "codecs on arrays",
        (
            *(Kernel(f"kv_write_{f}", 128, tensor_cores=False) for f in KvFormat),
            *(Kernel(f"{d}_{f}", 256, tensor_cores=False) for d in ("decode", "encode") for f in ("e4m3", "e5m2")),
        ),
    ),
    *(_decode(kv_format) for kv_format in KvFormat),
    *(_verify(kv_format) for kv_format in KvFormat),
    *(_prefill(kv_format) for kv_format in KvFormat),
    Family(
        "nvfp4_linear",
        "nvfp4_linear.cu",
        "NVFP4 weights (E2M1, E4M3 scale per 16, FP32 global) x FP16 activations, M 1..64, K % 64 = 0, N % 8 = 0, "
        "FP32 accumulation, K split over warps and added in order; swiglu: gate and up in one, silu(gate) * up",
        tuple(
            Kernel(name, tile.warps * 32)
            for tile in dict.fromkeys(tile for _, *pair in LINEAR_TILES for tile in pair)
            for name in (tile.kernel, tile.gated)
        ),
    ),
    Family(
        "nvfp4_chain",
        "nvfp4_chain.cu",
        "NVFP4 linears (plain or gated) one after another in one cooperative launch, M 1..64; each waits only for what "
        "it reads, with weights in flight from one to the next; otherwise as nvfp4_linear",
        tuple(Kernel(tile.kernel, tile.warps * 32) for _, tile in CHAIN_TILES),
    ),
    Family(
        "nvfp4_expand",
        "nvfp4_expand.cu",
        "for many rows: NVFP4 weights to FP16, exact, without the global scale, into a workspace; silu(gate) * up",
        (Kernel("nvfp4_expand", 256, tensor_cores=False), Kernel("silu_times", 256, tensor_cores=False)),
    ),
)


# Of benchmarks only: built with the rest, part of no product path, not emulated.
CALIBRATION = Family(
    "calibration",
    "calibration.cu",
    "clock, useful read rate, launch cost and matrix rate of the card that a benchmark runs on",
    (
        Kernel("spin", 32, tensor_cores=False),
        Kernel("nothing", 256, tensor_cores=False),
        Kernel("read_stream", 256, tensor_cores=False),
        Kernel("matrix_rate_dependent", 512),
        Kernel("matrix_rate_independent", 512),
    ),
)


def family(name: str) -> Family:
    """The family of that name; raises `KeyError`."""
    return {x.name: x for x in (*FAMILIES, CALIBRATION)}[name]
