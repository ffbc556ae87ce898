"""What every operator of torch_ops.py must compute, in plain torch: its CPU kernels, and what a GPU is checked against.

Attention is computed in FP64 and rounded once; codes of the KV cache mean what the kernels read (E4M3's two NaN codes
are +-480 there).
"""

from __future__ import annotations

import torch

from sm70_engine.ops.kv_codec import MAX_FINITE_CODE, decode_table

from .repack import GROUP, UNIT_WORDS

_SIGN_BIT = (15, 12, 14, 13)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def kv_decode(raw: torch.Tensor, kv_format: str) -> torch.Tensor:
    """FP64 values of a cache's elements as attention reads them."""
    if kv_format == "f16":
        return raw.double()
    table = torch.from_numpy(decode_table(kv_format).copy()).to(raw.device)
    if kv_format == "e4m3":
        table[0x7F], table[0xFF] = 480.0, -480.0
    return table[raw.view(torch.uint8).int()]


def kv_encode(values: torch.Tensor, kv_format: str, scale: float) -> torch.Tensor:
    """FP16 values to what the cache stores of value / scale: uint8 codes, or the halves themselves.

    Nearest, ties to even; what is too large becomes the largest finite code, NaN 0x7f.
    """
    if kv_format == "f16":
        return values
    kind = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[kv_format]
    largest = float(decode_table(kv_format)[MAX_FINITE_CODE[kv_format]])
    x = values.float() * (1.0 / scale)
    code = x.clamp(-largest, largest).to(kind).view(torch.uint8)
    return torch.where(x.isnan(), torch.full_like(code, 0x7F), code)


def kv_cache_write(
    kv_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    kv_format: str,
    key_scale: float,
    value_scale: float,
) -> None:
    """Writes the tokens whose slot is not negative; see the operator."""
    page = kv_cache.shape[2]
    (live,) = torch.nonzero(slots >= 0, as_tuple=True)
    block, position = slots[live] // page, slots[live] % page
    for part, rows, scale in ((0, key, key_scale), (1, value, value_scale)):
        stored = kv_encode(rows[live], kv_format, scale)
        target = kv_cache if kv_format == "f16" else kv_cache.view(torch.uint8)
        target[block, part, position] = stored


def attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    kv_format: str,
    queries: int,
    causal: bool,
    softmax_scale: float,
    scales: tuple[float, float],
    window: int,
) -> torch.Tensor:
    """FP16 [sequences * queries, heads, D]; a sequence of length 0, and a query that sees nothing, give zeros."""
    _, _, page, kv_heads, dim = kv_cache.shape
    out = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    for i, length in enumerate(lengths.tolist()):
        position = torch.arange(length, device=query.device)
        block = block_table[i, : -(-length // page)].long()
        for j in range(queries if length else 0):
            at = length - queries + j
            end, start = at + 1 if causal else length, max(0, at - window + 1) if window else 0
            if end <= start:
                continue
            live = position[start:end]
            rows = kv_cache[block[live // page], :, live % page]  # [tokens, 2, KV heads, D]
            keys, values = kv_decode(rows[:, 0], kv_format) * scales[0], kv_decode(rows[:, 1], kv_format) * scales[1]
            q = query[i * queries + j].double().view(kv_heads, -1, dim)
            weight = torch.softmax(torch.einsum("hgd,thd->hgt", q, keys) * softmax_scale, dim=-1)
            out[i * queries + j] = torch.einsum("hgt,thd->hgd", weight, values).reshape(-1, dim)
    return out.to(torch.float16)


def unpack_nvfp4(words: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """The weights [n, k] of packed words (cuda/nvfp4.cuh) in FP32, exact, without the global scale."""
    units = words.view(-1, k // 64, UNIT_WORDS)
    lane = torch.arange(32, device=words.device)
    column = (lane >> 2 & 3) * 8 + (lane & 3) + (lane >> 4) * 4
    # [tile, unit, half of K, lane, word] to [tile, lane, unit, half, word]
    codes = units[:, :, :256].reshape(*units.shape[:2], 2, 32, 4).permute(0, 3, 1, 2, 4)
    table = torch.tensor(_MAGNITUDES, dtype=torch.float32, device=words.device)
    elements = []
    for pair in range(4):
        for half in (0, 16):
            size = table[(codes >> (half + 9 - 3 * pair) & 7).long()]
            elements.append(torch.where((codes >> (half + _SIGN_BIT[pair]) & 1).bool(), -size, size))
    values = torch.stack(elements, dim=-1).reshape(units.shape[0], 32, k)
    shifts = torch.tensor((0, 8, 16, 24), device=words.device)
    raw = (units[:, :, 256:].permute(0, 2, 1).unsqueeze(-1) >> shifts & 0xFF).reshape(units.shape[0], 32, k // GROUP)
    scale = torch.from_numpy(decode_table("e4m3").copy()).to(words.device).float()[raw.long()]
    weights = torch.empty_like(values)
    weights[:, column] = values * scale.repeat_interleave(GROUP, dim=-1)
    return weights.reshape(-1, k)[:n]


def nvfp4_linear(x: torch.Tensor, words: torch.Tensor, n: int, scale: float) -> torch.Tensor:
    """FP16 [m, n]: x [m, k] times the transposed weights and the global scale, in FP32 and rounded once."""
    weight = unpack_nvfp4(words, n, x.shape[-1])
    return (x.float() @ weight.T * scale).to(torch.float16)


def nvfp4_swiglu(x: torch.Tensor, words: torch.Tensor, n: int, gate_scale: float, up_scale: float) -> torch.Tensor:
    """FP16 [m, n]: silu(gate) * up, in FP32 and rounded once; the words as `repack_gated` lays them out."""
    k = x.shape[-1]
    tiles = words.view(-(-n // 32), 2, -1)
    gate, up = (x.float() @ unpack_nvfp4(tiles[:, i].reshape(-1), n, k).T for i in (0, 1))
    return (torch.nn.functional.silu(gate * gate_scale) * (up * up_scale)).to(torch.float16)
