"""Refusals about which kernel reads a quantised KV cache."""

from __future__ import annotations

from sm70_profiles.adjustments import KERNEL_CAPABILITY, KERNEL_SETTINGS, measured_drafting
from sm70_profiles.checks.hardware import tenths
from sm70_profiles.checks.refuse import Found, refuse, shown
from sm70_profiles.engines import Feature
from sm70_profiles.plan import Plan
from sm70_profiles.reasons import RefusalCode
from sm70_profiles.settings import (
    Acknowledgement,
    KvCacheDtype,
    LongContextKernel,
    SpeculationMethod,
)

_FP8 = {KvCacheDtype.FP8, KvCacheDtype.FP8_E4M3, KvCacheDtype.FP8_E5M2}
_KERNEL_FEATURES = {
    LongContextKernel.PTH_FLASH_ATTENTION: Feature.PTH_FLASH_ATTENTION,
    LongContextKernel.FA2_FP8: Feature.FA2_FP8,
}
_BACKEND_CAPABILITY = {"FLASH_ATTN": 90, "TRITON_ATTN": 89}
"""The compute capability from which each backend reads an FP8 KV cache, times ten."""


def kernel_arm(plan: Plan) -> Found:
    """A long-context kernel is asked for only where it was measured."""
    asked = plan.explicit("single_gpu.long_context_kernel")
    if asked not in KERNEL_SETTINGS:
        return
    offered = plan.profile.settings.single_gpu and plan.profile.settings.single_gpu.long_context_kernel
    method = plan.method is not SpeculationMethod.NONE
    if asked is LongContextKernel.FA2_FP8:
        method = plan.drafts_with_model
    if not offered or not method:
        yield refuse(
            RefusalCode.KERNEL_ARM,
            "single_gpu.long_context_kernel",
            f"must be absent here: {asked} was measured with the long context"
            + (" and a block draft" if asked is LongContextKernel.FA2_FP8 else " and speculation"),
            asked,
            "Remove it, or choose the profile of the long context.",
        )


def kernel_setup(plan: Plan) -> Found:
    """pth-flash-attn runs with the drafting and on the GPU that it was measured with."""
    if plan.value("single_gpu.long_context_kernel") is not LongContextKernel.PTH_FLASH_ATTENTION:
        return
    if plan.acknowledged(Acknowledgement.UNMEASURED) or plan.method is SpeculationMethod.NONE:
        return
    differs = measured_drafting(plan)
    if differs is not None:
        yield refuse(
            RefusalCode.KERNEL_SETUP,
            differs,
            "must be as it was measured with PthFlashAttention: dflash, its trained block, lookup on, or mtp with 3,"
            " and one length for every batch",
            shown(plan.value(differs)),
            "Remove the override, or put `Unmeasured` into `overrides.acknowledge`.",
        )
    capability = plan.gpu.compute_capability
    if capability not in (None, KERNEL_CAPABILITY):
        yield refuse(
            RefusalCode.KERNEL_SETUP,
            "single_gpu.long_context_kernel",
            f"must be another one here: PthFlashAttention was measured on compute capability {KERNEL_CAPABILITY}",
            capability,
            "Remove it, or put `Unmeasured` into `overrides.acknowledge`.",
        )


def kernel_settings(plan: Plan) -> Found:
    """What the kernel fixes is not set otherwise."""
    kernel = plan.value("single_gpu.long_context_kernel")
    for setting, fixed in KERNEL_SETTINGS.get(kernel, {}).items():
        asked = plan.explicit(setting)
        if asked is not None and asked != fixed:
            yield refuse(
                RefusalCode.KERNEL_OVERRIDDEN,
                setting,
                f"must be absent, because {kernel} sets it to {fixed}",
                asked,
                "Remove the override, or set `singleGpu.longContextKernel: Stock`.",
            )


def kernel_connector(plan: Plan) -> Found:
    """The kernels were not tested with a KV connector."""
    asked = plan.explicit("single_gpu.long_context_kernel")
    if asked in KERNEL_SETTINGS and plan.connector:
        yield refuse(
            RefusalCode.KERNEL_WITH_OFFLOAD,
            "single_gpu.long_context_kernel",
            "must be Stock or absent while keys and values leave the GPU",
            asked,
            "Remove it, or the KV tier.",
        )


def kernel_installed(plan: Plan) -> Found:
    """The kernel is in the engine."""
    kernel = plan.value("single_gpu.long_context_kernel")
    feature = _KERNEL_FEATURES.get(kernel)
    if feature is not None and plan.lacks_feature(feature):
        origin = "explicit" if plan.explicit("single_gpu.long_context_kernel") is kernel else "the default here"
        yield refuse(
            RefusalCode.KERNEL_MISSING,
            "single_gpu.long_context_kernel",
            f"must be installed in the engine ({origin}); `{feature.meaning}` needs it",
            kernel,
            "Install it, or set `singleGpu.longContextKernel: Stock`.",
        )


def kv_backend(plan: Plan) -> Found:
    """The attention backend reads an FP8 cache on this GPU."""
    backend, capability = plan.settings.attention_backend, plan.gpu.compute_capability
    least = _BACKEND_CAPABILITY.get(backend or "")
    own = plan.value("single_gpu.long_context_kernel") is LongContextKernel.FA2_FP8
    if least is None or capability is None or own or plan.settings.kv_cache_dtype not in _FP8:
        return
    if tenths(capability) < least:
        yield refuse(
            RefusalCode.KV_BACKEND,
            "attention_backend",
            f"must read an FP8 KV cache; {backend} does from compute capability {least // 10}.{least % 10}",
            f"compute capability {capability}",
            "Leave the backend to the engine, or use another KV type.",
        )
