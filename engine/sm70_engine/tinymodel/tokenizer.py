"""The tiny model's own tokenizer and chat template: 256 bytes, the pieces of the chains, a few marks."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from sm70_engine.tinymodel.chains import CHAINS, PIECE, TOOL_CALL_END, TOOL_CALL_START, Kind

PAD, TURN_START, END_OF_TURN, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
TOOL_RESPONSE_START, TOOL_RESPONSE_END = "<tool_response>", "</tool_response>"
START = {Kind.TEXT: "<|recite_text|>", Kind.TOOL_CALL: "<|recite_tool_call|>", Kind.JSON: "<|recite_json|>"}
"""The last token of a prompt: it decides which chain the answer walks."""

SPECIAL = (PAD, TURN_START, END_OF_TURN, MASK, *START.values())
PLAIN_MARKS = (TOOL_CALL_START, TOOL_CALL_END, TOOL_RESPONSE_START, TOOL_RESPONSE_END)
"""Marks that stay in the text, because the tool parser looks for them there."""

CHAT_TEMPLATE = """\
{%- macro words(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set asked = namespace(json=false) -%}
{%- if tools -%}
{{ '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role in ('system', 'user') and 'JSON' in words(message.content) -%}
{%- set asked.json = true -%}
{%- endif -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'tool' -%}
{{ '<tool_response>' + words(message.content) + '</tool_response>' }}
{%- else -%}
{{ words(message.content) }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '</tool_call>' }}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- if tools and messages[-1].role != 'tool' -%}{{ '<|recite_tool_call|>' }}
{%- elif asked.json -%}{{ '<|recite_json|>' }}
{%- else -%}{{ '<|recite_text|>' }}
{%- endif -%}
{%- endif -%}
"""
"""Tools ask for the tool call (until its result is there), the word JSON for the JSON answer, all else for the text."""


@cache
def byte_characters() -> tuple[str, ...]:
    """The printable stand-in of every byte in a byte-level vocabulary, as GPT-2 defined it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = (byte for byte in range(256) if byte not in printable)
    stand_in = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(rest)}
    return tuple(stand_in[byte] for byte in range(256))


def in_bytes(piece: str) -> str:
    """A piece as the byte-level vocabulary spells it."""
    characters = byte_characters()
    return "".join(characters[byte] for byte in piece.encode())


def vocabulary() -> dict[str, int]:
    """Every token and its id: marks, bytes, then the pieces in the order of the chains."""
    tokens = [*SPECIAL, *PLAIN_MARKS, *byte_characters()]
    tokens += [in_bytes(piece) for chain in CHAINS for piece in chain.pieces if piece not in PLAIN_MARKS]
    return {token: number for number, token in enumerate(tokens)}


def piece_id(vocabulary: dict[str, int], piece: str) -> int:
    return vocabulary[piece if piece in PLAIN_MARKS else in_bytes(piece)]


def build_tokenizer() -> Tokenizer:
    """Whole pieces where the vocabulary has them, bytes elsewhere; any text survives the round trip."""
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary(), merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in SPECIAL])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in PLAIN_MARKS])
    return tokenizer


def tokenizer_config(longest: int) -> dict[str, Any]:
    """`tokenizer_config.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "bos_token": None,
        "eos_token": END_OF_TURN,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
