"""What the resolver changes by itself, each with the reason that a user is shown.

The order matters: a later step may rest on what an earlier one decided. No step overrides what the user asked for,
except where the engine would fail or answer wrongly; then a notice says so.
"""

from __future__ import annotations

from collections.abc import Callable

from sm70_profiles.engines import Feature
from sm70_profiles.plan import Plan
from sm70_profiles.reasons import NoticeCode, Severity
from sm70_profiles.settings import (
    Acknowledgement,
    CudagraphMode,
    KvCacheDtype,
    LongContextKernel,
    PrefixRetention,
    SpeculationMethod,
)

KERNEL_CAPABILITY = "8.6"
"""The compute capability that both long-context kernels were measured on."""
MTP_LONG_TOKENS = 3
MEASURED_RETENTION = {7: 13_056, 15: 14_592}
"""Six attention blocks of KVarN: 2176 tokens at 7 drafts, 2432 at 15."""
KVARN_TILE = 128

KERNEL_SETTINGS = {
    LongContextKernel.PTH_FLASH_ATTENTION: {
        "attention_backend": "CUSTOM",
        "kv_cache_dtype": KvCacheDtype.INT8_PER_HEAD,
        "speculation.attention_backend": "CUSTOM",
    },
    LongContextKernel.FA2_FP8: {
        "attention_backend": "FLASH_ATTN",
        "kv_cache_dtype": KvCacheDtype.FP8,
        "speculation.attention_backend": "FLASH_ATTN",
    },
}
"""What each long-context kernel fixes. A draft takes its backend from its own configuration, not from the target's."""


def measured_drafting(plan: Plan) -> str | None:
    """The setting that differs from what the kernels were measured with, or None."""
    if plan.value("speculation.dynamic_tokens") is not None:
        return "speculation.dynamic_tokens"
    if plan.method is SpeculationMethod.MTP:
        return None if plan.tokens == MTP_LONG_TOKENS else "speculation.tokens"
    if plan.method is not SpeculationMethod.DFLASH:
        return "speculation.method"
    if plan.tokens != plan.trained_tokens:
        return "speculation.tokens"
    return None if plan.value("speculation.lookup") else "speculation.lookup"


def choose_kernel(plan: Plan) -> LongContextKernel:
    """The kernel of a long-context recipe that leaves the choice open."""
    excluded = plan.value("single_gpu.excluded_kernels") or ()
    capability = plan.gpu.compute_capability or plan.profile.hardware.compute_capability
    if capability != KERNEL_CAPABILITY or plan.connector:
        return LongContextKernel.STOCK
    pth, fa2 = LongContextKernel.PTH_FLASH_ATTENTION, LongContextKernel.FA2_FP8
    # Installed is a fact for the one and not asked for the other, whose absence is then a refusal: the default of a
    # recipe must not depend on whether somebody ran a build step.
    ready = plan.has_feature(Feature.PTH_FLASH_ATTENTION) and not plan.value("vision.enabled")
    if pth not in excluded and ready and measured_drafting(plan) is None:
        return pth
    if fa2 not in excluded and plan.drafts_with_model:
        return fa2
    return LongContextKernel.STOCK


def long_context_kernel(plan: Plan) -> None:
    """Settles which kernel reads a quantised KV cache, and what that fixes."""
    kernel = plan.value("single_gpu.long_context_kernel")
    if kernel is None:
        return
    if kernel is LongContextKernel.AUTO:
        kernel = choose_kernel(plan)
        plan.adjust("single_gpu.long_context_kernel", kernel, "the first kernel that is installed and measured here")
        if kernel is LongContextKernel.PTH_FLASH_ATTENTION and plan.drafts_with_model:
            message = f"{kernel} displaced {LongContextKernel.FA2_FP8}, the default where it is not installed"
            plan.notice(NoticeCode.KERNEL_OVER_DEFAULT, Severity.NOTE, "single_gpu.long_context_kernel", message)
    for setting, value in KERNEL_SETTINGS.get(kernel, {}).items():
        if plan.explicit(setting) is None:
            plan.adjust(setting, value, f"{kernel} reads this format through this backend")
    if kernel is LongContextKernel.PTH_FLASH_ATTENTION:
        message = "INT8 keys and values through pth-flash-attn, target and draft"
        plan.notice(NoticeCode.KERNEL_CHOSEN, Severity.NOTE, "single_gpu.long_context_kernel", message)
    if kernel is LongContextKernel.FA2_FP8:
        if plan.explicit("single_gpu.split_kv_verify"):
            message = f"has no effect: {kernel} brings its own split-KV verify"
            plan.notice(NoticeCode.SPLIT_KV_WITHOUT_EFFECT, Severity.NOTE, "single_gpu.split_kv_verify", message)
        plan.adjust("single_gpu.split_kv_verify", False, f"{kernel} brings its own split-KV verify")


def fixed_pool(plan: Plan) -> None:
    """A pool in bytes is per GPU and was cut for one: on several it would leave memory unused."""
    several = (plan.settings.tensor_parallel_size or 1) > 1
    if not (several and plan.single_gpu and plan.drafts_with_model):
        return
    pinned = plan.profile.settings.kv_cache_memory_bytes
    if pinned and plan.explicit("kv_cache_memory_bytes") is None:
        message = f"the recipe's {pinned} bytes were cut for one GPU; the pool is sized by the utilisation instead"
        plan.adjustment(NoticeCode.POOL_UNPINNED, "kv_cache_memory_bytes", "0", message)
    if plan.long_block:
        message = f"{plan.tokens} draft tokens on several GPUs lost 27% in the one measurement there is"
        plan.notice(NoticeCode.LONG_BLOCK_ON_SEVERAL_GPUS, Severity.WARNING, "speculation.tokens", message)


def verify_length(plan: Plan) -> None:
    """A verify block that changes its length corrupts what a prefix hit resumes from a KVarN cache."""
    lookup = plan.value("speculation.lookup")
    if not (plan.kvarn and plan.caching and plan.long_block and lookup):
        return
    if plan.value("speculation.lookup_adaptive"):
        message = "an adaptive verify length corrupts the second turn over a cached prefix on this KV format"
        plan.notice(NoticeCode.UNSAFE_ACKNOWLEDGED, Severity.WARNING, "speculation.lookup_adaptive", message)
        return
    message = f"the verify block is held at {plan.tokens + 1} tokens: correct after a prefix hit, and faster"
    plan.adjustment(NoticeCode.VERIFY_LENGTH_PINNED, "speculation.lookup_adaptive", False, message)


def scheduling(plan: Plan) -> None:
    """Only the synchronous scheduler lets the lookup choose how many drafts are verified next."""
    adaptive = plan.single_gpu and plan.long_block and plan.value("speculation.lookup")
    if adaptive and plan.explicit("async_scheduling") is None:
        plan.adjust("async_scheduling", False, "asynchronous scheduling pads every step to the longest block")


def split_kv(plan: Plan) -> None:
    """The split-KV scratch is captured in graphs and must be sized once, for the longest block."""
    if plan.single_gpu and plan.drafts_with_model and plan.value("single_gpu.split_kv_max_queries") is None:
        plan.adjust("single_gpu.split_kv_max_queries", plan.tokens + 1, "draft tokens and the token they follow")


def capture_size(plan: Plan) -> None:
    """Graphs cover every sequence's block, up to what fits beside the pool."""
    limit, seqs = plan.profile.limits.max_capture_size, plan.settings.max_num_seqs
    if limit is None or seqs is None or not plan.drafts_with_model:
        return
    if plan.value("compilation.max_capture_size") is None:
        size = min(limit, seqs * (plan.tokens + 1))
        plan.adjust("compilation.max_capture_size", size, f"sequences times block, at most {limit}")


def kvarn_prefix(plan: Plan) -> None:
    """Prefix hits on KVarN must end on its tiles, and only the block drafters survive full graphs there."""
    if not (plan.kvarn and plan.caching):
        return
    if plan.value("prefix_match_unit") is None:
        plan.adjust("prefix_match_unit", KVARN_TILE, "prefix hits must end on the KV format's tiles")
    if not plan.drafts_with_model and plan.value("compilation.cudagraph_mode") is None:
        because = "full graphs corrupt one prompt length in 128 after a prefix hit"
        plan.adjust("compilation.cudagraph_mode", CudagraphMode.PIECEWISE, because)


def retention(plan: Plan) -> None:
    """The engine's default moved between releases, so it is always said how many states the prefix cache keeps."""
    if not (plan.single_gpu and plan.caching and plan.tokens) or plan.value("prefix_retention") is not None:
        return
    dense = PrefixRetention(dense=True)
    if not (plan.kvarn and plan.drafts_with_model):
        plan.adjust("prefix_retention", dense, "one state per block, whatever the engine's default")
        return
    interval = MEASURED_RETENTION.get(plan.tokens)
    if interval is not None:
        plan.adjust("prefix_retention", PrefixRetention(interval_tokens=interval), "six attention blocks, as measured")
        return
    message = "stays dense: two long conversations in turn will evict each other; six attention blocks would avoid it"
    plan.adjustment(NoticeCode.RETENTION_UNMEASURED, "prefix_retention", dense, message)


def pinned_memory(plan: Plan) -> None:
    """Under WSL the V2 runner needs pinned buffers before it loads weights."""
    needed = plan.single_gpu and plan.host.wsl and plan.drafts_with_model
    if needed and plan.value("single_gpu.wsl_pin_memory") is None:
        message = "the V2 runner needs pinned buffers under WSL"
        plan.adjustment(NoticeCode.PINNED_MEMORY_FOR_WSL, "single_gpu.wsl_pin_memory", True, message)


def allocator(plan: Plan) -> None:
    """Expandable segments save memory, except where something has to export or pin the pages."""
    if not plan.single_gpu or plan.explicit("expandable_segments") is not None:
        return
    graphs_over_ranks = (
        (plan.settings.tensor_parallel_size or 1) > 1
        and plan.settings.custom_all_reduce is not False
        and not plan.settings.enforce_eager
    )
    for applies, code, message in (
        (plan.host.wsl, NoticeCode.ALLOCATOR_FOR_WSL, "off: the paravirtual driver rejects them"),
        (plan.connector, NoticeCode.ALLOCATOR_FOR_OFFLOAD, "off: the engine rejects them beside a KV connector"),
        (graphs_over_ranks, NoticeCode.ALLOCATOR_FOR_ALL_REDUCE, "off: custom all-reduce cannot export them"),
    ):
        if applies:
            plan.adjustment(code, "expandable_segments", False, message)
            return
    plan.adjust("expandable_segments", True, "less fragmentation at a high utilisation")


def without_speculation(plan: Plan) -> None:
    """Draft lengths by batch size mean nothing when nothing drafts."""
    if plan.value("speculation.dynamic_tokens") is not None and plan.method is SpeculationMethod.NONE:
        message = "has no effect: nothing speculates"
        plan.notice(NoticeCode.DYNAMIC_TOKENS_IGNORED, Severity.WARNING, "speculation.dynamic_tokens", message)


def kv_connector(plan: Plan) -> None:
    """Of two ways to send keys and values away, the explicit configuration wins."""
    if plan.value("kv_offload.size_gib") and plan.has_argument("--kv-transfer-config"):
        message = "is ignored: `--kv-transfer-config` in `extraArgs` wins"
        plan.adjustment(NoticeCode.CONNECTOR_WINS, "kv_offload", None, message)


def acknowledged(plan: Plan) -> None:
    """Keeps visible what the user knowingly asked for."""
    if plan.acknowledged(Acknowledgement.UNMEASURED):
        message = "combinations that nobody measured are served on your word"
        plan.notice(NoticeCode.UNMEASURED_ACKNOWLEDGED, Severity.WARNING, "acknowledge", message)
    if plan.acknowledged(Acknowledgement.UNSAFE):
        message = "combinations that are known to corrupt answers are served on your word"
        plan.notice(NoticeCode.UNSAFE_ACKNOWLEDGED, Severity.WARNING, "acknowledge", message)


ADJUSTMENTS: tuple[Callable[[Plan], None], ...] = (
    kv_connector,
    long_context_kernel,
    fixed_pool,
    verify_length,
    scheduling,
    split_kv,
    capture_size,
    without_speculation,
    kvarn_prefix,
    retention,
    pinned_memory,
    allocator,
    acknowledged,
)
