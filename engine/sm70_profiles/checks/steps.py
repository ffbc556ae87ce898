"""Refusals about steps, types and blocks."""

from __future__ import annotations

from sm70_profiles.checks.refuse import Found, refuse
from sm70_profiles.plan import Plan
from sm70_profiles.reasons import RefusalCode
from sm70_profiles.settings import (
    Dtype,
    SpeculationMethod,
)


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
