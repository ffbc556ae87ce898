"""Profile documents come from ConfigMaps: whatever stands in them is one clear error, quickly and in little memory."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from sm70_profiles.catalog import ProfileNotFoundError, load_profile, profile_names
from sm70_profiles.documents import (
    MAX_DOCUMENT_BYTES,
    DocumentError,
    parse_document,
    parse_documents,
    parse_profile,
    write_document,
)

GOOD = """
schemaVersion: 1
name: mine
title: Mine
tier: Research
engine: {flavour: cpu}
hardware: {count: 1}
settings: {maxModelLen: 4096}
"""
BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n" + GOOD

BAD: dict[str, tuple[str | bytes, str]] = {
    "unknown key": (GOOD + "colour: red\n", "`colour`"),
    "unknown setting": (GOOD.replace("maxModelLen", "maxModelLength"), "`settings.maxModelLength`"),
    "snake case and camel case at once": (GOOD + "served_name: a\nservedName: b\n", "`served_name`"),
    "wrong unit": (GOOD.replace("{maxModelLen: 4096}", "{kvCacheMemoryBytes: 4GB}"), "`settings.kvCacheMemoryBytes`"),
    "share instead of percent": (
        GOOD.replace("{maxModelLen: 4096}", "{gpuMemoryUtilizationPercent: 0.86}"),
        "`settings.gpuMemoryUtilizationPercent`",
    ),
    "ten megabytes": (GOOD + "#" * 10_000_000, f"must not exceed {MAX_DOCUMENT_BYTES} bytes"),
    "alias": (BOMB, "aliases"),
    "recursive alias": ("a: &a [*a]\n" + GOOD, "aliases"),
    "not UTF-8": (GOOD.encode() + b"description: \xff\xfe\n", "UTF-8"),
    "UTF-16": (GOOD.encode("utf-16"), "UTF-8"),
    "duplicate key": (GOOD + "name: other\n", "must not occur twice; found `name`"),
    "duplicate inner key": (GOOD.replace("{maxModelLen: 4096}", "{maxModelLen: 1, maxModelLen: 2}"), "`maxModelLen`"),
    "NaN": (GOOD.replace("4096", ".nan"), "`settings.maxModelLen`"),
    "infinity": (GOOD.replace("4096", ".inf"), "`settings.maxModelLen`"),
    "negative": (GOOD.replace("4096", "-1"), "`settings.maxModelLen`"),
    "zero GPUs too many": (GOOD.replace("count: 1", "count: 65"), "`hardware.count`"),
    "huge number": (GOOD.replace("4096", "9" * 200), "`settings.maxModelLen`"),
    "shell in a word": (
        GOOD.replace("{maxModelLen: 4096}", '{reasoningParser: "$(reboot)"}'),
        "`settings.reasoningParser`",
    ),
    "newline in a word": (
        GOOD.replace("{maxModelLen: 4096}", '{reasoningParser: "a\\nb"}'),
        "`settings.reasoningParser`",
    ),
    "path in a name": (GOOD.replace("name: mine", "name: ../../etc/passwd"), "`name`"),
    "climbing file in a pin": (
        GOOD + "draft: {checkpoint: {sha256: {../../x: unknown}}}\n",
        "`draft.checkpoint.sha256.../../x",
    ),
    "python object": (GOOD + "title2: !!python/object/apply:os.system [reboot]\n", "YAML"),
    "a list": ("- 1\n- 2\n", "must be a mapping; found list"),
    "a word": ("hello", "must be a mapping; found str"),
    "nothing": ("", "must be a mapping; found NoneType"),
    "numbers as keys": (GOOD + "1: 2\n", "words as keys"),
    "a list as a key": ("? [a]\n: b\n", "a key must be a word"),
    "deep nesting": ("a: " + "[" * 5000 + "]" * 5000, "nest deeper"),
    "many values": ("a: [" + "x," * 60_000 + "]", "more than"),
    "broken": ("a: [1, 2", "YAML"),
    "two documents": (GOOD + "---\n" + GOOD, "YAML"),
    "tab indentation": ("a:\n\t- b\n", "YAML"),
    "bad date": ("a: 2024-99-99\n" + GOOD, "month"),
    "another schema": (GOOD.replace("schemaVersion: 1", "schemaVersion: 2"), "`schemaVersion`"),
    "broken TOML": ('schemaVersion = 1\nname = "x\n', "TOML"),
    "TOML float": ("schemaVersion = 1\nname = nan\n", "`name`"),
    "a path twice": (GOOD + "expectedAcceleration: [a, a]\n", "each path once"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", BAD)
def test_bad_documents(case: str) -> None:
    text, words = BAD[case]
    tracemalloc.start()
    with pytest.raises(DocumentError) as caught:
        parse_profile(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert len(message) < 8000
    assert caught.value.__cause__ is None
    # A bound on bombs: without the limits these take gigabytes and hours.
    assert peak < 64 << 20


def test_every_mistake_is_listed() -> None:
    with pytest.raises(DocumentError) as caught:
        parse_profile(GOOD.replace("4096", "-1").replace("tier: Research", "tier: Great") + "colour: red\n")
    assert all(word in str(caught.value) for word in ("`tier`", "`settings.maxModelLen`", "`colour`"))


def test_yaml_json_and_toml_say_the_same() -> None:
    toml = """
    schemaVersion = 1
    name = "mine"
    title = "Mine"
    tier = "Research"
    engine.flavour = "cpu"
    hardware.count = 1
    settings.maxModelLen = 4096
    """
    json = (
        '{"schemaVersion": 1, "name": "mine", "title": "Mine", "tier": "Research", "engine": {"flavour": "cpu"},'
        ' "hardware": {"count": 1}, "settings": {"maxModelLen": 4096}}'
    )
    assert parse_profile(GOOD) == parse_profile(toml) == parse_profile(json) == parse_profile(json.encode())


@pytest.mark.parametrize("name", profile_names())
def test_built_in_profiles_survive_writing(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert parse_profile(write_document(profile)) == profile


def test_unknown_profile_lists_the_known() -> None:
    with pytest.raises(ProfileNotFoundError, match="qwen38_27b_nvfp4_dflash2"):
        load_profile("qwen38")


def test_streams() -> None:
    stream = b"# nothing\n---\na: 1\n---\n\n---\nb: 2\n"
    assert parse_documents(stream) == [{"a": 1}, {"b": 2}]
    with pytest.raises(DocumentError, match="documents"):
        parse_documents(b"---\n" * 100)


def test_surrogates_are_an_error() -> None:
    with pytest.raises(DocumentError, match="UTF-8"):
        parse_document("a: \ud800")


RECIPES: dict[str, dict[str, Any]] = {
    "qwen38_27b_nvfp4_dflash2": {
        "dtype": "half",
        "attentionBackend": "FLASH_ATTN_V100",
        "kvCacheDtype": "fp8_e4m3",
        "maxModelLen": 262144,
        "maxNumBatchedTokens": 4096,
        "maxNumSeqs": 4,
        "gpuMemoryUtilizationPercent": 86,
        "blockSize": 2048,
        "mambaBlockSize": 2048,
        "tensorParallelSize": 4,
        "mambaCacheMode": "align",
        "partialPrefixCache": True,
        "promptTokensDetails": True,
        "mixedPrefillStepLatencyMilliseconds": 0,
    },
    "qwen38_27b_quasar_nvfp4_dflash2_e5m2": {
        "kvCacheDtype": "fp8_e5m2",
        "gpuMemoryUtilizationPercent": 80,
        "maxNumBatchedTokens": 4096,
        "maxNumSeqs": 4,
        "trustRemoteCode": True,
        "thinking": True,
        "reasoningParser": "qwen3",
    },
}


@pytest.mark.parametrize("name", RECIPES)
def test_published_values(name: str) -> None:
    settings = load_profile(name).settings.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert {key: settings.get(key) for key in RECIPES[name]} == RECIPES[name]


def test_draft_pin() -> None:
    draft = load_profile("qwen38_27b_nvfp4_dflash2").draft
    assert draft.checkpoint is not None
    assert draft.checkpoint.hugging_face is not None
    assert draft.checkpoint.hugging_face.revision == "dedf8df68adfb1afeaf7b7480c0a0243108177b4"
    assert draft.checkpoint.model_scope is not None
    assert draft.checkpoint.model_scope.revision == "unknown"
    assert set(draft.checkpoint.sha256.values()) == {"unknown"}
    assert (draft.tokens, draft.checkpoint.download_bytes) == (7, 3_850_000_000)


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_names_its_sources_or_is_ours(name: str) -> None:
    profile = load_profile(name)
    if profile.tier == "Reference":
        return
    assert profile.sources
    assert profile.measured or profile.unknown
