"""An HTTP client for any OpenAI-compatible endpoint that keeps what a judge needs: pieces, tokens, times, ending.

The suites, the benchmark, the demo and the tests ask through it. What comes back is untrusted: sizes and total time are
bounded, counts are counts, and whatever is no completion is an EndpointError.
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
MAX_LINE_BYTES = 4 * 1024 * 1024
MAX_METRICS_BYTES = 8 * 1024 * 1024
MAX_COUNT = 1 << 40
Message = Mapping[str, Any]
Prompt = str | Sequence[Message]


class EndpointError(RuntimeError):
    """The endpoint answered with an error status or with something that is no completion."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


ASKING_ERRORS = (EndpointError, httpx.HTTPError)
"""What asking can raise: the endpoint's own errors, and those of the way there."""


@dataclass(frozen=True)
class ToolCall:
    """A complete tool call; `arguments` is the JSON text as the server sent it."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Chunk:
    """One event of a stream that brought something: when, and how many tokens if the server says so."""

    seconds: float
    """Since the request was sent."""
    tokens: int | None


@dataclass(frozen=True)
class Answer:
    """One finished completion."""

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    first_piece_seconds: float | None
    """From sending the request to the first text, reasoning, tool call or token (TTFT as the client sees it)."""
    seconds: float
    pieces: int
    token_ids: tuple[int, ...] | None = None
    """What was generated, where the server returns it (`return_token_ids` of vLLM)."""
    chunks: tuple[Chunk, ...] = ()
    """Empty when the answer was not streamed."""

    @property
    def tokens(self) -> int | None:
        """Generated tokens: the returned ids, else the usage."""
        return self.completion_tokens if self.token_ids is None else len(self.token_ids)


@dataclass
class _Gatherer:
    """Puts the chunks of a stream together."""

    start: float
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)
    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    pieces: int = 0
    ids: list[int] | None = None
    chunks: list[Chunk] = field(default_factory=list)

    def take(self, chunk: Mapping[str, Any]) -> str:
        """Adds a chunk; returns its visible text."""
        seconds = time.perf_counter() - self.start
        self.usage = chunk.get("usage") or self.usage
        choices = chunk.get("choices") or []
        if not choices:
            return ""
        choice = choices[0]
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        delta = choice.get("delta") or choice.get("message") or {}
        piece = delta.get("content") or choice.get("text") or ""
        thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
        calls = delta.get("tool_calls") or []
        for place, part in enumerate(calls):
            function = part.get("function") or {}
            call = self.calls.setdefault(int(part.get("index", place)), ["", ""])
            call[0] += function.get("name") or ""
            call[1] += function.get("arguments") or ""
        ids = self._ids(choice.get("token_ids"))
        if piece or thought or calls:
            self.pieces += 1
        if piece or thought or calls or ids:
            self.chunks.append(Chunk(seconds, ids))
        self.text.append(str(piece))
        self.reasoning.append(str(thought))
        return str(piece)

    def _ids(self, found: Any) -> int | None:
        if found is None:
            return None
        self.ids = self.ids if self.ids is not None else []
        self.ids.extend(int(one) for one in found)
        return len(found)

    def answer(self, streamed: bool) -> Answer:
        details = self.usage.get("prompt_tokens_details") or {}
        return Answer(
            text="".join(self.text),
            reasoning="".join(self.reasoning),
            tool_calls=tuple(ToolCall(name, arguments) for _, (name, arguments) in sorted(self.calls.items())),
            finish_reason=None if self.finish_reason is None else str(self.finish_reason),
            prompt_tokens=_count(self.usage.get("prompt_tokens")),
            completion_tokens=_count(self.usage.get("completion_tokens")),
            cached_tokens=_count(details.get("cached_tokens")),
            first_piece_seconds=self.chunks[0].seconds if streamed and self.chunks else None,
            seconds=time.perf_counter() - self.start,
            pieces=self.pieces,
            token_ids=None if self.ids is None else tuple(self.ids),
            chunks=tuple(self.chunks) if streamed else (),
        )


class Endpoint:
    """One server. `url` is its root, without `/v1`; the key goes into the Authorization header and nowhere else.

    Everything that asks raises one of `ASKING_ERRORS`.
    `timeout_seconds` is how long the server may be silent, `total_seconds` how long one answer may take.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        api_key: str | None = None,
        timeout_seconds: float = 120,
        total_seconds: float = 3600,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.model = model
        self._total_seconds = total_seconds
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.Client(
            base_url=url, headers=headers, timeout=timeout_seconds, transport=transport, limits=limits
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        stream: bool = True,
        seen: Callable[[str], None] = lambda _piece: None,
        **options: Any,
    ) -> Answer:
        """A chat completion; `seen` gets each piece of text as it arrives.

        `options` go into the request's body as they are (`tools`, `response_format`, `seed` …). Raises EndpointError.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        body = {"messages": messages, "max_tokens": max_tokens, "temperature": temperature, **options}
        return self._generate("/v1/chat/completions", body, stream, seen)

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        stream: bool = True,
        **options: Any,
    ) -> Answer:
        """A plain completion of a text or of token ids. Raises EndpointError."""
        body = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": temperature,
            **options,
        }
        return self._generate("/v1/completions", body, stream, lambda _piece: None)

    def _generate(self, path: str, body: dict[str, Any], stream: bool, seen: Callable[[str], None]) -> Answer:
        body = {"model": self.model, **body, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        gatherer = _Gatherer(time.perf_counter())
        try:
            if stream:
                with self._http.stream("POST", path, json=body) as response:
                    _refuse_errors(response)
                    for chunk in _chunks(response, gatherer.start + self._total_seconds):
                        piece = gatherer.take(chunk)
                        if piece:
                            seen(piece)
            else:
                gatherer.take(_object(self._fetch("POST", path, MAX_ANSWER_BYTES, json=body)))
            return gatherer.answer(stream)
        except (TypeError, ValueError, AttributeError, LookupError, RecursionError) as error:
            raise EndpointError("the endpoint sent something that is no completion") from error

    def models(self) -> dict[str, int | None]:
        """The served models by name, with the tokens that a context has room for where the server says it."""
        found = self._get("/v1/models").get("data")
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise EndpointError("the endpoint's list of models is none")
        return {str(one.get("id"))[:256]: _count(one.get("max_model_len")) for one in found[:1024]}

    def tokenize(self, text: str) -> tuple[int, ...] | None:
        """Token ids of a text without special tokens; None where the server does not offer this (vLLM does)."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        try:
            found = _object(self._fetch("POST", "/tokenize", MAX_ANSWER_BYTES, json=body)).get("tokens")
            return tuple(int(one) for one in found or ()) or None
        except (EndpointError, TypeError, ValueError):
            return None

    def metrics(self) -> str | None:
        """The text of `/metrics`; None where there is none."""
        try:
            return self._fetch("GET", "/metrics", MAX_METRICS_BYTES).decode(errors="replace")
        except (EndpointError, httpx.HTTPError):
            return None

    def acceleration(self) -> AccelerationReport:
        """The guarded acceleration report. Raises EndpointError, or ReportError for a report that does not parse."""
        return parse_report(self._fetch("GET", "/v1/sm70/acceleration", MAX_REPORT_BYTES, cut=True))

    def _get(self, path: str) -> Mapping[str, Any]:
        return _object(self._fetch("GET", path, MAX_LINE_BYTES))

    def _fetch(self, method: str, path: str, limit: int, *, cut: bool = False, **options: Any) -> bytes:
        with self._http.stream(method, path, **options) as response:
            _refuse_errors(response)
            data = bytearray()
            for part in response.iter_bytes():
                data += part
                if len(data) > limit:
                    if cut:
                        break
                    raise EndpointError(f"the answer must not exceed {limit} bytes")
        return bytes(data)


def _chunks(response: httpx.Response, deadline: float) -> Iterator[Mapping[str, Any]]:
    for line in _lines(response, deadline):
        if not line.startswith(b"data:") or line.removeprefix(b"data:").strip() == b"[DONE]":
            continue
        data = line.removeprefix(b"data:").strip()
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError):
            raise EndpointError("the stream holds a line that is not JSON") from None
        if not isinstance(chunk, dict):
            raise EndpointError("the stream holds a chunk that is no object")
        if chunk.get("error"):
            raise EndpointError(_error_text(200, data), 200)
        yield chunk


def _lines(response: httpx.Response, deadline: float) -> Iterator[bytes]:
    size, rest = 0, b""
    for part in response.iter_bytes():
        size += len(part)
        if size > MAX_ANSWER_BYTES or len(rest) > MAX_LINE_BYTES:
            raise EndpointError(f"the answer must not exceed {MAX_ANSWER_BYTES} bytes, nor a line {MAX_LINE_BYTES}")
        if time.perf_counter() > deadline:
            raise EndpointError("the answer took too long")
        *lines, rest = (rest + part).split(b"\n")
        yield from (line.rstrip(b"\r") for line in lines)
    yield rest


def _object(data: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise EndpointError("the endpoint's answer is not JSON") from None
    if not isinstance(value, dict):
        raise EndpointError("the endpoint's answer is no object")
    return value


def _refuse_errors(response: httpx.Response) -> None:
    if not response.is_error:
        return
    data = bytearray()
    for part in response.iter_bytes():
        data += part
        if len(data) > 65_536:
            break
    raise EndpointError(_error_text(response.status_code, bytes(data)), response.status_code)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT else None


def why(error: Exception) -> str:
    """What an asking error says, on one line."""
    if isinstance(error, EndpointError):
        return str(error)
    return "the endpoint could not be asked: " + " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _error_text(status: int, body: bytes) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        message = body[:200].decode(errors="replace")
    return f"the endpoint answered {status}: {' '.join(str(message).split())[:300]}"
