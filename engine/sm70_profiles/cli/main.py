"""Arguments of `sm70-profiles`, and what each command answers with.

Exit codes: 0 when all is well; 1 when something is refused or a checksum is wrong; 2 when the arguments or a file
cannot be read; 3 when a checksum is unknown, so that nothing was verified.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from sm70_profiles.catalog import ProfileNotFoundError
from sm70_profiles.checkpoints import CheckpointError
from sm70_profiles.cli import commands
from sm70_profiles.cli.inputs import InputError
from sm70_profiles.cli.output import ExitCode, Output
from sm70_profiles.documents import DocumentError

Command = Callable[[argparse.Namespace, Output], int]


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = argparse.ArgumentParser(
        prog="sm70-profiles",
        description="Profiles of language-model servers on V100: what to serve, what must be fast, and every refusal.",
        epilog="Exit codes: 0 fine, 1 refused or wrong, 2 unreadable, 3 unverified.",
    )
    subs = top.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Command, text: str) -> argparse.ArgumentParser:
        sub = subs.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        sub.add_argument("--json", action="store_true", help="write JSON for machines")
        return sub

    command("list", commands.list_profiles, "list the built-in profiles")
    show = command("show", commands.show, "show a profile")
    show.add_argument("profile", metavar="NAME", help="a built-in profile, or a file")
    explain = command("explain", commands.explain, "say why every value is what it is")
    resolve = command("resolve", commands.resolve_profile, "show the command line, environment and predicted report")
    memory = command("memory", commands.memory, "say whether it fits and how many tokens the KV cache holds")
    for sub in (explain, resolve, memory):
        sub.add_argument("profile", metavar="NAME", help="a built-in profile, or a file")
        sub.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="an override")
        sub.add_argument("--gpu", metavar="PRODUCT", help="the GPU, for example Tesla-V100-SXM2-16GB")
        sub.add_argument("--facts", type=Path, metavar="FILE", help="facts as YAML: model, draft, gpu, engine, host")
        sub.add_argument("--model", default="/models/target", metavar="PATH", help="the model, read if it is here")
        sub.add_argument("--draft", metavar="PATH", help="the draft, read if it is here")
        sub.add_argument("--served-name", default="model", metavar="NAME")
        sub.add_argument("options", nargs="*", metavar="-- OPTION", help="options of `vllm serve`, read as overrides")
    check = command("check", commands.check, "list every refusal of a resource, offline")
    check.add_argument("-f", "--file", type=Path, required=True, metavar="FILE", help="the resource, `-` for stdin")
    check.add_argument("--profile-file", type=Path, metavar="FILE", help="the document that `profileRef` would name")
    check.add_argument("--facts", type=Path, metavar="FILE")
    diff = command("diff", commands.diff, "show how two profiles differ")
    diff.add_argument("left", metavar="A")
    diff.add_argument("right", metavar="B")
    imports = command("import-env", commands.import_environment, "turn a launcher's environment file into a resource")
    imports.add_argument("file", type=Path, metavar="FILE", help="an environment file or a start script")
    imports.add_argument("--name", default="imported", help="the resource's name")
    schema = command("schema", commands.schema, "write the JSON schema of a document")
    schema.add_argument("document", nargs="?", default="profile", choices=sorted(commands.SCHEMAS))
    pin = command("pin", commands.pin, "compute the checksums of a checkpoint, or compare them with a profile's")
    pin.add_argument("folder", type=Path, metavar="DIR")
    pin.add_argument("--against", metavar="NAME", help="compare with this profile's pinned draft")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    options = parser().parse_args(arguments)
    output = Output(as_json=options.json)
    try:
        return int(options.run(options, output))
    except (InputError, DocumentError, ProfileNotFoundError, CheckpointError) as error:
        output.fail(str(error))
        return ExitCode.UNREADABLE
    except BrokenPipeError:
        # The reader has seen enough; Python would complain again when it flushes at exit.
        sys.stderr.close()
        return ExitCode.FINE
