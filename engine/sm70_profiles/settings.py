"""The settings of a server: what a profile fixes and a user may override, every one typed and optional.

One type serves both sides, so an override cannot name what a profile does not have. There are no floats: shares are
whole percents, sizes are byte quantities, times are whole seconds or milliseconds.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self, TypeVar

from pydantic import Field, StringConstraints, model_validator

from sm70_profiles.base import Document, Quantity, Token

D = TypeVar("D", bound=Document)


class KvCacheDtype(StrEnum):
    """How keys and values are stored. `fp8` means E4M3, as in stock vLLM and in the 1.5.1 recipe."""

    AUTO = "auto"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FP8 = "fp8"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    FP8_PER_HEAD = "fp8_per_token_head"
    INT8_PER_HEAD = "int8_per_token_head"
    INT4_PER_HEAD = "int4_per_token_head"
    TURBOQUANT_4BIT = "turboquant_4bit_nc"
    KVARN_K4V2 = "kvarn_k4v2_g128"


class Dtype(StrEnum):
    """Type of activations and of unquantised weights. `half` and `float16` are the same."""

    AUTO = "auto"
    HALF = "half"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class StateDtype(StrEnum):
    """Type of the recurrent state of linear-attention layers."""

    AUTO = "auto"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class MambaCacheMode(StrEnum):
    """Where recurrent states are kept for prefix reuse: at block boundaries, or not at all."""

    NONE = "none"
    ALIGN = "align"


class SpeculationMethod(StrEnum):
    """Who drafts. DFlash2 is `dflash` with a draft of architecture `DFlash2DraftModel`."""

    NONE = "None"
    DFLASH = "dflash"
    DSPARK = "dspark"
    MTP = "mtp"
    NGRAM = "ngram"


DRAFT_MODEL_METHODS = frozenset({SpeculationMethod.DFLASH, SpeculationMethod.DSPARK})
"""The methods that need a draft model of its own."""


class DraftSampleMethod(StrEnum):
    """How drafts are chosen. Greedy drafts are accepted less often above temperature 0."""

    PROBABILISTIC = "probabilistic"
    GREEDY = "greedy"


class DynamicTokens(Document):
    """Draft tokens for a range of batch sizes, both ends included."""

    batch_from: int = Field(ge=1, le=4096)
    batch_to: int = Field(ge=1, le=4096)
    tokens: int = Field(ge=1, le=31)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.batch_to < self.batch_from:
            raise ValueError(f"`batchTo` must be at least `batchFrom` = {self.batch_from}, found {self.batch_to}")
        return self


class Speculation(Document):
    """Speculative decoding. `method: None` turns it off, whatever the profile says."""

    method: SpeculationMethod | None = None
    tokens: int | None = Field(default=None, ge=1, le=31, description="Draft tokens a round; default: the draft's own.")
    draft_sample_method: DraftSampleMethod | None = None
    lookup: bool | None = Field(default=None, description="Draft from the request's own context where it repeats.")
    lookup_adaptive: bool | None = Field(default=None, description="Verify long blocks only while the lookup hits.")
    dynamic_tokens: tuple[DynamicTokens, ...] | None = Field(
        default=None, min_length=1, max_length=16, description="Draft tokens by batch size."
    )
    attention_backend: Token | None = Field(default=None, description="Of the draft; it does not inherit the target's.")
    kv_cache_dtype: KvCacheDtype | None = Field(default=None, description="Of the draft; default: the target's.")


class ToolStrictLevel(StrEnum):
    """Which tool calls are held to the tool's schema: those marked strict, or every function or parameter."""

    AUTO = "auto"
    FUNCTION = "function"
    PARAMETER = "parameter"


class Tools(Document):
    """Tool calling."""

    enabled: bool | None = None
    parser: Token | None = Field(default=None, description="Must match the call format of the model's chat template.")
    strict_level: ToolStrictLevel | None = None


class Vision(Document):
    """Images in requests. `enabled: false` serves text alone and loads no vision tower."""

    enabled: bool | None = None
    max_images: int | None = Field(default=None, ge=1, le=64, description="Per request.")
    min_pixels: int | None = Field(default=None, ge=1, le=1 << 28)
    max_pixels: int | None = Field(default=None, ge=1, le=1 << 28)
    tower_offload_gib: int | None = Field(
        default=None, alias="towerOffloadGiB", ge=0, le=64, description="Keep this much of the tower in host memory."
    )


class RequestMetrics(StrEnum):
    """Timing and acceptance figures in every response."""

    OFF = "Off"
    SUMMARY = "Summary"
    DETAILED = "Detailed"


class KvOffload(Document):
    """A tier of the KV cache in host memory."""

    size_gib: int = Field(alias="sizeGiB", ge=0, le=2048, description="0 turns it off.")


class PrefixRetention(Document):
    """How many recurrent states the prefix cache keeps. Exactly one of the two must be set."""

    interval_tokens: int | None = Field(
        default=None, ge=0, le=1 << 20, description="One state every so many tokens; 0 keeps replay boundaries only."
    )
    dense: bool | None = Field(default=None, description="true keeps one state per block.")

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.interval_tokens is not None) == bool(self.dense):
            raise ValueError("exactly one of `intervalTokens` and `dense: true` must be set")
        return self


class CudagraphMode(StrEnum):
    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"


CustomOp = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[+-]?[a-z0-9_]+$")]
"""A custom operator to use (`+name`) or not (`-name`), or `all` or `none`."""


class Compilation(Document):
    """Compiled graphs and their cache."""

    cudagraph_mode: CudagraphMode | None = None
    max_capture_size: int | None = Field(default=None, ge=1, le=4096, description="Largest captured batch in tokens.")
    custom_ops: tuple[CustomOp, ...] | None = Field(default=None, max_length=32)
    cache: bool | None = Field(default=None, description="false compiles anew at every start; for troubleshooting.")


class Sampling(Document):
    """Defaults for requests that do not choose for themselves."""

    temperature_percent: int | None = Field(default=None, ge=0, le=1000, description="100 is temperature 1.")
    top_p_percent: int | None = Field(default=None, ge=1, le=100)
    top_k: int | None = Field(default=None, ge=0, le=1 << 20, description="0 considers every token.")


class LongContextKernel(StrEnum):
    """Attention over a quantised KV cache on compute capability 8.6."""

    AUTO = "Auto"
    PTH_FLASH_ATTENTION = "PthFlashAttention"
    FA2_FP8 = "Fa2Fp8"
    STOCK = "Stock"


class ActivationLayer(StrEnum):
    """A group of linear layers that may take INT8 activations."""

    MLP = "mlp"
    GATE_UP = "gate_up"
    LINEAR_ATTENTION = "linear_attn"
    SELF_ATTENTION = "self_attn"


class PrefillAttention(StrEnum):
    INT8 = "int8"
    FP16 = "fp16"


class SingleGpu(Document):
    """Switches that only the single-GPU launcher's patched engine has."""

    long_context_kernel: LongContextKernel | None = None
    excluded_kernels: tuple[LongContextKernel, ...] | None = Field(
        default=None, max_length=2, description="Kernels that `Auto` must not choose."
    )
    split_kv_verify: bool | None = Field(default=None, description="Split-KV attention for the verify step.")
    split_kv_max_queries: int | None = Field(default=None, ge=1, le=256, description="Default: draft tokens + 1.")
    int8_activations: bool | None = None
    int8_layers: tuple[ActivationLayer, ...] | None = Field(default=None, min_length=1, max_length=4)
    prefill_attention: PrefillAttention | None = None
    embedding_in_host_memory: bool | None = None
    kvarn_pool_percent: int | None = Field(default=None, ge=1, le=100)
    wsl_pin_memory: bool | None = None


class Acknowledgement(StrEnum):
    """What the user knowingly asks for although the recipe refuses it by default."""

    UNMEASURED = "Unmeasured"
    UNSAFE = "Unsafe"


class Overrides(Document):
    """Typed changes to the profile's settings. Every field is optional; an absent one keeps the profile's value."""

    dtype: Dtype | None = None
    kv_cache_dtype: KvCacheDtype | None = None
    max_model_len: int | None = Field(default=None, ge=1, le=4_194_304, description="Tokens of prompt and answer.")
    max_num_seqs: int | None = Field(default=None, ge=1, le=4096)
    max_num_batched_tokens: int | None = Field(default=None, ge=1, le=1_048_576, description="Tokens a step.")
    gpu_memory_utilization_percent: int | None = Field(default=None, ge=1, le=100)
    kv_cache_memory_bytes: Quantity | None = Field(
        default=None, description="Size of the KV cache of one GPU; 0 sizes it by `gpuMemoryUtilizationPercent`."
    )
    block_size: int | None = Field(default=None, ge=1, le=65_536, description="Tokens of a KV page.")
    mamba_block_size: int | None = Field(default=None, ge=1, le=65_536)
    tensor_parallel_size: int | None = Field(default=None, ge=1, le=64)
    pipeline_parallel_size: int | None = Field(default=None, ge=1, le=64)
    enforce_eager: bool | None = None
    prefix_caching: bool | None = None
    speculation: Speculation | None = None
    tools: Tools | None = None
    reasoning_parser: Token | None = None
    mixed_prefill_step_latency_milliseconds: int | None = Field(
        default=None, ge=0, le=600_000, description="Bound on a step that mixes prefill and decode; 0 sets none."
    )
    partial_prefix_cache: bool | None = Field(default=None, description="Resume a cached prefix inside a block.")
    vision: Vision | None = None
    request_metrics: RequestMetrics | None = None
    sse_keep_alive_seconds: int | None = Field(
        default=None, ge=-1, le=3600, description="Interval of comment lines on a silent stream; 0 off, -1 no option."
    )
    kv_offload: KvOffload | None = None
    attention_backend: Token | None = None
    mamba_cache_mode: MambaCacheMode | None = None
    mamba_ssm_cache_dtype: StateDtype | None = None
    prefix_match_unit: int | None = Field(default=None, ge=1, le=65_536, description="Tokens of one prefix hash.")
    prefix_retention: PrefixRetention | None = None
    async_scheduling: bool | None = None
    custom_all_reduce: bool | None = None
    api_server_count: int | None = Field(default=None, ge=1, le=64)
    prompt_tokens_details: bool | None = Field(default=None, description="Report cached prompt tokens in `usage`.")
    trust_remote_code: bool | None = None
    thinking: bool | None = Field(default=None, description="Default of the chat template's `enable_thinking`.")
    sampling: Sampling | None = None
    compilation: Compilation | None = None
    expandable_segments: bool | None = Field(default=None, description="Of the CUDA caching allocator.")
    single_gpu: SingleGpu | None = None
    acknowledge: tuple[Acknowledgement, ...] | None = Field(default=None, max_length=2)


def merge(base: D, over: D) -> D:
    """The base with every member that the other sets, sections merged member by member."""
    changes = {}
    for name in type(base).model_fields:
        old, new = getattr(base, name), getattr(over, name)
        if new is None or new == old:
            continue
        changes[name] = merge(old, new) if mergeable(old) and mergeable(new) else new
    return base.model_copy(update=changes) if changes else base


def mergeable(value: object) -> bool:
    """Whether the value is a section whose members are set one by one; a choice (one of several) is replaced whole."""
    return isinstance(value, Document) and not isinstance(value, PrefixRetention | KvOffload)


def with_value(settings: Overrides, setting: str, value: object) -> Overrides:
    """The settings with the value at a dotted path of attributes; sections on the way are made where absent."""
    return _with_value(settings, setting.split("."), value)


def _with_value(section: D, names: list[str], value: object) -> D:
    name, *rest = names
    if rest:
        inner = getattr(section, name)
        if inner is None:
            inner = SECTIONS[name]()
        value = _with_value(inner, rest, value)
    return section.model_copy(update={name: value})


SECTIONS: dict[str, type[Document]] = {
    "speculation": Speculation,
    "tools": Tools,
    "vision": Vision,
    "compilation": Compilation,
    "sampling": Sampling,
    "single_gpu": SingleGpu,
}
"""Sections whose members are settings of their own."""
