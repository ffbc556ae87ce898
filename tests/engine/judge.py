"""Judges answers of the tiny model by its `answers.json`."""

from __future__ import annotations

import json
from typing import Any


def faults(answer: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """What is wrong with a chat completion; empty when it is right."""
    choice, found = answer["choices"][0], []
    message = choice["message"]
    if choice["finish_reason"] != expected["finishReason"]:
        found.append(f"finish reason {choice['finish_reason']}")
    if answer["usage"]["completion_tokens"] != expected["completionTokens"]:
        found.append(f"{answer['usage']['completion_tokens']} tokens")
    if "content" in expected and message["content"] != expected["content"]:
        found.append(f"content {message['content']!r}")
    if "toolCall" in expected:
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
        wanted = expected["toolCall"]
        if [(name, json.loads(arguments)) for name, arguments in calls] != [(wanted["name"], wanted["arguments"])]:
            found.append(f"tool calls {calls}")
    return found
