"""Looks at the weight files and tokenizers of a checkpoint without loading them.

A copy that was cut short is the most common fault of a checkpoint, and vLLM finds it after minutes, in one of its
workers. The heads of the files tell it at once: each says how long its file must be.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sm70_profiles.base import printable

INDEX = "model.safetensors.index.json"
MAX_HEAD_BYTES = 128 << 20
MAX_TOKENIZER_BYTES = 256 << 20
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model")
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.gguf")


def weight_faults(folder: Path) -> Iterator[str]:
    """What is wrong with the weight files, each as a sentence; nothing when they are whole or of another format."""
    files = sorted(folder.glob("*.safetensors"))
    listed = _listed(folder)
    missing = sorted(set(listed) - {path.name for path in files})
    if missing:
        yield f"{INDEX} names {len(missing)} files that are not there: {printable(', '.join(missing[:4]), 200)}"
    if not files and not missing and not any(any(folder.glob(pattern)) for pattern in OTHER_WEIGHTS):
        yield "it holds no weights"
    for path in files:
        fault = safetensors_fault(path)
        if fault is not None:
            yield f"{printable(path.name, 120)}: {fault}"


def safetensors_fault(path: Path) -> str | None:
    """Why the file is not a whole safetensors file, judged by its head and its size alone."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(MAX_HEAD_BYTES, size - 8):
                return f"not a safetensors file, or cut short (it has {size} bytes)"
            head = json.loads(file.read(length))
        ends = [int(tensor["data_offsets"][1]) for name, tensor in head.items() if name != "__metadata__"]
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    except (ValueError, RecursionError, TypeError, KeyError, IndexError, AttributeError):
        return "its head is not that of a safetensors file"
    wanted = 8 + length + max(ends, default=0)
    return None if size == wanted else f"must have {wanted} bytes; it has {size}"


def tokenizer_faults(folder: Path, vocabulary: int | None) -> Iterator[str]:
    """What is wrong with the tokenizer of a target model. vocabulary: the size that config.json states."""
    if not any((folder / name).exists() for name in TOKENIZERS):
        yield f"it holds no tokenizer ({', '.join(TOKENIZERS[:3])} or another)"
        return
    try:
        tokens = read_vocabulary(folder)
    except ValueError as error:
        yield str(error)
        return
    largest = max(tokens.values(), default=-1)
    if vocabulary is not None and largest >= vocabulary:
        yield f"tokenizer.json has the token id {largest}, config.json a vocabulary of {vocabulary}"


def read_vocabulary(folder: Path) -> Mapping[str, int]:
    """Ids by token from tokenizer.json, added ones included; empty without that file. Raises ValueError."""
    path = folder / "tokenizer.json"
    try:
        if not path.exists():
            return {}
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise ValueError(f"tokenizer.json must not exceed {MAX_TOKENIZER_BYTES} bytes")
        document = json.loads(path.read_bytes())
        model = document["model"]["vocab"]
        # Unigram models list pairs of a token and its score; the position is the id.
        pairs = (
            enumerate(entry[0] for entry in model) if isinstance(model, list) else ((i, t) for t, i in model.items())
        )
        tokens = {str(token): int(number) for number, token in pairs}
        tokens |= {str(one["content"]): int(one["id"]) for one in document.get("added_tokens") or ()}
    except OSError as error:
        raise ValueError(f"tokenizer.json cannot be read: {error.strerror or error}") from None
    except (RecursionError, TypeError, KeyError, IndexError, AttributeError, json.JSONDecodeError):
        raise ValueError("tokenizer.json is not that of a tokenizer") from None
    return tokens


def vocabulary_difference(target: Mapping[str, int], draft: Mapping[str, int]) -> str | None:
    """How the draft's tokenizer contradicts the target's; None when either is unknown or they agree."""
    if not target or not draft:
        return None
    differing = [token for token, number in draft.items() if target.get(token) != number]
    if not differing:
        return None
    first = min(differing, key=lambda token: draft[token])
    return f"{len(differing)} tokens differ from the target's, the first is id {draft[first]}: `{printable(first, 40)}`"


def has_chat_template(folder: Path) -> bool:
    """Whether the checkpoint brings a chat template; without one, chat requests are refused."""
    if any((folder / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        config: Any = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))


def _listed(folder: Path) -> list[str]:
    """Weight files that the index names, inside the folder."""
    try:
        names = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return [INDEX + " (which is not an index)"]
    return [str(name) for name in names if os.sep not in str(name)][:4096]
