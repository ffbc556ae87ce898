"""How answers are written: tables for people, JSON for machines, mistakes on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sm70_profiles.reasons import Notice, Refusal
from sm70_profiles.report import PathReport, PathState

PIPE_WIDTH = 200


class ExitCode(IntEnum):
    """What the shell is told."""

    FINE = 0
    REFUSED = 1
    UNREADABLE = 2
    UNVERIFIED = 3


_STATE_STYLE = {PathState.ENABLED: "green", PathState.DISABLED: "red", PathState.NOT_APPLICABLE: "dim"}


class Output:
    """Standard output and standard error of one command."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        # A pipe has no width; tables for another program must not be folded at eighty columns.
        self._out = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
        self._err = Console(stderr=True, highlight=False)

    def json(self, value: Any) -> None:
        """The answer for a machine: one JSON document."""
        sys.stdout.write(json.dumps(plain(value), indent=2, ensure_ascii=False) + "\n")

    def text(self, text: str) -> None:
        """Text as it is, for example a document that another program reads."""
        sys.stdout.write(text if text.endswith("\n") else text + "\n")

    def line(self, markup: str = "") -> None:
        self._out.print(markup, soft_wrap=True)

    def heading(self, text: str) -> None:
        self.line(f"\n[bold]{escape(text)}[/bold]")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """A table of plain text."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for position, column in enumerate(columns):
            table.add_column(column, overflow="fold", no_wrap=position == 0)
        for row in rows:
            table.add_row(*(escape(cell) for cell in row))
        self._out.print(table)

    def paths(self, paths: Iterable[PathReport]) -> None:
        """The predicted report, expected paths first."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("PATH", "EXPECTED", "STATE", "REASON", "MESSAGE"):
            table.add_column(column, overflow="fold", no_wrap=column == "PATH")
        for path in sorted(paths, key=lambda path: not path.expected):
            style = _STATE_STYLE[path.state]
            table.add_row(
                path.name,
                "yes" if path.expected else "",
                f"[{style}]{path.state}[/{style}]",
                escape(path.reason or ""),
                escape(path.message),
            )
        self._out.print(table)

    def notices(self, notices: Iterable[Notice]) -> None:
        for notice in notices:
            self.line(f"[yellow]{notice.severity}[/yellow] {escape(str(notice))}")

    def refusals(self, refusals: Sequence[Refusal]) -> None:
        """Every refusal: what must hold, what was found, what to do."""
        for refusal in refusals:
            self.line(f"[red]refused[/red] {escape(str(refusal))}")

    def fail(self, message: str) -> None:
        """One mistake, on standard error."""
        if self.as_json:
            sys.stderr.write(json.dumps({"error": message}, ensure_ascii=False) + "\n")
        else:
            self._err.print(f"[red]error[/red] {escape(message)}", soft_wrap=True)


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True, exclude_none=True)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
