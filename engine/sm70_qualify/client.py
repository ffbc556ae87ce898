"""An HTTP client for any OpenAI-compatible endpoint that keeps what a judge needs: pieces, their times, usage, ending.

The demo and the tests ask through it, and the suites will. What comes back is untrusted: sizes are bounded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from sm70_profiles.report import MAX_REPORT_BYTES, AccelerationReport, parse_report

MAX_ANSWER_BYTES = 16 * 1024 * 1024
Message = Mapping[str, Any]


class EndpointError(RuntimeError):
    """The endpoint answered with an error status or with something that is no chat completion."""


@dataclass(frozen=True)
class ToolCall:
    """A complete tool call; `arguments` is the JSON text as the server sent it."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    """One finished chat completion."""

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    first_piece_seconds: float | None
    """From sending the request to the first piece of text, reasoning or tool call (TTFT as the client sees it)."""
    seconds: float
    pieces: int


@dataclass
class _Gatherer:
    """Puts the chunks of a stream together."""

    start: float
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)
    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    first: float | None = None
    pieces: int = 0

    def take(self, chunk: Mapping[str, Any]) -> str:
        """Adds a chunk; returns its visible text."""
        self.usage = chunk.get("usage") or self.usage
        choices = chunk.get("choices") or []
        if not choices:
            return ""
        self.finish_reason = choices[0].get("finish_reason") or self.finish_reason
        delta = choices[0].get("delta") or {}
        piece = delta.get("content") or ""
        thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
        for part in delta.get("tool_calls") or []:
            function = part.get("function") or {}
            call = self.calls.setdefault(int(part.get("index", 0)), ["", ""])
            call[0] += function.get("name") or ""
            call[1] += function.get("arguments") or ""
        if piece or thought or delta.get("tool_calls"):
            self.pieces += 1
            self.first = self.first if self.first is not None else time.perf_counter()
        self.text.append(piece)
        self.reasoning.append(thought)
        return str(piece)

    def answer(self) -> Answer:
        details = self.usage.get("prompt_tokens_details") or {}
        return Answer(
            text="".join(self.text),
            reasoning="".join(self.reasoning),
            tool_calls=tuple(ToolCall(name, arguments) for _, (name, arguments) in sorted(self.calls.items())),
            finish_reason=self.finish_reason,
            prompt_tokens=self.usage.get("prompt_tokens"),
            completion_tokens=self.usage.get("completion_tokens"),
            cached_tokens=details.get("cached_tokens"),
            first_piece_seconds=None if self.first is None else self.first - self.start,
            seconds=time.perf_counter() - self.start,
            pieces=self.pieces,
        )


class Endpoint:
    """One server. `url` is its root, without `/v1`; the key goes into the Authorization header and nowhere else."""

    def __init__(
        self,
        url: str,
        *,
        model: str,
        api_key: str | None = None,
        timeout_seconds: float = 120,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.model = model
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_seconds, transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(
        self,
        prompt: str | Sequence[Message],
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        seen: Callable[[str], None] = lambda _piece: None,
        **options: Any,
    ) -> Answer:
        """A streamed chat completion; `seen` gets each piece of text as it arrives.

        `options` go into the request's body as they are (`tools`, `response_format`, `seed` …). Raises EndpointError.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }
        gatherer = _Gatherer(time.perf_counter())
        with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                raise EndpointError(_error_text(response.status_code, response.read()))
            for chunk in _chunks(response):
                piece = gatherer.take(chunk)
                if piece:
                    seen(piece)
        return gatherer.answer()

    def acceleration(self) -> AccelerationReport:
        """The guarded acceleration report. Raises EndpointError, or ReportError for a report that does not parse."""
        with self._http.stream("GET", "/v1/sm70/acceleration") as response:
            if response.is_error:
                raise EndpointError(_error_text(response.status_code, response.read()))
            data = bytearray()
            for part in response.iter_bytes():
                data += part
                if len(data) > MAX_REPORT_BYTES:
                    break
        return parse_report(bytes(data))


def _chunks(response: httpx.Response) -> Iterator[Mapping[str, Any]]:
    size = 0
    for line in response.iter_lines():
        size += len(line)
        if size > MAX_ANSWER_BYTES:
            raise EndpointError(f"the answer must not exceed {MAX_ANSWER_BYTES} bytes")
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        try:
            chunk = json.loads(line[6:])
        except ValueError:
            raise EndpointError("the stream holds a line that is not JSON") from None
        if not isinstance(chunk, dict):
            raise EndpointError("the stream holds a chunk that is no object")
        if "error" in chunk:
            raise EndpointError(_error_text(200, line[6:].encode()))
        yield chunk


def _error_text(status: int, body: bytes) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode(errors="replace")
    return f"the endpoint answered {status}: {' '.join(str(message).split())[:300]}"
