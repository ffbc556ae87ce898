"""Which operators this build offers, by the kernels that its objects hold; read without a GPU."""

from __future__ import annotations

from sm70_engine.kernels.build import read_export
from sm70_engine.kernels.loader import objects_folder

OPERATORS = {
    "attention": ("kv_cache", "attention_decode_f16", "attention_decode_e4m3", "attention_decode_e5m2"),
    "xqa_decode": ("attention_decode_f16", "attention_decode_e4m3", "attention_decode_e5m2"),
    "grouped_e4m3_fp32_revision4": ("attention_verify_e4m3",),
    "sm70_grouped_long_fwd": ("attention_verify_e4m3",),
    "sm70_scalar_attention_fwd": ("attention_decode_e4m3",),
    "sm70_grouped_fp16_fwd": ("attention_verify_f16",),
    "grouped_e5m2": ("attention_verify_e5m2",),
    "draft_window_attention": ("attention_verify_f16", "attention_verify_e4m3", "attention_verify_e5m2"),
    "splitd_prefill": ("attention_prefill_f16", "attention_prefill_e4m3", "attention_prefill_e5m2"),
    "aligned_bm32_paged_prefill": ("attention_prefill_f16",),
    "sm70_d256_gqa_architecture_q8192_fwd": (
        "attention_prefill_f16",
        "attention_prefill_e4m3",
        "attention_prefill_e5m2",
    ),
    "fp8_prefill_bridge": ("attention_prefill_f16", "attention_prefill_e4m3", "attention_prefill_e5m2"),
    "nvfp4_decode": ("nvfp4_linear",),
    "nvfp4_prefill": ("nvfp4_expand",),
}
"""The families that an operator needs. The names of operators are those of `sm70_profiles.rules`."""


def operators_present() -> tuple[str, ...]:
    """Raises `KernelError` when the package holds no kernels, or those of other sources."""
    families = read_export(objects_folder()).keys()
    return tuple(operator for operator, needed in OPERATORS.items() if families >= set(needed))
