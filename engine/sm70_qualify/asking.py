"""How a run asks: everything goes through one object that writes it down, keeps to the time, and may be stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from sm70_profiles.identity import digest
from sm70_profiles.qualification import Members, ValueType
from sm70_qualify.client import Answer, Endpoint, EndpointError, Prompt, why
from sm70_qualify.prompts import Prompts

SCHEMA_TYPES: Mapping[ValueType, Mapping[str, Any]] = {
    ValueType.STRINGS: {"type": "array", "items": {"type": "string"}},
}
PYTHON_TYPES: Mapping[ValueType, tuple[type, ...]] = {
    ValueType.STRING: (str,),
    ValueType.INTEGER: (int,),
    ValueType.NUMBER: (int, float),
    ValueType.BOOLEAN: (bool,),
    ValueType.STRINGS: (list,),
}


class OutOfTimeError(EndpointError):
    """The run's time is up, or it was asked to stop."""


class Asker:
    """Asks one endpoint for one run. Thread-safe."""

    def __init__(
        self, endpoint: Endpoint, *, seconds: float, seed: int = 0, template: Mapping[str, Any] | None = None
    ) -> None:
        """`template`: arguments of every chat's template."""
        self.endpoint = endpoint
        self.prompts = Prompts(endpoint, seed=seed)
        self._deadline = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._raw: list[dict[str, Any]] = []
        self._template = dict(template or {})
        self._extras = True

    @property
    def raw(self) -> list[dict[str, Any]]:
        """Everything asked and answered, in the order in which the answers came."""
        with self._lock:
            return list(self._raw)

    @property
    def raw_digest(self) -> str:
        return digest(self.raw)

    def ask(self, gate: str, prompt: Prompt, **options: Any) -> Answer:
        """A chat completion."""
        template = {"chat_template_kwargs": self._template} if self._template else {}
        request = {"messages": prompt, **options, **template}
        return self._record(gate, request, lambda more: self.endpoint.ask(prompt, **options, **more), template)

    def send(self, gate: str, prompt: str | tuple[int, ...], **options: Any) -> Answer:
        """A completion of a prompt from `self.prompts`."""
        shown = prompt if isinstance(prompt, str) else {"tokens": len(prompt), "sha256": digest(list(prompt))}
        request = {"prompt": shown, **options}
        return self._record(gate, request, lambda more: self.prompts.send(prompt, **options, **more), {})

    def _record(
        self, gate: str, request: dict[str, Any], send: Callable[..., Answer], extras: Mapping[str, Any]
    ) -> Answer:
        if time.monotonic() > self._deadline:
            raise OutOfTimeError("the time of the run is up")
        entry: dict[str, Any] = {"gate": gate, "request": request}
        try:
            answer = self._with_extras(send, {"return_token_ids": True, **extras})
        except Exception as error:
            self._write({**entry, "error": why(error)})
            raise
        self._write({**entry, "answer": _plain(answer)})
        return answer

    def _with_extras(self, send: Callable[..., Answer], extras: Mapping[str, Any]) -> Answer:
        """Asks with vLLM's own members, until the endpoint refuses a request with them and takes it without."""
        if not self._extras:
            return send({})
        try:
            return send(extras)
        except EndpointError as error:
            if error.status not in (400, 422):
                raise
            answer = send({})
            self._extras = False
            return answer

    def _write(self, entry: dict[str, Any]) -> None:
        with self._lock:
            self._raw.append(entry)


def _plain(answer: Answer) -> dict[str, Any]:
    return {
        "text": answer.text,
        "reasoning": answer.reasoning,
        "toolCalls": [{"name": call.name, "arguments": call.arguments} for call in answer.tool_calls],
        "finishReason": answer.finish_reason,
        "usage": {
            "promptTokens": answer.prompt_tokens,
            "completionTokens": answer.completion_tokens,
            "cachedTokens": answer.cached_tokens,
        },
        "tokenIds": None if answer.token_ids is None else list(answer.token_ids),
        "chunks": [[round(chunk.seconds, 6), chunk.tokens] for chunk in answer.chunks],
        "seconds": round(answer.seconds, 6),
    }


def json_schema(members: Members) -> dict[str, Any]:
    """The JSON Schema of an object with exactly these members."""
    return {
        "type": "object",
        "properties": {name: dict(SCHEMA_TYPES.get(kind, {"type": str(kind)})) for name, kind in members.items()},
        "required": list(members),
        "additionalProperties": False,
    }


def misfit(value: Any, members: Members) -> str | None:
    """Why a value is no object with exactly these members; None when it is one."""
    if not isinstance(value, dict):
        return "no object"
    if set(value) != set(members):
        return f"members {', '.join(sorted(map(str, value)))[:80] or 'none'}"
    for name, kind in members.items():
        found = value[name]
        fits = isinstance(found, PYTHON_TYPES[kind]) and (kind is ValueType.BOOLEAN or not isinstance(found, bool))
        if not fits or (kind is ValueType.STRINGS and not all(isinstance(one, str) for one in found)):
            return f"`{name}` is no {kind}"
    return None


def tool(name: str, description: str, members: Members) -> dict[str, Any]:
    """The declaration of a tool in a request."""
    function = {"name": name, "description": description, "parameters": json_schema(members)}
    return {"type": "function", "function": function}


def response_format(members: Members) -> dict[str, Any]:
    """What makes a server keep to the schema."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": json_schema(members)}}
