"""Reads the command line of `sm70-serve`: a few options of its own, and any option of vLLM.

An option of vLLM that a typed setting owns becomes an override of the profile, so that the paths are judged by what the
user really asked for. Every other option goes to vLLM as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sm70_engine.serve.failure import ServeError
from sm70_profiles.catalog import ProfileNotFoundError, load_profile
from sm70_profiles.documents import DocumentError, describe, parse_profile
from sm70_profiles.profile import Profile
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.resolver import ServeRequest

REQUEST_ENVIRONMENT = "SM70_SERVE_REQUEST"
USAGE = """\
usage: sm70-serve MODEL --profile NAME|FILE [--draft FOLDER] [--render] [any option of `vllm serve`]

  MODEL      folder of the checkpoint
  --profile  a built-in profile (`sm70-profiles list`) or a file with one
  --draft    folder of the draft model
  --render   print what would be run and stop

Options of vLLM win over the profile. Without arguments the whole request is read from $SM70_SERVE_REQUEST.
The API key is read from $VLLM_API_KEY and never from the command line."""


@dataclass
class CommandLine:
    """What the user asked for."""

    render: bool = False
    help: bool = False
    request: ServeRequest | None = None


@dataclass
class _Draft:
    """A request while it is being read."""

    model: str | None = None
    profile: str | None = None
    draft: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    extra: list[str] = field(default_factory=list)


def _refuse(message: str, remedy: str = "See `sm70-serve --help`.") -> ServeError:
    return ServeError(TerminationReason.REFUSED, message, remedy)


def _whole(text: str) -> int:
    if not text.lstrip("-").isdecimal():
        raise ValueError("must be a whole number")
    return int(text)


def _percent(text: str) -> int:
    return round(float(text) * 100)


def _bytes(text: str) -> str:
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)i?B?", text)
    if match is None:
        raise ValueError("must be bytes such as 64Mi")
    return f"{match[1]}{match[2]}i" if match[2] else match[1]


SETTINGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "--dtype": ("dtype", str),
    "--kv-cache-dtype": ("kvCacheDtype", str),
    "--max-model-len": ("maxModelLen", _whole),
    "--max-num-seqs": ("maxNumSeqs", _whole),
    "--max-num-batched-tokens": ("maxNumBatchedTokens", _whole),
    "--gpu-memory-utilization": ("gpuMemoryUtilizationPercent", _percent),
    "--kv-cache-memory-bytes": ("kvCacheMemoryBytes", _bytes),
    "--block-size": ("blockSize", _whole),
    "--mamba-block-size": ("mambaBlockSize", _whole),
    "--tensor-parallel-size": ("tensorParallelSize", _whole),
    "-tp": ("tensorParallelSize", _whole),
    "--pipeline-parallel-size": ("pipelineParallelSize", _whole),
    "-pp": ("pipelineParallelSize", _whole),
    "--reasoning-parser": ("reasoningParser", str),
}
SWITCHES: dict[str, tuple[str, bool]] = {
    "--enforce-eager": ("enforceEager", True),
    "--no-enforce-eager": ("enforceEager", False),
    "--enable-prefix-caching": ("prefixCaching", True),
    "--no-enable-prefix-caching": ("prefixCaching", False),
}
FIELDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "--served-model-name": ("servedName", str),
    "--host": ("host", str),
    "--port": ("port", _whole),
    "--shutdown-timeout": ("drainTimeoutSeconds", _whole),
}


def read_command_line(arguments: list[str], environment: Mapping[str, str]) -> CommandLine:
    """The command. Raises ServeError for what cannot be understood."""
    result = CommandLine(render="--render" in arguments, help=bool({"-h", "--help"} & set(arguments)))
    rest = [argument for argument in arguments if argument != "--render"]
    if result.help:
        return result
    if rest:
        result.request = _request(_read(iter(rest)))
    elif text := environment.get(REQUEST_ENVIRONMENT):
        result.request = parse_request(text)
    else:
        raise _refuse(f"nothing to serve: give a model, or a request in ${REQUEST_ENVIRONMENT}")
    return result


def parse_request(text: str) -> ServeRequest:
    """A request in JSON, as the operator hands it over. Raises ServeError."""
    try:
        return ServeRequest.model_validate_json(text)
    except ValidationError as error:
        raise _refuse(f"${REQUEST_ENVIRONMENT} is not a request: {describe(error)}") from None


def _read(arguments: Iterator[str]) -> _Draft:
    draft = _Draft()
    for argument in arguments:
        option, joined, value = argument.partition("=")
        option = option.replace("_", "-") if option.startswith("--") else option

        def text(option: str = option, joined: str = joined, value: str = value) -> str:
            given = value if joined else next(arguments, None)
            if given is None:
                raise _refuse(f"`{option}` must have a value")
            return given

        if not argument.startswith("-") and draft.model is None and not draft.extra:
            draft.model = argument
        elif option == "--api-key":
            raise _refuse(
                "the API key must not be on the command line, where every process can read it",
                "Set the environment variable VLLM_API_KEY.",
            )
        elif option in ("--profile", "--draft"):
            setattr(draft, option[2:], text())
        elif option in SWITCHES:
            name, switch = SWITCHES[option]
            draft.overrides[name] = switch
        elif option in SETTINGS or option in FIELDS:
            name, convert = SETTINGS[option] if option in SETTINGS else FIELDS[option]
            (draft.overrides if option in SETTINGS else draft.fields)[name] = _converted(option, convert, text())
        elif not _read_structured(draft, option, text):
            draft.extra.append(argument)
    return draft


def _converted(option: str, convert: Callable[[str], Any], text: str) -> Any:
    try:
        return convert(text)
    except ValueError as error:
        raise _refuse(f"`{option}` {error}; found `{text}`") from None


def _read_structured(draft: _Draft, option: str, text: Callable[[], str]) -> bool:
    """Options that are parts of a typed setting. False when the option is none of them."""
    if option == "--enable-auto-tool-choice":
        draft.overrides.setdefault("tools", {})["enabled"] = True
    elif option == "--tool-call-parser":
        draft.overrides.setdefault("tools", {})["parser"] = text()
    elif option == "--speculative-config":
        _read_speculation(draft, text())
    else:
        return False
    return True


def _read_speculation(draft: _Draft, text: str) -> None:
    try:
        config = json.loads(text)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise _refuse(f"`--speculative-config` must be a JSON object; found `{text[:200]}`")
    unknown = sorted(set(config) - {"method", "model", "num_speculative_tokens"})
    if unknown:
        raise _refuse(f"`--speculative-config` must hold method, model and num_speculative_tokens; found {unknown}")
    if "model" in config:
        draft.draft = str(config["model"])
    speculation = {"method": config.get("method"), "tokens": config.get("num_speculative_tokens")}
    draft.overrides["speculation"] = {name: value for name, value in speculation.items() if value is not None}


def _request(draft: _Draft) -> ServeRequest:
    if draft.model is None:
        raise _refuse("the model must be given first")
    if draft.profile is None:
        raise _refuse("`--profile` must be given", "`sm70-profiles list` shows the built-in ones.")
    model = Path(draft.model).absolute()
    document: dict[str, Any] = {
        "profile": _profile(draft.profile),
        "modelPath": str(model),
        "servedName": model.name,
        "overrides": draft.overrides,
        "extraArgs": draft.extra,
        **draft.fields,
    }
    if draft.draft is not None:
        document["draftPath"] = str(Path(draft.draft).absolute())
    try:
        return ServeRequest.model_validate(document)
    except ValidationError as error:
        raise _refuse(f"the command line is not a request: {describe(error)}") from None


def _profile(name: str) -> Profile:
    path = Path(name)
    try:
        if path.suffix in (".yaml", ".yml") or "/" in name:
            return parse_profile(path.read_bytes())
        return load_profile(name)
    except ProfileNotFoundError as error:
        raise _refuse(str(error)) from None
    except OSError as error:
        raise _refuse(f"the profile cannot be read: {error}") from None
    except DocumentError as error:
        raise _refuse(f"{name}: {error}", "Correct the profile.") from None
