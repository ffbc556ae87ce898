"""Whether a long answer is text. A wrong kernel seldom stops a server; it makes it repeat itself or write noise."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable
from itertools import groupby

from sm70_profiles.qualification import TextHealth
from sm70_qualify.client import Answer

REPLACEMENT = "\ufffd"


def ailments(answer: Answer, limits: TextHealth) -> tuple[str, ...]:
    """What is wrong with an answer, in words; empty when it is healthy."""
    text = answer.reasoning + answer.text
    found: list[str] = []
    if answer.tokens is not None and answer.tokens < limits.minimum_tokens:
        found.append(f"{answer.tokens} tokens, fewer than {limits.minimum_tokens}")
    if not text.strip():
        found.append("no text")
    lines = (line.strip() for line in text.splitlines())
    runs = (
        ("token", longest_run(answer.token_ids or ()), limits.same_token_run),
        ("digit", max((len(digits) for digits in re.findall(r"\d+", text)), default=0), limits.digit_run),
        ("character", longest_run(text), limits.character_run),
        ("line", longest_run(lines, ignored=""), limits.line_run),
    )
    found += [
        f"a run of {length} of one {what}" if what != "digit" else f"a run of {length} digits"
        for what, length, limit in runs
        if length > limit
    ]
    for width, limit in sorted(limits.windows.items()):
        if (times := repeated(text, width)) > limit:
            found.append(f"{width} characters that occur {times} times")
    if REPLACEMENT in text:
        found.append("characters that could not be decoded")
    found += [f"the marker {marker}" for marker in limits.markers if marker in text]
    return tuple(found)


def longest_run(items: Iterable[Hashable], ignored: Hashable = None) -> int:
    """Length of the longest run of equal neighbours."""
    return max((sum(1 for _ in run) for value, run in groupby(items) if value != ignored), default=0)


def repeated(text: str, width: int) -> int:
    """How often the most frequent window of so many characters occurs.

    Windows of one character only (a ruler, an indentation) are left out: the longest run judges those.
    """
    windows = Counter(text[start : start + width] for start in range(len(text) - width + 1))
    return max((times for window, times in windows.items() if len(set(window)) > 1), default=0)
