"""Every refusal of the resolver: what must hold before anything boots.

A check reads the plan and yields what is wrong; none stops another, so a user sees all mistakes at once. An unknown
fact never refuses. Checks of one subject stand together and are listed at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

from sm70_profiles.adjustments import KERNEL_CAPABILITY, KERNEL_SETTINGS, KVARN_TILE, measured_drafting
from sm70_profiles.base import quantity_bytes
from sm70_profiles.contracts import reaches
from sm70_profiles.engines import Feature
from sm70_profiles.facts import ModelFacts
from sm70_profiles.flags import OWNED_FLAGS, Rendered, spec_path
from sm70_profiles.memory import GIB, MIB, MemoryBudget, Pool, layout
from sm70_profiles.plan import Plan
from sm70_profiles.profile import EngineFlavour
from sm70_profiles.reasons import Refusal, RefusalCode
from sm70_profiles.rules import RULES
from sm70_profiles.settings import (
    Acknowledgement,
    ActivationLayer,
    CudagraphMode,
    Dtype,
    KvCacheDtype,
    LongContextKernel,
    RequestMetrics,
    Speculation,
    SpeculationMethod,
    StateDtype,
)

Found = Iterator[Refusal]
Check = Callable[[Plan], Found]

ALL_REDUCE_CAPTURED = "custom all-reduce under graphs on several GPUs"
_FP8 = {KvCacheDtype.FP8, KvCacheDtype.FP8_E4M3, KvCacheDtype.FP8_E5M2}
_KERNEL_FEATURES = {
    LongContextKernel.PTH_FLASH_ATTENTION: Feature.PTH_FLASH_ATTENTION,
    LongContextKernel.FA2_FP8: Feature.FA2_FP8,
}
_BACKEND_CAPABILITY = {"FLASH_ATTN": 90, "TRITON_ATTN": 89}
"""The compute capability from which each backend reads an FP8 KV cache, times ten."""


def refuse(code: RefusalCode, field: str, must: str, found: object, remedy: str) -> Refusal:
    """One refusal; `field` is a dotted path of attributes in the overrides, or a field of the spec as it is written."""
    return Refusal(code=code, field=spec_path(field), must=must, found=str(found), remedy=remedy)


def model_facts(plan: Plan) -> ModelFacts:
    """The model at hand, else the recipe's."""
    return plan.facts.model or plan.profile.model_shape or ModelFacts()


def draft_facts(plan: Plan) -> ModelFacts | None:
    """The draft at hand, else the recipe's."""
    return plan.facts.draft or plan.profile.draft.shape


# Extra arguments ------------------------------------------------------------------------------------------------------


def extra_arguments(plan: Plan) -> Found:
    """`extraArgs` hold options that the engine has and no typed field owns."""
    for position, argument in enumerate(plan.request.extra_args):
        if not argument.startswith("-") or argument.lstrip("-")[:1].isdigit() or argument in ("-", "--"):
            continue
        option = argument.partition("=")[0]
        option = option.replace("_", "-") if option.startswith("--") else option
        owner = OWNED_FLAGS.get(option.partition(".")[0])
        if owner is not None:
            yield refuse(
                RefusalCode.OWNED_FLAG,
                f"extraArgs[{position}]",
                "must not hold an option that a typed field owns",
                f"`{option}`",
                f"Use `{owner}` instead." if "." in owner or owner == "model" else f"It is set by {owner}.",
            )
        elif not plan.table.has_option(option):
            yield refuse(
                RefusalCode.FLAG_UNKNOWN,
                f"extraArgs[{position}]",
                f"must hold options that {plan.table.title} has, spelled out",
                f"`{option}`",
                "Correct the option or remove it.",
            )


def metrics(plan: Plan) -> Found:
    """Request metrics ride on the engine's statistics."""
    if plan.value("request_metrics") in (None, RequestMetrics.OFF) or not plan.has_argument("--disable-log-stats"):
        return
    yield refuse(
        RefusalCode.METRICS_WITHOUT_STATS,
        "request_metrics",
        "must be Off while the engine keeps no statistics",
        "`--disable-log-stats` in `extraArgs`",
        "Remove the option, or set `requestMetrics: Off`.",
    )


# Steps, types and blocks ----------------------------------------------------------------------------------------------


def step_budget(plan: Plan) -> Found:
    """A step holds at least one token of every sequence, and no more than the recipe's pool can feed."""
    tokens, seqs = plan.settings.max_num_batched_tokens, plan.settings.max_num_seqs
    if tokens is not None and seqs is not None and tokens < seqs:
        yield refuse(
            RefusalCode.BUDGET,
            "max_num_batched_tokens",
            f"must be at least maxNumSeqs = {seqs}",
            tokens,
            "Raise `maxNumBatchedTokens` or lower `maxNumSeqs`.",
        )
    limit = plan.profile.limits.max_num_batched_tokens
    pinned = plan.settings.kv_cache_memory_bytes not in (None, "0")
    if limit is not None and pinned and tokens is not None and tokens > limit:
        yield refuse(
            RefusalCode.BUDGET_OVER_POOL,
            "max_num_batched_tokens",
            f"must not exceed {limit} beside the fixed KV pool",
            tokens,
            "Lower it, or size the pool by the utilisation with `kvCacheMemoryBytes: 0`.",
        )


def dtypes(plan: Plan) -> Found:
    """The GPU and the verify kernel compute in the type."""
    dtype = plan.settings.dtype or Dtype.AUTO
    if dtype not in plan.table.dtypes:
        yield refuse(
            RefusalCode.DTYPE,
            "dtype",
            "must be half on compute capability 7.0, which has no bfloat16",
            dtype,
            "Remove the override.",
        )
    if plan.method is not SpeculationMethod.NONE and dtype not in plan.table.speculation_dtypes:
        yield refuse(
            RefusalCode.DTYPE_WITH_SPECULATION,
            "dtype",
            "must be bfloat16 while drafts are verified: the split-KV verify kernel computes in it",
            dtype,
            "Remove the override, or turn speculation off with `speculation.method: None`.",
        )


def blocks(plan: Plan) -> Found:
    """Block sizes fit the engine's granularity and each other."""
    block, state = plan.settings.block_size, plan.settings.mamba_block_size
    if state is None or not plan.caching:
        return
    for step, why in ((8, "the engine's granularity"), (block or 1, "`blockSize`")):
        if state % step:
            yield refuse(
                RefusalCode.BLOCK_SIZE,
                "mamba_block_size",
                f"must be a multiple of {step}, {why}",
                state,
                f"Use {-(-state // step) * step}.",
            )


# Drafts and speculation -----------------------------------------------------------------------------------------------


def draft_presence(plan: Plan) -> Found:
    """A draft model is there exactly when something speculates with it."""
    given = plan.request.draft_path is not None
    pinned = plan.profile.draft.checkpoint is not None and plan.profile.draft.checkpoint.hugging_face is not None
    if plan.drafts_with_model and not given and not pinned:
        yield refuse(
            RefusalCode.DRAFT_MISSING,
            "draft",
            f"must name the draft model that speculation by {plan.method} needs",
            "none",
            "Set `draft`, or turn speculation off with `overrides.speculation.method: None`.",
        )
    if given and not plan.drafts_with_model:
        yield refuse(
            RefusalCode.DRAFT_UNUSED,
            "draft",
            "must be absent when nothing speculates with a draft model",
            "a draft",
            "Remove `draft`, or set `overrides.speculation.method: dflash`.",
        )


def speculation_method(plan: Plan) -> Found:
    """Speculation is asked for with a method."""
    asked = plan.request.overrides.speculation
    if asked in (None, Speculation()) or plan.value("speculation.method") is not None:
        return
    yield refuse(
        RefusalCode.SPECULATION_METHOD,
        "speculation.method",
        "must be set when anything else of `speculation` is",
        "none",
        "Name the method, or remove `overrides.speculation`.",
    )


def prefix_cache_on_cpu(plan: Plan) -> Found:
    """The CPU engine cannot roll a hybrid model's state back to a cached prefix."""
    cpu = plan.table.flavour is EngineFlavour.CPU
    if cpu and plan.method is not SpeculationMethod.NONE and plan.settings.prefix_caching:
        yield refuse(
            RefusalCode.SPECULATION_WITH_PREFIX_CACHE,
            "prefix_caching",
            "must be false while the CPU engine speculates on a hybrid model",
            "true",
            "Set `overrides.prefixCaching: false`.",
        )


def draft_fits(plan: Plan) -> Found:
    """The draft was made for this target."""
    draft, model = plan.facts.draft, plan.facts.model
    if draft is None or not plan.drafts_with_model:
        return
    wanted = plan.profile.draft.architectures
    if wanted and draft.architectures and not set(draft.architectures) & set(wanted):
        yield _draft_mismatch("architecture", " or ".join(wanted), ", ".join(draft.architectures))
    if model is not None:
        for what, ours, theirs in (
            ("vocabulary size", draft.vocabulary, model.vocabulary),
            ("hidden size", draft.hidden_size, model.hidden_size),
        ):
            if ours is not None and theirs is not None and ours != theirs:
                yield _draft_mismatch(what, f"{theirs}, the target model's", str(ours))


def _draft_mismatch(what: str, must: str, found: str) -> Refusal:
    return refuse(
        RefusalCode.DRAFT_INCOMPATIBLE,
        "draft",
        f"must have {what} {must}",
        found,
        "Use the draft that was made for this target model.",
    )


def target_path(plan: Plan) -> Found:
    """The engine takes a target for a draft by a word in its path."""
    if plan.method is SpeculationMethod.MTP and "dflash" in plan.request.model_path.lower():
        yield refuse(
            RefusalCode.DRAFT_IN_TARGET_PATH,
            "model",
            "must not have `dflash` in its path under speculation by mtp: the engine infers the method from it",
            f"`{plan.request.model_path}`",
            "Rename the folder.",
        )


def dynamic_tokens(plan: Plan) -> Found:
    """Draft lengths by batch size are unambiguous, and constant where a changing one corrupts prefix hits."""
    rows = plan.value("speculation.dynamic_tokens")
    if rows is None or plan.method is SpeculationMethod.NONE:
        return
    ordered = sorted(rows, key=lambda row: (row.batch_from, row.batch_to))
    overlap = any(one.batch_to >= two.batch_from for one, two in pairwise(ordered))
    longest = max(row.tokens for row in rows)
    if overlap or (plan.tokens and longest > plan.tokens):
        yield refuse(
            RefusalCode.DYNAMIC_TOKENS_RANGE,
            "speculation.dynamic_tokens",
            f"must give each batch size one length of at most speculation.tokens = {plan.tokens}",
            "overlapping ranges" if overlap else longest,
            "Correct the ranges or lengths.",
        )
    if plan.kvarn and plan.caching:
        yield refuse(
            RefusalCode.DYNAMIC_TOKENS_WITH_PREFIX_CACHE,
            "speculation.dynamic_tokens",
            "must be absent while prefixes are cached in KVarN: a verify length that changes corrupts a hit",
            f"{len(rows)} ranges",
            "Remove it, or set `prefixCaching: false`.",
        )


def full_graphs(plan: Plan) -> Found:
    """Full graphs over KVarN corrupt one prompt length in 128 after a prefix hit, except with a block draft."""
    mode = plan.value("compilation.cudagraph_mode")
    full = mode in (CudagraphMode.FULL, CudagraphMode.FULL_AND_PIECEWISE, CudagraphMode.FULL_DECODE_ONLY)
    risky = plan.kvarn and plan.caching and plan.method is SpeculationMethod.MTP
    if full and risky and not plan.acknowledged(Acknowledgement.UNSAFE):
        yield refuse(
            RefusalCode.CUDAGRAPH_UNSAFE,
            "compilation.cudagraph_mode",
            "must be PIECEWISE while drafts of mtp are verified over a cached prefix in KVarN",
            mode,
            "Remove the override, or put `Unsafe` into `overrides.acknowledge`.",
        )


# The GPU --------------------------------------------------------------------------------------------------------------


def gpu_count(plan: Plan) -> Found:
    """As many GPUs as ranks."""
    wanted, ranks = plan.request.gpus.count, plan.ranks
    count = plan.profile.hardware.count if wanted is None else wanted
    # The CPU engine computes nothing on its GPUs: it holds them so that scheduling and pinning are real, or holds none.
    admitted = {0, ranks} if plan.profile.engine.flavour is EngineFlavour.CPU else {ranks}
    if count not in admitted:
        yield refuse(
            RefusalCode.GPU_COUNT,
            "gpus.count",
            f"must be tensorParallelSize x pipelineParallelSize = {ranks}",
            count,
            f"Set `gpus.count: {ranks}` or change the parallel sizes in `overrides`.",
        )


def gpu_architecture(plan: Plan) -> Found:
    """The recipe's kernels run on this GPU."""
    hardware, found = plan.profile.hardware, plan.gpu.compute_capability
    if found is None or hardware.compute_capability is None:
        return
    least = hardware.min_compute_capability
    fits = _tenths(found) >= _tenths(least) if least else found == hardware.compute_capability
    if not fits:
        wanted = f"at least {least}" if least else hardware.compute_capability
        yield refuse(
            RefusalCode.GPU_ARCHITECTURE,
            "profile",
            f"must be a recipe for the GPU at hand; `{plan.profile.name}` needs compute capability {wanted}",
            found,
            "Choose a profile for this GPU, or another GPU.",
        )


def gpu_product(plan: Plan) -> Found:
    """The GPU is one that the recipe admits, and has the memory and the links that it demands."""
    products = _products(plan)
    at_hand = (plan.gpu.product,) if plan.gpu.product else plan.facts.gpu_products
    if products and at_hand and not set(products) & set(at_hand):
        yield refuse(
            RefusalCode.GPU_PRODUCT,
            "gpus.products",
            f"must name a GPU at hand; asked for {' or '.join(products)}",
            ", ".join(at_hand),
            "Widen `gpus.products`, or use nodes with such GPUs.",
        )
    least = plan.request.gpus.min_memory or plan.profile.hardware.min_memory
    memory = plan.gpu.memory_mib
    if least is not None and memory is not None and memory * MIB < quantity_bytes(least):
        yield refuse(
            RefusalCode.GPU_MEMORY,
            "gpus.minMemory",
            f"must not exceed the memory of the GPU at hand, {memory} MiB",
            least,
            "Use a larger GPU.",
        )
    wanted = plan.request.gpus.interconnect or plan.profile.hardware.interconnect
    if plan.gpu.interconnect is not None and not reaches(plan.gpu.interconnect, wanted):
        yield refuse(
            RefusalCode.TOPOLOGY,
            "gpus.interconnect",
            f"must be what the GPUs at hand have, {plan.gpu.interconnect}",
            wanted,
            "Use GPUs that are connected so, or lower the demand at the price of speed.",
        )


def _products(plan: Plan) -> tuple[str, ...]:
    asked = plan.request.gpus.products
    return plan.profile.hardware.products if asked is None else asked


def _tenths(capability: str) -> int:
    major, _, minor = capability.partition(".")
    return 10 * int(major) + int(minor)


# The model ------------------------------------------------------------------------------------------------------------


def model_class(plan: Plan) -> Found:
    """The model is of the class that the recipe is for."""
    wanted, found = plan.profile.model_architectures, plan.facts.model.architectures if plan.facts.model else ()
    if wanted and found and not set(found) & set(wanted):
        yield refuse(
            RefusalCode.MODEL_INCOMPATIBLE,
            "model",
            f"must have architecture {' or '.join(wanted)}, which profile `{plan.profile.name}` is for",
            ", ".join(found),
            "Use another profile or another model.",
        )


def model_split(plan: Plan) -> Found:
    """Heads and layers can be dealt out to the ranks."""
    model = model_facts(plan)
    tensor, pipeline = plan.settings.tensor_parallel_size or 1, plan.settings.pipeline_parallel_size or 1
    heads, kv_heads = model.attention_heads, model.kv_heads
    uneven_heads = heads is not None and heads % tensor
    uneven_kv = kv_heads is not None and kv_heads % tensor and tensor % kv_heads
    if uneven_heads or uneven_kv:
        yield refuse(
            RefusalCode.PARALLEL_SHAPE,
            "tensor_parallel_size",
            f"must divide the model's {heads} attention heads and fit its {kv_heads} KV heads",
            tensor,
            "Use 1, 2, 4 or 8.",
        )
    if model.layers is not None and model.layers % pipeline:
        yield refuse(
            RefusalCode.PARALLEL_SHAPE,
            "pipeline_parallel_size",
            f"must divide the model's {model.layers} layers",
            pipeline,
            "Use a divisor of the number of layers.",
        )


def context_length(plan: Plan) -> Found:
    """The context is within the model's positions."""
    limit, asked = model_facts(plan).max_position, plan.settings.max_model_len
    if limit is not None and asked is not None and asked > limit:
        yield refuse(
            RefusalCode.CONTEXT_TOO_LONG,
            "max_model_len",
            f"must not exceed the model's {limit} positions",
            asked,
            f"Set it to {limit} or less.",
        )


# Long-context kernels of the single-GPU recipes -----------------------------------------------------------------------


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
            plan.value(differs) if plan.value(differs) is not None else "none",
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
    if _tenths(capability) < least:
        yield refuse(
            RefusalCode.KV_BACKEND,
            "attention_backend",
            f"must read an FP8 KV cache; {backend} does from compute capability {least // 10}.{least % 10}",
            f"compute capability {capability}",
            "Leave the backend to the engine, or use another KV type.",
        )


# Prefix cache, pool and memory ----------------------------------------------------------------------------------------


def prefix_settings(plan: Plan) -> Found:
    """Settings of the prefix cache come with the prefix cache, and fit the KV format."""
    for setting in ("prefix_retention", "prefix_match_unit"):
        if plan.explicit(setting) is not None and not plan.caching:
            yield refuse(
                RefusalCode.PREFIX_SETTING_WITHOUT_CACHE,
                setting,
                "must be absent while prefix caching is off",
                _shown(plan.explicit(setting)),
                "Remove it, or set `prefixCaching: true`.",
            )
    unit = plan.settings.prefix_match_unit
    if plan.kvarn and plan.caching and unit is not None and unit % KVARN_TILE:
        yield refuse(
            RefusalCode.MATCH_UNIT,
            "prefix_match_unit",
            f"must be a multiple of {KVARN_TILE}, the KV format's tile; others corrupt the pool",
            unit,
            f"Use {KVARN_TILE}.",
        )
    interval = plan.value("prefix_retention.interval_tokens")
    block = attention_block(plan)
    if interval and plan.caching and block is not None and interval % block:
        yield refuse(
            RefusalCode.RETENTION_MULTIPLE,
            "prefix_retention.interval_tokens",
            f"must be a multiple of the attention block, {block} tokens here",
            interval,
            f"Use {-(-interval // block) * block}, or 0 for replay boundaries only.",
        )


def attention_block(plan: Plan) -> int | None:
    """Tokens of the attention block that the engine will settle on, where the shapes are known."""
    cut = layout(plan.settings, model_facts(plan), draft_facts(plan), plan.table.kv_groups, StateDtype.FLOAT32)
    return cut.block_size if cut is not None else None


def allocator(plan: Plan) -> Found:
    """Expandable segments are not demanded where something has to pin or export the pages."""
    if not plan.explicit("expandable_segments") or plan.table.flavour is EngineFlavour.SM70:
        return
    if plan.connector:
        yield refuse(
            RefusalCode.ALLOCATOR_WITH_OFFLOAD,
            "expandable_segments",
            "must be false beside a KV connector",
            "true",
            "Remove the override.",
        )
    several = (plan.settings.tensor_parallel_size or 1) > 1
    if several and plan.settings.custom_all_reduce is not False and not plan.settings.enforce_eager:
        yield refuse(
            RefusalCode.ALLOCATOR_WITH_ALL_REDUCE,
            "expandable_segments",
            f"must be false with {ALL_REDUCE_CAPTURED}",
            "true",
            "Remove the override, or set `customAllReduce: false`.",
        )


def capture(plan: Plan) -> Found:
    """Captured batches fit beside the recipe's pool."""
    limit, asked = plan.profile.limits.max_capture_size, plan.explicit("compilation.max_capture_size")
    if limit is not None and asked is not None and asked > limit:
        yield refuse(
            RefusalCode.CAPTURE_TOO_LARGE,
            "compilation.max_capture_size",
            f"must not exceed {limit}: larger graphs start and then die on the first full batch",
            asked,
            f"Use {limit} or less; larger batches then run without a graph.",
        )


def measured_context(plan: Plan) -> Found:
    """The context is not longer than what was seen to fit the recipe's pool."""
    limits, asked = plan.profile.limits, plan.settings.max_model_len
    if limits.max_model_len is None or asked is None or asked <= limits.max_model_len:
        return
    if limits.draft_tokens_above is not None and plan.tokens <= limits.draft_tokens_above:
        return
    pinned = plan.settings.kv_cache_memory_bytes
    stock = plan.profile.settings.kv_cache_memory_bytes
    larger = pinned and stock and quantity_bytes(pinned) > quantity_bytes(stock)
    if not pinned or pinned == "0" or larger:
        return
    yield refuse(
        RefusalCode.POOL_TOO_SMALL,
        "max_model_len",
        f"must not exceed {limits.max_model_len} with {plan.tokens} draft tokens and this KV pool",
        asked,
        f"Set it to {limits.max_model_len} or less.",
    )


def vision(plan: Plan) -> Found:
    """Images have sane limits, and the tower fits beside a draft."""
    section = plan.settings.vision
    if section is None or not section.enabled:
        return
    low, high = section.min_pixels, section.max_pixels
    if low is not None and high is not None and low > high:
        yield refuse(
            RefusalCode.VISION_LIMITS,
            "vision.min_pixels",
            f"must not exceed maxPixels = {high}",
            low,
            "Lower `minPixels` or raise `maxPixels`.",
        )
    small = plan.gpu.memory_mib is None or plan.gpu.memory_mib <= 24 * 1024
    if plan.single_gpu and plan.drafts_with_model and small and section.tower_offload_gib == 0:
        yield refuse(
            RefusalCode.VISION_RESIDENT,
            "vision.tower_offload_gib",
            "must be at least 1 beside a draft model on 24 GiB",
            0,
            "Remove the override.",
        )


def int8_layers(plan: Plan) -> Found:
    """INT8 activations do not stop between linear attention and self attention."""
    layers = plan.value("single_gpu.int8_layers")
    crashing = {ActivationLayer.MLP, ActivationLayer.LINEAR_ATTENTION}
    if plan.value("single_gpu.int8_activations") and layers is not None and set(layers) == crashing:
        yield refuse(
            RefusalCode.ACTIVATION_LAYERS,
            "single_gpu.int8_layers",
            "must be mlp alone, gate_up alone, or mlp, linear_attn and self_attn: this choice crashes the compiler",
            ", ".join(layers),
            "Add `self_attn` or remove `linear_attn`.",
        )


def shared_memory(plan: Plan) -> Found:
    """A KV tier in host memory fits the shared memory, which backs it in full."""
    size, room = plan.value("kv_offload.size_gib"), plan.host.shared_memory_bytes
    if size and room is not None and size * GIB > room:
        yield refuse(
            RefusalCode.SHARED_MEMORY,
            "kv_offload.size_gib",
            f"must fit the shared memory of {room // MIB} MiB",
            size,
            "Lower it, or raise `pod.sharedMemory`.",
        )


def allowed_paths(plan: Plan) -> Found:
    """Paths that may be disabled are paths."""
    known = {rule.path for rule in RULES} | set(plan.profile.expected_acceleration)
    for position, allowance in enumerate(plan.request.acceleration.allow_disabled):
        if allowance.path not in known:
            yield refuse(
                RefusalCode.ALLOWED_PATH_UNKNOWN,
                f"acceleration.allowDisabled[{position}].path",
                "must be a path of the report",
                f"`{allowance.path}`",
                "Use a name from the profile's `expectedAcceleration`.",
            )


CHECKS: tuple[Check, ...] = (
    gpu_count,
    extra_arguments,
    metrics,
    step_budget,
    dtypes,
    blocks,
    draft_presence,
    speculation_method,
    prefix_cache_on_cpu,
    draft_fits,
    target_path,
    dynamic_tokens,
    full_graphs,
    gpu_architecture,
    gpu_product,
    model_class,
    model_split,
    context_length,
    kernel_arm,
    kernel_setup,
    kernel_settings,
    kernel_connector,
    kernel_installed,
    kv_backend,
    prefix_settings,
    allocator,
    capture,
    measured_context,
    vision,
    int8_layers,
    shared_memory,
    allowed_paths,
)


def missing_features(plan: Plan, rendered: Rendered) -> Found:
    """What the engine lacks and cannot serve without."""
    for missing in rendered.missing:
        if missing.feature in plan.table.degrades:
            continue
        yield refuse(
            RefusalCode.FLAG_UNSUPPORTED,
            missing.setting,
            f"needs `{missing.needs}`, which {plan.table.title} does not have",
            _shown(plan.value(missing.setting)),
            "Remove the setting, or use an engine that has it.",
        )


def pool_holds_a_request(pool: Pool | None) -> Found:
    """The KV cache holds one request of the full length."""
    if pool is not None and pool.residents == 0:
        yield refuse(
            RefusalCode.POOL_TOO_SMALL,
            "max_model_len",
            f"must leave room for one request: {pool.pages_per_request} pages are needed, {pool.pages} there",
            f"{pool.pages} pages of {pool.block_size} tokens",
            f"Set `maxModelLen` to {pool.largest_context} or less, or give the KV cache more memory.",
        )


def memory_fits(budget: MemoryBudget | None) -> Found:
    """Weights, KV cache and a mixed load fit the GPU."""
    if budget is not None and not budget.fits:
        room = min(budget.headroom_bytes, budget.kv_bytes)
        yield refuse(
            RefusalCode.MEMORY,
            "gpu_memory_utilization_percent",
            f"must leave memory for mixed loads on {budget.gpu}; the prediction is below zero",
            f"{room // MIB} MiB",
            "Lower it, restrict `gpus.products` to larger GPUs, or lower `maxNumBatchedTokens`.",
        )


def _shown(value: object) -> str:
    if value is True or value is False:
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value) if not hasattr(value, "model_dump_json") else value.model_dump_json(exclude_none=True)
