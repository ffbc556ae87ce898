"""`sm70-fetch`: the command line. See docs/operations/fetch.md."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from sm70_engine.fetch.errors import FetchError, UsageError
from sm70_engine.fetch.fetching import Job, Progress, fetch
from sm70_engine.fetch.hubs import HubName, open_hub, require_pinned
from sm70_engine.fetch.selection import CODE, WANTED, Selection
from sm70_engine.fetch.status import told_to_askers
from sm70_engine.serve.failure import ServeError
from sm70_profiles.base import printable
from sm70_profiles.termination import Termination, TerminationKind

USAGE_STATUS = 64
TOKEN_VARIABLES = {HubName.HUGGING_FACE: "HF_TOKEN", HubName.MODEL_SCOPE: "MODELSCOPE_API_TOKEN"}
ENDPOINT_VARIABLES = {HubName.HUGGING_FACE: "HF_ENDPOINT", HubName.MODEL_SCOPE: "MODELSCOPE_ENDPOINT"}
REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def parser() -> argparse.ArgumentParser:
    # No abbreviations: `--token SECRET` would be taken for `--token-file` and shown in an error.
    whole = argparse.ArgumentParser(
        prog="sm70-fetch", allow_abbrev=False, description="Downloads one revision of a model repository, checked."
    )
    whole.add_argument("--hub", required=True, choices=[str(hub) for hub in HubName])
    whole.add_argument("--repo", required=True, metavar="OWNER/NAME")
    whole.add_argument("--revision", required=True, help="a commit (ModelScope: or a tag), not a branch")
    whole.add_argument("--to", required=True, type=Path, metavar="FOLDER")
    whole.add_argument("--include", action="append", metavar="GLOB", help=f"default: {' '.join(WANTED)}")
    whole.add_argument("--exclude", action="append", metavar="GLOB", help=f"default: {' '.join(CODE)}")
    whole.add_argument("--sha256", action="append", default=[], metavar="FILE=DIGEST")
    whole.add_argument("--token-file", type=Path, metavar="FILE", help="else HF_TOKEN or MODELSCOPE_API_TOKEN")
    whole.add_argument("--endpoint", metavar="URL", help="else HF_ENDPOINT or MODELSCOPE_ENDPOINT")
    whole.add_argument("--workers", type=int, default=4, metavar="N", help="files at a time (%(default)s)")
    whole.add_argument("--verify", action="store_true", help="read every byte again although the marker is there")
    whole.add_argument("--json", action="store_true", help="progress as one JSON object a line")
    whole.add_argument("--termination-log", type=Path, metavar="PATH")
    return whole


def main(arguments: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """The command line; returns the exit status."""
    try:
        options = parser().parse_args(arguments)
    except SystemExit as end:
        return USAGE_STATUS if end.code else 0
    try:
        job, token, endpoint = _job(options, environment)
        told = _Lines(sys.stdout) if options.json else _Bars()
        _end_on_signals()
        with told, told_to_askers(environment, told) as tell:
            done = fetch(job, lambda: open_hub(job.hub, job.repo, job.revision, token=token, endpoint=endpoint), tell)
    except (UsageError, ServeError) as error:
        print(f"sm70-fetch: {error}", file=sys.stderr)
        return USAGE_STATUS
    except FetchError as error:
        _fail(error, options)
        return error.exit_status
    _line(sys.stdout, "done", **_members(done)) if options.json else print(
        f"{job.repo} at {job.revision}: {done.files} files, {done.bytes} bytes in {job.folder}"
    )
    return 0


def _job(options: argparse.Namespace, environment: Mapping[str, str]) -> tuple[Job, str | None, str | None]:
    hub = HubName(options.hub)
    if REPO.fullmatch(options.repo) is None:
        raise UsageError(f"`--repo` must be OWNER/NAME, found `{printable(options.repo, 80)}`")
    require_pinned(hub, options.revision)
    if not 1 <= options.workers <= 64:
        raise UsageError("`--workers` must be from 1 to 64")
    selection = Selection(tuple(options.include or WANTED), tuple(CODE if options.exclude is None else options.exclude))
    demanded = {}
    for one in options.sha256:
        path, _, digest = one.rpartition("=")
        if not path or re.fullmatch("[0-9a-fA-F]{64}", digest) is None:
            raise UsageError(f"`--sha256` must be FILE=DIGEST of 64 hexadecimal digits, found `{printable(one, 120)}`")
        demanded[path] = digest.lower()
    endpoint = options.endpoint or environment.get(ENDPOINT_VARIABLES[hub]) or None
    if endpoint is not None and re.fullmatch(r"https?://[^\s@]+", endpoint) is None:
        raise UsageError("`--endpoint` must be an http or https address without a password")
    job = Job(
        hub=hub,
        repo=options.repo,
        revision=options.revision,
        folder=options.to,
        selection=selection,
        demanded=demanded,
        workers=options.workers,
        verify=options.verify,
    )
    return job, _token(hub, options.token_file, environment), endpoint


def _token(hub: HubName, file: Path | None, environment: Mapping[str, str]) -> str | None:
    if file is None:
        return environment.get(TOKEN_VARIABLES[hub]) or None
    try:
        token = file.read_text()[:4096].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"`{file}` cannot be read: {getattr(error, 'strerror', 'not text')}") from None
    if not token:
        raise UsageError(f"`{file}` must hold a token")
    return token


def _end_on_signals() -> None:
    """A SIGTERM ends the process at once: what has come is on the disk, and the next run goes on with it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda _number, _frame: os._exit(143))


def _fail(error: FetchError, options: argparse.Namespace) -> None:
    if options.json:
        _line(sys.stdout, "failed", reason=str(error.reason), message=error.message, remedy=error.remedy)
    print(f"sm70-fetch: {error}", file=sys.stderr)
    if options.termination_log is None:
        return
    words = Termination(kind=TerminationKind.FAILURE, reason=error.reason, message=error.message, remedy=error.remedy)
    try:
        options.termination_log.write_bytes(words.encode())
    except OSError as problem:
        print(f"sm70-fetch: `{options.termination_log}`: {problem.strerror}", file=sys.stderr)


def _members(progress: Progress) -> dict[str, object]:
    found: dict[str, object] = {
        "bytes": progress.bytes,
        "totalBytes": progress.total_bytes,
        "files": progress.files,
        "totalFiles": progress.total_files,
    }
    return found if progress.file is None else {"file": progress.file, **found}


def _line(stream: TextIO, event: str, **members: object) -> None:
    print(json.dumps({"event": event, **members}), file=stream, flush=True)


class _Lines:
    """Progress for machines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def __call__(self, progress: Progress) -> None:
        _line(self._stream, "progress", **_members(progress))


class _Bars:
    """Progress for people."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bars = Bars(*columns, TimeRemainingColumn(), console=Console(stderr=True))
        self._task = self._bars.add_task("looking", total=None)

    def __enter__(self) -> None:
        self._bars.start()

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def __call__(self, progress: Progress) -> None:
        said = f"{progress.files}/{progress.total_files} files"
        self._bars.update(self._task, description=said, completed=progress.bytes, total=progress.total_bytes)


if __name__ == "__main__":
    sys.exit(main())
