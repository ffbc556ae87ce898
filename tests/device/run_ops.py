"""The kernels' torch operators on a GPU, against their references. Needs torch, numpy, a driver and built objects.

    SM70_KERNEL_OBJECTS=objects python3 tests/device/run_ops.py

Each operator runs eagerly, on a side stream, in a CUDA graph that is replayed with other inputs, and under
torch.compile; opcheck looks at schema and fake kernel. Prints a line a check; exits 1 when one failed.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "engine"))

import numpy as np
import torch

from sm70_engine.kernels import torch_bridge, torch_ops, torch_reference, torch_weights
from sm70_engine.kernels.prefill import bridge_workspace_bytes

DEVICE = "cuda"
Made = tuple[Callable[..., torch.Tensor], torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2; infinite where something is not finite."""
    difference = (got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)
    return float(difference) if bool(got.isfinite().all()) else float("inf")


def attention(kv_format: str, dim: int, group: int, queries: int, causal: bool, window: int) -> Made:
    """An operator of its query, the query, and the reference of the same."""
    torch.manual_seed(dim + group + queries)
    heads, page, lengths = 2, 48, [700, 0, 33, 2050]
    blocks = sum(-(-n // page) for n in lengths)
    values = torch.randn(blocks, 2, page, heads, dim, device=DEVICE).half()
    kv_cache = values if kv_format == "f16" else torch_reference.kv_encode(values, kv_format, 0.5)
    table = torch.full((4, 50), 1 << 28, dtype=torch.int32)
    order, taken = torch.randperm(blocks, dtype=torch.int32), 0
    for i, n in enumerate(lengths):
        count = -(-n // page)
        table[i, :count] = order[taken : taken + count]
        taken += count
    size = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    table = table.to(DEVICE)
    rows = len(lengths) * max(queries, 1)
    scale = 1.0 if kv_format == "f16" else 0.5
    bytes_needed = torch_ops.attention_workspace_bytes(
        kv_format, heads, group, dim, 4, max(queries, 1), torch_ops.prepare(DEVICE)
    )
    workspace = torch.zeros(bytes_needed, dtype=torch.uint8, device=DEVICE)
    query = torch.randn(rows, heads * group, dim, device=DEVICE).half()

    def run(q: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(q, torch.nan)
        common = (out, workspace, q, kv_cache, table, size, kv_format)
        if queries:
            torch.ops.sm70.verify_attention(*common, queries, causal, dim**-0.5, scale, scale, window)
        else:
            torch.ops.sm70.decode_attention(*common, dim**-0.5, scale, scale, window)
        return out

    def reference(q: torch.Tensor) -> torch.Tensor:
        return torch_reference.attention(
            q, kv_cache, table, size, kv_format, max(queries, 1), causal, dim**-0.5, (scale, scale), window
        )

    return run, query, reference


def prefill(kv_format: str, dim: int, group: int, window: int, bridged: bool = False) -> Made:
    """Three sequences: a whole prompt, the rest of one, one token. bridged: through FP16 copies of their contexts."""
    torch.manual_seed(dim + group)
    page, heads, queries, lengths = 48, 2, (300, 130, 1), (300, 700, 50)
    blocks = sum(-(-n // page) for n in lengths)
    values = torch.randn(blocks, 2, page, heads, dim, device=DEVICE).half()
    kv_cache = values if kv_format == "f16" else torch_reference.kv_encode(values, kv_format, 0.5)
    table, order, taken = torch.zeros(3, 20, dtype=torch.int32), torch.randperm(blocks, dtype=torch.int32), 0
    for i, n in enumerate(lengths):
        count = -(-n // page)
        table[i, :count] = order[taken : taken + count]
        taken += count
    table = table.to(DEVICE)
    scale = 1.0 if kv_format == "f16" else 0.5
    pairs = tuple(zip(queries, lengths, strict=True))
    if bridged:
        work = torch_bridge.bridged_work(kv_cache, kv_format, group, pairs).to(DEVICE)
    else:
        work = torch_ops.prefill_work(kv_cache, kv_format, group, pairs, True, window).to(DEVICE)
    size = torch_ops.prefill_workspace_bytes(dim, torch_ops.prepare(DEVICE))
    workspace = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
    rows = sum(-(-n // 16) * 16 for n in lengths)
    copy = torch.full((bridge_workspace_bytes(rows, heads, dim),), 0xFF, dtype=torch.uint8, device=DEVICE)

    def run(q: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(q, torch.nan)
        common = (q, kv_cache, table, work, kv_format, queries, lengths, True, dim**-0.5, scale, scale)
        if bridged:
            torch.ops.sm70.prefill_bridged_attention(out, workspace, copy, *common)
        else:
            torch.ops.sm70.prefill_attention(out, workspace, *common, window)
        return out

    def reference(q: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q, device="cpu")
        common = (out, torch.empty(0), q.cpu(), kv_cache.cpu(), table.cpu(), work.cpu(), kv_format, queries, lengths)
        torch.ops.sm70.prefill_attention(*common, True, dim**-0.5, scale, scale, window)
        return out.to(DEVICE)

    return run, torch.randn(sum(queries), heads * group, dim, device=DEVICE).half(), reference


def weights(n: int, k: int, gated: bool, seed: int) -> torch_weights.PackedWeights:
    """Random weights over the whole range of codes; gate and up with scales of their own."""
    rng = np.random.default_rng(seed)
    rows = 2 * n if gated else n
    codes = torch.from_numpy(rng.integers(0, 256, (rows, k // 2), dtype=np.uint8)).to(DEVICE)
    scales = torch.from_numpy(rng.integers(0, 0x60, (rows, k // 16), dtype=np.uint8)).to(DEVICE)
    return torch_weights.pack(codes, scales, torch.tensor([0.002, 0.001][: 2 if gated else 1]), gated=gated)


def linear(m: int, n: int, k: int, gated: bool, limit: int = 1 << 20) -> Made:
    """As `attention`, for a linear; `limit` makes it unpack its weights in several pieces."""
    packed = weights(n, k, gated, m + n)
    size = torch_ops.linear_workspace_bytes(m, [(n, k, gated)], limit)
    workspace = torch.zeros(size, dtype=torch.uint8, device=DEVICE)

    def run(x: torch.Tensor) -> torch.Tensor:
        common = (x, packed.words, workspace, n, packed.scale)
        if gated:
            return torch.ops.sm70.nvfp4_packed_swiglu(*common, packed.up_scale)
        return torch.ops.sm70.nvfp4_packed_linear(*common)

    def reference(x: torch.Tensor) -> torch.Tensor:
        common = (x, packed.words, n, packed.scale)
        if gated:
            return torch_reference.nvfp4_swiglu(*common, packed.up_scale or 0.0)
        return torch_reference.nvfp4_linear(*common)

    return run, torch.randn(m, k, device=DEVICE).half() * 0.05, reference


def mlp(m: int) -> Made:
    """Gate, up and down of a small model in one launch."""
    first, second = weights(1088, 1024, True, 1), weights(1024, 1088, False, 2)
    size = torch_ops.linear_workspace_bytes(m, [(1088, 1024, True), (1024, 1088, False)], chained=1088)
    workspace = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
    scales = (first.scale, first.up_scale or 0.0, second.scale)

    def run(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.sm70.nvfp4_mlp(x, first.words, second.words, workspace, 1088, 1024, *scales)
        return result

    def reference(x: torch.Tensor) -> torch.Tensor:
        between = torch_reference.nvfp4_swiglu(x, first.words, 1088, *scales[:2])
        return torch_reference.nvfp4_linear(between, second.words, 1024, scales[2])

    return run, torch.randn(m, 1024, device=DEVICE).half() * 0.05, reference


def cases() -> Iterator[tuple[str, Made]]:
    """Name, and what `ways` needs."""
    for kv_format in ("e4m3", "e5m2", "f16"):
        yield f"decode_attention {kv_format} d256 g6", attention(kv_format, 256, 6, 0, True, 0)
        yield f"verify_attention {kv_format} d256 g6 q8", attention(kv_format, 256, 6, 8, True, 0)
        yield f"draft {kv_format} d128 g4 q8", attention(kv_format, 128, 4, 8, False, 128)
        yield f"prefill {kv_format} d256 g6", prefill(kv_format, 256, 6, 0)
        if kv_format != "f16":
            yield f"bridged prefill {kv_format} d256 g6", prefill(kv_format, 256, 6, 0, bridged=True)
    for m in (1, 8, 16, 32, 64, 100, 300):
        for gated in (False, True):
            yield f"{'swiglu' if gated else 'linear'} m{m} 520x1024", linear(m, 520, 1024, gated)
    for m in (1, 8, 33, 65, 200):
        yield f"mlp m{m}", mlp(m)


def ways(made: Made) -> Iterator[tuple[str, float]]:
    """Error by way of running."""
    run, x, reference = made
    other = x.flip(0) * 0.5
    want, wanted_other = reference(x), reference(other)
    yield "eager", error(run(x), want)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = run(x)
    torch.cuda.current_stream().wait_stream(stream)
    yield "side stream", error(got, want)
    static = x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(static)
    static.copy_(other)
    for _ in range(3):
        graph.replay()
    yield "graph with other inputs", error(captured, wanted_other)
    yield "eager again", 0.0 if torch.equal(run(x), got) else float("inf")


def compiled(made: Made) -> float:
    """Under torch.compile, without a break of the graph, with something of torch around it."""
    run, x, reference = made
    return error(torch.compile(lambda y: run(y + 0) * 1.0, fullgraph=True)(x), reference(x))


def check_write() -> Iterator[tuple[str, float]]:
    """The cache write against its reference, bit for bit, also from a graph."""
    for kv_format, dtype in (("e4m3", torch.uint8), ("e5m2", torch.uint8), ("f16", torch.float16)):
        scale = 1.0 if kv_format == "f16" else 0.3
        rows = torch.randn(2, 40, 2, 128, device=DEVICE).half() * 300
        slots = torch.randperm(4 * 48, device=DEVICE)[:40]
        slots[::5] = -1
        found = [torch.zeros(4, 2, 48, 2, 128, dtype=dtype, device=DEVICE) for _ in range(3)]
        torch_reference.kv_cache_write(found[0], rows[0], rows[1], slots, kv_format, scale, scale)
        torch.ops.sm70.kv_cache_write(found[1], rows[0], rows[1], slots, kv_format, scale, scale)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.ops.sm70.kv_cache_write(found[2], rows[0], rows[1], slots, kv_format, scale, scale)
        graph.replay()
        for name, cache in (("eager", found[1]), ("graph", found[2])):
            same = torch.equal(cache.view(torch.uint8), found[0].view(torch.uint8))
            yield f"kv_cache_write {kv_format}, {name}", 0.0 if same else float("inf")


def main() -> int:
    """Runs everything."""
    torch_ops.prepare(DEVICE)
    failed = total = 0

    def tell(name: str, value: float, limit: float = 6e-4) -> None:
        nonlocal failed, total
        total += 1
        failed += not value <= limit
        print(f"{'ok  ' if value <= limit else 'FAIL'} {name}: {value:.2e}", flush=True)

    def attempt(name: str, call: Callable[[], Any]) -> None:
        try:
            value = call()
            tell(name, value if isinstance(value, float) else 0.0)
        except Exception:  # a check that fails must not hide the others
            traceback.print_exc()
            tell(name, float("inf"))

    for name, value in check_write():
        tell(name, value)
    for name, made in cases():
        try:
            for way, value in ways(made):
                tell(f"{name}, {way}", value)
        except Exception:
            traceback.print_exc()
            tell(name, float("inf"))
    for name, made in (
        ("decode_attention", attention("e4m3", 256, 6, 0, True, 0)),
        ("linear m8", linear(8, 520, 1024, gated=False)),
        ("mlp m8", mlp(8)),
    ):
        attempt(f"torch.compile {name}", partial(compiled, made))
    packed, none = weights(520, 1024, False, 3), torch.zeros(0, dtype=torch.uint8, device=DEVICE)
    x = torch.randn(8, 1024, device=DEVICE).half()
    arguments = (x, packed.words, none, 520, packed.scale)
    attempt("opcheck linear", lambda: torch.library.opcheck(torch.ops.sm70.nvfp4_packed_linear, arguments))
    print(f"{torch.cuda.get_device_name()}: {total - failed} of {total} operator checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
