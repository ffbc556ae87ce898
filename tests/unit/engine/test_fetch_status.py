"""A download tells how far it is on the port where a starting server tells its phase."""

from __future__ import annotations

import socket

import httpx
import pytest

from sm70_engine.fetch.fetching import Progress
from sm70_engine.fetch.status import told_to_askers
from sm70_engine.serve.failure import ServeError
from sm70_profiles.report import StartupPhase, StartupReport


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def test_whoever_asks_is_told_the_newest_progress() -> None:
    port = free_port()
    seen: list[Progress] = []

    def ask() -> StartupReport:
        return StartupReport.model_validate_json(httpx.get(f"http://127.0.0.1:{port}/sm70/startup").content)

    with told_to_askers({"SM70_STATUS_PORT": str(port)}, seen.append) as tell:
        assert (ask().phase, ask().done_bytes) == (StartupPhase.DOWNLOADING, None)
        for progress in (Progress(1, 10, 0, 2), Progress(7, 10, 1, 2)):
            tell(progress)
        assert (ask().done_bytes, ask().total_bytes) == (7, 10)
    assert [one.bytes for one in seen] == [1, 7]
    with pytest.raises(httpx.ConnectError):
        ask()


def test_nobody_is_answered_unless_a_port_is_named_and_a_bad_one_is_refused() -> None:
    with told_to_askers({}, lambda _: None) as tell:
        tell(Progress(1, 1, 1, 1))
    with pytest.raises(ServeError, match="SM70_STATUS_PORT"), told_to_askers({"SM70_STATUS_PORT": "x"}, lambda _: None):
        pass
