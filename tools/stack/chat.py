"""A streamed chat completion from any OpenAI endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx


def stream(
    url: str, *, model: str, prompt: str, api_key: str | None, max_tokens: int = 128, **extra: Any
) -> Iterator[str]:
    """Yields the pieces of the answer as they arrive. Raises httpx.HTTPStatusError for an error status."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        **extra,
    }
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60) as answer:
        if answer.is_error:
            answer.read()
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            choices = json.loads(line[6:]).get("choices") or []
            piece = choices[0]["delta"].get("content") if choices else None
            if piece:
                yield piece
