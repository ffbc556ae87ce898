"""Reads the command line of `sm70-serve`: a few options of its own, and any option of vLLM.

An option of vLLM that a typed setting owns becomes an override of the profile, so that the paths are judged by what the
user really asked for. Every other option goes to vLLM as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sm70_engine.serve.failure import ServeError, refused
from sm70_engine.serve.pins import SkippableCheck
from sm70_profiles.base import printable
from sm70_profiles.catalog import ProfileNotFoundError, load_profile
from sm70_profiles.documents import DocumentError, describe, parse_profile
from sm70_profiles.profile import Profile
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.resolver import ServeRequest
from sm70_profiles.typed import read_options

REQUEST_ENVIRONMENT = "SM70_SERVE_REQUEST"
SKIP_ENVIRONMENT = "SM70_SKIP_CHECKS"
USAGE = """\
usage: sm70-serve MODEL --profile NAME|FILE [--draft FOLDER] [--render | --preflight] [any option of `vllm serve`]
       sm70-serve [--render | --preflight]

  MODEL         folder of the checkpoint
  --profile     a built-in profile (`sm70-profiles list`) or a file with one
  --draft       folder of the draft model; the profile's pinned one is not fetched then
  --skip-check  leave out a check by its name: model-sha256 or draft-sha256; may be repeated
  --render      print what would be run and stop
  --preflight   check all that can be known without a GPU and without loading weights, and stop

Options of vLLM win over the profile. Without a model the whole request is read from $SM70_SERVE_REQUEST.
$SM70_REQUIRE_PROFILE_ACCELERATION=1 refuses a start in which an expected path is not enabled.
The API key is read from $VLLM_API_KEY and never from the command line."""

OWN = {
    "--profile": "profile",
    "--draft": "draft",
    "--served-model-name": "servedName",
    "--host": "host",
    "--port": "port",
    "--shutdown-timeout": "drainTimeoutSeconds",
}
"""Options that are fields of the request rather than settings."""
SPECULATION = ("--speculative-config", "-sc")


@dataclass
class CommandLine:
    """What the user asked for."""

    render: bool = False
    preflight: bool = False
    help: bool = False
    skip: frozenset[SkippableCheck] = frozenset()
    request: ServeRequest | None = None
    from_environment: bool = False
    """Whether the request was handed over, as the operator does, rather than typed."""


def _refuse(message: str, remedy: str = "See `sm70-serve --help`.") -> ServeError:
    return ServeError(TerminationReason.REFUSED, message, remedy)


def read_command_line(arguments: list[str], environment: Mapping[str, str]) -> CommandLine:
    """The command. Raises ServeError for what cannot be understood."""
    result = CommandLine(
        render="--render" in arguments,
        preflight="--preflight" in arguments,
        help=bool({"-h", "--help"} & set(arguments)),
    )
    if result.help:
        return result
    skipped, rest = _take_skipped([word for word in arguments if word not in ("--render", "--preflight")])
    result.skip = _skippable([*environment.get(SKIP_ENVIRONMENT, "").split(","), *skipped])
    if rest:
        result.request = _request(rest)
    elif text := environment.get(REQUEST_ENVIRONMENT):
        result.request, result.from_environment = parse_request(text), True
    else:
        raise _refuse(f"nothing to serve: give a model, or a request in ${REQUEST_ENVIRONMENT}")
    return result


def _take_skipped(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The values of `--skip-check`, and all other words in order."""
    skipped, rest, pending = [], [], list(arguments)
    while pending:
        word = pending.pop(0)
        option, joined, value = word.partition("=")
        if option != "--skip-check":
            rest.append(word)
        elif not joined and not pending:
            raise _refuse("`--skip-check` must have a value")
        else:
            skipped.append(value if joined else pending.pop(0))
    return skipped, rest


def _skippable(names: Iterable[str]) -> frozenset[SkippableCheck]:
    wanted = {name.strip() for name in names} - {""}
    unknown = sorted(wanted - set(SkippableCheck))
    if unknown:
        known = " or ".join(SkippableCheck)
        raise _refuse(f"a check to skip must be {known}; found {printable(', '.join(unknown), 200)}")
    return frozenset(map(SkippableCheck, wanted))


def parse_request(text: str) -> ServeRequest:
    """A request in JSON, as the operator hands it over. Raises ServeError."""
    try:
        return ServeRequest.model_validate_json(text)
    except ValidationError as error:
        raise _refuse(f"${REQUEST_ENVIRONMENT} is not a request: {describe(error)}") from None


def _take_own(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """The options that are fields of the request, and all other words in order."""
    own: dict[str, str] = {}
    others: list[str] = []
    pending = list(arguments)
    while pending:
        word = pending.pop(0)
        option, joined, value = word.partition("=")
        option = option.replace("_", "-") if option.startswith("--") else option
        if option == "--api-key":
            raise _refuse(
                "the API key must not be on the command line, where every process can read it",
                "Set the environment variable VLLM_API_KEY.",
            )
        if option not in OWN and option not in SPECULATION:
            others.append(word)
            continue
        if not joined:
            if not pending:
                raise _refuse(f"`{option}` must have a value")
            value = pending.pop(0)
        if option in OWN:
            own[OWN[option]] = value
        else:
            others += _take_draft(own, value)
    return own, others


def _take_draft(own: dict[str, str], value: str) -> list[str]:
    """vLLM names the draft model within its speculative configuration; in a request it is a field."""
    try:
        config = json.loads(value)
    except (ValueError, RecursionError):
        config = None
    if isinstance(config, dict) and isinstance(config.get("model"), str):
        own["draft"] = config.pop("model")
        value = json.dumps(config)
    return ["--speculative-config", value]


def _request(arguments: list[str]) -> ServeRequest:
    own, others = _take_own(arguments)
    if not others or others[0].startswith("-"):
        raise _refuse("the model must be given first")
    if "profile" not in own:
        raise _refuse("`--profile` must be given", "`sm70-profiles list` shows the built-in ones.")
    model = Path(others[0]).absolute()
    typed = read_options(others[1:], where="the command line")
    if typed.refusals:
        raise refused(typed.refusals)
    document: dict[str, Any] = {
        "profile": _profile(own.pop("profile")),
        "modelPath": str(model),
        "servedName": model.name,
        "overrides": typed.settings,
        "extraArgs": typed.rest,
    }
    if "draft" in own:
        document["draftPath"] = str(Path(own.pop("draft")).absolute())
    try:
        return ServeRequest.model_validate({**document, **own})
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
