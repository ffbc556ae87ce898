"""The operators of vLLM's CUDA extension that its CUDA path names or calls, in torch.

vLLM's build without extensions has none of them. Three kinds are defined here, under vLLM's own names:
probes, which say that no CUTLASS kernel is there; operators, which compute; and bare schemas of operators that some
module takes by name at import and that nothing calls under this platform's configuration (calling one is an error).
Nothing here synchronises with the host, so all of it can be captured into CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

PROBES = (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
    "cutlass_blockwise_scaled_grouped_mm_supported",
    "mxfp4_experts_quant_supported",
)
SCHEMAS = (
    "silu_and_mul_quant(Tensor! result, Tensor input, Tensor scale) -> ()",
    "silu_and_mul_per_block_quant(Tensor! out, Tensor input, Tensor! scales, int group_size, Tensor? scale_ub=None, "
    "bool is_scale_transposed=False) -> ()",
    "static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, (int, int)? group_shape=None) -> ()",
    "dynamic_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale) -> ()",
    "dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()",
    "fused_qk_norm_rope(Tensor! qkv, int num_heads_q, int num_heads_k, int num_heads_v, int head_dim, float eps, "
    "Tensor q_weight, Tensor k_weight, Tensor cos_sin_cache, bool is_neox, Tensor position_ids) -> ()",
    "rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor weight, Tensor scale, float epsilon) -> ()",
    "fused_add_rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor! residual, Tensor weight, Tensor scale, "
    "float epsilon) -> ()",
    "rms_norm_dynamic_per_token_quant(Tensor! result, Tensor input, Tensor weight, Tensor! scale, float epsilon, "
    "Tensor? scale_ub, Tensor!? residual) -> ()",
)


def silu_and_mul(result: torch.Tensor, input: torch.Tensor) -> None:  # noqa: A002  # vLLM calls it by these names
    half = input.shape[-1] // 2
    result.copy_(torch.nn.functional.silu(input[..., :half]) * input[..., half:])


def gelu_and_mul(result: torch.Tensor, input: torch.Tensor) -> None:  # noqa: A002
    half = input.shape[-1] // 2
    result.copy_(torch.nn.functional.gelu(input[..., :half]) * input[..., half:])


def gelu_tanh_and_mul(result: torch.Tensor, input: torch.Tensor) -> None:  # noqa: A002
    half = input.shape[-1] // 2
    result.copy_(torch.nn.functional.gelu(input[..., :half], approximate="tanh") * input[..., half:])


def vocab_parallel_embedding(
    out: torch.Tensor,
    input_ids: torch.Tensor,
    weight: torch.Tensor,
    org_vocab_start_index: int,
    org_vocab_end_index: int,
    num_org_vocab_padding: int,
    added_vocab_start_index: int,
    added_vocab_end_index: int,
) -> None:
    """The rows that this rank owns, zeros for the others: summed over ranks, the whole embedding."""
    original = (input_ids >= org_vocab_start_index) & (input_ids < org_vocab_end_index)
    added = (input_ids >= added_vocab_start_index) & (input_ids < added_vocab_end_index)
    behind = org_vocab_end_index - org_vocab_start_index + num_org_vocab_padding
    offset = original * org_vocab_start_index + added * (added_vocab_start_index - behind)
    owned = original | added
    rows = torch.where(owned, input_ids - offset, 0).long()
    out.copy_(torch.where(owned.unsqueeze(-1), weight[rows], 0))


def _normalized(x: torch.Tensor, epsilon: float, dtype: torch.dtype) -> torch.Tensor:
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)).to(dtype)


def rms_norm(result: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:  # noqa: A002
    """A weight of two dimensions holds a row for each index of the input's first one (the draft's stacked layers)."""
    x = _normalized(input.float(), epsilon, input.dtype)
    if weight is not None and weight.dim() == 2:
        weight = weight.view(weight.shape[0], *([1] * (x.dim() - 2)), weight.shape[1])
    result.copy_(x if weight is None else x * weight)


def fused_add_rms_norm(
    input: torch.Tensor,  # noqa: A002
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
) -> None:
    residual.add_(input)
    x = _normalized(residual.float(), epsilon, input.dtype)
    input.copy_(x if weight is None else x * weight)


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    if rope_dim_offset or inverse:
        raise NotImplementedError("rotary_embedding: an offset or the inverse is not there without CUDA extensions")
    width, cache = cos_sin_cache.shape[-1], cos_sin_cache.to(query.dtype)
    rotated, rotated_key = RotaryEmbedding.forward_static(positions, query, key, head_size, width, cache, is_neox)
    query.copy_(rotated)
    if key is not None:
        key.copy_(rotated_key)


def apply_repetition_penalties_(
    logits: torch.Tensor, prompt_mask: torch.Tensor, output_mask: torch.Tensor, repetition_penalties: torch.Tensor
) -> None:
    from vllm._custom_ops import apply_repetition_penalties_torch

    apply_repetition_penalties_torch(logits, prompt_mask, output_mask, repetition_penalties)


def topk_softmax(
    topk_weights: torch.Tensor,
    topk_indices: torch.Tensor,
    token_expert_indices: torch.Tensor,
    gating_output: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None = None,
    is_padding: torch.Tensor | None = None,
) -> None:
    if bias is not None:
        raise NotImplementedError("topk_softmax: a bias is not there without CUDA extensions")
    weights, indices = gating_output.float().softmax(-1).topk(topk_weights.shape[-1], -1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    topk_weights.copy_(weights)
    topk_indices.copy_(indices)


def moe_align_block_size(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: torch.Tensor,
    experts_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    scatter_idx: torch.Tensor | None = None,
) -> None:
    """Sorts the choices by expert, each expert filled up to whole blocks; what is filled up points past the end."""
    if expert_map is not None or scatter_idx is not None:
        raise NotImplementedError("moe_align_block_size: expert parallelism is not there without CUDA extensions")
    chosen = topk_ids.flatten().long()
    total, device = chosen.numel(), chosen.device
    counts = torch.zeros(num_experts, dtype=torch.long, device=device)
    counts.scatter_add_(0, chosen, torch.ones_like(chosen))
    filled = (counts + block_size - 1) // block_size * block_size
    ends = filled.cumsum(0)
    order = chosen.argsort(stable=True)
    experts = chosen[order]
    within = torch.arange(total, device=device) - (counts.cumsum(0) - counts)[experts]
    sorted_token_ids.fill_(total)
    sorted_token_ids[(ends - filled)[experts] + within] = order.to(sorted_token_ids.dtype)
    blocks = torch.arange(experts_ids.numel(), device=device) * block_size
    experts_ids.copy_(torch.searchsorted(ends, blocks, right=True).clamp(max=num_experts - 1))
    num_tokens_post_pad.copy_(ends[-1:])


def moe_sum(
    input: torch.Tensor,  # noqa: A002
    output: torch.Tensor,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> None:
    output.copy_(input.float().sum(1))


def _extent(x: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if not x.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return int((1 + last) * x.element_size())


def _alias(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    storage = torch._C._construct_storage_from_data_pointer(x.data_ptr(), device, _extent(x))
    return torch.empty(0, dtype=x.dtype, device=device).set_(storage, 0, x.shape, x.stride())


def weak_ref_tensor(input: torch.Tensor) -> torch.Tensor:  # noqa: A002
    """The same memory, not kept alive: for the outputs of CUDA graphs."""
    return _alias(input, input.device)


_pinned: dict[int, torch.Tensor] = {}
"""Host memory that the device reads, by address. vLLM makes these buffers at start and keeps them, and so do we: an
alias does not own its memory."""


def get_cuda_view_from_cpu_tensor(cpu_tensor: torch.Tensor) -> torch.Tensor:
    """Pinned host memory as a tensor of the device; the address is the same on both sides."""
    device = torch.device("cuda", torch.cuda.current_device())
    if not cpu_tensor.numel():
        return torch.empty(cpu_tensor.shape, dtype=cpu_tensor.dtype, device=device)
    pinned = cpu_tensor if cpu_tensor.is_pinned() else cpu_tensor.pin_memory()
    _pinned[pinned.data_ptr()] = pinned
    return _alias(pinned, device)


OPERATORS: tuple[tuple[str, Callable[..., Any], str], ...] = (
    ("silu_and_mul(Tensor! result, Tensor input) -> ()", silu_and_mul, ""),
    ("gelu_and_mul(Tensor! result, Tensor input) -> ()", gelu_and_mul, ""),
    ("gelu_tanh_and_mul(Tensor! result, Tensor input) -> ()", gelu_tanh_and_mul, ""),
    (
        "vocab_parallel_embedding(Tensor! out, Tensor input_ids, Tensor weight, int org_vocab_start_index, "
        "int org_vocab_end_index, int num_org_vocab_padding, int added_vocab_start_index, int added_vocab_end_index) "
        "-> ()",
        vocab_parallel_embedding,
        "",
    ),
    ("rms_norm(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()", rms_norm, ""),
    (
        "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()",
        fused_add_rms_norm,
        "",
    ),
    (
        "rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache, "
        "bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()",
        rotary_embedding,
        "",
    ),
    ("weak_ref_tensor(Tensor input) -> Tensor", weak_ref_tensor, "CUDA"),
    ("get_cuda_view_from_cpu_tensor(Tensor cpu_tensor) -> Tensor", get_cuda_view_from_cpu_tensor, "CPU"),
    (
        "apply_repetition_penalties_(Tensor! logits, Tensor prompt_mask, Tensor output_mask, "
        "Tensor repetition_penalties) -> ()",
        apply_repetition_penalties_,
        "",
    ),
)
MOE_OPERATORS: tuple[tuple[str, Callable[..., Any], str], ...] = (
    (
        "topk_softmax(Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, Tensor gating_output, "
        "bool renormalize, Tensor? bias=None, Tensor? is_padding=None) -> ()",
        topk_softmax,
        "",
    ),
    (
        "moe_align_block_size(Tensor topk_ids, int num_experts, int block_size, Tensor! sorted_token_ids, "
        "Tensor! experts_ids, Tensor! num_tokens_post_pad, Tensor? expert_map=None, Tensor? scatter_idx=None) -> ()",
        moe_align_block_size,
        "",
    ),
    (
        "moe_sum(Tensor input, Tensor! output, Tensor? topk_ids=None, Tensor? expert_map=None) -> ()",
        moe_sum,
        "",
    ),
)
_libraries: list[torch.library.Library] = []


def register() -> None:
    """Defines all of it, once a process."""
    if _libraries:
        return
    library, experts = torch.library.Library("_C", "FRAGMENT"), torch.library.Library("_moe_C", "FRAGMENT")
    _libraries.extend((library, experts))
    for probe in PROBES:
        library.define(f"{probe}(int cuda_device_capability) -> bool")
        library.impl(probe, lambda _: False, "CompositeExplicitAutograd")
    for target, operators in ((library, OPERATORS), (experts, MOE_OPERATORS)):
        for schema, function, key in operators:
            target.define(schema)
            target.impl(schema.partition("(")[0], function, key or "CompositeExplicitAutograd")
    for schema in SCHEMAS:
        library.define(schema)
