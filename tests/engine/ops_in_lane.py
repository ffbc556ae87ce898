"""Runs with the lane's python: the kernels' torch operators on a CPU. Prints what it found as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sm70_engine.kernels import checks, peers_attention, repack, torch_bridge, torch_ops, torch_reference, torch_weights
from sm70_engine.kernels.bench import AttentionBench
from sm70_engine.kernels.bench_prefill import PrefillBench
from sm70_engine.kernels.checks import AttentionCase
from sm70_engine.kernels.emulator import Emulator
from sm70_engine.kernels.errors import KernelError
from sm70_engine.kernels.plans import CacheLayout, KvFormat
from sm70_engine.ops import kv_codec


def refusal(call: Callable[[], Any]) -> str:
    """The text of the `KernelError` that a call must end with."""
    try:
        call()
    except KernelError as error:
        return str(error)
    return ""


def cache_view(layout: CacheLayout, memory: np.ndarray[Any, Any]) -> torch.Tensor:
    """[blocks, 2, page, heads, D] over the bytes of a cache."""
    size = layout.format.bytes
    raw = torch.from_numpy(memory).view(torch.float16) if size == 2 else torch.from_numpy(memory)
    shape = (memory.size // layout.block_stride, 2, layout.page, layout.heads, layout.dim)
    steps = (layout.block_stride, layout.value_offset, layout.token_stride, layout.head_stride)
    return raw.as_strided(shape, (*(x // size for x in steps), 1))


def attention() -> dict[str, float]:
    """Decode, verifier and draft against the FP64 reference of the kernels' own checks: error over tolerance."""
    found = {}
    cases = [
        *(AttentionCase(f, 128, 6, (33, 0, 1, 160), 48, 5, heads=2, packed=True) for f in KvFormat),
        AttentionCase(KvFormat.E4M3, 64, 8, (100, 17, 0, 260), 112, 4, window=40),
        *(AttentionCase(f, 256, 6, (77, 0, 31), 16, 3, queries=8) for f in KvFormat),
        AttentionCase(KvFormat.E5M2, 128, 4, (300, 64), 112, 5, heads=2, window=40, causal=False, queries=8),
    ]
    for case in cases:
        data = checks.attention_data(case)
        kv_cache = cache_view(data.layout, data.cache)
        width = case.heads * case.group * case.dim
        query = torch.from_numpy(data.q)[:, :width].unflatten(1, (-1, case.dim))
        table, lengths = torch.from_numpy(data.table), torch.from_numpy(data.lengths)
        out = torch.full_like(query, torch.nan)
        size = torch_ops.attention_workspace_bytes(case.format, case.heads, case.group, case.dim, 8, case.tokens)
        common = (out, torch.zeros(size, dtype=torch.uint8), query, kv_cache, table, lengths, str(case.format))
        scales = (case.dim**-0.5, 1.0, 1.0, case.window)
        if case.queries:
            torch.ops.sm70.verify_attention(*common, case.queries, case.causal, *scales)
            if not case.causal:  # one of a kind: opcheck looks at schema and fake, not at shapes
                torch.library.opcheck(torch.ops.sm70.verify_attention, (*common, case.queries, case.causal, *scales))
        else:
            torch.ops.sm70.decode_attention(*common, *scales)
            if case.window:
                torch.library.opcheck(torch.ops.sm70.decode_attention, (*common, *scales))
        want, tolerance = checks.attention_reference(case, data)
        shape = (len(case.lengths), case.tokens, case.heads, case.group, case.dim)
        found[case.name] = checks.judge(case.name, out.numpy().reshape(shape), want, tolerance).ratio
    return found


def prefill() -> tuple[float, float]:
    """Two sequences, one with a prefix: each query as the decode of the context up to it; directly and bridged."""
    case = AttentionCase(KvFormat.E4M3, 128, 2, (40, 7), 16, 1, heads=2)
    data = checks.attention_data(case)
    kv_cache, table = cache_view(data.layout, data.cache), torch.from_numpy(data.table)
    queries, lengths, scale = (9, 7), (40, 7), 128**-0.5
    query = torch.randn(16, 4, 128, generator=torch.Generator().manual_seed(1)).half()
    sequences = tuple(zip(queries, lengths, strict=True))
    work = torch_ops.prefill_work(kv_cache, "e4m3", 2, sequences)
    assert torch_bridge.bridged_work(kv_cache, "e4m3", 2, sequences).numel() == work.numel() == 0
    out, workspace = torch.full_like(query, torch.nan), torch.zeros(1, dtype=torch.uint8)
    arguments = (out, workspace, query, kv_cache, table, work, "e4m3", queries, lengths, True, scale, 1.0, 1.0, 0)
    torch.ops.sm70.prefill_attention(*arguments)
    torch.library.opcheck(torch.ops.sm70.prefill_attention, arguments)
    rows = [(i, lengths[i] - queries[i] + j + 1) for i in (0, 1) for j in range(queries[i])]
    want, tables = torch.empty_like(out), torch.stack([table[i] for i, _ in rows])
    sizes = torch.tensor([length for _, length in rows], dtype=torch.int32)
    torch.ops.sm70.decode_attention(want, workspace, query, kv_cache, tables, sizes, "e4m3", scale, 1.0, 1.0, 0)
    bridged, copy = torch.full_like(query, torch.nan), torch.zeros(2 * 64 * 2 * 128 * 2, dtype=torch.uint8)
    through = (
        bridged, workspace, copy, query, kv_cache, table, work, "e4m3", queries, lengths, True, scale, 1.0, 1.0,
    )  # fmt: skip
    torch.ops.sm70.prefill_bridged_attention(*through)
    torch.library.opcheck(torch.ops.sm70.prefill_bridged_attention, through)
    short = (*through[:2], copy[:-1], *through[3:])
    assert "the copy must have" in refusal(lambda: torch.ops.sm70.prefill_bridged_attention(*short))
    return float((out - want).abs().max()), float((bridged - want).abs().max())


def cache_write() -> dict[str, bool]:
    """Every byte that is written, and that nothing else is."""
    found = {}
    rng = np.random.default_rng(1)
    for kv_format, make, scale in (
        (KvFormat.E4M3, CacheLayout.split, 0.37),
        (KvFormat.E5M2, CacheLayout.packed, 2.5),
        (KvFormat.F16, CacheLayout.packed, 1.0),
    ):
        layout = make(kv_format, 48, 2, 64)
        memory = rng.integers(0, 256, 3 * layout.block_stride, dtype=np.uint8)
        rows = torch.from_numpy(rng.standard_normal((2, 5, 2, 64)).astype(np.float16) * np.float16(200))
        rows[0, 0, 0, :4] = torch.tensor([torch.inf, -torch.inf, 65504, torch.nan])
        slots = torch.tensor([143, -1, 0, 50])  # the fifth row is padding
        before = cache_view(layout, memory).clone()
        arguments = (cache_view(layout, memory), rows[0], rows[1], slots, str(kv_format), scale, scale)
        torch.ops.sm70.kv_cache_write(*arguments)
        after = cache_view(layout, memory)
        want = before.clone()
        for token, slot in enumerate(slots.tolist()):
            for part in (0, 1) if slot >= 0 else ():
                values = rows[part, token].numpy().astype(np.float32) * np.float32(1 / scale)
                stored = rows[part, token] if kv_format is KvFormat.F16 else kv_codec.encode(values, kv_format)
                want[slot // 48, part, slot % 48] = torch.as_tensor(stored)
        found[str(kv_format)] = bool((after.view(torch.uint8) == want.view(torch.uint8)).all())
        if kv_format is KvFormat.F16:
            torch.library.opcheck(torch.ops.sm70.kv_cache_write, arguments)
    return found


def regated() -> bool:
    """Weights packed as one and gated afterwards are those packed gated, also where a half ends within a tile."""
    rng = np.random.default_rng(3)
    for n in (64, 80, 32):
        codes = torch.from_numpy(rng.integers(0, 256, (n, 96), dtype=np.uint8))
        scales = torch.from_numpy(rng.integers(0, 0x7F, (n, 12), dtype=np.uint8))
        found = torch_weights.gate(torch_weights.pack(codes, scales, torch.tensor(0.5)))
        wanted = torch_weights.pack(codes, scales, torch.tensor(0.5), gated=True)
        if (found.n, found.scale, found.up_scale) != (wanted.n, wanted.scale, wanted.up_scale):
            return False
        if not torch.equal(found.words, wanted.words):
            return False
    odd = torch_weights.pack(codes[:24], scales[:24], torch.tensor(0.5))
    return "a multiple of 8 columns each" in refusal(lambda: torch_weights.gate(odd))


def linears() -> dict[str, Any]:
    """Packed weights are the checkpoint's, and products are right for both layouts and gated."""
    rng = np.random.default_rng(2)
    codes, raw = (rng.integers(0, top, shape, dtype=np.uint8) for top, shape in ((256, (80, 96)), (0x7F, (80, 12))))
    exact = repack.dequantize(codes, raw)
    torch_codes, scales = torch.from_numpy(codes), torch.from_numpy(raw).view(torch.float8_e4m3fn)
    packed = torch_weights.pack(torch_codes, scales, torch.tensor(0.5))
    divided = torch_weights.pack(torch_codes, scales, torch.tensor([2.0]), "compressed-tensors")
    gated = torch_weights.pack(torch_codes, scales, torch.tensor([2.0**-9, 0.25]), gated=True)
    x = torch.from_numpy(rng.standard_normal((2, 3, 192)).astype(np.float16) * np.float16(0.25))
    none = torch.empty(0, dtype=torch.uint8)
    product = x.double().numpy() @ exact.T
    got = torch.ops.sm70.nvfp4_packed_linear(x, packed.words, none, 80, packed.scale)
    gate, up = np.split(product * np.repeat([2.0**-9, 0.25], 40), 2, axis=-1)
    both = torch.ops.sm70.nvfp4_packed_swiglu(x, gated.words, none, 40, gated.scale, gated.up_scale)
    down = torch_weights.pack(torch_codes[:, :32], scales[:, :4], torch.tensor(0.01))
    wide_codes, wide_scales = (torch.cat((t, t))[:128] for t in (torch_codes, scales))
    inner = torch_weights.pack(wide_codes, wide_scales, torch.tensor(0.002), gated=True)
    mlp = (x, inner.words, down.words, none, 64, 80, inner.scale, inner.up_scale, down.scale)
    between = torch.ops.sm70.nvfp4_packed_swiglu(x, inner.words, none, 64, inner.scale, inner.up_scale)
    chained = torch.ops.sm70.nvfp4_packed_linear(between, down.words, none, 80, down.scale)
    torch.library.opcheck(torch.ops.sm70.nvfp4_mlp, mlp)
    wanted = gate / (1 + np.exp(-gate)) * up
    plain = (x, packed.words, none, 80, packed.scale)
    torch.library.opcheck(torch.ops.sm70.nvfp4_packed_linear, plain)
    torch.library.opcheck(torch.ops.sm70.nvfp4_packed_swiglu, (x, gated.words, none, 40, gated.scale, gated.up_scale))
    twice = torch.compile(
        lambda y: torch.ops.sm70.nvfp4_packed_linear(y, *plain[1:]) * 2, backend="aot_eager", fullgraph=True
    )
    pack = torch_weights.pack
    return {
        "same_words": bool((packed.words.numpy().view(np.uint32) == repack.repack(codes, raw)).all()),
        "same_gated": bool((gated.words.numpy().view(np.uint32) == repack.repack_gated(codes, raw)).all()),
        "unpacked": bool((torch_reference.unpack_nvfp4(packed.words, 80, 192).double().numpy() == exact).all()),
        "regated": regated(),
        "divisor": divided.scale == packed.scale == 0.5 and bool((divided.words == packed.words).all()),
        "linear": float(np.abs(got.double().numpy() - product * 0.5).max() / np.abs(product * 0.5).max()),
        "swiglu": float(np.abs(both.double().numpy() - wanted).max() / np.abs(wanted).max()),
        "mlp": bool((torch.ops.sm70.nvfp4_mlp(*mlp) == chained).all()) and bool(chained.isfinite().all()),
        "compiled": bool((twice(x) == got * 2).all()),
        "refusals": [
            refusal(lambda: pack(torch_codes, scales, torch.tensor([0.5, 0.25]))),
            refusal(lambda: pack(torch_codes[:, :48], scales, torch.tensor(0.5))),
            refusal(lambda: pack(torch_codes, torch.full((80, 12), 0x80, dtype=torch.uint8), torch.tensor(0.5))),
            refusal(lambda: pack(torch_codes, scales, torch.tensor(0.0))),
            refusal(lambda: torch.ops.sm70.nvfp4_packed_linear(x.float(), *plain[1:])),
            refusal(lambda: torch.ops.sm70.nvfp4_packed_linear(x, packed.words[:-1], none, 80, 0.5)),
        ],
    }


def peers() -> dict[str, float]:
    """The benchmarks' peers: our kernels (emulated) and torch on a case's data, largest difference over the RMS."""
    found = {}
    for bench in (
        AttentionBench(KvFormat.E4M3, 256, 6, 2, 100, page=16),
        AttentionBench(KvFormat.F16, 128, 8, 1, 90, page=48, heads=2),
        AttentionBench(KvFormat.E5M2, 256, 6, 1, 77, page=32, queries=8),
        PrefillBench(KvFormat.E4M3, 128, 6, 20, 90),
    ):
        data = peers_attention.Data(peers_attention.Case.of(bench), "cpu", 1 << 18)
        last = data.copies - 1
        launches = peers_attention.own_launches(data, 3)  # holds the workspace
        for launch in launches(last):
            Emulator().run(launch)
        other = peers_attention.sdpa_way(data, data.dense().unsqueeze(0)).call(last)
        assert other is not None
        ours = data.out.float()
        found[bench.name] = float((other.float().reshape(ours.shape) - ours).abs().max() / ours.square().mean().sqrt())
    return found


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "peers": peers(),
                "attention": attention(),
                "prefill": prefill(),
                "cache_write": cache_write(),
                "linears": linears(),
            }
        )
    )
