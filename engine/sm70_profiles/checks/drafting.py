"""Refusals about drafts and speculation."""

from __future__ import annotations

from itertools import pairwise

from sm70_profiles.checks.refuse import Found, refuse
from sm70_profiles.plan import Plan
from sm70_profiles.profile import EngineFlavour
from sm70_profiles.reasons import Refusal, RefusalCode
from sm70_profiles.settings import (
    Acknowledgement,
    CudagraphMode,
    Speculation,
    SpeculationMethod,
)


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
