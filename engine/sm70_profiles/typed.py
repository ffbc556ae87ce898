"""Options of `vllm serve` read back into typed settings: a start script's line becomes overrides.

The counterpart of `flags.py`. An option that no setting owns stays an extra argument; one that an operator or a Secret
owns, or whose value does not fit, is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from sm70_profiles.base import printable
from sm70_profiles.flags import OWNED_FLAGS
from sm70_profiles.reasons import Refusal, RefusalCode
from sm70_profiles.settings import Overrides

Tree = dict[str, Any]

MAX_WORDS = 512
_NUMBER = re.compile(r"^[0-9]{1,10}$")
_SHARE = re.compile(r"^(?:(1)(?:\.0{1,2})?|0?\.([0-9]{1,2}))$")


@dataclass(frozen=True)
class Typed:
    """Settings, what is left as extra arguments, and what cannot be taken."""

    settings: Overrides = field(default_factory=Overrides)
    rest: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()


class UnreadableError(ValueError):
    """An option's value does not fit its setting. The message says what must hold."""


def read_options(words: Iterable[str], where: str = "extraArgs") -> Typed:
    """Typed settings for a command line; of an option given twice the last one counts. Never raises."""
    tree: Tree = {}
    rest: list[str] = []
    refusals: list[Refusal] = []
    pending = list(words)[:MAX_WORDS]
    while pending:
        word = pending.pop(0)
        option, given, value = word.partition("=")
        option = option.replace("_", "-") if option.startswith("--") else option
        reader = _READERS.get(option)
        if reader is None:
            owner = OWNED_FLAGS.get(option)
            if owner is None:
                rest.append(word)
                continue
            refusals.append(_owned(where, option, owner))
            if not given and pending and not pending[0].startswith("-"):
                pending.pop(0)
            continue
        if isinstance(reader, Valued) and not given:
            value = pending.pop(0) if pending else ""
        try:
            join(tree, reader.read(value))
        except UnreadableError as error:
            refusals.append(_unreadable(where, option, str(error), value))
    settings, invalid = _validated(tree, where)
    return Typed(settings, tuple(rest), (*refusals, *invalid))


@dataclass(frozen=True)
class Valued:
    """An option with a value."""

    read: Callable[[str], Tree]


@dataclass(frozen=True)
class Bare:
    """An option without one."""

    tree: Tree

    def read(self, _: str) -> Tree:
        return self.tree


def nested(path: str, value: Any) -> Tree:
    """`a.b` and a value as nested mappings."""
    tree: Any = value
    for part in reversed(path.split(".")):
        tree = {part: tree}
    result: Tree = tree
    return result


def number(text: str) -> int:
    """A plain decimal. Raises UnreadableError."""
    if not _NUMBER.match(text):
        raise UnreadableError("must be a plain whole number")
    return int(text)


def share(text: str) -> int:
    """A share such as 0.93 as a whole percent. Raises UnreadableError."""
    match = _SHARE.match(text)
    if match is None:
        raise UnreadableError("must be a share between 0 and 1 with at most two decimals")
    return 100 if match.group(1) else int(match.group(2).ljust(2, "0"))


def members(text: str) -> Mapping[str, Any]:
    """A JSON object. Raises UnreadableError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UnreadableError("must be a JSON object")
    return value


def _text(path: str) -> Valued:
    return Valued(lambda text: nested(path, text))


def _count(path: str) -> Valued:
    return Valued(lambda text: nested(path, number(text)))


def _on(path: str, value: Any = True) -> Bare:
    return Bare(nested(path, value))


def _retention(text: str) -> Tree:
    value = {"dense": True} if text == "None" else {"interval_tokens": number(text)}
    return {"prefix_retention": value}


def dynamic_tokens(value: Any) -> list[Tree]:
    """`[[1, 3, 7], [4, 512, 3]]` as ranges of batch sizes. Raises UnreadableError."""
    rows = value if isinstance(value, list) else None
    if rows is None or not all(
        isinstance(row, list) and len(row) == 3 and all(type(cell) is int for cell in row) for row in rows
    ):
        raise UnreadableError("must be a list of [first batch, last batch, tokens]")
    return [{"batch_from": low, "batch_to": high, "tokens": tokens} for low, high, tokens in rows]


_SPECULATION = {
    "method": "method",
    "num_speculative_tokens": "tokens",
    "draft_sample_method": "draft_sample_method",
    "attention_backend": "attention_backend",
    "kv_cache_dtype": "kv_cache_dtype",
}


def _speculation(text: str) -> Tree:
    config = dict(members(text))
    tree: Tree = {}
    if (rows := config.pop("num_speculative_tokens_per_batch_size", None)) is not None:
        tree["dynamic_tokens"] = dynamic_tokens(rows)
    for key, value in config.items():
        if key in ("model", "revision"):
            raise UnreadableError("must not name the draft model; that is the field `draft`")
        if key not in _SPECULATION:
            raise UnreadableError(f"must not hold `{key[:60]}`, which no typed setting has")
        tree[_SPECULATION[key]] = value
    if "method" not in tree:
        raise UnreadableError("must name a `method`")
    return {"speculation": tree}


_COMPILATION = {"max_cudagraph_capture_size", "custom_ops", "cudagraph_mode"}


def _compilation(text: str) -> Tree:
    config = members(text)
    unknown = sorted(set(config) - _COMPILATION)
    if unknown:
        raise UnreadableError(f"must not hold `{unknown[0][:60]}`, which no typed setting has")
    names = {"max_cudagraph_capture_size": "max_capture_size"}
    return {"compilation": {names.get(key, key): value for key, value in config.items()}}


def _detail(text: str) -> Tree:
    levels = {"none": "Off", "summary": "Summary", "detailed": "Detailed"}
    if text not in levels:
        raise UnreadableError("must be none, summary or detailed")
    return {"request_metrics": levels[text]}


def _thinking(text: str) -> Tree:
    config = members(text)
    if set(config) != {"enable_thinking"}:
        raise UnreadableError("must hold `enable_thinking` and nothing else")
    return {"thinking": config["enable_thinking"]}


_READERS: dict[str, Valued | Bare] = {
    "--dtype": Valued(lambda text: {"dtype": "float16" if text == "fp16" else text}),
    "--attention-backend": _text("attention_backend"),
    "--kv-cache-dtype": _text("kv_cache_dtype"),
    "--max-model-len": _count("max_model_len"),
    "--max-num-seqs": _count("max_num_seqs"),
    "--max-num-batched-tokens": _count("max_num_batched_tokens"),
    "--gpu-memory-utilization": Valued(lambda text: {"gpu_memory_utilization_percent": share(text)}),
    "--device-memory-utilization": Valued(lambda text: {"gpu_memory_utilization_percent": share(text)}),
    "--kv-cache-memory-bytes": _text("kv_cache_memory_bytes"),
    "--kv-cache-memory": _text("kv_cache_memory_bytes"),
    "--block-size": _count("block_size"),
    "--mamba-block-size": _count("mamba_block_size"),
    "--tensor-parallel-size": _count("tensor_parallel_size"),
    "-tp": _count("tensor_parallel_size"),
    "--pipeline-parallel-size": _count("pipeline_parallel_size"),
    "-pp": _count("pipeline_parallel_size"),
    "--enforce-eager": _on("enforce_eager"),
    "--no-enforce-eager": _on("enforce_eager", False),
    "--enable-prefix-caching": _on("prefix_caching"),
    "--no-enable-prefix-caching": _on("prefix_caching", False),
    "--mamba-cache-mode": _text("mamba_cache_mode"),
    "--mamba-ssm-cache-dtype": _text("mamba_ssm_cache_dtype"),
    "--prefix-match-unit": _count("prefix_match_unit"),
    "--prefix-cache-retention-interval": Valued(_retention),
    "--partial-prefix-cache": _on("partial_prefix_cache"),
    "--no-partial-prefix-cache": _on("partial_prefix_cache", False),
    "--mixed-prefill-step-latency-ms": _count("mixed_prefill_step_latency_milliseconds"),
    "--async-scheduling": _on("async_scheduling"),
    "--no-async-scheduling": _on("async_scheduling", False),
    "--disable-custom-all-reduce": _on("custom_all_reduce", False),
    "--no-disable-custom-all-reduce": _on("custom_all_reduce"),
    "--kv-offloading-size": _count("kv_offload.size_gib"),
    "--api-server-count": _count("api_server_count"),
    "-asc": _count("api_server_count"),
    "--trust-remote-code": _on("trust_remote_code"),
    "--no-trust-remote-code": _on("trust_remote_code", False),
    "--language-model-only": _on("vision.enabled", False),
    "--reasoning-parser": _text("reasoning_parser"),
    "--enable-prompt-tokens-details": _on("prompt_tokens_details"),
    "--no-enable-prompt-tokens-details": _on("prompt_tokens_details", False),
    "--enable-per-request-metrics": _on("request_metrics", "Summary"),
    "--no-enable-per-request-metrics": _on("request_metrics", "Off"),
    "--enable-force-include-usage": Bare({}),
    "--per-request-spec-decode-metrics": Valued(_detail),
    "--sse-keep-alive-interval": _count("sse_keep_alive_seconds"),
    "--default-chat-template-kwargs": Valued(_thinking),
    "--enable-auto-tool-choice": _on("tools.enabled"),
    "--no-enable-auto-tool-choice": _on("tools.enabled", False),
    "--tool-call-parser": _text("tools.parser"),
    "--tool-strict-level": _text("tools.strict_level"),
    "--speculative-config": Valued(_speculation),
    "-sc": Valued(_speculation),
    "--spec-method": _text("speculation.method"),
    "--spec-tokens": _count("speculation.tokens"),
    "--compilation-config": Valued(_compilation),
    "-cc": Valued(_compilation),
    "--max-cudagraph-capture-size": _count("compilation.max_capture_size"),
}
"""How each typed option is read."""


def join(tree: Tree, more: Tree) -> None:
    """Adds nested mappings to others; a choice (one of several) is replaced whole. `more` stays as it is."""
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict) and key != "prefix_retention":
            join(tree[key], value)
        else:
            tree[key] = deepcopy(value)


def validated(tree: Tree) -> Overrides:
    """Settings from nested mappings. Raises ValidationError."""
    return Overrides.model_validate(tree)


def _validated(tree: Tree, where: str) -> tuple[Overrides, list[Refusal]]:
    """The settings that are valid, and a refusal for each that is not."""
    refusals: list[Refusal] = []
    names = {info.alias or name: name for name, info in Overrides.model_fields.items()}
    for _ in range(len(names)):
        try:
            return validated(tree), refusals
        except ValidationError as error:
            for one in error.errors(include_url=False):
                location = [str(part) for part in one["loc"]]
                refusals.append(_invalid(where, ".".join(location), one["msg"], one.get("input")))
                tree.pop(names.get(location[0], location[0]), None)
    return Overrides(), refusals


def _owned(where: str, option: str, owner: str) -> Refusal:
    return Refusal(
        code=RefusalCode.OWNED_FLAG,
        field=where,
        must="must not hold an option that a typed field owns",
        found=f"`{option}`",
        remedy=f"It is set by `{owner}`." if "." in owner or owner == "model" else f"It is set by {owner}.",
    )


def _unreadable(where: str, option: str, must: str, found: str) -> Refusal:
    return Refusal(
        code=RefusalCode.KNOB_VALUE,
        field=where,
        must=f"`{option}` {must}",
        found=f"`{printable(found, 60)}`",
        remedy="Correct the value or remove the option.",
    )


def _invalid(where: str, path: str, message: str, found: Any) -> Refusal:
    return Refusal(
        code=RefusalCode.KNOB_VALUE,
        field=where,
        must=f"the value of `{path}` is not admitted: {message}",
        found=f"`{printable(str(found), 60)}`",
        remedy="Use one of the admitted values.",
    )
