"""The catalogue of routes: what a dispatch is counted as. A fallback is a route of its own, never silence."""

from __future__ import annotations

from enum import StrEnum

from sm70_profiles.base import Document


class Stage(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"
    DRAFT = "draft"


class FallbackReason(StrEnum):
    """Why a dispatch takes no accelerated path: a label of `sm70_route_fallback_total`."""

    KV_DTYPE = "kv_dtype"
    NO_PREFILL_KERNEL = "no_prefill_kernel"
    PREFILL_HEAD_DIM = "prefill_head_dim"
    LENGTHS_UNKNOWN = "lengths_unknown"
    TOO_MANY_ROWS = "too_many_rows"
    VERIFIER_HEAD_DIM = "verifier_head_dim"
    BACKEND_NOT_CHOSEN = "backend_not_chosen"
    WEIGHTS_OUTSIDE_CONTRACT = "weights_outside_contract"
    NOT_FUSED = "not_fused"
    NO_KERNEL = "no_kernel"

    @property
    def meaning(self) -> str:
        return _MEANINGS[self]


_MEANINGS = {
    FallbackReason.KV_DTYPE: "the KV cache has another type than the recipe's",
    FallbackReason.NO_PREFILL_KERNEL: "no prefill kernel is in this build",
    FallbackReason.PREFILL_HEAD_DIM: "the prefill kernel takes a head dimension of 128 or 256",
    FallbackReason.LENGTHS_UNKNOWN: (
        "the prefill kernel needs every length on the host, and a graph or vLLM's metadata has none"
    ),
    FallbackReason.TOO_MANY_ROWS: "query heads per KV head times queries exceed the verifier's tile",
    FallbackReason.VERIFIER_HEAD_DIM: "the verifier takes a head dimension of 128 or 256",
    FallbackReason.BACKEND_NOT_CHOSEN: "FLASH_ATTN_V100 refuses the layer, or another backend was asked for",
    FallbackReason.WEIGHTS_OUTSIDE_CONTRACT: "the kernels refuse the weights: their shape or scales",
    FallbackReason.NOT_FUSED: "gate and up cannot share a launch with their activation",
    FallbackReason.NO_KERNEL: "this build has no kernel of its own for the operation",
}


class Route(Document):
    """One way to execute an operation."""

    name: str
    path: str | None
    """The acceleration path that this route executes; None for a fallback."""
    stages: tuple[Stage, ...]
    description: str
    contract: str = ""
    """What a call must look like to take this route; other calls take a route that admits them."""
    counters: tuple[str, ...] = ()
    """Names under which the 1.5 engine counts the same work, for comparing logs."""
    reasons: tuple[FallbackReason, ...] = ()
    """Of a fallback: why it may be taken; a dispatch that names none is counted under the first."""

    @property
    def fallback(self) -> bool:
        return self.path is None


_BOTH = (Stage.PREFILL, Stage.DECODE)
_ALL = (Stage.PREFILL, Stage.DECODE, Stage.VERIFY)
_STEP = (Stage.DECODE, Stage.VERIFY)
_EVERY = (*_ALL, Stage.DRAFT)
_REFERENCE = (
    Route(
        name="nvfp4_linear_reference",
        path="reference_nvfp4_linear",
        stages=_ALL,
        description="NVFP4 weights, unpacked and multiplied by the plain reference on the CPU.",
    ),
    Route(
        name="attention_reference",
        path="reference_attention",
        stages=_EVERY,
        description="Paged attention of the CPU lane over the KV cache in the compute dtype.",
    ),
    Route(
        name="attention_e4m3_reference",
        path="reference_attention_e4m3",
        stages=_EVERY,
        description="Paged attention of the CPU lane over an E4M3 KV cache.",
    ),
    Route(
        name="attention_e5m2_reference",
        path=None,
        stages=_EVERY,
        description="Paged attention of the CPU lane over an E5M2 KV cache: served, but not the recipe's path.",
        reasons=(FallbackReason.KV_DTYPE,),
    ),
    Route(
        name="gdn_reference",
        path="reference_gdn",
        stages=_ALL,
        description="Gated delta net of the CPU lane.",
    ),
)
_ATTENTION = (
    Route(
        name="decode_scalar_paged",
        path="flash_attn_v100",
        stages=_STEP,
        description="Split-KV decode, one block per query head and partition.",
        contract="head size 64, 128 or 256; FP16, E4M3 or E5M2 pages; a window is admitted",
        counters=("decode_scalar_paged", "prefill_smallq_decode_scalar", "prefill_prefix_decode_rows_scalar"),
    ),
    Route(
        name="decode_xqa_paged",
        path="xqa_decode",
        stages=_STEP,
        description="Split-KV decode that shares each KV read within a group of query heads.",
        contract="head size 256; 4, 6 or 8 query heads to a KV head; no window; E5M2 from 16384 tokens",
        counters=("decode_xqa_paged", "prefill_smallq_decode_xqa", "prefill_prefix_decode_rows_xqa"),
    ),
    Route(
        name="decode_e4m3_scalar_tail",
        path="scalar_tail",
        stages=(Stage.VERIFY,),
        description="The single-token tail of a round, 256 partitions of 1024 tokens.",
        contract="one query; E4M3 pages of at least 1024 tokens; six query heads to a KV head; head size 256",
        counters=("decode_e4m3_compact_scalar_tail",),
    ),
    Route(
        name="verify_e4m3_grouped",
        path="e4m3_grouped_fp32",
        stages=(Stage.VERIFY,),
        description="Verification with FP32 state, six heads to a KV read.",
        contract="2 to 8 query rows, or 8 for each of up to 16 requests; E4M3 pages of a multiple of 16; no window",
        counters=("prefill_smallq_e4m3_grouped_fp32", "prefill_prefix_decode_rows_e4m3_grouped_fp32"),
    ),
    Route(
        name="verify_e4m3_long",
        path="long_context",
        stages=(Stage.VERIFY,),
        description="Verification with 80 context splits and compensated FP32 state.",
        contract="2 to 8 query rows; capacity of exactly 262144 tokens; six heads of 256",
    ),
    Route(
        name="verify_fp16_grouped",
        path="fp16_grouped_fp32",
        stages=(Stage.VERIFY,),
        description="Verification over FP16 pages.",
        contract="2 to 8 query rows, or 8 for each of up to 4 requests; pages of 832 tokens; six heads of 256",
        counters=("prefill_smallq_fp16_grouped_fp32",),
    ),
    Route(
        name="verify_e5m2_grouped",
        path="e5m2_grouped",
        stages=(Stage.VERIFY,),
        description="Verification over E5M2 pages, 48 rows a block.",
        contract="1 to 8 query rows; E5M2 pages of 1648 or 3296 tokens; six heads of 256",
        counters=("prefill_smallq_dflash2_grouped_verify",),
    ),
    Route(
        name="prefill_splitd",
        path="splitd_prefill",
        stages=(Stage.PREFILL,),
        description="Prefill with the head cut in four slices of 64.",
        contract="causal; head size 256; at least 1024 queries in multiples of 64",
        counters=("prefill_dense_splitd_d256", "prefill_prefix_paged_splitd_d256", "prefill_prefix_gather_splitd_d256"),
    ),
    Route(
        name="prefill_packed",
        path="splitd_prefill",
        stages=(Stage.PREFILL,),
        description="Prefill over pages as they lie, the rows of all heads of a KV head packed, FP32 accumulation.",
        contract="head size 128 or 256; 1 to 16 query heads to a KV head; FP16, E4M3 or E5M2 pages; any lengths",
    ),
    Route(
        name="prefill_gqa_fp32",
        path="q8000_prefill",
        stages=(Stage.PREFILL,),
        description="Prefill that packs six heads into wide GEMMs with FP32 accumulation.",
        contract="4096 queries, or 8000 to 8192; at least 8192 cached tokens; six heads of 256; not capturing",
        counters=("prefill_dense_d256_gqa_79t_fp32", "prefill_dense_d256_gqa_79t_fp32_q8192"),
    ),
    Route(
        name="prefill_bm32_paged",
        path="bm32_paged_prefill",
        stages=(Stage.PREFILL,),
        description="Paged prefill, 32 queries against 128 cached tokens a step.",
        contract="FP16 pages of a multiple of 16; head size 256; at least 32 queries; no window",
        counters=("bm32_paged_prefill",),
    ),
    Route(
        name="prefill_fp8_bridge",
        path="fp8_prefill_bridge",
        stages=(Stage.PREFILL,),
        description="Expands an FP8 context once a chunk into FP16 rows of a workspace that all layers share; "
        "counted beside the prefill route that reads them.",
        contract="E4M3 or E5M2 pages; head size 128 or 256; at least 1024 queries after at least 8192 cached tokens; "
        "no window; the context fits into the reserved workspace; rows beyond the length are zeroed to the next 16",
        counters=("prefill_prefix_fp8_e4m3_bridge", "prefill_prefix_fp8_e5m2_bridge"),
    ),
    Route(
        name="prefill_sparse",
        path="flash_next_sparse_attention",
        stages=(Stage.PREFILL,),
        description="Page-sparse prefill, eight neighbouring queries a group.",
        contract="Flash-Next; pages of four tokens with exact row masks",
    ),
    Route(
        name="draft_window",
        path="draft_window_attention",
        stages=(Stage.DRAFT,),
        description="Non-causal attention of the draft within its window.",
        contract="drafts + 1 query rows; window 2048; paged prefix",
        counters=("prefill_prefix_dflash_noncausal_batch",),
    ),
    Route(
        name="attention_rows",
        path=None,
        stages=(*_ALL, Stage.DRAFT),
        description="Each query as a sequence of its own through the decode kernel: right, but reads all pages.",
        contract="taken where no prefill kernel is built, or a segment exceeds the verifier's tile",
        reasons=(
            FallbackReason.NO_PREFILL_KERNEL,
            FallbackReason.PREFILL_HEAD_DIM,
            FallbackReason.LENGTHS_UNKNOWN,
            FallbackReason.TOO_MANY_ROWS,
            FallbackReason.VERIFIER_HEAD_DIM,
        ),
    ),
    Route(
        name="attention_triton",
        path=None,
        stages=(*_ALL, Stage.DRAFT),
        description="vLLM's Triton attention: right, and without tensor cores on compute capability 7.0.",
        counters=("prefill_triton_safe", "unsupported_triton_fallback", "dflash_draft_triton_fallback"),
        reasons=(FallbackReason.BACKEND_NOT_CHOSEN,),
    ),
)
_LINEAR = (
    Route(
        name="nvfp4_qpn2",
        path="nvfp4_decode",
        stages=_STEP,
        description="NVFP4 GEMM for few rows: codes and byte scales as they lie.",
        contract="1 to 64 rows; K a multiple of 64, N of 8; FP16 activations",
    ),
    Route(
        name="nvfp4_gated",
        path="nvfp4_decode",
        stages=_STEP,
        description="NVFP4 gate and up in one launch for few rows, silu(gate) times up before anything is rounded.",
        contract="1 to 64 rows; K a multiple of 64, gate and up as many columns each, a multiple of 8; no bias",
    ),
    Route(
        name="nvfp4_packed_prefill",
        path="nvfp4_prefill",
        stages=(Stage.PREFILL,),
        description="NVFP4 unpacked to an ephemeral FP16 operand, multiplied by cuBLAS.",
        contract="more than 128 rows; K a multiple of 64, N of 8",
    ),
    Route(
        name="nvfp4_batch",
        path="batch_gemm",
        stages=_ALL,
        description="NVFP4 GEMM for the row counts between decode and prefill.",
        contract="65 to 128 rows; K a multiple of 64, N of 8",
    ),
    Route(
        name="fp8_w8a16",
        path="fp8_linear",
        stages=_ALL,
        description="FP8 block weights with FP16 activations.",
        contract="E4M3 in blocks of 128 x 128 or per channel",
    ),
    Route(
        name="int4_w4a16",
        path="int4_linear",
        stages=_ALL,
        description="INT4 weights with FP16 activations.",
        contract="groups of 32, 64 or 128",
    ),
    Route(
        name="nvfp4_moe_grouped",
        path="nvfp4_moe",
        stages=_ALL,
        description="Grouped NVFP4 experts.",
        contract="duplicate slots and graph capture are safe; no half-precision atomics",
    ),
    Route(
        name="nvfp4_moe_decode",
        path="flash_next_moe_decode",
        stages=_STEP,
        description="Experts for a single token.",
        contract="at most 512 experts, ten a token; 1 or 5 rows",
    ),
    Route(
        name="lm_head_quantized",
        path="quantized_lm_head",
        stages=_STEP,
        description="LM head in one byte a weight, FP32 logits, dense order.",
    ),
    Route(
        name="linear_emulated",
        path=None,
        stages=_ALL,
        description="Weights unpacked to the compute dtype for every call.",
        reasons=(FallbackReason.WEIGHTS_OUTSIDE_CONTRACT,),
    ),
    Route(
        name="swiglu_separate",
        path=None,
        stages=_ALL,
        description="silu(gate) times up of NVFP4 layers as an operation of its own, after gate and up were rounded.",
        reasons=(FallbackReason.NOT_FUSED,),
    ),
    Route(
        name="lm_head_fp16",
        path=None,
        stages=_ALL,
        description="LM head in FP16.",
        reasons=(FallbackReason.NO_KERNEL,),
    ),
)
_REST = (
    Route(
        name="gdn_decode",
        path="qwen38_decode",
        stages=(Stage.DECODE,),
        description="Gated delta net, one token, state in the global pool.",
        contract="head size 128 for keys and values; FP32 state; padded slots are -1",
    ),
    Route(
        name="gdn_verify",
        path="dflash2_verifier",
        stages=(Stage.VERIFY,),
        description="Gated delta net over a block of drafts, with replay of the accepted ones.",
        contract="at most 8 tokens a sequence; head size 128; FP32 state",
    ),
    Route(
        name="gdn_prefill_chunked",
        path="gdn_prefill",
        stages=(Stage.PREFILL,),
        description="Gated delta net in chunks of 64 tokens.",
        contract="head size 128; state FP32",
    ),
    Route(
        name="gdn_triton",
        path=None,
        stages=_ALL,
        description="vLLM's Triton gated delta net.",
        reasons=(FallbackReason.NO_KERNEL,),
    ),
    Route(
        name="verify_sparse_rejection",
        path="sparse_rejection",
        stages=(Stage.VERIFY,),
        description="Rejection sampling over the drafted tokens and the target's top ones.",
        contract="probabilistic drafts",
    ),
    Route(
        name="draft_lookup",
        path="lookup_drafting",
        stages=(Stage.DRAFT,),
        description="Drafts copied from the request's own context.",
    ),
    Route(
        name="verify_dense_rejection",
        path=None,
        stages=(Stage.VERIFY,),
        description="Rejection sampling over the whole vocabulary.",
        reasons=(FallbackReason.NO_KERNEL,),
    ),
    Route(
        name="all_reduce_one_shot",
        path="custom_all_reduce",
        stages=_ALL,
        description="All-reduce by direct reads over NVLink.",
        contract="2 or 4 fully connected ranks; at most 512 KiB, else two-shot",
    ),
    Route(
        name="all_reduce_nccl",
        path=None,
        stages=_ALL,
        description="All-reduce through NCCL.",
        reasons=(FallbackReason.NO_KERNEL,),
    ),
)
ROUTES = {route.name: route for route in (*_REFERENCE, *_ATTENTION, *_LINEAR, *_REST)}
