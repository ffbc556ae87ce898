"""The benchmark against a reciting server: what it counts, what it says of it, and what it never asks twice."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from sm70_qualify.bench.cli import main
from sm70_qualify.bench.load import speculation
from sm70_qualify.bench.result import BenchResult
from sm70_qualify.client import Answer, Chunk
from sm70_qualify.prompts import PASSAGE, calibrate
from sm70_qualify.timing import TokenSource, spread, timing
from unit.qualify.reciter import MODEL, Reciter, serving


def bench(reciter: Reciter, tmp_path: Path, *more: str, status: int = 0) -> BenchResult:
    out = tmp_path / "result.json"
    with serving(reciter) as url:
        arguments = ["--url", url, "--requests", "3", "--output-tokens", "20", "--out", str(out), "--json", *more]
        assert main(arguments) == status
    return BenchResult.model_validate_json(out.read_text())


def completions(reciter: Reciter) -> list[dict[str, Any]]:
    return [body for path, body in reciter.asked if path == "/v1/completions"]


def test_tokens_are_counted_by_their_ids_and_chunks_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reciter = Reciter(tokens_a_chunk=4)
    result = bench(reciter, tmp_path, "--prompt-tokens", "64,1K", "--top-k", "20", "--label", "four a chunk")
    assert json.loads(capsys.readouterr().out) == json.loads(result.model_dump_json())
    assert (result.model, result.label, result.refused_options) == (MODEL, "four a chunk", ())
    assert [level.contract.input_len for level in result.levels] == [64, 1024]
    for level in result.levels:
        assert (level.completed, level.failed, level.total_output_tokens) == (3, 0, 60)
        assert level.contract.input_len_exact
        assert level.contract.prompts == "token ids"
        assert level.token_source == ("token ids",)
        assert level.tokens_per_chunk == 4
        assert level.tpot_ms is not None
        assert level.chunk_interval_ms is not None
        # 20 tokens in 5 chunks: 16 tokens and 4 intervals come after the first.
        assert (level.tpot_ms.samples, level.chunk_interval_ms.samples) == (3, 12)
        assert level.chunk_interval_ms.mean == pytest.approx(4 * level.tpot_ms.mean, abs=1e-3)
        assert level.finish_reasons == {"length": 3}
    assert {body["top_k"] for body in completions(reciter)} == {20}
    assert {body["min_tokens"] for body in completions(reciter)} == {2, 20}


def test_rounds_and_acceptance_are_those_of_the_level(tmp_path: Path) -> None:
    (level,) = bench(Reciter(), tmp_path, "--prompt-tokens", "64").levels
    assert level.spec_decode is not None
    assert (level.spec_decode.num_drafts, level.spec_decode.num_draft_tokens) == (15, 60)
    assert (level.spec_decode.draft_acceptance_rate, level.spec_decode.mean_acceptance_length) == (0.75, 4)
    assert level.spec_decode.round_ms is not None
    (level,) = bench(Reciter(), tmp_path, "--prompt-tokens", "64", "--concurrency", "3").levels
    assert level.spec_decode is not None
    assert level.spec_decode.round_ms is None


def test_every_prompt_is_new(tmp_path: Path) -> None:
    reciter = Reciter()
    (level,) = bench(reciter, tmp_path, "--prompt-tokens", "64", "--concurrency", "2").levels
    prompts = [tuple(body["prompt"][:16]) for body in completions(reciter)]
    assert len(set(prompts)) == len(prompts)
    assert reciter.hits == 0
    assert level.contract.concurrency == 2


@pytest.mark.parametrize("chat", [True, False])
def test_any_openai_endpoint_is_measured_and_what_it_lacks_is_said(
    chat: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reciter = Reciter(token_ids=False, tokenizes=False, faults=frozenset({"no metrics"}))
    more = ["--chat"] if chat else []
    with serving(reciter) as url:
        out = tmp_path / "out"
        arguments = ["--url", url, "--prompt-tokens", "96", "--requests", "2", "--out", str(out), *more]
        assert main([*arguments, "--output-tokens", "20", "--natural-stop"]) == 0
    result = BenchResult.model_validate_json(out.read_text())
    (level,) = result.levels
    assert "return_token_ids" in result.refused_options
    assert (level.contract.prompts, level.contract.input_len_exact) == ("text", True)
    assert level.token_source == ("usage",)
    assert level.spec_decode is None
    shown = capsys.readouterr().out
    assert "tokens counted by usage, not by returned ids" in shown
    assert "it was asked without" in shown
    asked = {path for path, _ in reciter.asked}
    assert ("/v1/chat/completions" in asked) is chat


def test_failed_requests_are_counted_and_told(tmp_path: Path) -> None:
    result = bench(Reciter(max_model_len=100), tmp_path, "--prompt-tokens", "64,200", status=1)
    assert [(level.completed, level.failed) for level in result.levels] == [(3, 0), (0, 3)]
    assert result.levels[1].errors == {"the endpoint answered 400: too long": 3}
    assert result.levels[1].ttft_ms is None


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:9"]) == 3
    assert "could not be asked" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt-tokens", "512K"], "from 1 to 262144"),
        (["--prompt-tokens", "1K,many"], "`many`"),
        (["--concurrency", "0"], "from 1 to 1024"),
        (["--output-tokens", "0"], "at least 1"),
        (["--prompt-file", "/nowhere/text"], "cannot be read"),
        (["--api-key", "s3cret"], "--api-key"),
    ],
)
def test_usage(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:9", *arguments]) == 64
    assert words in capsys.readouterr().err


def test_a_chart_is_drawn(tmp_path: Path) -> None:
    chart = tmp_path / "chart.png"
    bench(Reciter(), tmp_path, "--prompt-tokens", "64,1K", "--plot", str(chart))
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_a_chart_without_matplotlib_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    reciter = Reciter()
    with serving(reciter) as url:
        assert main(["--url", url, "--plot", str(tmp_path / "chart.png")]) == 64
    assert "pip install 'sm70[plots]'" in capsys.readouterr().err
    assert reciter.asked == []


def answer(chunks: list[tuple[float, int | None]], ids: int | None, usage: int | None) -> Answer:
    return Answer(
        text="x",
        reasoning="",
        tool_calls=(),
        finish_reason="stop",
        prompt_tokens=100,
        completion_tokens=usage,
        cached_tokens=60,
        first_piece_seconds=None,
        seconds=3.0,
        pieces=len(chunks),
        token_ids=None if ids is None else tuple(range(ids)),
        chunks=tuple(Chunk(*chunk) for chunk in chunks),
    )


def test_time_per_token_starts_after_the_first_chunk() -> None:
    found = timing(answer([(1.0, 4), (1.5, 4), (2.0, 2)], 10, 10))
    assert found is not None
    assert found.token_source is TokenSource.TOKEN_IDS
    assert (found.tpot_seconds, found.decode_rate) == (1.0 / 6, 6.0)
    assert (found.computed_tokens, found.prefill_rate) == (40, 40.0)
    assert found.chunk_intervals == (0.5, 0.5)


@pytest.mark.parametrize(
    ("ids", "usage", "source", "tpot"),
    [(None, 11, TokenSource.USAGE, 0.1), (None, None, TokenSource.CHUNKS, 0.5), (0, 11, TokenSource.USAGE, 0.1)],
)
def test_without_ids_the_usage_counts_and_without_it_the_chunks(
    ids: int | None, usage: int | None, source: TokenSource, tpot: float
) -> None:
    found = timing(answer([(1.0, None), (1.5, None), (2.0, None)], ids, usage))
    assert found is not None
    assert found.token_source is source
    assert found.tpot_seconds == pytest.approx(tpot)


def test_one_token_has_no_rate_and_none_no_times() -> None:
    one = timing(answer([(1.0, 1)], 1, 1))
    assert one is not None
    assert (one.tpot_seconds, one.decode_rate) == (None, None)
    assert timing(answer([], None, 0)) is None


def test_quantiles_are_linear_and_say_their_samples() -> None:
    found = spread([4.0, 1.0, 3.0, 2.0])
    assert found is not None
    assert (found.samples, found.mean, found.minimum, found.maximum) == (4, 2.5, 1.0, 4.0)
    assert found.p50 == 2.5
    assert found.p90 == pytest.approx(3.7)
    assert spread([]) is None


@pytest.mark.parametrize("tokens", [150, 1000, 4096])
@pytest.mark.parametrize("rate", [1.0, 1.37, 2.6])
def test_text_is_calibrated_to_the_token(tokens: int, rate: float) -> None:
    """A tokenizer that cuts words into parts, but knows a lone letter."""

    def count(text: str) -> int:
        words = text.split(" ")
        return 5 + sum(1 if word == "a" else int(len(word) * rate / 4) + 1 for word in words)

    assert calibrate(tokens, PASSAGE.split(), count).tokens == tokens


@pytest.mark.parametrize("text", [None, "", "}{ not metrics", "vllm:spec_decode_num_drafts_total nan\n"])
def test_metrics_that_say_nothing(text: str | None) -> None:
    assert speculation(text) is None
