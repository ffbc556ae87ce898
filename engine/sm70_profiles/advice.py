"""What a user should know although it is served: the notes and warnings that need the final settings."""

from __future__ import annotations

from collections.abc import Callable

from sm70_profiles.base import quantity_bytes
from sm70_profiles.flags import Rendered
from sm70_profiles.memory import GIB, MIB, MemoryBudget, Pool
from sm70_profiles.plan import Plan
from sm70_profiles.profile import UNKNOWN
from sm70_profiles.reasons import NoticeCode, Severity
from sm70_profiles.settings import SpeculationMethod

LOW_HEADROOM = 256 * MIB
"""Headroom below which a warning is due; 0.88 on 16 GB came within 160 MiB of the allocator's limit."""


def seats(plan: Plan, pool: Pool | None) -> None:
    """Sequences are admissions, not residency."""
    seqs, limit = plan.settings.max_num_seqs, plan.profile.limits.max_num_seqs
    if seqs is None:
        return
    if limit is not None and seqs > limit:
        message = f"is {seqs}; more than {limit} started and then died on the first prompt"
        plan.notice(NoticeCode.SEATS_OVER_MEASURED, Severity.WARNING, "max_num_seqs", message)
    if pool is not None and pool.state_pages and seqs > (pool.pages - 1) // pool.state_pages:
        message = (
            f"admits {seqs}; the pool holds about {pool.residents_short} requests of a thousand tokens and"
            f" {pool.residents} at the full length, because each reserves {pool.state_pages} of {pool.pages} pages"
        )
        plan.notice(NoticeCode.SEATS_OVER_RESIDENTS, Severity.NOTE, "max_num_seqs", message)


def pool_size(plan: Plan, _: Pool | None) -> None:
    """A larger pool eats the headroom of prefill."""
    asked, stock = plan.settings.kv_cache_memory_bytes, plan.profile.settings.kv_cache_memory_bytes
    if asked and stock and quantity_bytes(asked) > quantity_bytes(stock):
        message = f"is above the recipe's {stock}: prefill and the first full batch allocate from the difference"
        plan.notice(NoticeCode.POOL_OVER_DEFAULT, Severity.WARNING, "kv_cache_memory_bytes", message)


def draft_size(plan: Plan, _: Pool | None) -> None:
    """Memory defaults are cut for one draft."""
    limit = plan.profile.limits.draft_bytes
    size = plan.facts.draft.weight_bytes if plan.facts.draft else None
    if limit is None or size is None or size <= limit or not plan.drafts_with_model:
        return
    pinned = plan.settings.kv_cache_memory_bytes not in (None, "0")
    defaults = pinned and plan.explicit("max_model_len") is None
    severity = Severity.WARNING if defaults else Severity.NOTE
    message = f"has {size / GIB:.1f} GiB; pool and context are cut for {limit / GIB:.1f} GiB"
    plan.notice(NoticeCode.LARGE_DRAFT, severity, "draft", message)


def log_probabilities(plan: Plan, _: Pool | None) -> None:
    """An old error whose repair nobody confirmed."""
    if plan.kvarn and plan.caching and plan.method is SpeculationMethod.MTP:
        message = "prompt log-probabilities were wrong with mtp over a cached prefix in KVarN; qualify them"
        plan.notice(NoticeCode.LOGPROBS_UNVERIFIED, Severity.WARNING, "kv_cache_dtype", message)


def block_growth(plan: Plan, pool: Pool | None) -> None:
    """The engine enlarges a page that would not cover a recurrent state."""
    asked = plan.settings.block_size
    if pool is not None and asked is not None and pool.block_size > asked:
        message = f"asks for {asked}; the prediction is that the engine runs with {pool.block_size}"
        plan.notice(NoticeCode.BLOCK_SIZE_WILL_GROW, Severity.WARNING, "block_size", message)


def state_cache(plan: Plan, _: Pool | None) -> None:
    """Without prefix caching no states are kept, and the engine refuses their block size."""
    if not plan.caching and plan.settings.mamba_block_size is not None:
        message = "is not passed on: states are kept only with prefix caching"
        plan.notice(NoticeCode.STATE_CACHE_MODE_DROPPED, Severity.NOTE, "mamba_block_size", message)


def draft_source(plan: Plan, _: Pool | None) -> None:
    """A pinned draft is downloaded, and verified as far as its checksums are known."""
    checkpoint = plan.profile.draft.checkpoint
    if not plan.drafts_with_model or checkpoint is None:
        return
    if plan.request.draft_path is None and checkpoint.hugging_face is not None:
        size = f", about {checkpoint.download_bytes / 1e9:.2f} GB" if checkpoint.download_bytes else ""
        message = f"is downloaded at the first start: {checkpoint.hugging_face.repo}{size}"
        plan.notice(NoticeCode.DOWNLOAD, Severity.NOTE, "draft", message)
    if UNKNOWN in checkpoint.sha256.values():
        message = "cannot be verified: the profile does not know the checksums; `sm70-profiles pin` fills them"
        plan.notice(NoticeCode.UNVERIFIED, Severity.NOTE, "draft", message)


ADVICE: tuple[Callable[[Plan, Pool | None], None], ...] = (
    seats,
    pool_size,
    draft_size,
    log_probabilities,
    block_growth,
    state_cache,
    draft_source,
)


def missing_features(plan: Plan, rendered: Rendered) -> None:
    """Features that the engine lacks and serves without."""
    for missing in rendered.missing:
        if missing.feature in plan.table.degrades:
            message = f"has no effect: {plan.table.title} lacks `{missing.needs}`"
            plan.notice(NoticeCode.FEATURE_MISSING, Severity.WARNING, missing.setting, message)


def memory(plan: Plan, budget: MemoryBudget | None) -> None:
    """Little headroom, and a grouping of layers that holds fewer tokens than the recipe's figures say."""
    if budget is None:
        return
    if budget.fits and budget.allocator_headroom_bytes < LOW_HEADROOM:
        message = f"leaves about {budget.allocator_headroom_bytes // MIB} MiB for mixed loads on {budget.gpu}"
        plan.notice(NoticeCode.HEADROOM, Severity.WARNING, "gpu_memory_utilization_percent", message)
    if budget.engine_pool is not None and budget.pool is not None:
        message = (
            f"holds {budget.engine_pool.tokens} tokens with the layer groups of {plan.table.title}, where the recipe's"
            f" figures assume groups that hold {budget.pool.tokens}"
        )
        plan.notice(NoticeCode.KV_GROUPS_DIFFER, Severity.WARNING, "max_model_len", message)
