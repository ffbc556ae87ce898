"""Properties of the resolver over any combination of overrides, facts and profiles."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from sm70_profiles.catalog import load_profile, profile_names
from sm70_profiles.engines import Feature, engine_table
from sm70_profiles.envfile import KNOBS
from sm70_profiles.facts import EngineFacts, EngineFlavour, Facts, GpuFacts, HostFacts, Interconnect, ModelFacts
from sm70_profiles.importenv import import_knobs
from sm70_profiles.reasons import RefusalCode
from sm70_profiles.resolver import Resolution, ServeRequest, resolve
from sm70_profiles.settings import DRAFT_MODEL_METHODS, Overrides, merge
from sm70_profiles.typed import read_options

bounded = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

optional_bool = st.none() | st.booleans()
words = st.sampled_from(["FLASH_ATTN", "TRITON_ATTN", "CUSTOM", "FLASH_ATTN_V100", "qwen3", "hermes"])


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def section(**members: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=members)


ranges = st.lists(
    st.tuples(st.integers(1, 8), st.integers(8, 16), st.integers(1, 31)).map(
        lambda row: {"batchFrom": row[0], "batchTo": row[1], "tokens": row[2]}
    ),
    min_size=1,
    max_size=3,
)
kv_types = st.sampled_from(
    ["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head", "kvarn_k4v2_g128", "turboquant_4bit_nc"]
)
speculation = section(
    method=st.sampled_from(["None", "dflash", "dspark", "mtp", "ngram"]),
    tokens=st.integers(1, 31),
    draftSampleMethod=st.sampled_from(["probabilistic", "greedy"]),
    lookup=st.booleans(),
    lookupAdaptive=st.booleans(),
    dynamicTokens=ranges,
    attentionBackend=words,
    kvCacheDtype=kv_types,
)
SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "dtype": st.sampled_from(["auto", "half", "float16", "bfloat16", "float32"]),
    "kvCacheDtype": kv_types,
    "maxModelLen": st.sampled_from([1, 1024, 4096, 65_536, 131_072, 262_144, 300_000, 4_194_304]),
    "maxNumSeqs": st.sampled_from([1, 2, 4, 8, 13, 4096]),
    "maxNumBatchedTokens": st.sampled_from([1, 2048, 4096, 6000, 8000, 8192, 1_048_576]),
    "gpuMemoryUtilizationPercent": st.integers(1, 100),
    "kvCacheMemoryBytes": st.sampled_from(["0", "1", "64Mi", "5583457484", "6Gi", "999999999999Ti"]),
    "blockSize": st.sampled_from([1, 16, 128, 1000, 2048, 65_536]),
    "mambaBlockSize": st.sampled_from([1, 8, 2048, 3000]),
    "tensorParallelSize": st.sampled_from([1, 2, 3, 4, 8, 64]),
    "pipelineParallelSize": st.sampled_from([1, 2, 3]),
    "enforceEager": st.booleans(),
    "prefixCaching": st.booleans(),
    "speculation": speculation,
    "tools": section(
        enabled=st.booleans(), parser=words, strictLevel=st.sampled_from(["auto", "function", "parameter"])
    ),
    "mixedPrefillStepLatencyMilliseconds": st.sampled_from([0, 250]),
    "partialPrefixCache": st.booleans(),
    "vision": section(
        enabled=st.booleans(),
        maxImages=st.integers(1, 4),
        minPixels=st.integers(1, 9),
        maxPixels=st.integers(1, 9),
        towerOffloadGiB=st.integers(0, 2),
    ),
    "requestMetrics": st.sampled_from(["Off", "Summary", "Detailed"]),
    "sseKeepAliveSeconds": st.integers(-1, 60),
    "kvOffload": st.integers(0, 16).map(lambda size: {"sizeGiB": size}),
    "attentionBackend": words,
    "mambaCacheMode": st.sampled_from(["none", "align"]),
    "mambaSsmCacheDtype": st.sampled_from(["auto", "float16", "float32"]),
    "prefixMatchUnit": st.sampled_from([1, 64, 128]),
    "prefixRetention": st.sampled_from(
        [{"dense": True}, {"intervalTokens": 0}, {"intervalTokens": 13_056}, {"intervalTokens": 7}]
    ),
    "asyncScheduling": st.booleans(),
    "customAllReduce": st.booleans(),
    "thinking": st.booleans(),
    "sampling": section(
        temperaturePercent=st.integers(0, 1000), topPPercent=st.integers(1, 100), topK=st.integers(0, 99)
    ),
    "compilation": section(
        cudagraphMode=st.sampled_from(["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"]),
        maxCaptureSize=st.sampled_from([1, 64, 128]),
        cache=st.booleans(),
    ),
    "expandableSegments": st.booleans(),
    "singleGpu": section(
        longContextKernel=st.sampled_from(["Auto", "PthFlashAttention", "Fa2Fp8", "Stock"]),
        splitKvVerify=st.booleans(),
        int8Activations=st.booleans(),
        int8Layers=st.lists(
            st.sampled_from(["mlp", "gate_up", "linear_attn", "self_attn"]), min_size=1, max_size=4, unique=True
        ),
        embeddingInHostMemory=st.booleans(),
        kvarnPoolPercent=st.integers(1, 100),
    ),
    "acknowledge": st.lists(st.sampled_from(["Unmeasured", "Unsafe"]), max_size=2, unique=True),
}
many = st.fixed_dictionaries({}, optional=SETTINGS)
few = st.lists(st.sampled_from(sorted(SETTINGS)), max_size=4, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: SETTINGS[name] for name in names})
)
"""Few settings at a time are often served; many are nearly always refused. Both are tried."""
overrides_documents = few | many
profiles = st.sampled_from(profile_names())
extra_arguments = st.lists(
    st.sampled_from(
        [
            "--seed",
            "3",
            "--kv-transfer-config",
            "{}",
            "--disable-log-stats",
            "--host",
            "--nonsense",
            "-tp",
            "-1",
            "word",
        ]
    ),
    max_size=4,
).map(tuple)
facts_documents = st.builds(
    Facts,
    gpu=maybe(
        st.builds(
            GpuFacts,
            product=maybe(
                st.sampled_from(["Tesla-V100-SXM2-16GB", "Tesla-V100-SXM2-32GB", "NVIDIA-GeForce-RTX-3090", "Other"])
            ),
            memory_mib=maybe(st.sampled_from([1, 16_151, 32_480])),
            compute_capability=maybe(st.sampled_from(["7.0", "8.6", "8.9", "9.0"])),
            interconnect=maybe(st.sampled_from(list(Interconnect))),
        )
    ),
    engine=maybe(
        st.builds(
            EngineFacts,
            flavour=maybe(st.sampled_from(list(EngineFlavour))),
            features=maybe(st.frozensets(st.sampled_from([str(feature) for feature in Feature]), max_size=4)),
        )
    ),
    host=maybe(st.builds(HostFacts, wsl=optional_bool, shared_memory_bytes=maybe(st.sampled_from([0, 1 << 40])))),
    model=maybe(
        st.builds(
            ModelFacts,
            hidden_size=maybe(st.sampled_from([0, 1, 5120])),
            layers=maybe(st.sampled_from([0, 1, 64])),
            attention_heads=maybe(st.sampled_from([0, 1, 24])),
            kv_heads=maybe(st.sampled_from([0, 1, 4])),
            head_dim=maybe(st.sampled_from([0, 64, 256])),
            full_attention_layers=maybe(st.sampled_from([0, 1, 16])),
            linear_attention_layers=maybe(st.sampled_from([0, 1, 48])),
            quantization=maybe(st.sampled_from(["nvfp4", "fp8", "awq", "gguf"])),
            experts=maybe(st.sampled_from([0, 512])),
        )
    ),
    draft=maybe(
        st.builds(
            ModelFacts,
            layers=maybe(st.sampled_from([0, 1, 5])),
            kv_heads=maybe(st.sampled_from([0, 8])),
            head_dim=maybe(st.sampled_from([0, 128])),
            block_size=maybe(st.sampled_from([0, 1, 8])),
            sliding_window=maybe(st.sampled_from([0, 2048])),
            weight_bytes=maybe(st.sampled_from([0, 1 << 33])),
        )
    ),
)
likely_facts = st.builds(
    Facts,
    host=maybe(st.builds(HostFacts, wsl=optional_bool)),
    engine=maybe(st.builds(EngineFacts, features=st.just(frozenset(map(str, Feature))))),
)


def request(
    name: str, document: dict[str, Any] | Overrides, draft: bool = True, extra: tuple[str, ...] = ()
) -> ServeRequest:
    overrides = document if isinstance(document, Overrides) else Overrides.model_validate(document)
    profile = load_profile(name)
    ranks = merge(profile.settings, overrides)
    count = min((ranks.tensor_parallel_size or 1) * (ranks.pipeline_parallel_size or 1), 64)
    return ServeRequest.model_validate(
        {
            "profile": profile,
            "model_path": "/models/target",
            "draft_path": "/models/draft" if draft else None,
            "served_name": "m",
            "overrides": overrides,
            "extra_args": extra,
            "gpus": {"count": count},
        }
    )


@bounded
@given(profiles, overrides_documents, facts_documents, st.booleans(), extra_arguments)
def test_any_combination_resolves_or_lists_refusals(
    name: str, document: dict[str, Any], facts: Facts, draft: bool, extra: tuple[str, ...]
) -> None:
    resolution = resolve(request(name, document, draft, extra), facts)
    table = engine_table(resolution.flavour)
    ours = resolution.argv[: len(resolution.argv) - len(extra)]
    assert {word.partition("=")[0] for word in ours[1:] if word.startswith("--")} <= table.options
    for refusal in resolution.refusals:
        assert refusal.must
        assert refusal.found
        assert refusal.remedy
    assert len({path.name for path in resolution.paths}) == len(resolution.paths)
    assert Resolution.model_validate_json(resolution.model_dump_json(by_alias=True)) == resolution


@bounded
@given(profiles, overrides_documents, st.randoms(use_true_random=False))
def test_order_of_overrides_is_irrelevant(name: str, document: dict[str, Any], shuffle: random.Random) -> None:
    first = resolve(request(name, document))
    keys = list(document)
    shuffle.shuffle(keys)
    again = resolve(request(name, {key: document[key] for key in keys}))
    assert again.model_dump_json() == first.model_dump_json()
    # Nor does it matter whether they come one by one.
    stepwise = Overrides()
    for key in keys:
        stepwise = merge(stepwise, Overrides.model_validate({key: document[key]}))
    assert resolve(request(name, stepwise)).model_dump_json() == first.model_dump_json()


BAD: dict[str, tuple[RefusalCode, dict[str, Any], set[str]]] = {
    "a step smaller than its sequences": (
        RefusalCode.BUDGET,
        {"maxNumBatchedTokens": 1, "maxNumSeqs": 4096},
        {"maxNumBatchedTokens", "maxNumSeqs"},
    ),
    "a context beyond the model": (RefusalCode.CONTEXT_TOO_LONG, {"maxModelLen": 4_000_000}, {"maxModelLen"}),
    "images that are none": (
        RefusalCode.VISION_LIMITS,
        {"vision": {"enabled": True, "minPixels": 9, "maxPixels": 4}},
        {"vision"},
    ),
    "layers that crash the compiler": (
        RefusalCode.ACTIVATION_LAYERS,
        {"singleGpu": {"int8Activations": True, "int8Layers": ["mlp", "linear_attn"]}},
        {"singleGpu"},
    ),
}
"""A mistake, and the settings that its rule reads. A setting that other refusing rules read as well is left out."""
READ_BY_OTHERS = {
    "maxNumSeqs": {RefusalCode.POOL_TOO_SMALL, RefusalCode.BUDGET},
    "maxNumBatchedTokens": {
        RefusalCode.POOL_TOO_SMALL,
        RefusalCode.BUDGET,
        RefusalCode.BUDGET_OVER_POOL,
        RefusalCode.MEMORY,
    },
    "maxModelLen": {RefusalCode.POOL_TOO_SMALL, RefusalCode.CONTEXT_TOO_LONG, RefusalCode.MEMORY},
    "vision": {
        RefusalCode.VISION_LIMITS,
        RefusalCode.VISION_RESIDENT,
        RefusalCode.KERNEL_MISSING,
        RefusalCode.KERNEL_SETUP,
    }
    | {RefusalCode.POOL_TOO_SMALL, RefusalCode.FLAG_UNSUPPORTED, RefusalCode.KV_BACKEND, RefusalCode.KERNEL_OVERRIDDEN},
    "singleGpu": {code for code in RefusalCode if code.startswith("Kernel")}
    | {RefusalCode.FLAG_UNSUPPORTED, RefusalCode.ACTIVATION_LAYERS, RefusalCode.POOL_TOO_SMALL, RefusalCode.KV_BACKEND},
}


@bounded
@given(
    st.sampled_from(["qwen38_27b_nvfp4_dflash2", "rtx3090_long_dflash2", "rtx3090_fast_mtp"]),
    overrides_documents,
    st.sampled_from(sorted(BAD)),
)
def test_a_mistake_only_adds_refusals(name: str, document: dict[str, Any], mistake: str) -> None:
    code, bad, read = BAD[mistake]
    before = {(one.code, one.field) for one in resolve(request(name, document)).refusals}
    after = {(one.code, one.field) for one in resolve(request(name, {**document, **bad})).refusals}
    others = set().union(*(READ_BY_OTHERS[setting] for setting in read))
    assert {one for one in before if one[0] not in others} <= after
    assert code in {one[0] for one in after}


@bounded
@given(profiles, few, likely_facts)
def test_resolving_its_own_output_changes_nothing(name: str, document: dict[str, Any], facts: Facts) -> None:
    profile = load_profile(name)
    drafts = merge(profile.settings, Overrides.model_validate(document)).speculation
    draft = drafts is not None and drafts.method in DRAFT_MODEL_METHODS
    first = resolve(request(name, document, draft), facts)
    event("refused" if first.refusals else "served")
    if first.refusals:
        return
    again = resolve(request(name, first.settings, draft), facts)
    assert again.refusals == ()
    assert (again.argv, again.env) == (first.argv, first.env)
    assert (again.settings, again.paths, again.memory, again.pool) == (
        first.settings,
        first.paths,
        first.memory,
        first.pool,
    )


@bounded
@given(
    st.dictionaries(
        st.sampled_from(sorted(KNOBS)),
        st.text(max_size=20)
        | st.sampled_from(["0", "1", "", "fast", "huge", "long", "mtp", "dflash2", "off", "7", "15"]),
        max_size=12,
    )
)
def test_any_environment_imports_or_lists_refusals(knobs: dict[str, str]) -> None:
    imported = import_knobs(knobs)
    if imported.profile is None or imported.refusals:
        assert imported.refusals
        return
    assert imported.resource("x")["spec"]["profile"] == imported.profile


@bounded
@given(
    st.lists(
        st.text(max_size=12)
        | st.sampled_from(
            [
                "--max-model-len",
                "--kv-cache-dtype",
                "--speculative-config",
                "{}",
                "fp8",
                "-tp",
                "2",
                "--vision",
                "=",
                "--",
            ]
        ),
        max_size=12,
    )
)
def test_any_command_line_reads(line: list[str]) -> None:
    typed = read_options(line)
    assert isinstance(typed.settings, Overrides)
    assert set(typed.rest) <= set(line)
