"""Answers to OpenAI requests: the three chains that the tiny model recites, chosen as its chat template chooses."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simulated_engine.behaviour import Answers
from sm70_engine.tinymodel.chains import CHAINS, TOOL_ARGUMENTS, TOOL_NAME, Kind

BLOCK = 128
"""Tokens of a page of the tiny model's cache: what is found in it again is a multiple."""
MAX_MODEL_LEN = 4096
LONG = 900
"""Tokens of a prompt that is a measurement's rather than a person's."""
PIECES = {chain.kind: chain.pieces for chain in CHAINS}
IDS = {piece: 300 + place for place, piece in enumerate(dict.fromkeys(itertools.chain(*PIECES.values())))}
END_OF_TURN_ID = 2


class BadRequestError(ValueError):
    """What vLLM answers with an error; `status` is its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Recital:
    """One answer: its pieces in order, and how it ends."""

    kind: Kind
    pieces: tuple[str, ...]
    finish_reason: str
    prompt: bytes
    cached: int

    @property
    def ids(self) -> list[int]:
        """The returned token ids, with the end of turn where it was reached."""
        found = [IDS.get(piece, 1) for piece in self.pieces]
        return found if self.finish_reason == "length" else [*found, END_OF_TURN_ID]

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": len(self.prompt),
            "completion_tokens": len(self.ids),
            "total_tokens": len(self.prompt) + len(self.ids),
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass
class Reciter:
    """One server's mouth; it remembers the prompts that it saw, as a prefix cache does."""

    model: str
    seen: list[bytes] = field(default_factory=list)
    count: int = 0

    def recite(self, request: Mapping[str, Any], answers: Answers, chat: bool) -> Recital:
        """The answer to the body of a request. Raises BadRequestError."""
        if request.get("model") not in (None, self.model):
            raise BadRequestError(404, f"The model `{request.get('model')}` does not exist.")
        prompt = _chat_prompt(request) if chat else _plain_prompt(request)
        if len(prompt) >= MAX_MODEL_LEN:
            raise BadRequestError(400, f"the maximum context length is {MAX_MODEL_LEN} tokens, found {len(prompt)}")
        kind = _kind(request) if chat else Kind.TEXT
        pieces = list(PIECES[kind])
        self.count += 1
        if answers is Answers.WRONG:
            pieces.reverse()
        elif answers is Answers.VARYING:
            turn = self.count % len(pieces)
            pieces = pieces[turn:] + pieces[:turn]
        elif answers is Answers.BRIEF and len(prompt) > LONG:
            pieces = []
        limit = request.get("max_completion_tokens") or request.get("max_tokens") or (16 if not chat else None)
        cut = limit is not None and int(limit) <= len(pieces)
        pieces = pieces[: int(limit)] if cut and limit is not None else pieces
        ending = "length" if cut else "tool_calls" if kind is Kind.TOOL_CALL else "stop"
        return Recital(kind, tuple(pieces), ending, prompt, self._cached(prompt))

    def _cached(self, prompt: bytes) -> int:
        best = max((_common(prompt, other) for other in self.seen), default=0)
        self.seen = [*self.seen[-63:], prompt]
        # The last token is always computed, or there would be nothing to sample from.
        return min(best, len(prompt) - 1) // BLOCK * BLOCK if prompt else 0


def _common(one: bytes, other: bytes) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _words(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or () if isinstance(part, Mapping))


def _messages(request: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequestError(400, "`messages` must be a list that is not empty")
    return messages


def _chat_prompt(request: Mapping[str, Any]) -> bytes:
    parts = [
        f"<{one.get('role')}>{_words(one.get('content'))}{one.get('tool_calls') or ''}" for one in _messages(request)
    ]
    return f"{request.get('tools') or ''}{''.join(parts)}<assistant>".encode()


def _plain_prompt(request: Mapping[str, Any]) -> bytes:
    prompt = request.get("prompt")
    if isinstance(prompt, str):
        return prompt.encode()
    if isinstance(prompt, list) and all(isinstance(one, int) for one in prompt):
        return bytes(one % 256 for one in prompt)
    raise BadRequestError(400, "`prompt` must be a text or a list of token ids")


def _kind(request: Mapping[str, Any]) -> Kind:
    messages = _messages(request)
    if request.get("tools") and request.get("tool_choice") != "none" and messages[-1].get("role") != "tool":
        return Kind.TOOL_CALL
    asked = [_words(one.get("content")) for one in messages if one.get("role") in ("system", "user")]
    structured = (request.get("response_format") or {}).get("type") in ("json_schema", "json_object")
    return Kind.JSON if structured or any("JSON" in text for text in asked) else Kind.TEXT


def tool_call(recital: Recital) -> dict[str, Any] | None:
    """The call as a parser finds it in the recited text; None when the words are not in order."""

    if recital.kind is not Kind.TOOL_CALL or recital.pieces != PIECES[Kind.TOOL_CALL]:
        return None
    return {
        "id": "call-simulated",
        "type": "function",
        "function": {"name": TOOL_NAME, "arguments": json.dumps(TOOL_ARGUMENTS)},
    }
