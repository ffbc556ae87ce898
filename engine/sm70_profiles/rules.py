"""The acceleration rules: one row a path, judged from configuration and facts alone.

The offline prediction and the engine's report both come from this table; the engine adds what only a process knows
(is the operator present, which device) through `Capabilities`. A rule judges the value that was asked for. Where the
engine settles on another one, `settled_values` says so in a row of its own.

Judging stops at the first objection, in this order: another engine flavour or model (not applicable), an operator that
is missing, a switch that turns the path off, a path that this one builds on, then the contracts as listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sm70_profiles.contracts import (
    OFF,
    Applies,
    Capabilities,
    Case,
    Contract,
    Judgement,
    asked_for,
    backend_is,
    budget,
    caches_prefixes,
    captures_graphs,
    context_of,
    draft_has,
    grouped,
    half_precision,
    head_dim,
    keeps_compiled_code,
    model_has,
    only_for,
    only_on,
    only_with,
    page_aligned,
    page_of_at_least,
    parallel,
    probabilistic_drafts,
    recipe_hardware,
    same,
    speculates_with,
    wants_kv,
    weights_in,
)
from sm70_profiles.engines import Feature, engine_table
from sm70_profiles.facts import EngineFlavour, ModelFacts
from sm70_profiles.profile import Profile
from sm70_profiles.reasons import PathReason
from sm70_profiles.report import PathReport, PathState, SettledValue, Summary
from sm70_profiles.settings import KvCacheDtype, Overrides, SpeculationMethod

__all__ = [
    "RULES",
    "Capabilities",
    "Case",
    "Judgement",
    "Rule",
    "judge_paths",
    "settled_values",
    "summarize",
    "switched_off",
]


@dataclass(frozen=True)
class Rule:
    """One path. A path that `builds_on` others is disabled for their reason when one of them is."""

    path: str
    flavour: EngineFlavour
    """The engine flavour on which the path exists; elsewhere it is not applicable."""
    route: str | None
    operator: str | None = None
    """The operator that must be registered in the process."""
    contracts: tuple[Contract, ...] = field(default=())
    applies: tuple[Applies, ...] = ()
    builds_on: tuple[str, ...] = ()
    switch: str | None = None
    """A variable that turns the path off when it is 0; users of the release know its name."""
    feature: Feature | None = None
    """A feature of the engine's table without which the path does not exist."""
    description: str = ""


QWEN38_27B = {"hidden_size": 5120, "attention_heads": 24, "kv_heads": 4, "head_dim": 256}
"""The dense 27B hybrid that nearly every exact shape refers to."""
FLASH_NEXT = {"hidden_size": 2560, "experts": 512, "experts_per_token": 10}

_v100 = only_on("7.0")
_qwen38 = only_for("the dense Qwen3.8-27B class", lambda model: same(model, **QWEN38_27B))
_flash_next = only_for("Qwen3.8-Flash-Next", lambda model: same(model, **FLASH_NEXT))
_hybrid = only_for("hybrid models", lambda model: _known(model.linear_attention_layers))
_mixture = only_for("mixtures of experts", lambda model: _known(model.experts))
_dense = only_for("dense models", lambda model: None if model.experts is None else not model.experts)
_quantised_in = {
    "NVFP4": only_for("NVFP4 weights", lambda model: _format(model, "nvfp4", "fp4")),
    "FP8": only_for("FP8 weights", lambda model: _format(model, "fp8")),
    "INT4": only_for(
        "INT4 weights", lambda model: _format(model, "awq", "gptq", "int4", "w4a16", "compressed-tensors")
    ),
}


def _format(model: ModelFacts, *words: str) -> bool | None:
    if model.quantization is None:
        return False if model.layers is not None else None
    return any(word in model.quantization.lower() for word in words)


_E4M3 = wants_kv(KvCacheDtype.FP8, KvCacheDtype.FP8_E4M3)
_E5M2 = wants_kv(KvCacheDtype.FP8_E5M2)
_FP16 = wants_kv(KvCacheDtype.AUTO, KvCacheDtype.FLOAT16)
_FP8 = wants_kv(KvCacheDtype.FP8, KvCacheDtype.FP8_E4M3, KvCacheDtype.FP8_E5M2)
_ANY_KV = wants_kv(
    KvCacheDtype.AUTO, KvCacheDtype.FLOAT16, KvCacheDtype.FP8, KvCacheDtype.FP8_E4M3, KvCacheDtype.FP8_E5M2
)
_drafts = only_with(SpeculationMethod.DFLASH)
_CPU = EngineFlavour.CPU


def _known(count: int | None) -> bool | None:
    return None if count is None else count > 0


def _sm70(
    path: str,
    operator: str | None,
    description: str,
    *contracts: Contract,
    route: str | None = None,
    applies: tuple[Applies, ...] = (),
    builds_on: tuple[str, ...] = (),
    switch: str | None = None,
    feature: Feature | None = None,
) -> Rule:
    """A row of the V100 engine."""
    return Rule(
        path=path,
        flavour=EngineFlavour.SM70,
        route=route,
        operator=operator,
        contracts=contracts,
        applies=(_v100, *applies),
        builds_on=builds_on,
        switch=switch,
        feature=feature,
        description=description,
    )


RULES = (
    _sm70("profile_hardware", None, "The GPUs that the recipe names.", recipe_hardware),
    _sm70(
        "flash_attn_v100",
        "attention",
        "The attention backend under all attention paths.",
        backend_is("FLASH_ATTN_V100", "CUSTOM"),
        half_precision,
        _ANY_KV,
        head_dim(64, 128, 256),
        page_aligned,
        route="decode_scalar_paged",
    ),
    _sm70(
        "dflash2_verifier",
        "dflash2_verifier",
        "Fused verification of a block of seven drafts.",
        speculates_with(SpeculationMethod.DFLASH, 7),
        half_precision,
        probabilistic_drafts,
        model_has(**QWEN38_27B),
        draft_has(selector_top_k=16),
        parallel(4),
        route="gdn_verify",
    ),
    _sm70(
        "batch_gemm",
        "batch_gemm",
        "Quantised GEMMs for small batches.",
        half_precision,
        parallel(4),
        applies=(_qwen38,),
        switch="VLLM_SM70_NVFP4_TURBOMIND",
        route="nvfp4_batch",
    ),
    _sm70(
        "qwen38_decode",
        "qwen38_decode",
        "The dense 27B's fused decode step.",
        half_precision,
        parallel(4),
        applies=(_qwen38,),
        switch="VLLM_SM70_GDN_DECODE_FLASHQLA",
        route="gdn_decode",
    ),
    _sm70(
        "e4m3_grouped_fp32",
        "grouped_e4m3_fp32_revision4",
        "Verification over E4M3 pages, six query heads to a KV read, FP32 state.",
        _E4M3,
        page_aligned,
        head_dim(256),
        grouped(6),
        switch="VLLM_FLASH_V100_E4M3_GROUPED_FP32",
        route="verify_e4m3_grouped",
    ),
    _sm70(
        "long_context",
        "sm70_grouped_long_fwd",
        "Grouped verification with 80 context splits for the full context.",
        context_of(262_144),
        builds_on=("e4m3_grouped_fp32",),
        switch="VLLM_SM70_E4M3_LONG_ATTENTION",
        route="verify_e4m3_long",
    ),
    _sm70(
        "scalar_tail",
        "sm70_scalar_attention_fwd",
        "The single-token tail of a round over large pages.",
        page_of_at_least(1024),
        builds_on=("e4m3_grouped_fp32", "long_context"),
        switch="VLLM_SM70_DFLASH2_TAIL_CUDAGRAPHS",
        route="decode_e4m3_scalar_tail",
    ),
    _sm70(
        "fp16_grouped_fp32",
        "sm70_grouped_fp16_fwd",
        "Grouped verification over FP16 pages of 832 tokens.",
        _FP16,
        head_dim(256),
        grouped(6),
        route="verify_fp16_grouped",
    ),
    _sm70(
        "e5m2_grouped",
        "grouped_e5m2",
        "Grouped verification over E5M2 pages.",
        _E5M2,
        page_aligned,
        head_dim(256),
        grouped(6),
        switch="VLLM_FLASH_V100_DFLASH2_GROUPED_VERIFY",
        applies=(_drafts,),
        route="verify_e5m2_grouped",
    ),
    _sm70(
        "xqa_decode",
        "xqa_decode",
        "Single-token decode that shares each KV read between the query heads of a group.",
        _ANY_KV,
        head_dim(256),
        grouped(4, 6, 8),
        switch="VLLM_FLASH_V100_DECODE_USE_XQA",
        route="decode_xqa_paged",
    ),
    _sm70(
        "q8000_prefill",
        "sm70_d256_gqa_architecture_q8192_fwd",
        "FP32-accumulated prefill for chunks of exactly 4096, or of 8000 tokens and more.",
        budget(native=4096, at_least=8000),
        half_precision,
        head_dim(256),
        grouped(6),
        route="prefill_gqa_fp32",
    ),
    _sm70(
        "splitd_prefill",
        "splitd_prefill",
        "Prefill with the head cut in four slices; the first chunks of every prompt.",
        half_precision,
        head_dim(256),
        switch="VLLM_FLASH_V100_FA2_D256_PREFILL",
        route="prefill_splitd",
    ),
    _sm70(
        "bm32_paged_prefill",
        "aligned_bm32_paged_prefill",
        "Paged prefill over FP16 pages.",
        _FP16,
        page_aligned,
        head_dim(256),
        switch="VLLM_FLASH_V100_PREFILL_D256_BM32_PHASE",
        route="prefill_bm32_paged",
    ),
    _sm70(
        "fp8_prefill_bridge",
        "fp8_prefill_bridge",
        "One pass expands an FP8 prefix for the FP16 prefill kernels.",
        _FP8,
        head_dim(128, 256),
        switch="VLLM_FLASH_V100_FP8_PREFILL_BRIDGE",
        route="prefill_fp8_bridge",
    ),
    _sm70(
        "draft_window_attention",
        "draft_window_attention",
        "Non-causal window attention of the draft, flat in the context length.",
        applies=(_drafts,),
        route="draft_window",
    ),
    _sm70(
        "sparse_rejection",
        "sparse_rejection",
        "Rejection sampling over the drafted tokens and the target's top ones alone.",
        probabilistic_drafts,
        applies=(_drafts,),
        route="verify_sparse_rejection",
    ),
    _sm70(
        "lookup_drafting",
        "lookup_drafting",
        "Drafts from the request's own context; opt-in.",
        asked_for(lambda settings: settings.speculation.lookup if settings.speculation else None, "speculation.lookup"),
        applies=(_drafts,),
        feature=Feature.LOOKUP,
        route="draft_lookup",
    ),
    _sm70(
        "nvfp4_decode",
        "nvfp4_decode",
        "NVFP4 GEMM for 1 to 64 rows on packed codes and byte scales.",
        half_precision,
        weights_in("nvfp4", "fp4"),
        applies=(_dense, _quantised_in["NVFP4"]),
        route="nvfp4_qpn2",
    ),
    _sm70(
        "nvfp4_prefill",
        "nvfp4_prefill",
        "NVFP4 unpacked to an ephemeral FP16 operand for large chunks.",
        half_precision,
        weights_in("nvfp4", "fp4"),
        applies=(_dense, _quantised_in["NVFP4"]),
        route="nvfp4_packed_prefill",
    ),
    _sm70(
        "fp8_linear",
        "fp8_linear",
        "FP8 block weights with FP16 activations.",
        half_precision,
        weights_in("fp8"),
        applies=(_quantised_in["FP8"],),
        switch="VLLM_SM70_FP8_TURBOMIND",
        route="fp8_w8a16",
    ),
    _sm70(
        "int4_linear",
        "int4_linear",
        "INT4 weights of AWQ, GPTQ or compressed-tensors.",
        half_precision,
        weights_in("awq", "gptq", "int4", "w4a16", "compressed-tensors"),
        applies=(_quantised_in["INT4"],),
        switch="VLLM_SM70_AWQ_TURBOMIND",
        route="int4_w4a16",
    ),
    _sm70(
        "nvfp4_moe",
        "nvfp4_moe",
        "Grouped NVFP4 experts, indexed input, fused SwiGLU.",
        half_precision,
        weights_in("nvfp4", "fp4"),
        applies=(_mixture, _quantised_in["NVFP4"]),
        route="nvfp4_moe_grouped",
    ),
    _sm70(
        "flash_next_moe_decode",
        "flash_next_moe_decode",
        "Single-token experts of Flash-Next.",
        half_precision,
        parallel(4),
        applies=(_flash_next,),
        route="nvfp4_moe_decode",
    ),
    _sm70(
        "flash_next_sparse_attention",
        "sparse_attention",
        "Page-sparse prefill attention of Flash-Next.",
        half_precision,
        applies=(_flash_next,),
        route="prefill_sparse",
    ),
    _sm70(
        "gdn_prefill",
        "gdn_prefill",
        "Chunked gated delta net.",
        half_precision,
        applies=(_hybrid,),
        route="gdn_prefill_chunked",
    ),
    _sm70(
        "quantized_lm_head",
        "quantized_lm_head",
        "The LM head in one byte a weight with FP32 logits.",
        half_precision,
        applies=(_drafts,),
        switch="VLLM_SM70_DFLASH2_QUANT_LM_HEAD",
        route="lm_head_quantized",
    ),
    _sm70(
        "custom_all_reduce",
        "custom_all_reduce",
        "One-shot all-reduce over NVLink instead of NCCL.",
        asked_for(lambda settings: settings.custom_all_reduce is not False, "customAllReduce"),
        feature=Feature.CUSTOM_ALL_REDUCE,
        route="all_reduce_one_shot",
    ),
    _sm70(
        "partial_prefix_cache",
        "partial_prefix_cache",
        "Resuming a cached prefix inside a block.",
        caches_prefixes,
        asked_for(lambda settings: settings.partial_prefix_cache, "partialPrefixCache"),
        feature=Feature.PARTIAL_PREFIX_CACHE,
    ),
    _sm70("compile_graph", None, "Compiled and captured graphs.", captures_graphs),
    _sm70("compile_cache", None, "Compiled code kept between starts.", keeps_compiled_code),
    Rule(
        "reference_nvfp4_linear",
        _CPU,
        "nvfp4_linear_reference",
        operator="nvfp4_linear",
        description="NVFP4 weights through the plain reference.",
    ),
    Rule(
        "reference_attention",
        _CPU,
        "attention_reference",
        operator="attention",
        description="Paged attention of the CPU lane.",
    ),
    Rule(
        "reference_attention_e4m3",
        _CPU,
        "attention_e4m3_reference",
        operator="attention",
        contracts=(_E4M3,),
        description="Paged attention of the CPU lane over E4M3 pages.",
    ),
    Rule("reference_gdn", _CPU, "gdn_reference", operator="gdn", description="Gated delta net of the CPU lane."),
    Rule(
        "reference_prefill",
        _CPU,
        None,
        operator="attention",
        contracts=(budget(native=2048, at_least=8000),),
        description="The budget rule of `q8000_prefill` with the CPU lane's native size.",
    ),
    Rule(
        "reference_scalar_tail",
        _CPU,
        None,
        operator="attention",
        contracts=(page_of_at_least(128),),
        builds_on=("reference_attention_e4m3",),
        description="The page rule of `scalar_tail` with the CPU lane's page.",
    ),
    Rule(
        "reference_verifier",
        _CPU,
        None,
        contracts=(speculates_with(SpeculationMethod.DFLASH, 3),),
        description="The speculation rule of `dflash2_verifier` with the tiny draft's block.",
    ),
    Rule(
        "reference_compile",
        _CPU,
        None,
        contracts=(captures_graphs,),
        description="Compiled graphs of the CPU lane.",
    ),
    Rule(
        "reference_compile_cache",
        _CPU,
        None,
        contracts=(keeps_compiled_code,),
        description="Compiled code of the CPU lane kept between starts.",
    ),
)


def judge_paths(profile: Profile, settings: Overrides, capabilities: Capabilities) -> tuple[PathReport, ...]:
    """Every path's state under these settings, in the table's order; expected ones that no rule knows come last."""
    expected = frozenset(profile.expected_acceleration)
    case = Case(profile, settings, capabilities)
    rows: dict[str, PathReport] = {}
    for rule in RULES:
        rows[rule.path] = _judge(rule, rule.path in expected, case, rows)
    unknown = [name for name in profile.expected_acceleration if name not in rows]
    return (*rows.values(), *(_unknown(name) for name in unknown))


def summarize(paths: Iterable[PathReport]) -> Summary:
    """Enabled over expected. An expected path that is not applicable counts as not enabled."""
    expected = [path for path in paths if path.expected]
    return Summary(enabled=sum(path.state is PathState.ENABLED for path in expected), total=len(expected))


def switched_off(path: str, environment: Mapping[str, str]) -> bool:
    """Whether the user turned the path off by its variable: what the report then says, an engine must do."""
    rule = next(rule for rule in RULES if rule.path == path)
    return rule.switch is not None and environment.get(rule.switch, "").lower() in OFF


def settled_values(settings: Overrides, worker_facts: Mapping[str, str | int | None]) -> tuple[SettledValue, ...]:
    """Where a worker's value differs from the one that was asked for and judged; labelled with whose view it is."""
    rows = []
    for name, asked in (("block_size", settings.block_size), ("mamba_block_size", settings.mamba_block_size)):
        found = worker_facts.get(name)
        if asked is not None and isinstance(found, int) and found != asked:
            message = f"asked for {asked} and judged by it; the worker of rank 0 runs with {found}"
            rows.append(
                SettledValue(field=name, requested=str(asked), settled=str(found), view="worker 0", message=message)
            )
    return tuple(rows)


def _unknown(name: str) -> PathReport:
    return PathReport(
        name=name,
        expected=True,
        state=PathState.DISABLED,
        reason=f"{PathReason.OPERATOR_MISSING}:{name}",
        message="this engine has no such path",
    )


def _judge(rule: Rule, expected: bool, case: Case, rows: Mapping[str, PathReport]) -> PathReport:
    def row(state: PathState, reason: str | None = None, message: str = "") -> PathReport:
        return PathReport(
            name=rule.path, expected=expected, state=state, reason=reason, message=message, route=rule.route
        )

    unfit = _not_applicable(rule, case)
    if unfit is not None:
        return row(PathState.NOT_APPLICABLE, PathReason.NOT_APPLICABLE, unfit)
    objection = _missing(rule, case) or _switched_off(rule, case)
    if objection is not None:
        return row(PathState.DISABLED, *objection)
    for name in rule.builds_on:
        base = rows[name]
        if base.state is not PathState.ENABLED:
            return row(base.state, base.reason, f"builds on {name}, which {base.message}")
    for contract in rule.contracts:
        judgement = contract(case)
        if judgement is not None:
            return row(PathState.DISABLED, *judgement)
    return row(PathState.ENABLED)


def _not_applicable(rule: Rule, case: Case) -> str | None:
    if case.capabilities.flavour is not rule.flavour:
        return f"a path of the {rule.flavour} engine; this is the {case.capabilities.flavour} engine"
    return next((why for why in (applies(case) for applies in rule.applies) if why is not None), None)


def _missing(rule: Rule, case: Case) -> Judgement:
    operators = case.capabilities.operators
    if operators is not None and rule.operator and rule.operator not in operators:
        reason = f"{PathReason.OPERATOR_MISSING}:{rule.operator}"
        return reason, f"the operator `{rule.operator}` is not registered in this process"
    if rule.feature is not None and rule.feature not in engine_table(case.capabilities.flavour).features:
        reason = f"{PathReason.OPERATOR_MISSING}:{rule.feature}"
        return reason, f"this engine lacks it (`{rule.feature.meaning}`)"
    return None


def _switched_off(rule: Rule, case: Case) -> Judgement:
    if switched_off(rule.path, case.capabilities.environment):
        return PathReason.USER_OVERRIDE, f"{rule.switch} is 0"
    return None
