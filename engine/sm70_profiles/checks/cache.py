"""Refusals about the prefix cache, the KV pool and the memory of a GPU."""

from __future__ import annotations

from sm70_profiles.adjustments import KVARN_TILE
from sm70_profiles.base import quantity_bytes
from sm70_profiles.checks.refuse import Found, refuse, shown
from sm70_profiles.memory import MIB, MemoryBudget, Pool, layout
from sm70_profiles.plan import Plan
from sm70_profiles.profile import EngineFlavour
from sm70_profiles.reasons import RefusalCode
from sm70_profiles.settings import (
    StateDtype,
)

ALL_REDUCE_CAPTURED = "custom all-reduce under graphs on several GPUs"


def prefix_settings(plan: Plan) -> Found:
    """Settings of the prefix cache come with the prefix cache, and fit the KV format."""
    for setting in ("prefix_retention", "prefix_match_unit"):
        if plan.explicit(setting) is not None and not plan.caching:
            yield refuse(
                RefusalCode.PREFIX_SETTING_WITHOUT_CACHE,
                setting,
                "must be absent while prefix caching is off",
                shown(plan.explicit(setting)),
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
    cut = layout(plan.settings, plan.model, plan.draft, plan.table.kv_groups, StateDtype.FLOAT32)
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


def pool_holds_a_request(plan: Plan, pool: Pool | None) -> Found:
    """The KV cache holds one request of the full length."""
    if pool is not None and pool.residents == 0:
        yield refuse(
            RefusalCode.POOL_TOO_SMALL,
            "max_model_len",
            f"must leave room for one request: it takes {pool.pages_per_request} of {pool.pages} pages",
            plan.settings.max_model_len,
            f"Set it to {pool.largest_context} or less, or give the KV cache more memory.",
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
