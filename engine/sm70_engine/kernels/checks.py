"""Every kernel against an FP64 reference, on any backend, over the cases where kernels go wrong.

Block tables are permuted and their unused entries point nowhere; slots that no query may see hold NaN (or what the
format has); rows are longer than their content and filled with NaN; padded rows of a batch have length 0; outputs
start as NaN and what must stay untouched is compared as well.

Tolerances bound the roundings that the kernels are specified to make, and nothing that grows with the length:
  linear     one rounding to FP16 of the result, and 2^-19 of the sum of |products| for the FP32 accumulation
  attention  one rounding to FP16 of the result, one of each probability (2^-11 of the weighted |V|), and a fourth
             of that for FP32
`ratio` in a result is the largest error over its tolerance; above 1 the check fails.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from sm70_engine.ops import kv_codec

from . import plans, repack
from .backend import Array, Backend, poison
from .plans import (
    AttentionMemory,
    CacheLayout,
    ChainOp,
    ChainTile,
    DecodePlan,
    KvFormat,
    LinearTile,
    VerifyPlan,
)

HALF_ULP = 2.0**-11
SMALLEST = 2.0**-24
NOWHERE = 1 << 28


class Size(StrEnum):
    """How much to check: `small` for a gate on the emulator, `full` for a patient one, `device` for a GPU."""

    SMALL = "small"
    FULL = "full"
    DEVICE = "device"


@dataclass(frozen=True)
class Result:
    """One check. `ratio`: largest error over tolerance; `relative_l2`: of the whole output."""

    name: str
    ratio: float
    relative_l2: float
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error kept within its tolerance (NaN does not)."""
        return self.ratio <= 1.0 and not self.note


def judge(name: str, got: Array, want: Array, tolerance: Array, note: str = "") -> Result:
    """Compares in FP64; NaN anywhere in `got` fails."""
    error = np.abs(got.astype(np.float64) - want)
    ratio = float(np.max(np.where(np.isnan(error), np.inf, error) / tolerance))
    norm = float(np.sqrt(np.mean(want**2))) or 1.0
    return Result(name, ratio, float(np.sqrt(np.mean(error**2))) / norm, note)


# ---------------------------------------------------------------- KV cache


def _same(name: str, got: Array, want: Array) -> Result:
    wrong = int(np.count_nonzero(got != want))
    return Result(name, 0.0 if not wrong else np.inf, 0.0, f"{wrong} of {want.size} bytes differ" if wrong else "")


def check_codecs(backend: Backend) -> Iterator[Result]:
    """All 256 codes to halves and all 65,536 halves to codes, bit for bit (NaN: any quiet NaN of the same sign)."""
    codes = np.arange(256, dtype=np.uint8)
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    for kv_format in (KvFormat.E4M3, KvFormat.E5M2):
        source, target = backend.put(codes), backend.put(poison(256))
        backend.run(plans.kv_convert("decode", kv_format, source=source.address, target=target.address, count=256))
        got, want = target.read(), kv_codec.decode(codes, kv_format).astype(np.float16)
        equal = (got.view(np.uint16) == want.view(np.uint16)) | (np.isnan(got) & np.isnan(want))
        equal &= np.signbit(got) == np.signbit(want)
        yield _same(f"decode_{kv_format} 256 codes", equal, np.ones(256, bool))
        source, target = backend.put(halves), backend.put(np.zeros(65536, np.uint8))
        backend.run(plans.kv_convert("encode", kv_format, source=source.address, target=target.address, count=65536))
        yield _same(f"encode_{kv_format} 65536 halves", target.read(), kv_codec.encode(halves, kv_format))


def _stored(values: Array, kv_format: KvFormat, scale: float) -> Array:
    """The bytes that the cache must hold for halves [..., D]."""
    if kv_format is KvFormat.F16:
        return values.view(np.uint8)
    inverse = np.float32(1.0 / scale)
    return kv_codec.encode(values.astype(np.float32) * inverse, kv_format)


def check_kv_write(
    backend: Backend, layout: CacheLayout, tokens: int, scales: tuple[float, float], seed: int
) -> Result:
    """Tokens to scattered slots, some of them negative; every byte of the cache is compared."""
    rng = np.random.default_rng(seed)
    blocks = -(-2 * tokens // layout.page) + 1
    width = layout.heads * layout.dim
    rows = rng.standard_normal((2, tokens, width + 24)).astype(np.float16) * np.float16(40)
    rows[:, :, width:] = np.nan
    rows[0, 0, :4] = (np.inf, -np.inf, 65504, -0.0)
    slots = rng.permutation(blocks * layout.page)[:tokens].astype(np.int64)
    slots[rng.random(tokens) < 0.2] = -1
    cache = rng.integers(0, 256, blocks * layout.block_stride, dtype=np.uint8)
    want = cache.copy()
    for token, slot in enumerate(slots):
        for head in range(layout.heads):
            for is_value in (0, 1):
                if slot < 0:
                    continue
                at = slot // layout.page * layout.block_stride + slot % layout.page * layout.token_stride
                at += head * layout.head_stride + is_value * layout.value_offset
                piece = rows[is_value, token, head * layout.dim : (head + 1) * layout.dim]
                data = _stored(piece, layout.format, scales[is_value])
                want[at : at + data.size] = data
    key, value, where, memory = (backend.put(x) for x in (rows[0], rows[1], slots, cache))
    backend.run(
        plans.kv_write(
            layout,
            tokens=tokens,
            key=key.address,
            value=value.address,
            slots=where.address,
            cache=memory.address,
            key_stride=width + 24,
            value_stride=width + 24,
            key_scale=scales[0],
            value_scale=scales[1],
        )
    )
    kind = "packed" if layout.value_offset < layout.token_stride else "split"
    name = f"kv_write_{layout.format} {kind} d{layout.dim} heads {layout.heads} page {layout.page} tokens {tokens}"
    return _same(f"{name} scales {scales}", memory.read(), want)


def check_kv_cache(backend: Backend, size: Size) -> Iterator[Result]:
    """Codecs and cache writes."""
    yield from check_codecs(backend)
    tokens = 9 if size is Size.SMALL else 200
    for kv_format in KvFormat:
        scales = (1.0, 1.0) if kv_format is KvFormat.F16 else (0.37, 2.5)
        for dim, heads, page in ((64, 3, 16), (128, 8, 48), (256, 1, 784)):
            yield check_kv_write(backend, CacheLayout.split(kv_format, page, heads, dim), tokens, (1.0, 1.0), dim)
            yield check_kv_write(backend, CacheLayout.packed(kv_format, page, heads, dim), tokens, scales, dim)


# ---------------------------------------------------------------- attention


@dataclass(frozen=True)
class AttentionCase:
    """A batch. `queries` 0: decode, one token per sequence. `packed`: K and V of a token side by side."""

    format: KvFormat
    dim: int
    group: int
    lengths: tuple[int, ...]
    page: int
    splits: int
    heads: int = 1
    window: int = 0
    packed: bool = False
    amplitude: float = 1.0
    queries: int = 0
    causal: bool = True

    @property
    def tokens(self) -> int:
        """Query tokens per sequence."""
        return self.queries or 1

    @property
    def plan(self) -> DecodePlan | VerifyPlan:
        """The launch's plan."""
        make = CacheLayout.packed if self.packed else CacheLayout.split
        common = (make(self.format, self.page, self.heads, self.dim), len(self.lengths), self.group, self.splits)
        if not self.queries:
            return DecodePlan(*common, self.window)
        return VerifyPlan(*common, self.window, self.queries, self.causal)

    @property
    def name(self) -> str:
        """For tables."""
        text = f"{self.plan.kernel} g{self.group} heads {self.heads} page {self.page} splits {self.splits}"
        text += f" q{self.queries}" if self.queries else ""
        text += "" if self.causal else " not causal"
        text += f" window {self.window}" if self.window else ""
        text += " packed" if self.packed else ""
        text += f" x{self.amplitude:g}" if self.amplitude != 1.0 else ""
        lengths = self.lengths if len(self.lengths) <= 6 else f"{len(self.lengths)} sequences"
        return f"{text} lengths {lengths}"


@dataclass(frozen=True)
class AttentionData:
    """Inputs of a case: the cache's bytes, its tables, the queries, and K and V as the values that were stored."""

    layout: CacheLayout
    cache: Array
    table: Array
    lengths: Array
    q: Array
    keys: list[Array]
    values: list[Array]


POISON = {KvFormat.E4M3: 0x7F, KvFormat.E5M2: 0x7E, KvFormat.F16: 0x7E}


def random_codes(rng: np.random.Generator, kv_format: KvFormat, count: int, amplitude: float) -> tuple[Array, Array]:
    """`count` normal values in the storage format: bytes and FP32 values. By table, because it must be fast."""
    draws = rng.integers(0, 4096, count)
    normal = np.sort(np.random.default_rng(0).standard_normal(4096)) * amplitude
    if kv_format is KvFormat.F16:
        stored = normal.astype(np.float16)
        return stored[draws].view(np.uint8), stored[draws].astype(np.float32)
    codes = kv_codec.encode(normal, kv_format)
    return codes[draws], kv_codec.decode(codes, kv_format).astype(np.float32)[draws]


def attention_data(case: AttentionCase, seed: int = 0) -> AttentionData:
    """Makes the inputs of a case."""
    rng = np.random.default_rng([seed, case.dim, case.group, case.page, sum(case.lengths)])
    layout = case.plan.layout
    used = [-(-length // case.page) for length in case.lengths]
    total = sum(used) + 2
    order = rng.permutation(total).astype(np.int32)
    table = np.full((len(case.lengths), max(used) + 2), NOWHERE, np.int32)
    cache = np.full(total * layout.block_stride, POISON[case.format], np.uint8)
    # [block, K or V, position, head, bytes of a row], whatever the layout
    row, blocks = case.dim * case.format.bytes, cache.reshape(total, -1)
    if case.packed:
        view = blocks.reshape(total, case.heads, case.page, 2, row).transpose(0, 3, 2, 1, 4)
    else:
        view = blocks.reshape(total, 2, case.page, case.heads, row)
    keys, values, taken = [], [], 0
    for i, length in enumerate(case.lengths):
        begin = max(0, length - case.tokens - case.window + 1) if case.window else 0
        live = range(begin // case.page, used[i])
        table[i, live.start : live.stop] = order[taken + live.start : taken + live.stop]
        taken += used[i]
        read = []
        for part in (0, 1):
            raw, value = random_codes(rng, case.format, length * case.heads * case.dim, case.amplitude)
            raw, value = raw.reshape(length, case.heads, row), value.reshape(length, case.heads, case.dim)
            for j in live:
                first, last = max(begin, j * case.page), min(length, (j + 1) * case.page)
                view[table[i, j], part, first - j * case.page : last - j * case.page] = raw[first:last]
            read.append(value[begin:])
        keys.append(read[0])
        values.append(read[1])
    width = case.heads * case.group * case.dim
    q = np.full((len(case.lengths) * case.tokens, width + 64), np.nan, np.float16)
    q[:, :width] = rng.standard_normal((q.shape[0], width)) * case.amplitude
    return AttentionData(layout, cache, table, np.array(case.lengths, np.int32), q, keys, values)


def attention_reference(case: AttentionCase, data: AttentionData) -> tuple[Array, Array]:
    """The output in FP64, and its tolerance; zero, exactly, for a sequence of length 0."""
    shape = (len(case.lengths), case.tokens, case.heads, case.group, case.dim)
    out, tolerance = np.zeros(shape), np.full(shape, SMALLEST)
    q = data.q[:, : case.heads * case.group * case.dim].astype(np.float64).reshape(shape)
    for i, length in enumerate(case.lengths):
        first = length - len(data.keys[i])  # the position of the first row that was kept
        for h in range(case.heads if length else 0):
            keys, values = data.keys[i][:, h].astype(np.float64), data.values[i][:, h].astype(np.float64)
            for j in range(case.tokens):
                position = length - case.tokens + j
                end = position + 1 if case.causal else length
                start = max(0, position - case.window + 1) if case.window else 0
                if end <= start:
                    continue
                key, value = keys[start - first : end - first], values[start - first : end - first]
                score = q[i, j, h] @ key.T * case.dim**-0.5
                weight = np.exp(score - score.max(axis=1, keepdims=True))
                weight /= weight.sum(axis=1, keepdims=True)
                out[i, j, h] = weight @ value
                tolerance[i, j, h] += HALF_ULP * (np.abs(out[i, j, h]) + 1.25 * (weight @ np.abs(value)))
    return out, tolerance


def run_attention(
    backend: Backend, case: AttentionCase, data: AttentionData, launches: int = 1
) -> tuple[Array, Array, Array]:
    """Output [sequences, tokens, heads, group, D], the untouched ends of its rows, and what a decode left behind."""
    plan = case.plan
    width, rows = case.heads * case.group * case.dim, len(case.lengths) * case.tokens
    out = backend.put(poison((rows, width + 16)))
    # A decode finds zeros and leaves zeros; the verifier's content is of no matter.
    start = poison if case.queries else np.zeros
    partial = backend.put(start(plan.partial_floats, np.float32))
    stats = backend.put(start(plan.stats_floats, np.float32))
    q, cache, table, lengths = (backend.put(x) for x in (data.q, data.cache, data.table, data.lengths))
    memory = AttentionMemory(
        q=q.address,
        out=out.address,
        cache=cache.address,
        block_table=table.address,
        lengths=lengths.address,
        partial=partial.address,
        stats=stats.address,
        table_stride=data.table.shape[1],
        q_stride=data.q.shape[1],
        out_stride=width + 16,
    )
    for launch in plan.launches(memory, case.dim**-0.5) * launches:
        backend.run(launch)
    result = out.read()
    shape = (len(case.lengths), case.tokens, case.heads, case.group, case.dim)
    left = np.zeros(1) if case.queries else np.concatenate([partial.read(), stats.read()])
    return result[:, :width].reshape(shape), result[:, width:], left


def check_attention(backend: Backend, case: AttentionCase) -> Result:
    """One case; two launches in a row, as the second one finds the workspace of the first."""
    data = attention_data(case)
    got, beyond, left = run_attention(backend, case, data, launches=2)
    want, tolerance = attention_reference(case, data)
    note = "" if np.isnan(beyond).all() else "wrote past the rows of the output"
    note = "the workspace is not zeros after the launch" if left.any() else note
    return judge(case.name, got, want, tolerance, note)


_EDGES = (15, 16, 17, 31, 32, 33, 127, 128, 129, 255, 1, 2)


def decode_cases(size: Size, formats: tuple[KvFormat, ...] = tuple(KvFormat)) -> Iterator[AttentionCase]:
    """The grid. Every kernel meets every kind of edge at size `small` already; the larger sizes lengthen it."""
    for kv_format in formats:
        for dim in (64, 128, 256):
            for rows in (1, 2):
                few, some, most = (1, 6, 8) if rows == 1 else (9, 12, 16)
                yield AttentionCase(kv_format, dim, some, (77,), 16, 3)
                yield AttentionCase(kv_format, dim, few, (33, 0, 1, 160), 48, 5, heads=2, packed=True)
                yield AttentionCase(kv_format, dim, most, (100, 17, 0, 260), 112, 4, window=40)
                yield AttentionCase(kv_format, dim, some, (280,), 16, 20, window=250, packed=True, amplitude=6.0)
                if size is not Size.SMALL:
                    yield AttentionCase(kv_format, dim, some, _EDGES, 16, 2, heads=2)
                    yield AttentionCase(kv_format, dim, most, _EDGES, 784, 7, window=16, packed=True)
                    yield AttentionCase(kv_format, dim, few, (1500, 900, 2300), 832, 80)
                if size is Size.DEVICE:
                    yield AttentionCase(kv_format, dim, some, (5000, 16, 9000, 0, 32768), 1648, 40)
                    yield AttentionCase(kv_format, dim, most, (16384 + 5,), 3296, 160)
        # The profile's shape at length: 4,096 tokens on the emulator, all of 262,144 on a device.
        long = {Size.SMALL: 4096, Size.FULL: 12000, Size.DEVICE: 131072 - 3}[size]
        yield AttentionCase(kv_format, 256, 6, (long,), 784, 80)
        if size is Size.DEVICE:
            yield AttentionCase(kv_format, 256, 6, (262144,), 2048, 80)
            yield AttentionCase(kv_format, 256, 6, (262144,), 2048, 80, window=2048)
            yield AttentionCase(kv_format, 256, 8, tuple(4096 + 37 * i for i in range(8)), 1056, 10)


def verify_cases(size: Size, formats: tuple[KvFormat, ...] = tuple(KvFormat)) -> Iterator[AttentionCase]:
    """Verifier and draft: every kernel, lengths around the steps of 64, many steps, and shorter than the queries."""
    groups = {2: (8, 2), 4: (4, 8), 6: (6, 8), 8: (8, 8)}
    for kv_format in formats:
        for dim, tiles in plans.VERIFY_TILES.items():
            for rows in tiles:
                group, queries = groups[rows]
                yield AttentionCase(kv_format, dim, group, (77, 0, 31), 16, 3, queries=queries)
                yield AttentionCase(kv_format, dim, group - 1, (190, 5, 33), 48, 4, 2, packed=True, queries=queries)
                yield AttentionCase(kv_format, dim, group, (300, 64), 112, 5, window=40, causal=False, queries=queries)
                yield AttentionCase(
                    kv_format, dim, group, (300, 65), 16, 20, window=100, queries=queries, amplitude=6.0
                )
                if size is not Size.SMALL:
                    yield AttentionCase(kv_format, dim, group, _EDGES, 784, 7, heads=2, queries=queries)
                    yield AttentionCase(kv_format, dim, 1, _EDGES, 16, 3, window=16, queries=group, packed=True)
                if size is Size.DEVICE:
                    yield AttentionCase(kv_format, dim, group, (5000, 16384 + 7), 1648, 80, queries=queries)
        long = {Size.SMALL: 2000, Size.FULL: 9000, Size.DEVICE: 131072 - 3}[size]
        yield AttentionCase(kv_format, 256, 6, (long,), 2048, 2 if size is Size.SMALL else 80, queries=8)
        if size is Size.DEVICE:
            yield AttentionCase(kv_format, 256, 6, (262144,), 2048, 80, queries=8)
            yield AttentionCase(kv_format, 128, 4, (262144,), 2048, 40, heads=2, window=2048, causal=False, queries=8)


# ---------------------------------------------------------------- NVFP4 linear


@dataclass(frozen=True)
class LinearCase:
    """One product. `tile` None: the variant that the dispatch chooses."""

    m: int
    n: int
    k: int
    tile: LinearTile | None = None
    gated: bool = False

    @property
    def name(self) -> str:
        """For tables."""
        tile = self.tile or plans.linear_tile(self.m, self.n * (2 if self.gated else 1))
        return f"{tile.gated if self.gated else tile.kernel} m{self.m} n{self.n} k{self.k}"


@functools.lru_cache(maxsize=1)
def _linear_weight(n: int, k: int, seed: int, gated: bool) -> tuple[Array, Array]:
    """Random weights over their whole range: as FP64 [n, k] (gated: gate rows, then up rows), and packed."""
    rng = np.random.default_rng([seed, n, k])
    codes = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scales = rng.integers(0, 0x7F, (n, k // repack.GROUP), dtype=np.uint8)
    pack = repack.repack_gated if gated else repack.repack
    return repack.dequantize(codes, scales), pack(codes, scales)


def _gated(product: Array, size: Array, ratio: float) -> tuple[Array, Array]:
    """silu(gate) * up and its tolerance, from the products of both with one scale; `ratio`: the up's scale to it.

    The accumulations' errors go through the product; silu's slope is at most 1.1. FP32 of silu itself: 2^-19.
    """
    gate, up = np.split(product, 2, axis=1)
    gate_size, up_size = np.split(size * 2.0**-19, 2, axis=1)
    up, up_size = up * ratio, up_size * ratio
    silu = gate / (1.0 + np.exp(-np.maximum(gate, -700.0)))
    want = silu * up
    tolerance = (HALF_ULP + 2.0**-19) * np.abs(want) + 1.1 * gate_size * np.abs(up) + np.abs(silu) * up_size + SMALLEST
    return want, tolerance


def check_linear(backend: Backend, case: LinearCase, seed: int = 0) -> Result:
    """One case, weights over their whole range, outputs up to thousands."""
    weight, words = _linear_weight(case.n * (2 if case.gated else 1), case.k, seed, case.gated)
    rng = np.random.default_rng([seed, case.m, case.n, case.k])
    scale, up_scale = (0.0173, None) if not case.gated else (0.0002, 0.0173)
    a = np.full((case.m + 3, case.k + 24), np.nan, np.float16)
    a[: case.m, : case.k] = rng.standard_normal((case.m, case.k)) * 0.25
    x = a[: case.m, : case.k].astype(np.float64)
    want, size = x @ weight.T * scale, np.abs(x) @ np.abs(weight).T * scale
    tolerance = HALF_ULP * np.abs(want) + 2.0**-19 * size + SMALLEST
    if up_scale is not None:
        want, tolerance = _gated(want, size, up_scale / scale)
    out = backend.put(poison((case.m + 3, case.n + 16)))
    packed, activations = backend.put(words), backend.put(a)
    backend.run(
        plans.linear(
            m=case.m,
            n=case.n,
            k=case.k,
            weight=packed.address,
            a=activations.address,
            out=out.address,
            scale=scale,
            a_stride=case.k + 24,
            out_stride=case.n + 16,
            tile=case.tile,
            up_scale=up_scale,
        )
    )
    got = out.read()
    clean = np.isnan(got[case.m :]).all() and np.isnan(got[:, case.n :]).all()
    return judge(case.name, got[: case.m, : case.n], want, tolerance, "" if clean else "wrote past its output")


def linear_cases(size: Size) -> Iterator[LinearCase]:
    """The grid: every variant, M at its limits, N that is no multiple of the tile, K with fewer units than warps."""
    shapes = {
        Size.SMALL: ((96, 576), (40, 128)),
        Size.FULL: ((160, 1024), (40, 64), (4120, 256)),
        Size.DEVICE: ((4120, 5120), (5120, 1536), (5120, 4352), (8704, 5120), (40, 64), (264, 1024)),
    }[size]
    for n, k in shapes:
        for most, *variants in plans.LINEAR_TILES:
            least = {8: 1, 16: 9, 32: 17, 64: 33}[most]
            for tile in dict.fromkeys(variants):
                for m in (least, most - 1, most) if size is not Size.SMALL or n > 64 else (least,):
                    yield LinearCase(m, n, k, tile)
    for n, k in shapes:
        for most, *variants in plans.LINEAR_TILES:
            for tile in dict.fromkeys(variants):
                yield LinearCase(most - 1, n, k, tile, gated=True)


# ---------------------------------------------------------------- NVFP4 chain, and for many rows


@dataclass(frozen=True)
class ChainCase:
    """A gated linear n0 x k0, one that reads its result (n1 x n0), one that reads the first input (n2 x k0), one that
    reads whole units of the second one's result, and `links` more, each reading the one before."""

    m: int
    k0: int
    n0: int
    n1: int
    n2: int
    links: int = 0
    tile: ChainTile | None = None

    @property
    def name(self) -> str:
        """For tables."""
        tile = self.tile or next(tile for most, tile in plans.CHAIN_TILES if self.m <= most)
        shapes = f"gated {self.n0}x{self.k0}, {self.n1}x{self.n0}, {self.n2}x{self.k0}"
        return f"{tile.kernel} m{self.m} {shapes}{f' and {self.links} more' if self.links else ''}"

    @property
    def linears(self) -> tuple[tuple[int | None, int, int], ...]:
        """Of each linear which earlier one it reads, N and K."""
        last = (1, 72, self.n1 // 64 * 64)
        more = ((i + 3, 72, 64) for i in range(self.links))
        return ((None, self.n0, self.k0), (0, self.n1, self.n0), (None, self.n2, self.k0), last, *more)


def check_chain(backend: Backend, case: ChainCase, seed: int = 0) -> Result:
    """One case, launched on other input three times before, once with another layout of the workspace.

    Every linear is judged by what it read as the kernel rounded it.
    """
    rng = np.random.default_rng([seed, case.m, case.n0])
    m, shapes = case.m, case.linears
    weights = [
        _linear_weight.__wrapped__(n * 2 if i == 0 else n, k, seed + i, i == 0) for i, (_, n, k) in enumerate(shapes)
    ]
    # From the fourth on: outputs of the size of the inputs.
    scales = [0.0002, 0.0173, 0.004, *(float((w**2).sum(1).mean() ** -0.5) for w, _ in weights[3:])]
    inputs = []
    for _ in range(2):
        a = np.full((m + 1, case.k0 + 8), np.nan, np.float16)
        a[:m, : case.k0] = rng.standard_normal((m, case.k0)) * 0.002
        inputs.append(a)
    words, x = [backend.put(packed) for _, packed in weights], [backend.put(a) for a in inputs]
    outs = [backend.put(poison((m + 1, n + 8))) for _, n, _ in shapes]

    def ops(which: int) -> list[ChainOp]:
        return [
            ChainOp(
                words[i].address, x[which].address if reads is None else 0, outs[i].address, scales[i], n, k, k + 8,
                n + 8, 1.0 if i == 0 else None, reads,
            )
            for i, (reads, n, k) in enumerate(shapes)
        ]  # fmt: skip

    size = plans.chain_workspace_bytes(ops(0), m)
    workspace = backend.put(np.zeros(size + 256, np.uint8))
    for which, given in ((0, size), (0, size + 256), (0, size + 256), (1, size + 256)):
        table = backend.put(np.frombuffer(bytes(plans.chain_table(ops(which), m)), np.uint8).copy())
        backend.run(
            plans.chain(
                ops(which), m=m, workspace=workspace.address, workspace_bytes=given, table=table.address,
                multiprocessors=backend.multiprocessors, tile=case.tile,
            )
        )  # fmt: skip
    got = [out.read() for out in outs]
    wants, tolerances = [], []
    for i, (reads, _, k) in enumerate(shapes):
        weight = weights[i][0]
        y = (inputs[1] if reads is None else got[reads])[:m, :k].astype(np.float64)
        want, size_of = y @ weight.T * scales[i], np.abs(y) @ np.abs(weight).T * scales[i]
        tolerance = HALF_ULP * np.abs(want) + 2.0**-19 * size_of + SMALLEST
        if i == 0:
            want, tolerance = _gated(want, size_of, 1 / scales[0])
        wants.append(want)
        tolerances.append(tolerance)
    clean = all(np.isnan(y[m:]).all() and np.isnan(y[:, w.shape[1] :]).all() for y, w in zip(got, wants, strict=True))
    left = workspace.read()
    ticket, arrived, half, side, used = (int(x) for x in left[:20].view(np.uint32))
    next_side = left[plans.CHAIN_STATE_BYTES + side * half :][:used]
    note = "" if clean else "wrote past an output"
    note = note if not (ticket or arrived) else "the workspace's counters are not zero after the launch"
    note = note if used and (next_side == 0xFF).all() else "the next launch's side of the workspace is not clean"
    parts = [y[:m, : w.shape[1]] for y, w in zip(got, wants, strict=True)]
    whole, want, tolerance = (np.concatenate(x, axis=1) for x in (parts, wants, tolerances))
    return judge(case.name, whole, want, tolerance, note)


def chain_cases(size: Size) -> Iterator[ChainCase]:
    """Every variant; K with fewer units than warps, column groups that do not come out even, one or several rounds;
    more linears than the parameters hold."""
    shapes = {
        Size.SMALL: ((576, 192, 264, 40),),
        Size.FULL: ((576, 192, 264, 40), (1024, 320, 1056, 328)),
        Size.DEVICE: ((576, 192, 264, 40), (5120, 4352, 5120, 4120), (5120, 4352, 4128, 40)),
    }[size]
    for shape in shapes:
        for most, _ in plans.CHAIN_TILES:
            for m in (most,) if size is Size.SMALL else (most // 2 + 1, most):
                yield ChainCase(m, *shape)
    yield ChainCase(1, 64, 64, 72, 8, links=plans.CHAIN_INLINE)


def check_expand(backend: Backend, n: int, k: int, gated: bool) -> Result:
    """All weights of a matrix, or of the up half of a gated one, bit for bit."""
    weight, words = _linear_weight(n * (2 if gated else 1), k, 0, gated)
    want = weight[n:] if gated else weight
    tiles = -(-n // 32)
    out, packed = backend.put(poison((tiles * 32 + 1, k))), backend.put(words)
    backend.run(
        plans.expand(weight=packed.address, out=out.address, k=k, tiles=tiles, first=int(gated), step=2 if gated else 1)
    )
    got = out.read()
    name = f"nvfp4_expand n{n} k{k}{' gated' if gated else ''}"
    result = _same(name, got[:n].astype(np.float64), want)
    return result if np.isnan(got[-1]).all() else replace(result, note="wrote past its output")


def check_silu(backend: Backend, m: int, n: int) -> Result:
    """silu(gate) * up over the range of halves that it keeps finite."""
    rows = (np.random.default_rng(m).standard_normal((m, 2 * n + 8)) * 6).astype(np.float16)
    rows[:, 2 * n :] = np.nan
    source, out = backend.put(rows), backend.put(poison((m, n + 8)))
    step = 2 * n + 8
    backend.run(
        plans.silu_times(
            gate=source.address, up=source.address + 2 * n, out=out.address, m=m, n=n, stride=step, out_stride=n + 8
        )
    )
    gate, up = rows[:, :n].astype(np.float64), rows[:, n : 2 * n].astype(np.float64)
    want = gate / (1 + np.exp(-gate)) * up
    got = out.read()
    note = "" if np.isnan(got[:, n:]).all() else "wrote past its output"
    return judge(f"silu_times m{m} n{n}", got[:, :n], want, (HALF_ULP + 2.0**-19) * np.abs(want) + SMALLEST, note)


def check_many_rows(backend: Backend, size: Size) -> Iterator[Result]:
    """What the linears of many rows are made of."""
    for n, k in ((40, 192), (96, 576)) if size is not Size.DEVICE else ((40, 192), (4120, 5120)):
        yield check_expand(backend, n, k, gated=False)
        yield check_expand(backend, n, k, gated=True)
    yield check_silu(backend, 5, 2072)


def run_all(backend: Backend, size: Size) -> Iterator[Result]:
    """Every check of every family."""
    yield from check_kv_cache(backend, size)
    for case in (*decode_cases(size), *verify_cases(size)):
        yield check_attention(backend, case)
    for product in linear_cases(size):
        yield check_linear(backend, product)
    for chained in chain_cases(size):
        yield check_chain(backend, chained)
    yield from check_many_rows(backend, size)
