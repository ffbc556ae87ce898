"""Reports for people: a table, and a line a gate while the run goes on."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sm70_profiles.qualification import AnyCheck, Bound, Gate, QualificationReport, Verdict
from sm70_qualify.run import Watcher

STYLES = {
    Verdict.PASSED: "green",
    Verdict.FAILED: "bold red",
    Verdict.INCONCLUSIVE: "yellow",
    Verdict.ERROR: "bold magenta",
}


def show(report: QualificationReport, console: Console) -> None:
    """A row a gate, then what the gates say, then the verdict."""
    title = f"suite {report.suite.name} {report.suite.version} ({report.suite.digest[:10]})"
    if report.profile:
        title += f", profile {report.profile}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for name in ("gate", "verdict", "measured", "threshold", "unit", "samples"):
        right = name in ("measured", "threshold", "samples")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for gate in report.gates:
        table.add_row(*_cells(gate))
    for skipped in report.skipped:
        table.add_row(skipped.name, Text("skipped", style="dim"))
    console.print(table)
    for gate in sorted(report.gates, key=lambda gate: gate.verdict is Verdict.PASSED):
        if gate.message:
            console.print(Text.assemble((gate.name, STYLES[gate.verdict]), f": {gate.message}"))
    for skipped in report.skipped:
        console.print(Text(f"{skipped.name}: {skipped.because}", style="dim"))
    console.print(_conclusion(report))


def _cells(gate: Gate) -> tuple[str | Text, ...]:
    sign = "≥ " if gate.bound is Bound.AT_LEAST else "≤ "
    return (
        gate.name,
        Text(gate.verdict, style=STYLES[gate.verdict]),
        gate.measured or "",
        sign + gate.threshold if gate.threshold is not None else "",
        gate.unit,
        str(gate.samples) if gate.samples else "",
    )


def _conclusion(report: QualificationReport) -> Text:
    line = Text.assemble("verdict: ", (str(report.verdict), STYLES[report.verdict]))
    if report.message and not report.gates:
        line.append(f" — {report.message}")
    return line


def lines(console: Console) -> Watcher:
    """A line when a gate begins and one when it is judged; on a terminal the second replaces the first."""
    status = console.status("", spinner="dots") if console.is_terminal else None

    def begins(check: AnyCheck, number: int, of: int) -> None:
        if status is not None:
            status.update(f"{number}/{of} {check.name}")
            status.start()

    def judged(gate: Gate) -> None:
        if status is not None:
            status.stop()
        measured = f" {gate.measured} {gate.unit}" if gate.measured is not None else ""
        console.print(Text.assemble((f"{gate.verdict:<12}", STYLES[gate.verdict]), f" {gate.name}{measured}"))

    return Watcher(begins, judged)
