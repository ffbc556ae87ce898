"""Finds and ends processes without a pid file: what marks them is a variable in their environment."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROC = Path("/proc")


def until(condition: Callable[[], bool], what: str, seconds: float = 60, pause: float = 0.05) -> None:
    """Waits for a condition; raises TimeoutError that says what was waited for."""
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError(f"not within {seconds:.0f} s: {what}")
        time.sleep(pause)


def variables(name: str) -> Iterator[tuple[int, int, str]]:
    """Start time, id and value of every process that has this variable in its environment."""
    prefix = f"{name}=".encode()
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            # A process may end while it is being read.
            with contextlib.suppress(OSError):
                for variable in (entry / "environ").read_bytes().split(b"\0"):
                    if variable.startswith(prefix):
                        started = (entry / "stat").read_text().rpartition(")")[2].split()[19]
                        yield int(started), int(entry.name), variable.removeprefix(prefix).decode(errors="replace")


def marked(name: str, value: str) -> list[int]:
    """The processes with this variable in their environment, oldest first."""
    return [pid for _, pid, found in sorted(variables(name)) if found == value]


def running(folder: Path) -> bool:
    """Whether any process runs a program of a folder."""
    for link in PROC.glob("[0-9]*/exe"):
        with contextlib.suppress(OSError):
            if link.readlink().is_relative_to(folder):
                return True
    return False


def namespaced(pid: int) -> list[str]:
    """The process's ids, from the outermost PID namespace to its own."""
    for line in (PROC / str(pid) / "status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return line.split()[1:]
    return []


def kill(*pids: int, number: signal.Signals = signal.SIGKILL, seconds: float = 20) -> None:
    """Signals processes; after SIGTERM or SIGKILL, waits for their end."""
    handles = {}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handles[os.pidfd_open(pid)] = pid
    try:
        for handle in handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            for handle, pid in handles.items():
                if not select.select([handle], [], [], seconds)[0]:
                    raise TimeoutError(f"process {pid} did not end within {seconds:.0f} s of {number.name}")
    finally:
        for handle in handles:
            os.close(handle)
