"""Runs vLLM as a child: passes its log on, forwards signals, and gives the end a name and an exit status.

Stock vLLM exits with 0 after its engine process has died. The supervisor knows whether the end was asked for: only then
is it a success.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO

from sm70_engine.serve.last_words import TAIL_LINES

FORWARDED = (signal.SIGTERM, signal.SIGINT)
KILL_MARGIN_SECONDS = 20.0
"""How much longer than the drain a shutdown may take before everything is killed."""


class Supervisor:
    """One server process and its descendants."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], drain_seconds: float) -> None:
        self._command, self._environment, self._drain = command, environment, drain_seconds
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._asked: signal.Signals | None = None
        self._deadline: threading.Timer | None = None

    @property
    def asked(self) -> signal.Signals | None:
        """The signal that asked for the end, if one did."""
        return self._asked

    @property
    def tail(self) -> list[str]:
        """The last lines of the server's log."""
        return list(self._tail)

    def run(self, on_signal: Callable[[], None]) -> int:
        """Runs until the server has ended; returns its exit status, negative for a signal.

        `on_signal` is called when the end is asked for, before the server is told: if what follows is cut short, what
        it did stands.
        """
        process: subprocess.Popen[str] | None = None

        def forward(number: int, _frame: object) -> None:
            if self._asked is None:
                self._asked = signal.Signals(number)
                on_signal()
            if process is not None:
                self._pass_signal(process, number)

        for number in FORWARDED:
            signal.signal(number, forward)
        # A session of its own: a terminal's Ctrl-C reaches the server once, by us, and what is left can be killed.
        process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            bufsize=1,
            start_new_session=True,
        )
        assert process.stdout is not None
        reader = threading.Thread(target=self._pass_on, args=(process.stdout,), daemon=True)
        reader.start()
        if self._asked is not None:  # while the process was being made
            self._pass_signal(process, self._asked)
        try:
            status = process.wait()
        finally:
            kill_group(process.pid)  # an engine process that outlived its server holds memory and devices
            if self._deadline is not None:
                self._deadline.cancel()
            for number in FORWARDED:
                signal.signal(number, signal.SIG_IGN)  # the end is here; its message must still be written
        reader.join(timeout=5)
        return status

    def _pass_signal(self, process: subprocess.Popen[str], number: int) -> None:
        if self._deadline is None:
            self._deadline = threading.Timer(self._drain + KILL_MARGIN_SECONDS, kill_group, (process.pid,))
            self._deadline.daemon = True
            self._deadline.start()
        if process.poll() is None:
            process.send_signal(number)

    def _pass_on(self, stream: IO[str]) -> None:
        for line in stream:
            self._tail.append(line.rstrip("\n"))
            sys.stdout.write(line)
            sys.stdout.flush()


def kill_group(group: int) -> None:
    """Kills whatever is left of a process group."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
