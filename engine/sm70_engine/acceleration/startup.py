"""Where a start is: each process of the server says which phase it enters, and anyone with the file can read it.

The report is readable only when the server listens; for the phases before, `sm70-serve` answers (`serve.status`).
"""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from sm70_profiles.report import StartupPhase, StartupReport

_ORDER = list(StartupPhase)


def enter(file: Path, phase: StartupPhase, now: float | None = None) -> None:
    """Says that the phase has begun. Phases do not go back: of several workers the first one counts."""
    line = f"{phase} {time.time() if now is None else now:.3f}\n".encode()
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, line)  # one write of a short line: whole, whoever else writes
    finally:
        os.close(descriptor)


def read_startup(file: Path) -> StartupReport | None:
    """The phase of now and the durations of those before it; None when none was entered."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    entered: list[tuple[StartupPhase, float]] = []
    for line in lines:
        word, _, moment = line.partition(" ")
        phase = StartupPhase(word)
        if not entered or _ORDER.index(phase) > _ORDER.index(entered[-1][0]):
            entered.append((phase, float(moment)))
    if not entered:
        return None
    phase, since = entered[-1]
    return StartupReport(
        phase=phase,
        since=datetime.fromtimestamp(since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        seconds={before: round(end - begin, 3) for (before, begin), (_, end) in pairwise(entered)},
    )
