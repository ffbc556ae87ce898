"""The command line: vLLM's options become overrides where a setting owns them, the rest passes through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sm70_engine.serve.arguments import REQUEST_ENVIRONMENT, read_command_line
from sm70_engine.serve.failure import ServeError
from sm70_profiles.catalog import load_profile
from sm70_profiles.resolver import OWNED_FLAGS, ServeRequest

PROFILE = "tiny_hybrid_reference"


def request(*arguments: str, environment: dict[str, str] | None = None) -> ServeRequest:
    result = read_command_line([*arguments], environment or {}).request
    assert result is not None
    return result


def refusal(*arguments: str, environment: dict[str, str] | None = None) -> str:
    with pytest.raises(ServeError) as error:
        read_command_line([*arguments], environment or {})
    return f"{error.value.message} {error.value.remedy}"


def test_a_model_and_a_profile_are_enough() -> None:
    found = request("/models/tiny", "--profile", PROFILE)
    assert found.profile == load_profile(PROFILE)
    assert (found.model_path, found.served_name, found.extra_args) == ("/models/tiny", "tiny", ())
    assert found.overrides.model_dump(exclude_none=True) == {}


def test_a_relative_model_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert request("tiny", "--profile", PROFILE, "--draft", "d").model_path == str(tmp_path / "tiny")
    assert request("tiny", "--profile", PROFILE, "--draft", "d").draft_path == str(tmp_path / "d")


@pytest.mark.parametrize(
    ("arguments", "overrides"),
    [
        (["--kv-cache-dtype", "fp8_e5m2"], {"kvCacheDtype": "fp8_e5m2"}),
        (["--kv-cache-dtype=fp8_e5m2"], {"kvCacheDtype": "fp8_e5m2"}),
        (["--kv_cache_dtype", "fp8_e5m2"], {"kvCacheDtype": "fp8_e5m2"}),
        (["-tp", "4", "--max-model-len", "8192"], {"tensorParallelSize": 4, "maxModelLen": 8192}),
        (["--gpu-memory-utilization", "0.92"], {"gpuMemoryUtilizationPercent": 92}),
        (["--kv-cache-memory-bytes", "67108864"], {"kvCacheMemoryBytes": "67108864"}),
        (["--no-enforce-eager", "--no-enable-prefix-caching"], {"enforceEager": False, "prefixCaching": False}),
        (["--enable-auto-tool-choice", "--tool-call-parser", "x"], {"tools": {"enabled": True, "parser": "x"}}),
        (
            ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'],
            {"speculation": {"method": "ngram", "tokens": 3}},
        ),
    ],
)
def test_an_owned_option_becomes_an_override(arguments: list[str], overrides: dict[str, Any]) -> None:
    found = request("/m", "--profile", PROFILE, *arguments)
    assert found.overrides.model_dump(mode="json", by_alias=True, exclude_none=True) == overrides
    assert found.extra_args == ()


def test_other_options_pass_through_in_order() -> None:
    extra = ["--seed", "7", "--enable-sleep-mode", "--chat-template=x.jinja", "-O3"]
    assert request("/m", "--profile", PROFILE, *extra).extra_args == tuple(extra)


def test_the_server_fields_are_options_too() -> None:
    found = request(
        "/m",
        "--profile",
        PROFILE,
        "--host",
        "127.0.0.1",
        "--port=81",
        "--served-model-name",
        "x",
        "--shutdown-timeout",
        "9",
    )
    assert (found.host, found.port, found.served_name, found.drain_timeout_seconds) == ("127.0.0.1", 81, "x", 9)


def test_a_draft_in_the_speculative_config_is_the_draft() -> None:
    config = '{"method": "dflash", "model": "/d", "num_speculative_tokens": 3}'
    assert request("/m", "--profile", PROFILE, "--speculative-config", config).draft_path == "/d"


def test_no_option_that_a_field_owns_slips_through() -> None:
    for option in OWNED_FLAGS:
        try:
            found = read_command_line(["/m", "--profile", PROFILE, option, "1"], {}).request
        except ServeError:
            continue
        assert found is not None
        assert option not in found.extra_args, option


def test_the_operators_request_comes_by_the_environment() -> None:
    given = request("/m", "--profile", PROFILE, "--kv-cache-dtype", "fp8_e5m2")
    environment = {REQUEST_ENVIRONMENT: given.model_dump_json(by_alias=True)}
    assert request(environment=environment) == given


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to serve"),
        (["--profile", PROFILE], "model must be given"),
        (["/m"], "`--profile` must be given"),
        (["/m", "--profile", "nonsense"], "no built-in profile `nonsense`"),
        (["/m", "--profile", "./none.yaml"], "cannot be read"),
        (["/m", "--profile", PROFILE, "--max-model-len", "many"], "`--max-model-len` must be a plain whole number"),
        (["/m", "--profile", PROFILE, "--max-model-len"], "`--max-model-len` must be a plain whole number"),
        (["/m", "--profile", PROFILE, "--kv-cache-dtype", "fp3"], "kv"),
        (["/m", "--profile", PROFILE, "--port", "70000"], "port"),
        (["/m", "--profile", PROFILE, "--port"], "`--port` must have a value"),
        (["/m", "--profile", PROFILE, "--uds", "/x"], "--uds"),
        (["/m", "--profile", PROFILE, "--max-num-seqs", "0", "--dtype", "int3"], "dtype"),
        (["/m", "--profile", PROFILE, "--speculative-config", "no"], "must be a JSON object"),
        (["/m", "--profile", PROFILE, "--speculative-config", '{"method": "x", "y": 1}'], "must not hold `y`"),
    ],
)
def test_what_cannot_be_understood_is_said(arguments: list[str], words: str) -> None:
    assert words in refusal(*arguments)


def test_the_api_key_must_not_be_an_argument() -> None:
    message = refusal("/m", "--profile", PROFILE, "--api-key", "sekret")
    assert "VLLM_API_KEY" in message
    assert "sekret" not in message


def test_a_broken_request_in_the_environment_is_said() -> None:
    assert "is not a request" in refusal(environment={REQUEST_ENVIRONMENT: '{"schemaVersion": 1}'})


def test_a_profile_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("schemaVersion: 1\nname: own\n")
    assert "must be given" not in refusal("/m", "--profile", str(path))
    text = load_profile(PROFILE).model_dump_json(by_alias=True, exclude_none=True).replace(PROFILE, "own")
    path.write_text(text)
    assert request("/m", "--profile", str(path)).profile.name == "own"
