"""The acceleration rules: the override table of the release document, and every row's own conditions."""

from __future__ import annotations

from typing import Any

import pytest

from sm70_profiles.catalog import load_profile, profile_names
from sm70_profiles.contracts import Capabilities
from sm70_profiles.facts import EngineFlavour, GpuFacts, Interconnect, ModelFacts
from sm70_profiles.profile import Profile
from sm70_profiles.reasons import PathReason
from sm70_profiles.report import PathReport, PathState
from sm70_profiles.routes import ROUTES, Stage
from sm70_profiles.rules import RULES, judge_paths, settled_values, summarize
from sm70_profiles.settings import Overrides, merge

RELEASE = "qwen38_27b_nvfp4_dflash2"
SMALL = "tiny_hybrid_reference_release"

E4M3_PATHS = {"e4m3_grouped_fp32", "long_context", "scalar_tail"}
OVERRIDES: dict[str, tuple[dict[str, Any], set[str], str]] = {
    "E5M2 KV": ({"kvCacheDtype": "fp8_e5m2"}, E4M3_PATHS, "kv_dtype"),
    "6000 tokens a step": ({"maxNumBatchedTokens": 6000}, {"q8000_prefill"}, "budget<8000"),
    "pages of 16": ({"blockSize": 16}, {"scalar_tail"}, "page_size"),
    "five drafts": ({"speculation": {"tokens": 5}}, {"dflash2_verifier"}, "num_speculative_tokens=5≠7"),
    "no speculation": ({"speculation": {"method": "None"}}, {"dflash2_verifier"}, "method=None≠dflash"),
    "eager": ({"enforceEager": True}, {"compile_graph"}, "user_override"),
}
"""The release document's table: an override, the paths that it disables, and the reason."""

REFERENCE: dict[str, tuple[dict[str, Any], set[str], str]] = {
    "E5M2 KV": (
        {"kvCacheDtype": "fp8_e5m2"},
        {"reference_attention_e4m3", "reference_scalar_tail"},
        "kv_dtype",
    ),
    "6000 tokens a step": ({"maxNumBatchedTokens": 6000}, {"reference_prefill"}, "budget<8000"),
    "pages of 16": ({"blockSize": 16}, {"reference_scalar_tail"}, "page_size"),
    "five drafts": ({"speculation": {"tokens": 5}}, {"reference_verifier"}, "num_speculative_tokens=5≠3"),
    "no speculation": ({"speculation": {"method": "None"}}, {"reference_verifier"}, "method=None≠dflash"),
    "eager": ({"enforceEager": True}, {"reference_compile"}, "user_override"),
}
"""The same table on the CPU lane, through the same rule functions."""


def judged(
    name: str | Profile = RELEASE, overrides: dict[str, Any] | None = None, **capabilities: Any
) -> dict[str, PathReport]:
    profile = load_profile(name) if isinstance(name, str) else name
    settings = merge(profile.settings, Overrides.model_validate(overrides or {}))
    capabilities.setdefault("flavour", profile.engine.flavour)
    return {path.name: path for path in judge_paths(profile, settings, Capabilities(**capabilities))}


def disabled_expected(paths: dict[str, PathReport]) -> dict[str, str | None]:
    return {name: path.reason for name, path in paths.items() if path.expected and path.state is PathState.DISABLED}


def test_release_profile_is_complete() -> None:
    paths = judged()
    assert str(summarize(paths.values())) == "11/11"
    assert disabled_expected(paths) == {}


@pytest.mark.parametrize("case", OVERRIDES)
def test_release_document_table(case: str) -> None:
    overrides, disabled, reason = OVERRIDES[case]
    before, after = judged(), judged(overrides=overrides)
    assert disabled_expected(after) == dict.fromkeys(disabled, reason)
    # Nothing else of the whole table becomes disabled, expected or not.
    turned = {
        name
        for name in after
        if after[name].state is PathState.DISABLED and before[name].state is not PathState.DISABLED
    }
    assert turned == disabled
    assert all(after[name].message for name in disabled)


def test_small_release_profile_is_complete() -> None:
    assert str(summarize(judged(SMALL).values())) == "8/8"


@pytest.mark.parametrize("case", REFERENCE)
def test_table_on_the_cpu_lane(case: str) -> None:
    overrides, disabled, reason = REFERENCE[case]
    assert disabled_expected(judged(SMALL, overrides)) == dict.fromkeys(disabled, reason)


@pytest.mark.parametrize(
    ("tokens", "enabled"),
    [
        (2048, False),
        (4095, False),
        (4096, True),
        (4097, False),
        (6000, False),
        (7999, False),
        (8000, True),
        (8192, True),
        (16384, True),
    ],
)
def test_native_budgets_of_the_prefill(tokens: int, enabled: bool) -> None:
    path = judged(overrides={"maxNumBatchedTokens": tokens})["q8000_prefill"]
    assert (path.state is PathState.ENABLED) == enabled
    assert path.reason == (None if enabled else "budget<8000")


CONTRACTS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("dflash2_verifier", {"dtype": "float32"}, {}, "contract_mismatch:dtype"),
    ("dflash2_verifier", {"tensorParallelSize": 2}, {}, "tensor_parallel_size=2≠4"),
    ("dflash2_verifier", {"pipelineParallelSize": 2}, {}, "pipeline_parallel_size=2≠1"),
    ("dflash2_verifier", {"speculation": {"draftSampleMethod": "greedy"}}, {}, "contract_mismatch:draft_sample_method"),
    ("dflash2_verifier", {}, {"model": ModelFacts(hidden_size=4096)}, "contract_mismatch:hidden_size"),
    ("dflash2_verifier", {}, {"model": ModelFacts(attention_heads=32)}, "contract_mismatch:attention_heads"),
    ("dflash2_verifier", {}, {"draft": ModelFacts(selector_top_k=8)}, "contract_mismatch:selector_top_k"),
    ("dflash2_verifier", {"speculation": {"method": "mtp"}}, {}, "method=mtp≠dflash"),
    ("e4m3_grouped_fp32", {"blockSize": 1000}, {}, "page_alignment"),
    ("e4m3_grouped_fp32", {}, {"model": ModelFacts(head_dim=128)}, "head_dim"),
    ("e4m3_grouped_fp32", {}, {"model": ModelFacts(attention_heads=16, kv_heads=4)}, "gqa"),
    ("e4m3_grouped_fp32", {}, {"environment": {"VLLM_FLASH_V100_E4M3_GROUPED_FP32": "0"}}, "user_override"),
    ("e4m3_grouped_fp32", {}, {"operators": frozenset()}, "operator_missing:grouped_e4m3_fp32_revision4"),
    ("long_context", {"maxModelLen": 131072}, {}, "context_capacity"),
    (
        "long_context",
        {},
        {"operators": frozenset({"grouped_e4m3_fp32_revision4"})},
        "operator_missing:sm70_grouped_long_fwd",
    ),
    ("scalar_tail", {"maxModelLen": 131072}, {}, "context_capacity"),
    ("scalar_tail", {"blockSize": 1008}, {}, "page_size"),
    ("fp16_grouped_fp32", {}, {}, "kv_dtype"),
    ("bm32_paged_prefill", {}, {}, "kv_dtype"),
    ("q8000_prefill", {}, {"operators": frozenset()}, "operator_missing:sm70_d256_gqa_architecture_q8192_fwd"),
    ("flash_attn_v100", {"attentionBackend": "TRITON_ATTN"}, {}, "user_override"),
    ("compile_graph", {"compilation": {"cudagraphMode": "NONE"}}, {}, "compilation_disabled"),
    ("compile_cache", {"compilation": {"cache": False}}, {}, "compile_cache_disabled"),
    ("compile_cache", {}, {"environment": {"VLLM_DISABLE_COMPILE_CACHE": "1"}}, "compile_cache_disabled"),
    ("compile_cache", {}, {"environment": {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}}, "inductor_cache_disabled"),
    ("partial_prefix_cache", {}, {}, "operator_missing:partial_prefix_cache"),
    ("lookup_drafting", {"speculation": {"lookup": True}}, {}, "operator_missing:lookup"),
    ("profile_hardware", {}, {"gpu": GpuFacts(count=2)}, "contract_mismatch:gpu_count"),
    ("profile_hardware", {}, {"gpu": GpuFacts(product="Tesla-V100-PCIE-16GB")}, "contract_mismatch:gpu_product"),
    ("profile_hardware", {}, {"gpu": GpuFacts(interconnect=Interconnect.ANY)}, "contract_mismatch:interconnect"),
]


@pytest.mark.parametrize(("path", "overrides", "facts", "reason"), CONTRACTS)
def test_contracts(path: str, overrides: dict[str, Any], facts: dict[str, Any], reason: str) -> None:
    row = judged(overrides=overrides, **facts)[path]
    assert (row.state, row.reason) == (PathState.DISABLED, reason)
    assert row.message


def test_weights_in_another_format() -> None:
    quantised = ModelFacts(quantization="fp8", layers=32, experts=0)
    rows = judged("custom", model=quantised)
    assert rows["nvfp4_decode"].state is PathState.NOT_APPLICABLE
    assert rows["fp8_linear"].state is PathState.ENABLED
    assert judged("custom")["nvfp4_decode"].reason == PathReason.CONFIGURATION_NOT_RESOLVED
    weights = ModelFacts(experts=0)
    assert judged("custom", model=weights)["nvfp4_decode"].reason == PathReason.CODEC


def test_prefix_caching_off() -> None:
    profile = load_profile(RELEASE)
    settings = Overrides.model_validate({"prefixCaching": False, "partialPrefixCache": True})
    # On an engine that has the feature, what decides is the cache itself.
    from sm70_profiles.contracts import Case, caches_prefixes

    judgement = caches_prefixes(Case(profile, settings, Capabilities(EngineFlavour.SM70)))
    assert judgement is not None
    assert judgement[0] == PathReason.PREFIX_CACHING_DISABLED


def test_paths_of_other_engines_and_gpus_are_not_applicable() -> None:
    on_cpu = judged(flavour=EngineFlavour.CPU)
    assert {path.state for name, path in on_cpu.items() if not name.startswith("reference_")} == {
        PathState.NOT_APPLICABLE
    }
    on_turing = judged(gpu=GpuFacts(compute_capability="7.5"))
    assert {path.state for path in on_turing.values()} == {PathState.NOT_APPLICABLE}
    assert {path.reason for path in on_turing.values()} == {"not_applicable"}


def test_flash_next_is_another_contract() -> None:
    rows = judged()
    assert rows["flash_next_moe_decode"].state is PathState.NOT_APPLICABLE
    assert rows["nvfp4_moe"].state is PathState.NOT_APPLICABLE
    other = judged("qwen38_flash_next_nvfp4_mtp4")
    assert other["flash_next_moe_decode"].state is PathState.ENABLED
    assert other["qwen38_decode"].state is PathState.NOT_APPLICABLE


def test_draft_paths_follow_the_method() -> None:
    rows = judged(overrides={"speculation": {"method": "None"}})
    assert rows["draft_window_attention"].state is PathState.NOT_APPLICABLE
    assert judged()["draft_window_attention"].state is PathState.ENABLED


def test_unknown_expected_path_is_missing_not_silent() -> None:
    row = judged("glm53_flash_nvfp4_tp4pp2")["sparse_mla"]
    assert (row.state, row.reason) == (PathState.DISABLED, "operator_missing:sparse_mla")


def test_rules_judge_what_was_asked_and_say_what_was_settled() -> None:
    profile = load_profile(RELEASE)
    settings = merge(profile.settings, Overrides(block_size=16))
    rows = settled_values(settings, {"block_size": 1648, "mamba_block_size": 2048})
    assert [(row.field, row.requested, row.settled, row.view) for row in rows] == [
        ("block_size", "16", "1648", "worker 0")
    ]
    assert judged(overrides={"blockSize": 16})["scalar_tail"].reason == PathReason.PAGE_SIZE
    assert settled_values(settings, {}) == ()


def test_every_path_reason_is_reached() -> None:
    reached = {reason for _, _, _, reason in CONTRACTS} | {reason for _, _, reason in OVERRIDES.values()}
    reached |= {
        "not_applicable",
        PathReason.CONFIGURATION_NOT_RESOLVED,
        PathReason.CODEC,
        PathReason.PREFIX_CACHING_DISABLED,
    }
    words = {reason.partition(":")[0] if ":" in reason else reason for reason in reached}
    words |= {reason.partition("=")[0] for reason in reached if "≠" in reason}
    assert set(PathReason) <= words


def test_every_route_of_a_rule_is_in_the_catalogue() -> None:
    for rule in RULES:
        if rule.route is not None:
            assert ROUTES[rule.route].path == rule.path
    # A path may have further routes besides the one that its rule names; a route without a path is a fallback.
    executed = {rule.path for rule in RULES if rule.route is not None}
    assert {route.path for route in ROUTES.values() if not route.fallback} == executed


def test_catalogue() -> None:
    assert all(route.name == name and route.stages and route.description for name, route in ROUTES.items())
    for stage in Stage:
        assert any(route.fallback for route in ROUTES.values() if stage in route.stages), stage
    assert len({rule.path for rule in RULES}) == len(RULES)
    assert all(rule.description for rule in RULES)


@pytest.mark.parametrize("name", profile_names())
def test_expected_paths_of_profiles_are_enabled_or_explained(name: str) -> None:
    profile = load_profile(name)
    for path in judged(profile).values():
        if path.expected and path.state is not PathState.ENABLED:
            # What this engine lacks is the only thing that may be missing from a recipe as it stands.
            assert (path.reason or "").startswith("operator_missing:")
