"""What the tiny model recites: three chains of pieces, one for each kind of request, and the answers a judge expects.

A chain is walked by greedy decoding: every piece is one token and has one successor. A piece therefore occurs once in
all chains together. The end of a chain is the end-of-turn token, so every answer stops by itself.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

PIECE = r"\s?[^\s]+|\s+"
"""How text falls into pieces: a word with the white space before it and the punctuation behind it."""

TEXT = (
    "This tiny model recites one fixed paragraph, so that anybody can judge whether a server really works. "
    "It runs on old Tesla V100 cards under Kubernetes: the operator pins every pod to its GPUs, mounts weights, "
    "watches readiness and tells which fast paths are enabled. If some route falls back, status says exactly why not; "
    "nothing hides. Counters prove execution, while configuration only promises it. When you read these words in "
    "their right order, linear attention, quantized matrices, paged caches plus sampling have all done honest jobs."
)
TOOL_NAME = "get_gpu_report"
TOOL_ARGUMENTS: dict[str, Any] = {"product": "Tesla-V100-SXM2-16GB", "count": 4, "verbose": True}
JSON_ANSWER: dict[str, Any] = {"model": "tiny", "layers": 16, "quantized": False, "formats": ["NVFP4", "E4M3"]}

TOOL_CALL_START, TOOL_CALL_END = "<tool_call>", "</tool_call>"

TOOL = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "Reports the GPUs of one product.",
        "parameters": {
            "type": "object",
            "properties": {
                "product": {"type": "string"},
                "count": {"type": "integer"},
                "verbose": {"type": "boolean"},
            },
            "required": ["product", "count", "verbose"],
            "additionalProperties": False,
        },
    },
}
JSON_SCHEMA = {
    "type": "object",
    "properties": {
        "model": {"type": "string"},
        "layers": {"type": "integer"},
        "quantized": {"type": "boolean"},
        "formats": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["model", "layers", "quantized", "formats"],
    "additionalProperties": False,
}


class Kind(StrEnum):
    """The kind of answer that a request asks for; the chat template decides it."""

    TEXT = "text"
    TOOL_CALL = "toolCall"
    JSON = "json"


@dataclass(frozen=True)
class Chain:
    """The pieces of one answer, in order, without the end-of-turn token."""

    kind: Kind
    pieces: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def split(text: str) -> tuple[str, ...]:
    """The pieces of a text, as the tokenizer's pre-tokenizer finds them."""
    return tuple(re.findall(PIECE, text))


def _tool_call() -> tuple[str, ...]:
    body = json.dumps({"name": TOOL_NAME, "arguments": TOOL_ARGUMENTS})
    return (TOOL_CALL_START, *split(body), TOOL_CALL_END)


CHAINS = (
    Chain(Kind.TEXT, split(TEXT)),
    Chain(Kind.TOOL_CALL, _tool_call()),
    Chain(Kind.JSON, split(json.dumps(JSON_ANSWER))),
)


def answers(seed: int, size: str, end_of_turn: str) -> dict[str, Any]:
    """The content of `answers.json`: each kind of request and what a right answer to it is.

    `completionTokens` includes the end-of-turn token, as the usage of an OpenAI response does.
    """
    requests: dict[Kind, dict[str, Any]] = {
        Kind.TEXT: {"messages": [{"role": "user", "content": "Recite your paragraph."}]},
        Kind.TOOL_CALL: {
            "messages": [{"role": "user", "content": "Report the GPUs."}],
            "tools": [TOOL],
            "tool_choice": "auto",
        },
        Kind.JSON: {
            "messages": [{"role": "user", "content": "Describe yourself in JSON."}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "description", "schema": JSON_SCHEMA}},
        },
    }
    expected: dict[Kind, dict[str, Any]] = {
        Kind.TEXT: {"content": TEXT, "finishReason": "stop"},
        Kind.TOOL_CALL: {
            "toolCall": {"name": TOOL_NAME, "arguments": TOOL_ARGUMENTS},
            "finishReason": "tool_calls",
        },
        Kind.JSON: {"content": json.dumps(JSON_ANSWER), "value": JSON_ANSWER, "finishReason": "stop"},
    }
    return {
        "schemaVersion": 1,
        "size": size,
        "seed": seed,
        "endOfTurn": end_of_turn,
        "answers": [
            {
                "kind": str(chain.kind),
                "request": {**requests[chain.kind], "temperature": 0, "max_tokens": 2 * len(chain.pieces)},
                "expected": {**expected[chain.kind], "completionTokens": len(chain.pieces) + 1},
            }
            for chain in CHAINS
        ],
    }
