"""Environment files and start scripts of the launcher: read, never run."""

from __future__ import annotations

import pytest

from sm70_profiles.catalog import load_profile
from sm70_profiles.envfile import read_environment
from sm70_profiles.importenv import import_knobs
from sm70_profiles.reasons import NoticeCode, RefusalCode
from sm70_profiles.resource import read_resource, serve_request

SCRIPT = """#!/bin/bash
# MAX_LEN=1 in a comment
set -e
CTX=${CTX:-huge}
export SPEC='dflash2' DFLASH_TOKENS=15
DRAFT=/m/d;MODEL="/m/with space"
KV_MEM= MAX_SEQS=3 ./start_qwen.sh --flag
if [ "$CTX" = fast ]; then
  GPU_UTIL=0.90
fi
EXTRA_ARGS="--max-model-len 8192 --seed 3"
UNRELATED=$(date)
"""


def test_script() -> None:
    knobs, refusals = read_environment(SCRIPT)
    assert refusals == ()
    assert knobs == {
        "CTX": "huge",
        "SPEC": "dflash2",
        "DFLASH_TOKENS": "15",
        "DRAFT": "/m/d",
        "MODEL": "/m/with space",
        "KV_MEM": "",
        "MAX_SEQS": "3",
        "GPU_UTIL": "0.90",
        "EXTRA_ARGS": "--max-model-len 8192 --seed 3",
    }
    imported = import_knobs(knobs)
    assert imported.refusals == ()
    assert imported.profile == "rtx3090_huge_dflash2"
    assert imported.extra_args == ("--seed", "3")
    name, spec = read_resource(imported.resource("mine"))
    request = serve_request(name, spec, load_profile(imported.profile))
    assert request.overrides == imported.settings
    assert request.overrides.max_model_len == 8192


@pytest.mark.parametrize(
    "line",
    [
        "PORT=$(cat port)",
        "PORT=`id`",
        "PORT=${OTHER}",
        'PORT="$HOME"',
        "PORT=80$X",
        "MODEL=/a\\ b",
        'MODEL="unfinished',
    ],
)
def test_values_that_only_a_shell_could_compute(line: str) -> None:
    knobs, refusals = read_environment(line + "\n")
    assert knobs == {}
    assert [refusal.code for refusal in refusals] == [RefusalCode.KNOB_SYNTAX]


@pytest.mark.parametrize("data", [b"\xff\xfe", b"#" * (2 << 20)])
def test_files_that_are_none(data: bytes) -> None:
    knobs, refusals = read_environment(data)
    assert knobs == {}
    assert [refusal.code for refusal in refusals] == [RefusalCode.KNOB_SYNTAX]


def test_the_key_is_never_copied() -> None:
    imported = import_knobs({"VLLM_API_KEY": "hush-hush", "MODEL": "/m/x"})
    assert imported.keyed
    assert "hush-hush" not in str(imported)
    assert "hush-hush" not in str(imported.resource("x"))
    assert "hush-hush" not in imported.request().model_dump_json()
    assert imported.resource("x")["spec"]["auth"] == {"apiKeySecretRef": {"name": "x-api-key", "key": "api-key"}}


@pytest.mark.parametrize("value", ["true", "yes", "2", "on"])
def test_booleans_are_zero_or_one(value: str) -> None:
    refused = import_knobs({"SPEC": "dflash2", "LOOKUP": value}).refusals
    assert [refusal.field for refusal in refused] == ["LOOKUP"]


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("MAX_LEN", "64k"),
        ("MAX_SEQS", "many"),
        ("GPU_UTIL", "93"),
        ("DYNAMIC_K", "[[1,2]]"),
        ("DYNAMIC_K", "nonsense"),
        ("INT8_ACT", "fp4"),
        ("CUDAGRAPH_MODE", "FASTEST"),
        ("TOOL_PARSER", "$(reboot)"),
        ("KV_MEM", "5GB"),
        ("PREFIX_RETENTION", "dense"),
        ("PORT", "http"),
        ("EXTRA_ARGS", "--max-model-len 64k"),
        ("EXTRA_ARGS", "--api-key x"),
    ],
)
def test_values_that_do_not_fit_are_refused(knob: str, value: str) -> None:
    assert import_knobs({"CTX": "fast", "SPEC": "mtp", knob: value}).refusals


@pytest.mark.parametrize(
    ("knobs", "ignored"),
    [
        ({"SPEC": "dflash2", "DRAFT_TOKENS": "3"}, "DRAFT_TOKENS"),
        ({"SPEC": "mtp", "DFLASH_TOKENS": "9"}, "DFLASH_TOKENS"),
        ({"CTX": "huge", "SPEC_ATTN": "1"}, "SPEC_ATTN"),
        ({"SPEC": "off", "DRAFT_SAMPLE": "greedy"}, "DRAFT_SAMPLE"),
        ({"KV": "kvarn"}, "KV"),
        ({"INT8_LAYERS": "mlp"}, "INT8_LAYERS"),
        ({"KVARN_POOL_MEM_FRAC": "0.2"}, "KVARN_POOL_MEM_FRAC"),
    ],
)
def test_knobs_that_the_launcher_ignores_are_named(knobs: dict[str, str], ignored: str) -> None:
    notices = import_knobs(knobs).notices
    assert ignored in {notice.field for notice in notices if notice.code is NoticeCode.KNOB_IGNORED}


def test_undeclared_variables_are_not_read() -> None:
    """The launcher splices an ambient CG_MODE into its JSON; here only declared knobs count."""
    assert import_knobs({"CG_MODE": ',"x":1'}).settings == import_knobs({}).settings


def test_allocator_settings_beyond_ours_become_a_variable() -> None:
    imported = import_knobs({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"})
    assert imported.environment == {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}
    assert imported.resource("x")["spec"]["env"] == [
        {"name": "PYTORCH_CUDA_ALLOC_CONF", "value": "max_split_size_mb:128"}
    ]
