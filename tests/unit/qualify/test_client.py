"""The judge's client against a scripted server: what it puts together, what it refuses, and where the key goes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from sm70_profiles.report import MAX_REPORT_BYTES, ReportError
from sm70_qualify.client import Endpoint, EndpointError, ToolCall


def endpoint(handler: Callable[[httpx.Request], httpx.Response], **options: Any) -> Endpoint:
    return Endpoint("http://server", model="tiny", transport=httpx.MockTransport(handler), **options)


def stream(*chunks: dict[str, Any] | str) -> httpx.Response:
    lines = [f"data: {chunk if isinstance(chunk, str) else json.dumps(chunk)}\n\n" for chunk in chunks]
    return httpx.Response(200, text="".join([*lines, "data: [DONE]\n\n"]))


def delta(finish: str | None = None, **content: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": content, "finish_reason": finish}]}


def test_puts_text_usage_and_ending_together() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    pieces: list[str] = []
    with endpoint(
        lambda _: stream(delta(content="Hello"), delta(content=", you"), delta("stop"), {"choices": [], "usage": usage})
    ) as server:
        answer = server.ask("hi", seen=pieces.append)
    assert (answer.text, answer.finish_reason, answer.pieces) == ("Hello, you", "stop", 2)
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (7, 2, 4)
    assert pieces == ["Hello", ", you"]
    assert answer.first_piece_seconds is not None
    assert answer.first_piece_seconds <= answer.seconds


def test_puts_tool_calls_together_by_index() -> None:
    def part(index: int, **function: str) -> dict[str, Any]:
        return delta(tool_calls=[{"index": index, "function": function}])

    with endpoint(
        lambda _: stream(
            part(0, name="weather"), part(1, name="clock"), part(0, arguments='{"city":'), part(0, arguments='"Paris"}')
        )
    ) as server:
        answer = server.ask("?", tools=[])
    assert answer.tool_calls == (ToolCall("weather", '{"city":"Paris"}'), ToolCall("clock", ""))


def test_the_key_is_in_the_header_only() -> None:
    asked: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return stream(delta(content="x"))

    with endpoint(handler, api_key="s3cret") as server:
        server.ask("hi")
    assert asked[0].headers["authorization"] == "Bearer s3cret"
    assert b"s3cret" not in asked[0].content
    assert "s3cret" not in str(asked[0].url)


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (httpx.Response(401, json={"error": {"message": "wrong key"}}), "401: wrong key"),
        (httpx.Response(503, text="down\nfor now"), "503: down for now"),
        (stream("{not json"), "not JSON"),
        (stream("[1]"), "no object"),
        (stream({"error": {"message": "too long"}}), "too long"),
    ],
)
def test_says_what_the_server_did_wrong(response: httpx.Response, words: str) -> None:
    with endpoint(lambda _: response) as server, pytest.raises(EndpointError, match=words):
        server.ask("hi")


def test_an_endless_report_is_cut_off() -> None:
    with (
        endpoint(lambda _: httpx.Response(200, content=b"x" * (4 * MAX_REPORT_BYTES))) as server,
        pytest.raises(ReportError, match="must not exceed"),
    ):
        server.acceleration()


def test_token_ids_and_the_times_of_chunks_are_kept() -> None:
    def part(text: str, *ids: int) -> dict[str, Any]:
        return {"choices": [{"index": 0, "text": text, "token_ids": list(ids), "finish_reason": None}]}

    with endpoint(lambda _: stream(part("a b", 1, 2), part("", 3), part("c", 4))) as server:
        answer = server.complete((7, 8, 9), max_tokens=4)
    assert (answer.token_ids, answer.tokens, answer.text) == ((1, 2, 3, 4), 4, "a bc")
    assert [chunk.tokens for chunk in answer.chunks] == [2, 1, 1]
    assert [chunk.seconds for chunk in answer.chunks] == sorted(chunk.seconds for chunk in answer.chunks)
    assert answer.pieces == 2


def test_an_answer_that_is_not_streamed_has_no_chunks() -> None:
    message = {"content": "x", "tool_calls": [{"function": {"name": "clock", "arguments": "{}"}}]}
    whole = {"choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": {"completion_tokens": 3}}
    with endpoint(lambda _: httpx.Response(200, json=whole)) as server:
        answer = server.ask("hi", stream=False)
    assert (answer.text, answer.tool_calls, answer.tokens) == ("x", (ToolCall("clock", "{}"),), 3)
    assert (answer.chunks, answer.first_piece_seconds) == ((), None)


@pytest.mark.parametrize(
    "chunk",
    [
        {"choices": "all"},
        {"choices": [7]},
        {"choices": [{"delta": "text"}]},
        {"choices": [{"delta": {"tool_calls": [{"index": "first"}]}}]},
        {"choices": [{"text": "x", "token_ids": ["one"]}]},
        {"choices": [{"text": "x", "token_ids": 5}]},
        {"choices": [], "usage": "much"},
    ],
)
def test_what_is_no_completion_is_an_error_and_no_crash(chunk: dict[str, Any]) -> None:
    with endpoint(lambda _: stream(chunk)) as server, pytest.raises(EndpointError, match="no completion"):
        server.ask("hi")


@pytest.mark.parametrize("count", [-1, True, "7", 1.5, 1 << 60, None])
def test_a_count_that_is_none_is_not_known(count: object) -> None:
    usage = {"prompt_tokens": count, "completion_tokens": 2}
    with endpoint(lambda _: stream(delta(content="x"), {"choices": [], "usage": usage})) as server:
        answer = server.ask("hi")
    assert (answer.prompt_tokens, answer.completion_tokens) == (None, 2)


def test_an_endless_line_and_an_endless_answer_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sm70_qualify.client.MAX_LINE_BYTES", 1000)
    monkeypatch.setattr("sm70_qualify.client.MAX_ANSWER_BYTES", 100_000)

    def forever() -> Iterator[bytes]:
        while True:
            yield b"x" * 600

    def lines() -> Iterator[bytes]:
        while True:
            yield b'data: {"choices": []}\n' * 1000

    for parts in (forever(), lines()):
        response = httpx.Response(200, content=parts)
        with endpoint(lambda _: response) as server, pytest.raises(EndpointError, match="must not"):  # noqa: B023
            server.ask("hi")


def test_an_answer_that_takes_too_long_ends() -> None:
    def slowly() -> Iterator[bytes]:
        while True:
            yield b'data: {"choices": []}\n'

    with (
        endpoint(lambda _: httpx.Response(200, content=slowly()), total_seconds=0) as server,
        pytest.raises(EndpointError, match="too long"),
    ):
        server.ask("hi")


@pytest.mark.parametrize("body", ["", "[]", '{"data": [1]}', "[" * 100_000])
def test_a_list_of_models_that_is_none(body: str) -> None:
    with endpoint(lambda _: httpx.Response(200, text=body)) as server, pytest.raises(EndpointError):
        server.models()
