"""Options of vLLM as typed settings, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sm70_profiles.catalog import load_profile, profile_names
from sm70_profiles.flags import OWNED_FLAGS
from sm70_profiles.reasons import RefusalCode
from sm70_profiles.resolver import Resolution
from sm70_profiles.settings import Overrides
from sm70_profiles.typed import read_options

Serve = Callable[..., Resolution]

READ: list[tuple[str, dict[str, Any]]] = [
    ("--kv-cache-dtype fp8_e5m2 --max-num-seqs=2", {"kvCacheDtype": "fp8_e5m2", "maxNumSeqs": 2}),
    ("--max_model_len 4096", {"maxModelLen": 4096}),
    ("-tp 2 -pp 2", {"tensorParallelSize": 2, "pipelineParallelSize": 2}),
    ("--gpu-memory-utilization 0.9", {"gpuMemoryUtilizationPercent": 90}),
    ("--gpu-memory-utilization .97", {"gpuMemoryUtilizationPercent": 97}),
    ("--gpu-memory-utilization 1.0", {"gpuMemoryUtilizationPercent": 100}),
    ("--max-num-seqs 2 --max-num-seqs 3", {"maxNumSeqs": 3}),
    ("--dtype fp16", {"dtype": "float16"}),
    ("--no-enable-prefix-caching", {"prefixCaching": False}),
    ("--prefix-cache-retention-interval None", {"prefixRetention": {"dense": True}}),
    ("--prefix-cache-retention-interval 0", {"prefixRetention": {"intervalTokens": 0}}),
    ("--disable-custom-all-reduce", {"customAllReduce": False}),
    ("--kv-offloading-size 8", {"kvOffload": {"sizeGiB": 8}}),
    ("--language-model-only", {"vision": {"enabled": False}}),
    (
        '--speculative-config {"method":"dflash","num_speculative_tokens":5}',
        {"speculation": {"method": "dflash", "tokens": 5}},
    ),
    ('--compilation-config {"cudagraph_mode":"PIECEWISE"}', {"compilation": {"cudagraphMode": "PIECEWISE"}}),
    ("--per-request-spec-decode-metrics detailed", {"requestMetrics": "Detailed"}),
    ('--default-chat-template-kwargs {"enable_thinking":false}', {"thinking": False}),
]


@pytest.mark.parametrize(("line", "settings"), READ)
def test_reading(line: str, settings: dict[str, Any]) -> None:
    typed = read_options(line.split())
    assert (typed.rest, typed.refusals) == ((), ())
    assert typed.settings == Overrides.model_validate(settings)


BAD = [
    "--max-model-len 64k",
    "--max-model-len",
    "--gpu-memory-utilization 93",
    "--gpu-memory-utilization 0.935",
    "--kv-cache-dtype fp9",
    "--speculative-config {}",
    "--speculative-config nonsense",
    '--speculative-config {"method":"dflash","quantization":"x"}',
    '--speculative-config {"method":"dflash","model":"x"}',
    '--compilation-config {"mode":3}',
    "--max-num-seqs -1",
    "--max-num-seqs 99999",
    "--reasoning-parser $(reboot)",
]


@pytest.mark.parametrize("line", BAD)
def test_values_that_do_not_fit(line: str) -> None:
    typed = read_options(line.split())
    assert {refusal.code for refusal in typed.refusals} == {RefusalCode.KNOB_VALUE}
    assert typed.settings == Overrides()


def test_owned_and_unknown_options() -> None:
    typed = read_options(["--host", "0.0.0.0", "--seed", "3", "--max-num-seqs", "2", "word"])
    assert [refusal.code for refusal in typed.refusals] == [RefusalCode.OWNED_FLAG]
    assert typed.rest == ("--seed", "3", "word")
    assert typed.settings == Overrides(max_num_seqs=2)


@pytest.mark.parametrize("name", profile_names())
def test_a_profiles_own_command_line_reads_back(serve: Serve, name: str) -> None:
    """What the resolver writes, the reader understands: nothing is left over, nothing is changed."""
    resolution = serve(name)
    ours = ("--served-model-name", "--host", "--port", "--shutdown-timeout")
    words = list(resolution.argv[1:])
    for option in ours:
        position = words.index(option)
        del words[position : position + 2]
    typed = read_options(word.replace('"model":"/models/draft",', "").replace(_pin(name), "") for word in words)
    profile = load_profile(name)
    left = {word for word in typed.rest if word.startswith("--")}
    assert left <= {"--override-generation-config", "--limit-mm-per-prompt", "--mm-processor-kwargs"}
    assert all(refusal.code is RefusalCode.OWNED_FLAG for refusal in typed.refusals)
    backend = typed.settings.attention_backend
    again = typed.settings.model_copy(
        update={"attention_backend": profile.settings.attention_backend if backend == "CUSTOM" else backend}
    )
    overrides = again.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert serve(name, overrides).argv == resolution.argv


def _pin(name: str) -> str:
    checkpoint = load_profile(name).draft.checkpoint
    hub = checkpoint.hugging_face if checkpoint else None
    return f'"model":"{hub.repo}","revision":"{hub.revision}",' if hub else "\0"


def test_owned_flags_name_their_owner() -> None:
    assert OWNED_FLAGS["--kv-cache-dtype"] == "overrides.kvCacheDtype"
    assert OWNED_FLAGS["--speculative-config"] == "overrides.speculation"
    assert OWNED_FLAGS["--api-key"] == "auth.apiKeySecretRef"
    assert OWNED_FLAGS["--port"] == "the operator"
