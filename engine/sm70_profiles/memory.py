"""The memory model: what a server needs on one GPU, how many tokens its KV cache holds, what is left for mixed loads.

Two halves. The geometry of the pool (pages, groups, recurrent states) is exact arithmetic over the model's shape and
the engine's grouping rule; it is held against the single-GPU launcher's measured table. The budget of one GPU is a sum
of terms that are derived where the shape gives them and otherwise are named constants with their source; it is held
against the published figures of the 1.5.1 recipe. `docs/reference/memory_model.md` lists both with their errors.

All sizes are bytes of one GPU unless a name says otherwise.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import gcd

from pydantic import Field

from sm70_profiles.base import Document, quantity_bytes
from sm70_profiles.facts import KvGroups, ModelFacts
from sm70_profiles.flags import speculates
from sm70_profiles.settings import DRAFT_MODEL_METHODS, Dtype, KvCacheDtype, MambaCacheMode, Overrides, StateDtype

MIB = 1 << 20
GIB = 1 << 30

PAGE_GRANULARITY = 16
"""vLLM enlarges attention pages in steps of the block that was asked for, at least 16 tokens (0.32.0)."""
KVARN_BYTES_PER_HEAD = 210
"""Bytes a token, layer and KV head of 256 channels with kvarn_k4v2_g128: 840 for four heads, single-GPU launcher."""
SCALE_BYTES = 4
"""Per-token-head formats keep an FP32 scale for each key and value: 2080 bytes where FP8 has 2048, same launcher."""
NULL_PAGES = 1
"""One page of the pool is never given out (vLLM's null block)."""
SHORT_PROMPT = 1024
DEFAULT_BUDGET = 2048
"""Tokens a step when nothing is set (vLLM 0.32.0, online serving on GPUs below 70 GiB)."""

SCORE_BLOCK_TOKENS = 24_576
"""KV block of the FP32-accumulated prefill; design notes of the 1.5 engine."""
SCORE_QUERIES = 8192
"""The largest query chunk that it is specialised for; same notes."""
NATIVE_BUDGET = 4096
LEAST_BUDGET = 8000
"""It runs at exactly 4096 tokens a step and from 8000 up; 1.5.1 release profile."""
NON_TORCH = round(0.20 * GIB)
"""CUDA libraries and NCCL inside the engine's budget: 0.20 GiB in a vLLM log at TP8 (vllm-project/vllm PR 14447)."""
STRESS_PEAK = round(15.1 * GIB)
STRESS_UTILIZATION_PERCENT = 86
STRESS_DEVICE_MIB = 16_151
"""One 250K request and then four of 64K peaked at 15.1 GiB with utilisation 0.86 on 16 GB; 1.5.1 release profile."""
GRAPHS = round(0.13 * GIB)
"""Memory of captured graphs, which the engine's budget does not count; 1.5.0 release notes, verifier defaults."""
TRANSIENTS = STRESS_PEAK - STRESS_DEVICE_MIB * MIB * STRESS_UTILIZATION_PERCENT // 100 - GRAPHS
"""What else a mixed load takes beyond the engine's budget: contexts, fragmentation, transients."""

_SCALAR_BYTES = {
    KvCacheDtype.FLOAT16: 2,
    KvCacheDtype.BFLOAT16: 2,
    KvCacheDtype.FP8: 1,
    KvCacheDtype.FP8_E4M3: 1,
    KvCacheDtype.FP8_E5M2: 1,
    KvCacheDtype.FP8_PER_HEAD: 1,
    KvCacheDtype.INT8_PER_HEAD: 1,
}
_SCALED = {KvCacheDtype.FP8_PER_HEAD, KvCacheDtype.INT8_PER_HEAD}
_STATE_BYTES = {StateDtype.FLOAT16: 2, StateDtype.BFLOAT16: 2, StateDtype.FLOAT32: 4}


class GpuModel(Document):
    """A GPU product that the memory model knows."""

    memory_mib: int
    compute_capability: str


@cache
def gpu_models() -> dict[str, GpuModel]:
    """The known products by their name as GPU feature discovery writes it."""
    text = files(__package__).joinpath("data/gpus.toml").read_text("utf-8")
    return {name: GpuModel.model_validate(entry) for name, entry in tomllib.loads(text).items()}


class Pool(Document):
    """The KV cache of one GPU. Counts are pages; a page holds `blockSize` tokens of one group of layers."""

    block_size: int = Field(description="Tokens of a page in the target's attention layers.")
    draft_block_size: int | None = None
    page_bytes: int
    token_bytes: int = Field(description="Of one token in all attention layers of the target.")
    state_bytes: int = Field(description="Of one recurrent state in all linear-attention layers, as it is paged.")
    bytes: int
    pages: int
    attention_groups: int
    state_groups: int
    draft_groups: int
    state_pages: int = Field(description="Of one request, before it stores a token.")
    attention_pages: int = Field(description="Of one request at the full context length.")
    draft_pages: int = Field(description="Of one request at the full context length.")
    tokens: int = Field(description="Tokens of requests at the full context length that fit together.")
    residents: int = Field(description="Requests at the full context length that fit together.")
    residents_short: int = Field(description="Requests of about a thousand tokens that fit together.")
    largest_context: int = Field(description="Tokens of the longest single request that fits.")

    @property
    def pages_per_request(self) -> int:
        return self.state_pages + self.attention_pages + self.draft_pages


@dataclass(frozen=True)
class Layout:
    """What one token and one state take on one rank, and how layers share pages."""

    attention_token: int
    block_size: int
    draft_block_size: int
    page: int
    attention_groups: int
    state_groups: int
    draft_groups: int
    layers_per_group: int


def kv_token_bytes(dtype: KvCacheDtype, heads: int, head_dim: int, native: int = 2) -> int | None:
    """Bytes of one token's keys and values in one layer; `native` is the size of the activations' type."""
    if dtype is KvCacheDtype.KVARN_K4V2:
        return KVARN_BYTES_PER_HEAD * heads * head_dim // 256
    size = native if dtype is KvCacheDtype.AUTO else _SCALAR_BYTES.get(dtype)
    if size is None:
        return None
    scales = 2 * SCALE_BYTES * heads if dtype in _SCALED else 0
    return 2 * heads * head_dim * size + scales


def state_bytes(model: ModelFacts, draft_tokens: int, ranks: int, state_dtype: StateDtype) -> int | None:
    """Bytes of one linear-attention layer's state: the convolution's window, with room to roll back, and the matrix."""
    dims = (
        model.linear_key_heads,
        model.linear_value_heads,
        model.linear_key_dim,
        model.linear_value_dim,
        model.conv_kernel,
    )
    if any(dim is None for dim in dims):
        return None
    key_heads, value_heads, key_dim, value_dim, kernel = (dim or 0 for dim in dims)
    channels = (2 * key_heads * key_dim + value_heads * value_dim) // ranks
    matrix = value_heads // ranks * key_dim * value_dim
    return 2 * channels * (kernel - 1 + draft_tokens) + matrix * _STATE_BYTES[state_dtype]


def layers_per_group(rule: KvGroups, kinds: tuple[int, ...], draft: int) -> int:
    """How many layers share one page. `kinds` are the layer counts of the target, `draft` that of the draft or 0."""
    present = tuple(count for count in (*kinds, draft) if count)
    if rule is KvGroups.SMALLEST:
        low, high = min(present), max(present)
        return high if high < 1.5 * low else low
    common = gcd(*(count for count in kinds if count))
    fitting = (size for size in range(draft, common) if size and common % size == 0)
    return next(fitting, common) if draft else common


def layout(
    settings: Overrides, model: ModelFacts, draft: ModelFacts | None, rule: KvGroups, default_state: StateDtype
) -> Layout | None:
    """How the pool is cut, or None where the shape is not known well enough."""
    ranks = settings.tensor_parallel_size or 1
    dtype = settings.kv_cache_dtype or KvCacheDtype.AUTO
    attention, states = model.full_attention_layers, model.linear_attention_layers or 0
    if not (attention and model.kv_heads and model.head_dim):
        return None
    token = kv_token_bytes(dtype, max(1, model.kv_heads // ranks), model.head_dim, _native(settings))
    draft_token, draft_layers = _draft_token(settings, draft, ranks, dtype)
    if token is None or draft_token is None:
        return None
    requested = settings.mamba_ssm_cache_dtype
    state_dtype = default_state if requested in (None, StateDtype.AUTO) else requested
    state = state_bytes(model, draft_tokens(settings, draft), ranks, state_dtype) if states else 0
    if state is None:
        return None
    step = max(settings.block_size or 0, PAGE_GRANULARITY) if states else settings.block_size or PAGE_GRANULARITY
    block = step * max(1, _ceil(state, step * token))
    draft_block, page = block, block * max(token, draft_token)
    if draft_token > token and draft_token % token == 0:
        ratio = draft_token // token
        if rule is KvGroups.SMALLEST:
            block *= ratio
        else:
            draft_block, page = max(1, block // ratio), block * token
    size = layers_per_group(rule, (attention, states), draft_layers)
    return Layout(
        attention_token=token * attention,
        block_size=block,
        draft_block_size=draft_block,
        page=page * size,
        attention_groups=_ceil(attention, size),
        state_groups=_ceil(states, size),
        draft_groups=_ceil(draft_layers, size),
        layers_per_group=size,
    )


def pool(
    settings: Overrides,
    model: ModelFacts,
    draft: ModelFacts | None,
    rule: KvGroups,
    size: int,
    default_state: StateDtype = StateDtype.FLOAT32,
) -> Pool | None:
    """The pool of `size` bytes, or None where shapes or the context length are not known."""
    cut = layout(settings, model, draft, rule, default_state)
    context = settings.max_model_len
    if cut is None or context is None or size < 0:
        return None
    pages = size // cut.page
    aligned = settings.prefix_caching is not False and settings.mamba_cache_mode is not MambaCacheMode.NONE
    states = cut.state_groups * (draft_tokens(settings, draft) + (2 if aligned else 1))
    attention = cut.attention_groups * _ceil(context, cut.block_size)
    window = cut.draft_groups * _window_pages(settings, draft, cut.draft_block_size, context)
    usable = max(pages - NULL_PAGES, 0)
    need = states + attention + window
    room = max(usable - states - window, 0)
    short = states + cut.attention_groups * _ceil(SHORT_PROMPT, cut.block_size)
    return Pool(
        block_size=cut.block_size,
        draft_block_size=cut.draft_block_size if cut.draft_groups else None,
        page_bytes=cut.page,
        token_bytes=cut.attention_token,
        state_bytes=cut.state_groups * cut.page,
        bytes=size,
        pages=pages,
        attention_groups=cut.attention_groups,
        state_groups=cut.state_groups,
        draft_groups=cut.draft_groups,
        state_pages=states,
        attention_pages=attention,
        draft_pages=window,
        tokens=pages * context // need,
        residents=pages // need,
        residents_short=usable // short,
        largest_context=room // cut.attention_groups * cut.block_size,
    )


def draft_tokens(settings: Overrides, draft: ModelFacts | None = None) -> int:
    """Draft tokens a round: as set, else what the draft's block leaves, else none."""
    if not speculates(settings) or settings.speculation is None:
        return 0
    if settings.speculation.tokens is not None:
        return settings.speculation.tokens
    return draft.block_size - 1 if draft and draft.block_size else 0


def _draft_token(
    settings: Overrides, draft: ModelFacts | None, ranks: int, target: KvCacheDtype
) -> tuple[int | None, int]:
    """Bytes of a token in one layer of the draft model, and its layers; (0, 0) without a draft model."""
    speculation = settings.speculation
    if speculation is None or speculation.method not in DRAFT_MODEL_METHODS:
        return 0, 0
    if draft is None or not (draft.layers and draft.kv_heads and draft.head_dim):
        return None, 0
    dtype = speculation.kv_cache_dtype or target
    return kv_token_bytes(dtype, max(1, draft.kv_heads // ranks), draft.head_dim, _native(settings)), draft.layers


def _window_pages(settings: Overrides, draft: ModelFacts | None, block: int, context: int) -> int:
    """Pages of one draft group: its window and the tokens in flight, one batch more when scheduling is asynchronous."""
    if draft is None or not draft.sliding_window:
        return _ceil(context, block)
    batches = 1 if settings.async_scheduling is False else 2
    tokens = draft.sliding_window - 1 + batches * (settings.max_num_batched_tokens or DEFAULT_BUDGET)
    return _ceil(min(tokens, context), block) + 1


def _native(settings: Overrides) -> int:
    return 4 if settings.dtype is Dtype.FLOAT32 else 2


def _ceil(value: int, step: int) -> int:
    return -(-value // step)


class Term(Document):
    """One part of a GPU's memory and where the figure comes from."""

    name: str
    bytes: int
    source: str


class MemoryBudget(Document):
    """One GPU. `headroom` is what a mixed load leaves of the device, `allocatorHeadroom` of what torch can allocate."""

    gpu: str
    device_bytes: int
    budget_bytes: int = Field(description="Device memory times the utilisation.")
    terms: tuple[Term, ...] = Field(description="Inside the budget, beside the KV cache.")
    reserve: tuple[Term, ...] = Field(description="Outside the budget, under a mixed load.")
    kv_bytes: int = Field(description="Negative when weights and workspaces alone exceed the budget.")
    headroom_bytes: int
    allocator_headroom_bytes: int
    pool: Pool | None
    engine_pool: Pool | None = Field(
        default=None, description="With the serving engine's own grouping, where that differs from the recipe's."
    )

    @property
    def fits(self) -> bool:
        return self.headroom_bytes >= 0 and self.kv_bytes > 0


def parameter_bytes(model: ModelFacts) -> int | None:
    """Bytes of a dense hybrid model's weights over all GPUs, from its shape; embeddings and head stay FP16."""
    size = _weight_bits(model.quantization)
    dims = (model.hidden_size, model.intermediate_size, model.vocabulary, model.attention_heads, model.head_dim)
    if size is None or model.experts or any(dim is None for dim in dims):
        return None
    hidden, inner, vocabulary, heads, dim = (value or 0 for value in dims)
    attention = model.full_attention_layers or 0
    linear = model.linear_attention_layers or 0
    # Hybrid attention has an output gate, so queries are projected twice.
    query, key_value = 2 * heads * dim, 2 * (model.kv_heads or heads) * dim
    key = (model.linear_key_heads or 0) * (model.linear_key_dim or 0)
    value = (model.linear_value_heads or 0) * (model.linear_value_dim or 0)
    per_attention = hidden * (query + key_value) + heads * dim * hidden
    per_linear = hidden * (2 * key + 2 * value + 2 * (model.linear_value_heads or 0)) + value * hidden
    layers = 3 * hidden * inner * (attention + linear) + attention * per_attention + linear * per_linear
    return layers * size // 16 + 2 * 2 * vocabulary * hidden


def _weight_bits(quantization: str | None) -> int | None:
    """Bits of 16 weights over 8, scales included: NVFP4 has one byte of scale to 16 weights."""
    if quantization is None:
        return 32
    sizes = (("fp4", 9), ("fp8", 16))
    return next((bits for word, bits in sizes if word in quantization.lower()), None)


def budget(
    gpu: str,
    device_mib: int,
    settings: Overrides,
    model: ModelFacts,
    draft: ModelFacts | None,
    rule: KvGroups,
    engine_rule: KvGroups | None = None,
) -> MemoryBudget | None:
    """The memory of one GPU for a V100 recipe, or None where the weights are not known."""
    weights = model.weight_bytes if model.weight_bytes is not None else parameter_bytes(model)
    if weights is None:
        return None
    device = device_mib * MIB
    limit = device * (settings.gpu_memory_utilization_percent or 90) // 100
    terms = tuple(term for term in _terms(settings, model, draft, weights) if term.bytes)
    fixed = quantity_bytes(settings.kv_cache_memory_bytes) if settings.kv_cache_memory_bytes else 0
    kv = fixed or limit - sum(term.bytes for term in terms)
    used = sum(term.bytes for term in terms) + kv if fixed else limit
    reserve = _reserve(settings)
    headroom = device - used - sum(term.bytes for term in reserve)
    own = pool(settings, model, draft, rule, kv)
    other = pool(settings, model, draft, engine_rule, kv) if engine_rule not in (None, rule) else None
    return MemoryBudget(
        gpu=gpu,
        device_bytes=device,
        budget_bytes=limit,
        terms=terms,
        reserve=reserve,
        kv_bytes=kv,
        headroom_bytes=headroom,
        allocator_headroom_bytes=headroom - NON_TORCH,
        pool=own,
        engine_pool=other if own is None or other is None or other.tokens != own.tokens else None,
    )


def _reserve(settings: Overrides) -> tuple[Term, ...]:
    transients = Term(name="transients", bytes=TRANSIENTS, source="published stress peak of the 1.5.1 recipe")
    graphs = Term(name="captured graphs", bytes=GRAPHS, source="1.5.0 release notes")
    return (transients,) if settings.enforce_eager else (graphs, transients)


def _terms(settings: Overrides, model: ModelFacts, draft: ModelFacts | None, weights: int) -> tuple[Term, ...]:
    tensor, pipeline = settings.tensor_parallel_size or 1, settings.pipeline_parallel_size or 1
    hidden, inner = model.hidden_size or 0, (model.intermediate_size or 0) // tensor
    heads, kv_heads = (model.attention_heads or 0) // tensor, max(1, (model.kv_heads or 0) // tensor)
    dim = model.head_dim or 0
    tokens = settings.max_num_batched_tokens or DEFAULT_BUDGET
    context = settings.max_model_len or 0
    drafts = settings.speculation is not None and settings.speculation.method in DRAFT_MODEL_METHODS
    quantized_kv = (settings.kv_cache_dtype or KvCacheDtype.AUTO) in (
        KvCacheDtype.FP8,
        KvCacheDtype.FP8_E4M3,
        KvCacheDtype.FP8_E5M2,
    )
    native_prefill = tokens == NATIVE_BUDGET or tokens >= LEAST_BUDGET
    captured = (draft.capture_layers or 0) if draft is not None and drafts else 0
    per_token = (4 + 2 + 2) * hidden + (4 + 2) * inner + 2 * 2 * hidden * captured
    scores = min(SCORE_BLOCK_TOKENS, context) * min(tokens, SCORE_QUERIES) * heads * 2
    draft_bytes = (draft.weight_bytes or 0) if draft is not None and drafts else 0
    return (
        Term(name="weights", bytes=weights // (tensor * pipeline), source="checkpoint or shape, split over all GPUs"),
        Term(name="draft weights", bytes=draft_bytes // tensor, source="checkpoint, split over tensor ranks"),
        Term(
            name="quantised LM head",
            bytes=(model.vocabulary or 0) * hidden // tensor if drafts else 0,
            source="one byte a weight beside the FP16 head; design notes of the 1.5 engine",
        ),
        Term(
            name="prefix bridge",
            bytes=context * 2 * kv_heads * dim * 2 if quantized_kv else 0,
            source="FP16 keys and values of the full context, one layer; design notes of the 1.5 engine",
        ),
        Term(
            name="prefill scores",
            bytes=scores if native_prefill else 0,
            source="FP16 scores of one KV block, all heads; design notes of the 1.5 engine",
        ),
        Term(
            name="dequantised operand",
            bytes=4 * hidden * inner,
            source="FP16 gate and up of one layer, unpacked for a GEMM",
        ),
        Term(
            name="activations",
            bytes=per_token * tokens,
            source="FP32 residual, norms, gate and up, and the hidden states that a draft reads, once joined",
        ),
        Term(name="libraries", bytes=NON_TORCH, source="vLLM log at TP8, vllm-project/vllm PR 14447"),
    )
