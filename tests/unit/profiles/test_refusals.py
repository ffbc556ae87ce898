"""Every refusal and every notice is reached by a request that a user might make, and says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sm70_profiles.engines import Feature
from sm70_profiles.facts import EngineFacts, EngineFlavour, Facts, GpuFacts, HostFacts, Interconnect, ModelFacts
from sm70_profiles.importenv import import_knobs
from sm70_profiles.reasons import NoticeCode, RefusalCode
from sm70_profiles.resolver import Resolution

Serve = Callable[..., Resolution]
RELEASE = "qwen38_27b_nvfp4_dflash2"
TINY = "tiny_hybrid_reference"
DRAFTED = "tiny_hybrid_reference_dflash"


def gpu(**facts: Any) -> Facts:
    return Facts(gpu=GpuFacts(**facts))


def model(**facts: Any) -> Facts:
    return Facts(model=ModelFacts(**facts))


def without(*features: Feature) -> Facts:
    return Facts(engine=EngineFacts(features=frozenset(set(Feature) - set(features))))


MESH = {"expandableSegments": True}
CASES: list[tuple[RefusalCode, str, dict[str, Any], dict[str, Any]]] = [
    (RefusalCode.OWNED_FLAG, TINY, {}, {"extra_args": ["--kv-cache-dtype=fp8"]}),
    (RefusalCode.OWNED_FLAG, TINY, {}, {"extra_args": ["--kv_cache_dtype", "fp8"]}),
    (RefusalCode.OWNED_FLAG, TINY, {}, {"extra_args": ["--compilation-config.mode", "3"]}),
    (RefusalCode.OWNED_FLAG, TINY, {}, {"extra_args": ["--api-key", "x"]}),
    (RefusalCode.FLAG_UNKNOWN, TINY, {}, {"extra_args": ["--kv-cache-dt", "fp8"]}),
    (RefusalCode.FLAG_UNSUPPORTED, "rtx3090_fast_mtp", {"mixedPrefillStepLatencyMilliseconds": 250}, {}),
    (RefusalCode.FLAG_UNSUPPORTED, RELEASE, {"kvCacheDtype": "kvarn_k4v2_g128"}, {}),
    (RefusalCode.GPU_COUNT, RELEASE, {}, {"gpus": {"count": 2}}),
    (RefusalCode.GPU_ARCHITECTURE, RELEASE, {}, {"facts": gpu(compute_capability="8.6")}),
    (RefusalCode.GPU_ARCHITECTURE, "rtx3090_fast_mtp", {}, {"facts": gpu(compute_capability="7.0")}),
    (RefusalCode.GPU_PRODUCT, RELEASE, {}, {"facts": gpu(product="NVIDIA-A100-SXM4-40GB")}),
    (RefusalCode.GPU_PRODUCT, RELEASE, {}, {"facts": Facts(gpu_products=("NVIDIA-A100-SXM4-40GB",))}),
    (RefusalCode.GPU_MEMORY, RELEASE, {}, {"facts": gpu(memory_mib=12_000)}),
    (RefusalCode.TOPOLOGY, RELEASE, {}, {"facts": gpu(interconnect=Interconnect.NVLINK)}),
    (RefusalCode.DTYPE, RELEASE, {"dtype": "bfloat16"}, {}),
    (RefusalCode.DTYPE_WITH_SPECULATION, "rtx3090_fast_mtp", {"dtype": "half"}, {}),
    (RefusalCode.DRAFT_MISSING, DRAFTED, {}, {"draft_path": None}),
    (RefusalCode.DRAFT_UNUSED, TINY, {}, {"draft_path": "/models/draft"}),
    (RefusalCode.DRAFT_INCOMPATIBLE, DRAFTED, {}, {"facts": Facts(draft=ModelFacts(architectures=("Other",)))}),
    (
        RefusalCode.DRAFT_INCOMPATIBLE,
        DRAFTED,
        {},
        {"facts": Facts(model=ModelFacts(vocabulary=512), draft=ModelFacts(vocabulary=1024))},
    ),
    (RefusalCode.DRAFT_IN_TARGET_PATH, "rtx3090_fast_mtp", {}, {"model_path": "/models/Qwen-DFlash2"}),
    (RefusalCode.SPECULATION_WITH_PREFIX_CACHE, DRAFTED, {"prefixCaching": True}, {}),
    (RefusalCode.SPECULATION_METHOD, TINY, {"speculation": {"tokens": 3}}, {}),
    (RefusalCode.MODEL_INCOMPATIBLE, RELEASE, {}, {"facts": model(architectures=("LlamaForCausalLM",))}),
    (RefusalCode.PARALLEL_SHAPE, RELEASE, {"tensorParallelSize": 3}, {"gpus": {"count": 3}}),
    (RefusalCode.PARALLEL_SHAPE, RELEASE, {"pipelineParallelSize": 3}, {"gpus": {"count": 12}}),
    (RefusalCode.BUDGET, TINY, {"maxNumBatchedTokens": 4}, {}),
    (RefusalCode.BUDGET_OVER_POOL, "rtx3090_fast_dflash2", {"maxNumBatchedTokens": 8192}, {}),
    (RefusalCode.CONTEXT_TOO_LONG, RELEASE, {"maxModelLen": 300_000}, {}),
    (RefusalCode.POOL_TOO_SMALL, "rtx3090_long_dflash2", {"speculation": {"tokens": 15}}, {}),
    (RefusalCode.POOL_TOO_SMALL, "rtx3090_huge_dflash2", {"speculation": {"tokens": 15}, "maxModelLen": 229_376}, {}),
    (RefusalCode.MEMORY, RELEASE, {"gpuMemoryUtilizationPercent": 92}, {}),
    (RefusalCode.CAPTURE_TOO_LARGE, "rtx3090_fast_dflash2", {"compilation": {"maxCaptureSize": 128}}, {}),
    (RefusalCode.VISION_RESIDENT, "rtx3090_fast_dflash2", {"vision": {"enabled": True, "towerOffloadGiB": 0}}, {}),
    (RefusalCode.VISION_LIMITS, "rtx3090_fast_mtp", {"vision": {"enabled": True, "minPixels": 9, "maxPixels": 4}}, {}),
    (
        RefusalCode.DYNAMIC_TOKENS_WITH_PREFIX_CACHE,
        "rtx3090_huge_dflash2",
        {"speculation": {"dynamicTokens": [{"batchFrom": 1, "batchTo": 8, "tokens": 3}]}},
        {},
    ),
    (
        RefusalCode.DYNAMIC_TOKENS_RANGE,
        "rtx3090_fast_dflash2",
        {
            "speculation": {
                "dynamicTokens": [
                    {"batchFrom": 1, "batchTo": 4, "tokens": 3},
                    {"batchFrom": 4, "batchTo": 8, "tokens": 2},
                ]
            }
        },
        {},
    ),
    (RefusalCode.CUDAGRAPH_UNSAFE, "rtx3090_huge_mtp", {"compilation": {"cudagraphMode": "FULL"}}, {}),
    (RefusalCode.KERNEL_ARM, "rtx3090_fast_mtp", {"singleGpu": {"longContextKernel": "PthFlashAttention"}}, {}),
    (RefusalCode.KERNEL_ARM, "rtx3090_long_mtp", {"singleGpu": {"longContextKernel": "Fa2Fp8"}}, {}),
    (
        RefusalCode.KERNEL_SETUP,
        "rtx3090_long_mtp",
        {"singleGpu": {"longContextKernel": "PthFlashAttention"}, "speculation": {"tokens": 4}},
        {},
    ),
    (
        RefusalCode.KERNEL_OVERRIDDEN,
        "rtx3090_long_dflash2",
        {"singleGpu": {"longContextKernel": "PthFlashAttention"}, "kvCacheDtype": "fp8"},
        {},
    ),
    (
        RefusalCode.KERNEL_WITH_OFFLOAD,
        "rtx3090_long_dflash2",
        {"singleGpu": {"longContextKernel": "Fa2Fp8"}, "kvOffload": {"sizeGiB": 8}},
        {},
    ),
    (
        RefusalCode.KERNEL_MISSING,
        "rtx3090_long_dflash2",
        {},
        {"facts": without(Feature.FA2_FP8, Feature.PTH_FLASH_ATTENTION)},
    ),
    (
        RefusalCode.KV_BACKEND,
        "rtx3090_fast_mtp",
        {"kvCacheDtype": "fp8"},
        {"facts": gpu(compute_capability="8.6")},
    ),
    (RefusalCode.RETENTION_MULTIPLE, "rtx3090_huge_dflash2", {"prefixRetention": {"intervalTokens": 4000}}, {}),
    (RefusalCode.MATCH_UNIT, "rtx3090_huge_mtp", {"prefixMatchUnit": 64}, {}),
    (
        RefusalCode.PREFIX_SETTING_WITHOUT_CACHE,
        "rtx3090_fast_mtp",
        {"prefixCaching": False, "prefixRetention": {"dense": True}},
        {},
    ),
    (RefusalCode.BLOCK_SIZE, RELEASE, {"mambaBlockSize": 3000}, {}),
    (RefusalCode.ALLOCATOR_WITH_OFFLOAD, "rtx3090_fast_mtp", {**MESH, "kvOffload": {"sizeGiB": 4}}, {}),
    (
        RefusalCode.ALLOCATOR_WITH_ALL_REDUCE,
        "rtx3090_fast_mtp",
        {**MESH, "tensorParallelSize": 2},
        {"gpus": {"count": 2}},
    ),
    (
        RefusalCode.ACTIVATION_LAYERS,
        "rtx3090_fast_mtp",
        {"singleGpu": {"int8Activations": True, "int8Layers": ["mlp", "linear_attn"]}},
        {},
    ),
    (RefusalCode.METRICS_WITHOUT_STATS, TINY, {"requestMetrics": "Summary"}, {"extra_args": ["--disable-log-stats"]}),
    (
        RefusalCode.SHARED_MEMORY,
        "rtx3090_fast_mtp",
        {"kvOffload": {"sizeGiB": 8}},
        {"facts": Facts(host=HostFacts(shared_memory_bytes=1 << 30))},
    ),
    (
        RefusalCode.ALLOWED_PATH_UNKNOWN,
        TINY,
        {},
        {"acceleration": {"allowDisabled": [{"path": "no_such_path", "because": "typing error"}]}},
    ),
]

NOTICES: list[tuple[NoticeCode, str, dict[str, Any], dict[str, Any]]] = [
    (NoticeCode.VERIFY_LENGTH_PINNED, "rtx3090_huge_dflash2", {"speculation": {"tokens": 15}}, {}),
    (NoticeCode.POOL_UNPINNED, "rtx3090_fast_dflash2", {"tensorParallelSize": 2}, {"gpus": {"count": 2}}),
    (
        NoticeCode.LONG_BLOCK_ON_SEVERAL_GPUS,
        "rtx3090_fast_dflash2",
        {"tensorParallelSize": 2, "speculation": {"tokens": 15}},
        {"gpus": {"count": 2}},
    ),
    (NoticeCode.ALLOCATOR_FOR_WSL, "rtx3090_fast_mtp", {}, {"facts": Facts(host=HostFacts(wsl=True))}),
    (NoticeCode.ALLOCATOR_FOR_OFFLOAD, "rtx3090_fast_mtp", {"kvOffload": {"sizeGiB": 4}}, {}),
    (NoticeCode.ALLOCATOR_FOR_ALL_REDUCE, "rtx3090_fast_mtp", {"tensorParallelSize": 2}, {"gpus": {"count": 2}}),
    (NoticeCode.PINNED_MEMORY_FOR_WSL, "rtx3090_fast_dflash2", {}, {"facts": Facts(host=HostFacts(wsl=True))}),
    (NoticeCode.KERNEL_CHOSEN, "rtx3090_long_mtp", {}, {"facts": without()}),
    (NoticeCode.KERNEL_OVER_DEFAULT, "rtx3090_long_dflash2", {}, {"facts": without()}),
    (NoticeCode.SPLIT_KV_WITHOUT_EFFECT, "rtx3090_long_dflash2", {"singleGpu": {"splitKvVerify": True}}, {}),
    (NoticeCode.SEATS_OVER_RESIDENTS, "rtx3090_fast_dflash2", {}, {}),
    (NoticeCode.SEATS_OVER_MEASURED, "rtx3090_huge_dflash2", {"maxNumSeqs": 13}, {}),
    (NoticeCode.POOL_OVER_DEFAULT, "rtx3090_fast_dflash2", {"kvCacheMemoryBytes": "6Gi"}, {}),
    (
        NoticeCode.DYNAMIC_TOKENS_IGNORED,
        "rtx3090_fast_mtp",
        {"speculation": {"method": "None", "dynamicTokens": [{"batchFrom": 1, "batchTo": 8, "tokens": 3}]}},
        {},
    ),
    (NoticeCode.RETENTION_UNMEASURED, "rtx3090_huge_dflash2", {"speculation": {"tokens": 5}}, {}),
    (NoticeCode.LARGE_DRAFT, "rtx3090_fast_dflash2", {}, {"facts": Facts(draft=ModelFacts(weight_bytes=4 << 30))}),
    (
        NoticeCode.CONNECTOR_WINS,
        "rtx3090_fast_mtp",
        {"kvOffload": {"sizeGiB": 4}},
        {"extra_args": ["--kv-transfer-config", "{}"]},
    ),
    (
        NoticeCode.UNSAFE_ACKNOWLEDGED,
        "rtx3090_huge_dflash2",
        {"speculation": {"tokens": 15, "lookupAdaptive": True}},
        {},
    ),
    (NoticeCode.UNMEASURED_ACKNOWLEDGED, "rtx3090_long_mtp", {"acknowledge": ["Unmeasured"]}, {}),
    (NoticeCode.BLOCK_SIZE_WILL_GROW, RELEASE, {"blockSize": 16}, {}),
    (NoticeCode.DOWNLOAD, RELEASE, {}, {}),
    (NoticeCode.UNVERIFIED, RELEASE, {}, {}),
    (NoticeCode.FEATURE_MISSING, RELEASE, {}, {}),
    (NoticeCode.HEADROOM, RELEASE, {"gpuMemoryUtilizationPercent": 88}, {}),
    (NoticeCode.STATE_CACHE_MODE_DROPPED, RELEASE, {"prefixCaching": False}, {}),
    (NoticeCode.LOGPROBS_UNVERIFIED, "rtx3090_huge_mtp", {}, {}),
    (NoticeCode.KV_GROUPS_DIFFER, RELEASE, {}, {}),
]

IMPORTED: list[tuple[RefusalCode | NoticeCode, dict[str, str]]] = [
    (RefusalCode.KNOB_VALUE, {"CTX": "xl"}),
    (RefusalCode.KERNEL_CONFLICT, {"CTX": "long", "SPEC": "dflash2", "PTH_FA": "1", "FA2_FP8KV": "1"}),
    (NoticeCode.KNOB_IGNORED, {"SPEC": "dflash2", "DRAFT_TOKENS": "3"}),
    (NoticeCode.KNOB_SHADOWED, {"EXTRA_ARGS": "--max-model-len 4096"}),
    (NoticeCode.SECRET_NOT_COPIED, {"VLLM_API_KEY": "hush"}),
    (NoticeCode.EXPOSED_ADDRESS, {"HOST": "10.0.0.1"}),
    (NoticeCode.MODEL_NOT_GIVEN, {}),
]


@pytest.mark.parametrize(("code", "profile", "overrides", "more"), CASES)
def test_refusals(
    serve: Serve, code: RefusalCode, profile: str, overrides: dict[str, Any], more: dict[str, Any]
) -> None:
    found = [one for one in serve(profile, overrides, **more).refusals if one.code is code]
    assert found
    for refusal in found:
        assert refusal.must.startswith("must") or refusal.must.startswith("needs")
        assert refusal.found
        assert refusal.remedy.endswith(".")
        assert refusal.field.split("[")[0].split(".")[0] in {
            "overrides",
            "extraArgs",
            "gpus",
            "draft",
            "model",
            "profile",
            "acceleration",
        }


@pytest.mark.parametrize(("code", "profile", "overrides", "more"), NOTICES)
def test_notices(serve: Serve, code: NoticeCode, profile: str, overrides: dict[str, Any], more: dict[str, Any]) -> None:
    resolution = serve(profile, overrides, **more)
    assert code in {notice.code for notice in resolution.notices}
    assert any(str(code) in warning for warning in resolution.warnings)


@pytest.mark.parametrize(("code", "knobs"), IMPORTED)
def test_import(code: RefusalCode | NoticeCode, knobs: dict[str, str]) -> None:
    imported = import_knobs(knobs)
    assert code in {*(one.code for one in imported.notices), *(one.code for one in imported.refusals)}


ELSEWHERE = {
    RefusalCode.PROFILE_NOT_FOUND,  # test_cli
    RefusalCode.PROFILE_INVALID,
    RefusalCode.RESOURCE_INVALID,
    RefusalCode.KNOB_SYNTAX,  # test_import_env
}


def test_every_code_is_reached() -> None:
    here = {code for code, *_ in CASES} | {code for code, _ in IMPORTED}
    assert set(RefusalCode) <= here | ELSEWHERE
    assert set(NoticeCode) <= {code for code, *_ in NOTICES} | {code for code, _ in IMPORTED}


def test_all_mistakes_at_once(serve: Serve) -> None:
    overrides = {"dtype": "bfloat16", "gpuMemoryUtilizationPercent": 92, "maxModelLen": 300_000}
    resolution = serve(RELEASE, overrides, gpus={"count": 2}, extra_args=["--model", "x", "--nonsense"])
    assert {refusal.code for refusal in resolution.refusals} >= {
        RefusalCode.DTYPE,
        RefusalCode.MEMORY,
        RefusalCode.CONTEXT_TOO_LONG,
        RefusalCode.GPU_COUNT,
        RefusalCode.OWNED_FLAG,
        RefusalCode.FLAG_UNKNOWN,
    }
    assert list(resolution.refusals) == sorted(resolution.refusals, key=lambda one: (one.field, one.code, one.found))


@pytest.mark.parametrize(
    ("profile", "needs"),
    [
        ("rtx3090_huge_mtp", {"--kv-cache-dtype kvarn_k4v2_g128", "KVARN_POOL_MEM_FRAC"}),
        ("rtx3090_fast_dflash2", {"VLLM_DFLASH2_LOOKUP"}),
        ("rtx3090_fast_mtp", set()),
    ],
)
def test_single_gpu_recipes_on_stock_vllm(serve: Serve, profile: str, needs: set[str]) -> None:
    """What only the launcher's engine has is refused by name; the rest of the recipe would serve."""
    resolution = serve(profile, facts=Facts(engine=EngineFacts(flavour=EngineFlavour.VLLM)))
    refused = [one for one in resolution.refusals if one.code is RefusalCode.FLAG_UNSUPPORTED]
    assert {word for word in needs if any(f"`{word}`" in one.must for one in refused)} == needs
    assert len(refused) == len(needs)
    assert not any("kvarn" in word or "LOOKUP" in word for word in resolution.env)


def test_an_option_that_an_engine_lacks_is_refused_by_name(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock vLLM has had the keep-alive since 0.30; an engine without it is refused, unless it is left off."""
    from sm70_profiles import resolver
    from sm70_profiles.engines import engine_table

    stock = engine_table(EngineFlavour.SINGLE_GPU)
    older = stock.model_copy(update={"options": stock.options - {"--sse-keep-alive-interval"}})
    monkeypatch.setattr(resolver, "engine_table", lambda _: older)
    refused = serve("rtx3090_fast_mtp").refusals
    assert [one.field for one in refused] == ["overrides.sseKeepAliveSeconds"]
    assert "`--sse-keep-alive-interval`" in refused[0].must
    for seconds in (0, -1):
        resolution = serve("rtx3090_fast_mtp", {"sseKeepAliveSeconds": seconds})
        assert resolution.refusals == ()
        assert "--sse-keep-alive-interval" not in resolution.argv
