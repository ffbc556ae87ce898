"""The tiny model's vocabulary: every text survives, every piece is one token, and the template asks for one chain."""

from __future__ import annotations

import json
import string
from typing import Any

import jinja2
import jinja2.sandbox
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sm70_engine.tinymodel.chains import CHAINS, TEXT, TOOL, Kind
from sm70_engine.tinymodel.tokenizer import (
    CHAT_TEMPLATE,
    END_OF_TURN,
    SPECIAL,
    START,
    build_tokenizer,
    piece_id,
    vocabulary,
)

TOKENIZER = build_tokenizer()


def render(messages: list[dict[str, Any]], **options: Any) -> str:
    """The prompt, as transformers renders chat templates."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(CHAT_TEMPLATE).render(messages=messages, add_generation_prompt=True, **options)


def user(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@given(st.text(st.characters(codec="utf-8")))
def test_any_text_survives_the_round_trip(text: str) -> None:
    if any(mark in text for mark in SPECIAL):
        return
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: str(chain.kind))
def test_a_chain_is_its_pieces(chain: Any) -> None:
    known, ids = vocabulary(), TOKENIZER.encode(chain.text, add_special_tokens=False).ids
    assert ids == [piece_id(known, piece) for piece in chain.pieces]
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == chain.text


def test_no_piece_is_in_two_places() -> None:
    pieces = [piece for chain in CHAINS for piece in chain.pieces]
    assert len(set(pieces)) == len(pieces)
    assert len(next(chain for chain in CHAINS if chain.kind is Kind.TEXT).pieces) >= 64
    assert sorted(vocabulary().values()) == list(range(len(vocabulary())))


def test_the_text_is_prose() -> None:
    assert set(TEXT) <= set(string.ascii_letters + string.digits + string.punctuation + " ")
    assert TEXT.endswith(".")
    assert END_OF_TURN not in TEXT


def test_the_file_reads_back_the_same() -> None:
    again = Tokenizer.from_str(TOKENIZER.to_str())
    assert again.encode(TEXT).ids == TOKENIZER.encode(TEXT).ids
    assert again.get_vocab_size() == len(vocabulary())


@pytest.mark.parametrize(
    ("messages", "options", "kind"),
    [
        (user("hello"), {}, Kind.TEXT),
        (user([{"type": "text", "text": "hello"}]), {}, Kind.TEXT),
        (user("hello"), {"tools": [TOOL]}, Kind.TOOL_CALL),
        (user("answer in JSON"), {}, Kind.JSON),
        (user([{"type": "text", "text": "as JSON, please"}]), {}, Kind.JSON),
        ([{"role": "system", "content": "Speak JSON."}, *user("hello")], {}, Kind.JSON),
        ([*user("JSON"), {"role": "assistant", "content": "{}"}, *user("again")], {}, Kind.JSON),
        ([*user("hello"), {"role": "assistant", "content": "JSON"}, *user("and?")], {}, Kind.TEXT),
        (user("hello"), {"tools": []}, Kind.TEXT),
    ],
)
def test_the_template_asks_for_the_chain(messages: list[dict[str, Any]], options: dict[str, Any], kind: Kind) -> None:
    prompt = render(messages, **options)
    assert prompt.endswith(START[kind])
    assert TOKENIZER.encode(prompt, add_special_tokens=False).ids[-1] == vocabulary()[START[kind]]


def test_after_a_tool_has_answered_the_model_speaks() -> None:
    call = {"function": {"name": "get_gpu_report", "arguments": {"count": 4}}}
    messages = [
        *user("Report."),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "all well"},
    ]
    prompt = render(messages, tools=[TOOL])
    assert '<tool_call>{"name": "get_gpu_report", "arguments": {"count": 4}}</tool_call>' in prompt
    assert "<tool_response>all well</tool_response>" in prompt
    assert prompt.endswith(START[Kind.TEXT])


def test_without_a_generation_prompt_no_start_is_added() -> None:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment()
    assert not any(mark in environment.from_string(CHAT_TEMPLATE).render(messages=user("x")) for mark in START.values())
