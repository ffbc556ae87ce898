"""Runs vLLM as a child: passes its log on, forwards signals, and gives the end a name and an exit status.

Stock vLLM exits with 0 after its engine process has died. The supervisor knows whether the end was asked for: only then
is it a success.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
        it did stands. Call it from the main thread: signals are received here until the end.
        """
        with received_signals() as signals:
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
            try:
                self._forward_until_end(process, signals, on_signal)
            finally:
                kill_group(process.pid)  # an engine process that outlived its server holds memory and devices
            status = process.wait()
        reader.join(timeout=5)
        return status

    def _forward_until_end(
        self, process: subprocess.Popen[str], signals: socket.socket, on_signal: Callable[[], None]
    ) -> None:
        deadline: float | None = None
        end = os.pidfd_open(process.pid)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(end, selectors.EVENT_READ)
                selector.register(signals, selectors.EVENT_READ)
                while True:
                    remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
                    ready = {key.fileobj for key, _ in selector.select(remaining)}
                    if signals in ready:
                        for number in signals.recv(64):
                            if self._asked is None:
                                self._asked = signal.Signals(number)
                                on_signal()
                                deadline = time.monotonic() + self._drain + KILL_MARGIN_SECONDS
                            process.send_signal(number)
                    if end in ready:
                        return
                    if not ready:  # the deadline
                        kill_group(process.pid)
                        deadline = None
        finally:
            os.close(end)

    def _pass_on(self, stream: IO[str]) -> None:
        for line in stream:
            self._tail.append(line.rstrip("\n"))
            sys.stdout.write(line)
            sys.stdout.flush()


@contextmanager
def received_signals() -> Iterator[socket.socket]:
    """Within it, each signal that asks for the end is one byte to be read, its number; after it, they are ignored.

    The interpreter writes the byte, and no handler of ours does any work: two signals that arrive together would
    interrupt each other's handler, and whatever lock the first one holds.
    """
    reading, writing = socket.socketpair()
    with reading, writing:
        reading.setblocking(False)
        writing.setblocking(False)
        previous = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        for number in FORWARDED:
            signal.signal(number, lambda _number, _frame: None)
        try:
            yield reading
        finally:
            for number in FORWARDED:
                signal.signal(number, signal.SIG_IGN)  # the end is here; its message must still be written
            signal.set_wakeup_fd(previous)


def kill_group(group: int) -> None:
    """Kills whatever is left of a process group."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
