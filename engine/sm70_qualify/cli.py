"""`sm70-qualify`: runs a suite against a server and leaves a report. See docs/reference/qualification.md."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from sm70_profiles.base import printable
from sm70_profiles.identity import canonical_json, digest
from sm70_profiles.qualification import (
    MAX_REPORT_BYTES,
    Performance,
    QualificationError,
    QualificationReport,
    Suite,
    decimal,
    parse_qualification,
    suite_names,
)
from sm70_qualify import inputs
from sm70_qualify.asking import Asker
from sm70_qualify.client import ASKING_ERRORS, Endpoint, why
from sm70_qualify.display import lines, show
from sm70_qualify.inputs import USAGE_STATUS, UsageError
from sm70_qualify.run import Interrupted, Watcher, await_endpoint, now, run, survey, unreachable


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(prog="sm70-qualify", description="Judges a running model server by a suite.")
    commands = whole.add_subparsers(dest="command", required=True)
    # No abbreviations: `--api-key KEY` would be taken for `--api-key-file` and the key shown in an error.
    one = commands.add_parser("run", help="run a suite and write a report", allow_abbrev=False)
    one.add_argument("--url", required=True, help="root of the server, without /v1")
    one.add_argument("--suite", required=True, metavar="NAME|FILE")
    one.add_argument("--out", type=Path, metavar="FILE", help="where the report goes")
    one.add_argument("--raw", type=Path, metavar="FILE", help="where everything asked and answered goes")
    one.add_argument("--termination-log", type=Path, metavar="PATH", help="where the report goes in 4096 bytes")
    one.add_argument("--model", metavar="NAME", help="served name; default: the only one")
    one.add_argument("--profile", metavar="NAME|FILE", help="default: the one that the server's report names")
    one.add_argument(
        "--threshold", action="append", default=[], metavar="GATE=FIGURE", help="floor of a performance gate"
    )
    one.add_argument("--api-key-file", type=Path, metavar="FILE", help=f"else ${inputs.KEY_VARIABLE}")
    one.add_argument("--wait", type=float, default=0, metavar="SECONDS", help="how long the server may be unreachable")
    one.add_argument("--seed", type=int, default=0, help="of the prompts that must be new")
    one.add_argument("--quiet", action="store_true", help="no progress, no table")
    one.add_argument("--json", action="store_true", help="the report on the standard output instead of the table")
    show = commands.add_parser("show", help="print the table of a report")
    show.add_argument("report", type=Path)
    suites = commands.add_parser("suites", help="list the built-in suites, or the gates of one")
    suites.add_argument("suite", nargs="?", metavar="NAME|FILE")
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    try:
        options = parser().parse_args(arguments)
    except SystemExit as end:  # argparse ends with 2, which means Inconclusive here
        return USAGE_STATUS if end.code else 0
    try:
        match options.command:
            case "run":
                return _run(options)
            case "show":
                return _show(options.report)
            case _:
                return _suites(options.suite)
    except (UsageError, QualificationError) as error:
        print(f"sm70-qualify: {error}", file=sys.stderr)
        return USAGE_STATUS


def _run(options: argparse.Namespace) -> int:
    suite = inputs.suite(options.suite)
    profile = inputs.profile(options.profile)
    thresholds = _thresholds(options.threshold, suite)
    key = inputs.api_key(options.api_key_file)
    url = inputs.root(options.url)
    progress = Console(stderr=True, quiet=options.quiet)
    _catch_termination()

    endpoint = Endpoint(
        url,
        model=options.model or "",
        api_key=key,
        timeout_seconds=suite.request_timeout_seconds,
        total_seconds=suite.request_timeout_seconds,
    )
    started, raw, interrupted = now(), [], False
    with endpoint:
        try:
            await_endpoint(endpoint, options.wait)
            if options.model is None:
                endpoint.model = inputs.only_model(endpoint)
            subject = survey(endpoint, profile)
            asker = Asker(
                endpoint, seconds=suite.timeout_seconds, seed=options.seed, template=suite.chat_template_arguments
            )
            watcher = Watcher() if options.quiet else lines(progress)
            report, interrupted = run(suite, asker, subject, thresholds=thresholds, watcher=watcher)
            raw = asker.raw
        except ASKING_ERRORS as error:
            name = profile.name if profile is not None else None
            report = unreachable(suite, printable(why(error), 500), started, name, digest([]))
        except (Interrupted, KeyboardInterrupt):
            name, interrupted = profile.name if profile is not None else None, True
            report = unreachable(suite, "the run was stopped before it began", started, name, digest([]))
    _leave(report, raw, options)
    if interrupted:
        # Threads may still wait for answers that nobody needs.
        sys.stdout.flush()
        os._exit(report.verdict.exit_status)
    return report.verdict.exit_status


def _thresholds(given: Sequence[str], suite: Suite) -> dict[str, str]:
    rated = [check.name for check in suite.gates if isinstance(check, Performance)]
    found: dict[str, str] = {}
    for one in given:
        name, _, figure = one.partition("=")
        if name not in rated:
            raise UsageError(
                f"`--threshold` must name a performance gate of the suite ({', '.join(rated) or 'it has none'}), "
                f"found `{printable(name, 64)}`"
            )
        try:
            found[name] = decimal(float(figure))
        except ValueError:
            raise UsageError(f"`--threshold {name}=` must have a number, found `{printable(figure, 40)}`") from None
    return found


def _catch_termination() -> None:
    def stop(_number: int, _frame: object) -> None:
        raise Interrupted

    try:
        signal.signal(signal.SIGTERM, stop)
    except ValueError:  # Not the main thread: whoever runs this in one stops it otherwise.
        return


def _leave(report: QualificationReport, raw: list[dict[str, object]], options: argparse.Namespace) -> None:
    text = report.model_dump_json(by_alias=True, exclude_none=True, indent=2) + "\n"
    for file, data in (
        (options.raw, canonical_json(raw).encode()),
        (options.out, text.encode()),
        (options.termination_log, report.encode()),
    ):
        if file is not None:
            try:
                file.write_bytes(data)
            except OSError as error:
                print(f"sm70-qualify: `{file}` cannot be written: {error.strerror}", file=sys.stderr)
    if options.json:
        print(text, end="")
    elif not options.quiet:
        show(report, Console())


def _show(file: Path) -> int:
    report = parse_qualification(inputs.read(file), MAX_REPORT_BYTES)
    show(report, Console())
    return report.verdict.exit_status


def _suites(name: str | None) -> int:
    for one in [name] if name else suite_names():
        suite = inputs.suite(one)
        print(f"{suite.name} {suite.version} ({suite.reference.digest[:10]}): {suite.title}")
        for check in suite.gates if name else ():
            given = check.model_dump(mode="json", by_alias=True, exclude={"name", "check", "prompts", "questions"})
            print(f"  {check.name:<20} {check.check:<18} {json.dumps(given)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
