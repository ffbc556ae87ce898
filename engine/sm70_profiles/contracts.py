"""The conditions of the acceleration rules: each judges one thing about a configuration and says what it found.

A contract answers with a reason and a message when something stands against a path; an applicability condition answers
with a message when the path belongs to something else. Both read nothing but the case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sm70_profiles.facts import EngineFlavour, GpuFacts, Interconnect, ModelFacts, complete
from sm70_profiles.flags import COMPILE_CACHE_OFF
from sm70_profiles.profile import Profile
from sm70_profiles.reasons import PathReason
from sm70_profiles.settings import (
    CudagraphMode,
    DraftSampleMethod,
    Dtype,
    KvCacheDtype,
    Overrides,
    SpeculationMethod,
)

INDUCTOR_CACHE_OFF = "TORCHINDUCTOR_FORCE_DISABLE_CACHES"
OFF = frozenset({"0", "false", "off"})
ON = frozenset({"1", "true", "on"})


@dataclass(frozen=True)
class Capabilities:
    """What the process offers. `operators` None means: not asked (an offline prediction), so nothing is missing."""

    flavour: EngineFlavour
    operators: frozenset[str] | None = None
    gpu: GpuFacts | None = None
    model: ModelFacts | None = None
    draft: ModelFacts | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """What one judgement is about. `model` and `draft` are the facts at hand, completed by the recipe's own."""

    profile: Profile
    settings: Overrides
    capabilities: Capabilities

    @property
    def model(self) -> ModelFacts | None:
        return complete(self.capabilities.model, self.profile.model_shape)

    @property
    def draft(self) -> ModelFacts | None:
        return complete(self.capabilities.draft, self.profile.draft.shape)

    @property
    def kv_cache_dtype(self) -> KvCacheDtype:
        return self.settings.kv_cache_dtype or KvCacheDtype.AUTO

    @property
    def method(self) -> SpeculationMethod:
        speculation = self.settings.speculation
        return (speculation.method if speculation else None) or SpeculationMethod.NONE


Judgement = tuple[str, str] | None
"""Reason and message of why a path is disabled; None when nothing stands against it."""
Contract = Callable[[Case], Judgement]
Applies = Callable[[Case], str | None]
"""Why a path is not applicable; None when it is."""


def wants_kv(*admitted: KvCacheDtype) -> Contract:
    """The KV cache has one of these types."""

    def judge(case: Case) -> Judgement:
        found = case.kv_cache_dtype
        if found in admitted:
            return None
        return PathReason.KV_DTYPE, f"needs a KV cache of {' or '.join(admitted)}; found {found}"

    return judge


def budget(native: int, at_least: int) -> Contract:
    """Tokens a step: exactly the native size, or at least so many."""

    def judge(case: Case) -> Judgement:
        found = case.settings.max_num_batched_tokens
        if found is None:
            return PathReason.CONFIGURATION_NOT_RESOLVED, "needs `maxNumBatchedTokens`; found none"
        if found == native or found >= at_least:
            return None
        return PathReason.BUDGET, f"needs `maxNumBatchedTokens` of {native}, or {at_least} and more; found {found}"

    return judge


def page_of_at_least(tokens: int) -> Contract:
    """The KV page that was asked for holds so many tokens. Unasked, the engine's choice is not judged."""

    def judge(case: Case) -> Judgement:
        found = case.settings.block_size
        if found is None or found >= tokens:
            return None
        return PathReason.PAGE_SIZE, f"needs a `blockSize` of at least {tokens}; found {found}"

    return judge


def page_aligned(case: Case) -> Judgement:
    """The KV page is a multiple of 16 tokens."""
    found = case.settings.block_size
    if found is None or found % 16 == 0:
        return None
    return PathReason.PAGE_ALIGNMENT, f"needs a `blockSize` that is a multiple of 16; found {found}"


def speculates_with(method: SpeculationMethod, tokens: int) -> Contract:
    """Speculation by this method with so many drafts; a number left open is the draft's own."""

    def judge(case: Case) -> Judgement:
        if case.method is not method:
            reason = f"{PathReason.METHOD}={case.method}≠{method}"
            return reason, f"verifies drafts of {method}; `speculation.method` is {case.method}"
        found = case.settings.speculation.tokens if case.settings.speculation else None
        if found is None and case.draft is not None and case.draft.block_size:
            found = case.draft.block_size - 1
        if found is None or found == tokens:
            return None
        reason = f"{PathReason.NUM_SPECULATIVE_TOKENS}={found}≠{tokens}"
        return reason, f"verifies {tokens} draft tokens a round; `speculation.tokens` is {found}"

    return judge


def parallel(tensor: int, pipeline: int = 1) -> Contract:
    """The split over GPUs for which the shapes are compiled."""

    def judge(case: Case) -> Judgement:
        for reason, name, found, wanted in (
            (PathReason.TENSOR_PARALLEL_SIZE, "tensorParallelSize", case.settings.tensor_parallel_size or 1, tensor),
            (
                PathReason.PIPELINE_PARALLEL_SIZE,
                "pipelineParallelSize",
                case.settings.pipeline_parallel_size or 1,
                pipeline,
            ),
        ):
            if found != wanted:
                return f"{reason}={found}≠{wanted}", f"needs `{name}` {wanted}; found {found}"
        return None

    return judge


def context_of(tokens: int) -> Contract:
    """The context length that the path's workspace is cut for."""

    def judge(case: Case) -> Judgement:
        found = case.settings.max_model_len
        if found == tokens:
            return None
        return PathReason.CONTEXT_CAPACITY, f"needs `maxModelLen` {tokens}; found {found or 'none'}"

    return judge


def half_precision(case: Case) -> Judgement:
    """Activations in FP16; `auto` becomes FP16 on compute capability 7.0."""
    found = case.settings.dtype or Dtype.AUTO
    if found in (Dtype.AUTO, Dtype.HALF, Dtype.FLOAT16):
        return None
    return f"{PathReason.CONTRACT_MISMATCH}:dtype", f"computes in half; found {found}"


def probabilistic_drafts(case: Case) -> Judgement:
    """Drafts are sampled; the verifier's acceptance is exact only with the probabilities they were drawn from."""
    found = case.settings.speculation.draft_sample_method if case.settings.speculation else None
    if found is not DraftSampleMethod.GREEDY:
        return None
    mismatch = f"{PathReason.CONTRACT_MISMATCH}:draft_sample_method"
    return mismatch, f"needs probabilistic drafts; `speculation.draftSampleMethod` is {found}"


def model_has(**wanted: int) -> Contract:
    """Dimensions of the target; those that are unknown are not judged, but the model must be known at all."""
    return _has("model", lambda case: case.model, wanted)


def draft_has(**wanted: int) -> Contract:
    """Dimensions of the draft; those that are unknown are not judged."""
    return _has("draft", lambda case: case.draft or ModelFacts(), wanted)


def _has(what: str, of: Callable[[Case], ModelFacts | None], wanted: Mapping[str, int]) -> Contract:
    def judge(case: Case) -> Judgement:
        facts = of(case)
        if facts is None:
            return PathReason.CONFIGURATION_NOT_RESOLVED, f"needs the {what}'s shape, which is not known"
        for name, value in wanted.items():
            found = getattr(facts, name)
            if found is not None and found != value:
                return f"{PathReason.CONTRACT_MISMATCH}:{name}", f"needs a {what} with {name} {value}; found {found}"
        return None

    return judge


def head_dim(*admitted: int) -> Contract:
    """The size of one attention head."""

    def judge(case: Case) -> Judgement:
        found = case.model.head_dim if case.model else None
        if found is None or found in admitted:
            return None
        return PathReason.HEAD_DIM, f"needs heads of {' or '.join(map(str, admitted))}; found {found}"

    return judge


def grouped(*admitted: int) -> Contract:
    """Query heads to one KV head."""

    def judge(case: Case) -> Judgement:
        model = case.model
        if model is None or not model.attention_heads or not model.kv_heads:
            return None
        found = model.attention_heads // model.kv_heads
        if found in admitted:
            return None
        return PathReason.GQA, f"packs {' or '.join(map(str, admitted))} query heads to a KV head; found {found}"

    return judge


def weights_in(*formats: str) -> Contract:
    """The weights' format, by a word of the checkpoint's quantisation."""

    def judge(case: Case) -> Judgement:
        if case.model is None:
            return PathReason.CONFIGURATION_NOT_RESOLVED, "needs the weights' format, which is not known"
        found = (case.model.quantization or "none").lower()
        if any(word in found for word in formats):
            return None
        return PathReason.CODEC, f"reads weights in {' or '.join(formats)}; found {found}"

    return judge


def captures_graphs(case: Case) -> Judgement:
    """Compiled graphs are on."""
    if case.settings.enforce_eager:
        return PathReason.USER_OVERRIDE, "`enforceEager` turns compilation off"
    if case.settings.compilation and case.settings.compilation.cudagraph_mode is CudagraphMode.NONE:
        return PathReason.COMPILATION_DISABLED, "`compilation.cudagraphMode` is NONE"
    return None


def keeps_compiled_code(case: Case) -> Judgement:
    """The compile cache is on. Whether anything is compiled is another path's matter."""
    environment = case.capabilities.environment
    typed = case.settings.compilation.cache if case.settings.compilation else None
    if typed is False or environment.get(COMPILE_CACHE_OFF, "").lower() in ON:
        return PathReason.COMPILE_CACHE_DISABLED, "compiled code is not kept; every start compiles anew"
    if environment.get(INDUCTOR_CACHE_OFF, "").lower() in ON:
        return PathReason.INDUCTOR_CACHE_DISABLED, f"{INDUCTOR_CACHE_OFF} is set"
    return None


def caches_prefixes(case: Case) -> Judgement:
    """Prefix caching is on."""
    if case.settings.prefix_caching is False:
        return PathReason.PREFIX_CACHING_DISABLED, "`prefixCaching` is false"
    return None


def asked_for(setting: Callable[[Overrides], bool | None], name: str) -> Contract:
    """A setting that turns an opt-in path on."""

    def judge(case: Case) -> Judgement:
        return None if setting(case.settings) else (PathReason.USER_OVERRIDE, f"`{name}` is off")

    return judge


def backend_is(*names: str) -> Contract:
    """The attention backend, unless it is left to the engine."""

    def judge(case: Case) -> Judgement:
        found = case.settings.attention_backend
        if found is None or found in names:
            return None
        return PathReason.USER_OVERRIDE, f"`attentionBackend` is {found}"

    return judge


def recipe_hardware(case: Case) -> Judgement:
    """GPUs as the recipe demands them; what is unknown is not judged."""
    gpu, wanted = case.capabilities.gpu or GpuFacts(), case.profile.hardware
    mismatches = (
        ("gpu_count", gpu.count, gpu.count is not None and gpu.count < wanted.count, wanted.count),
        ("gpu_product", gpu.product, bool(gpu.product and wanted.products) and gpu.product not in wanted.products, ""),
        (
            "interconnect",
            gpu.interconnect,
            gpu.interconnect is not None and not reaches(gpu.interconnect, wanted.interconnect),
            wanted.interconnect,
        ),
    )
    for name, found, wrong, value in mismatches:
        if wrong:
            wish = value or " or ".join(wanted.products)
            return f"{PathReason.CONTRACT_MISMATCH}:{name}", f"the recipe is for {name} {wish}; found {found}"
    return None


def reaches(found: Interconnect, wanted: Interconnect) -> bool:
    """Whether one interconnect does what another is asked for."""
    order = (Interconnect.ANY, Interconnect.NVLINK, Interconnect.NVLINK_MESH)
    return order.index(found) >= order.index(wanted)


def only_on(capability: str) -> Applies:
    """A path of GPUs of one compute capability."""

    def judge(case: Case) -> str | None:
        found = case.capabilities.gpu.compute_capability if case.capabilities.gpu else None
        return None if found in (None, capability) else f"a path of compute capability {capability}; found {found}"

    return judge


def only_for(what: str, admits: Callable[[ModelFacts], bool | None]) -> Applies:
    """A path of one class of models; an unknown model is admitted and judged by the contracts."""

    def judge(case: Case) -> str | None:
        if case.model is None or admits(case.model) is not False:
            return None
        return f"a path of {what}, which this model is not"

    return judge


def only_with(*methods: SpeculationMethod) -> Applies:
    """A path of speculation by one of these methods."""

    def judge(case: Case) -> str | None:
        if case.method in methods:
            return None
        return f"a path of speculation by {' or '.join(methods)}; found {case.method}"

    return judge


def same(facts: ModelFacts, **wanted: int) -> bool | None:
    """Whether all known dimensions are the wanted ones; None when none is known."""
    known = [getattr(facts, name) == value for name, value in wanted.items() if getattr(facts, name) is not None]
    return all(known) if known else None
