"""The judge's client against a scripted server: what it puts together, what it refuses, and where the key goes."""

from __future__ import annotations

import json
from collections.abc import Callable
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
