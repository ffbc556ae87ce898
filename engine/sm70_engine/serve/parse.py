"""Parses the arguments of `vllm serve` with the installed vLLM, without making a configuration of them.

    python -m sm70_engine.serve.parse ARGUMENTS...     prints one line of JSON: {"fault": ..., "message": ...}

A process of its own, started by the preflight inside a session: our platform is active there, hooks are checked, and
whatever vLLM does at import cannot hurt the preflight.
"""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import NoReturn

PREFIX = "sm70 parse: "


class Fault(StrEnum):
    """What was wrong."""

    NONE = "none"
    ARGUMENTS = "arguments"
    ENGINE = "engine"


class _ArgumentsError(Exception):
    pass


def parse(arguments: list[str]) -> tuple[Fault, str]:
    """The fault and its message."""
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        class Parser(FlexibleArgumentParser):  # type: ignore[misc]
            def error(self, message: str) -> NoReturn:
                raise _ArgumentsError(message)

        parser = make_arg_parser(Parser(prog="vllm serve"))
    except Exception as error:  # whatever the installation is ill with
        return Fault.ENGINE, f"{type(error).__name__}: {error}"
    try:
        validate_parsed_serve_args(parser.parse_args(arguments))
    except Exception as error:  # vLLM's own conversions raise what they like
        return Fault.ARGUMENTS, str(error)
    return Fault.NONE, ""


if __name__ == "__main__":
    fault, message = parse(sys.argv[1:])
    print(f"\n{PREFIX}{json.dumps({'fault': fault, 'message': message[:2000]})}", flush=True)
