"""The resolver beyond refusals: what is emitted, who decided, and that the same input gives the same bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from sm70_profiles.catalog import load_profile, profile_names
from sm70_profiles.engines import engine_table
from sm70_profiles.facts import EngineFacts, EngineFlavour, Facts, GpuFacts, ModelFacts
from sm70_profiles.flags import FLAGS, OWNED_FLAGS, PREFIX_CACHE_SETTINGS, path_of
from sm70_profiles.resolver import SERVER_ENVIRONMENT, SERVING_ONLY, Resolution, ServeRequest, resolve
from sm70_profiles.settings import Overrides

Serve = Callable[..., Resolution]
RELEASE = "qwen38_27b_nvfp4_dflash2"


def option(resolution: Resolution, name: str) -> str | None:
    argv = resolution.argv
    return argv[argv.index(name) + 1] if name in argv else None


def test_tiny_profile(serve: Serve) -> None:
    resolution = serve("tiny_hybrid_reference")
    assert resolution.argv == (
        "/models/target", "--served-model-name", "m", "--host", "0.0.0.0", "--port", "8000",
        "--shutdown-timeout", "30", "--dtype", "bfloat16", "--kv-cache-dtype", "fp8_e4m3",
        "--max-model-len", "4096", "--max-num-seqs", "8", "--max-num-batched-tokens", "2048",
        "--kv-cache-memory-bytes", "67108864", "--tensor-parallel-size", "1", "--pipeline-parallel-size", "1",
        "--enforce-eager", "--enable-prefix-caching", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    )  # fmt: skip
    assert resolution.env == SERVER_ENVIRONMENT
    assert resolution.refusals == ()


@pytest.mark.parametrize("name", profile_names())
def test_only_options_that_the_engine_has(serve: Serve, name: str) -> None:
    resolution = serve(name)
    table = engine_table(resolution.flavour)
    options = {word.partition("=")[0] for word in resolution.argv[1:] if word.startswith("--")}
    assert options <= table.options
    assert resolution.refusals == ()


def test_release_recipe_on_our_engine(serve: Serve) -> None:
    resolution = serve(RELEASE)
    assert option(resolution, "--attention-backend") == "CUSTOM"
    assert "--partial-prefix-cache" not in resolution.argv
    assert "--mixed-prefill-step-latency-ms" not in resolution.argv
    config = json.loads(option(resolution, "--speculative-config") or "{}")
    assert config == {
        "method": "dflash",
        "model": "incoai/Qwen3.8-27B-DFlash2",
        "revision": "dedf8df68adfb1afeaf7b7480c0a0243108177b4",
        "num_speculative_tokens": 7,
        "draft_sample_method": "probabilistic",
        "kv_cache_dtype": "auto",
    }
    sampling = option(resolution, "--override-generation-config")
    assert sampling == '{"temperature":1.0,"top_p":0.95,"top_k":20}'


def test_a_local_draft_drops_the_remote_revision(serve: Serve) -> None:
    remote, local = serve(RELEASE), serve(RELEASE, draft_path="/models/draft")
    config = json.loads(option(local, "--speculative-config") or "{}")
    assert config["model"] == "/models/draft"
    assert "revision" not in config
    # Only a pinned draft that is not there needs the network.
    assert "HF_HUB_OFFLINE" not in remote.env
    assert local.env["HF_HUB_OFFLINE"] == "1"


def test_provenance(serve: Serve) -> None:
    resolution = serve(
        "rtx3090_fast_dflash2", {"speculation": {"tokens": 15}, "maxNumSeqs": 3, "compilation": {"customOps": ["none"]}}
    )
    rows = {row.field: (row.value, row.origin) for row in resolution.provenance}
    assert rows["speculation.tokens"] == ("15", "override")
    assert rows["speculation.method"] == ("dflash", "profile")
    assert rows["maxModelLen"] == ("57344", "profile")
    assert rows["maxNumSeqs"] == ("3", "override")
    assert rows["asyncScheduling"] == ("false", "adjustment")
    assert rows["compilation.maxCaptureSize"] == ("48", "adjustment")
    assert rows["compilation.customOps"] == ("none", "override")
    because = {row.field: row.because for row in resolution.provenance}
    assert all(because[field] for field, (_, origin) in rows.items() if origin == "adjustment")
    assert because["maxModelLen"] == "for this many draft tokens"
    settings = {path_of(name) for name in ("max_model_len", "speculation.tokens", "vision.tower_offload_gib")}
    assert settings <= set(rows)


@pytest.mark.parametrize("name", profile_names())
def test_same_input_same_bytes(serve: Serve, name: str) -> None:
    first, second = serve(name), serve(name)
    assert first.model_dump_json(by_alias=True) == second.model_dump_json(by_alias=True)
    assert first.hash == second.hash


def test_percentages_are_written_exactly(serve: Serve) -> None:
    for share in range(1, 101):
        written = option(serve("custom", {"gpuMemoryUtilizationPercent": share}), "--gpu-memory-utilization")
        assert written == f"{share // 100}.{share % 100:02d}"
        sampling = option(serve("custom", {"sampling": {"topPPercent": share}}), "--override-generation-config")
        assert len(sampling or "") <= len('{"top_p":0.99}')


def test_partial_facts_keep_the_recipes_shape(serve: Serve) -> None:
    """A checkpoint that says little of itself does not make the recipe unknown."""
    little = Facts(model=ModelFacts(hidden_size=5120, layers=64), draft=ModelFacts(layers=5))
    assert serve(RELEASE, facts=little).memory == serve(RELEASE).memory
    other = Facts(model=ModelFacts(hidden_size=4096, layers=64))
    assert serve(RELEASE, facts=other).memory is None


def test_facts_change_the_engine(serve: Serve) -> None:
    resolution = serve(RELEASE, facts=Facts(engine=EngineFacts(flavour=EngineFlavour.CPU)))
    assert resolution.flavour is EngineFlavour.CPU
    assert {path.state for path in resolution.paths if path.expected} == {"not_applicable"}


def test_without_prefix_caching_its_settings_stay_behind(serve: Serve) -> None:
    resolution = serve(RELEASE, {"prefixCaching": False})
    owned = {
        name
        for name, field in OWNED_FLAGS.items()
        for setting in PREFIX_CACHE_SETTINGS
        if field.endswith(path_of(setting))
    }
    assert not owned & set(resolution.argv)
    assert "--no-enable-prefix-caching" in resolution.argv


def test_pool_left_to_the_engine(serve: Serve) -> None:
    pinned = serve("rtx3090_fast_dflash2")
    free = serve("rtx3090_fast_dflash2", {"kvCacheMemoryBytes": "0"})
    assert any(word.startswith("--kv-cache-memory=") for word in pinned.argv)
    assert not any(word.startswith("--kv-cache-memory") for word in free.argv)


def test_request_survives_json() -> None:
    request = ServeRequest(
        profile=load_profile(RELEASE), model_path="/m", served_name="x", overrides=Overrides(block_size=16)
    )
    assert ServeRequest.model_validate_json(request.model_dump_json(by_alias=True)) == request
    resolution = resolve(request)
    assert Resolution.model_validate_json(resolution.model_dump_json(by_alias=True)) == resolution


@pytest.mark.parametrize("path", ["relative", "/a;reboot", "/a$(x)", "/a`x`", "/a\nb", "/" + "a" * 600, ""])
def test_paths_with_shell_in_them_are_refused_by_type(path: str) -> None:
    with pytest.raises(ValueError, match="modelPath"):
        ServeRequest.model_validate({"profile": load_profile("custom"), "modelPath": path, "servedName": "m"})


def test_operator_sees_the_whole_gpu_request(serve: Serve) -> None:
    resolution = serve(RELEASE, gpus={"minMemory": "30Gi", "products": ["Tesla-V100-SXM2-32GB"]})
    assert resolution.gpus.model_dump(mode="json") == {
        "count": 4,
        "products": ["Tesla-V100-SXM2-32GB"],
        "min_memory": "30Gi",
        "interconnect": "NVLinkMesh",
        "resource_name": "nvidia.com/gpu",
    }


def test_settings_are_either_compiled_or_only_served() -> None:
    assert set(Overrides.model_fields) >= SERVING_ONLY


def test_compile_cache_key_needs_what_a_process_knows(serve: Serve) -> None:
    assert serve(RELEASE).cache is not None
    unknown = serve(RELEASE).cache
    assert unknown is not None
    assert unknown.key is None
    facts = Facts(
        gpu=GpuFacts(product="Tesla-V100-SXM2-16GB", driver="580.159.04"),
        engine=EngineFacts(build="0.1.0", torch="2.10.0", cuda="12.8"),
    )
    keys: dict[str, str | None] = {}
    changes: dict[str, dict[str, Any]] = {
        "as it is": {},
        "another name": {"served_name": "other"},
        "another port": {"port": 9000},
        "another place": {"model_path": "/elsewhere"},
        "louder": {"extra_args": ["--enable-log-requests", "--log-level", "DEBUG"]},
        "other answers": {"overrides": {"sampling": {"topK": 5}, "tools": {"enabled": False}}},
        "other pages": {"overrides": {"blockSize": 4096, "mambaBlockSize": 4096}},
        "another option": {"extra_args": ["--seed", "1"]},
    }
    for name, change in changes.items():
        cache = serve(RELEASE, change.pop("overrides", None), facts=facts, **change).cache
        assert cache is not None
        keys[name] = cache.key
    assert None not in keys.values()
    same = {"as it is", "another name", "another port", "another place", "louder", "other answers"}
    assert len({keys[name] for name in same}) == 1
    assert len({keys[name] for name in changes}) == 3


def test_flags_name_real_settings() -> None:
    for flag in FLAGS:
        assert path_of(flag.setting)
        assert flag.option in OWNED_FLAGS
