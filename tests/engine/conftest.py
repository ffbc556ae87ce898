"""Fixtures of the engine tests: the lane's python, the tiny models, and a server per module."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.server import Server, start
from lane import cpu_lane
from sm70_engine.tinymodel.cli import main as make_model

Starter = Callable[..., Server]


@pytest.fixture(scope="session")
def lane() -> Path:
    """The python of the CPU lane."""
    return cpu_lane()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every tiny checkpoint: tiny, plain, bad, draft."""
    folder = tmp_path_factory.mktemp("models")
    make_model(["--out", str(folder / "tiny"), "--draft", "dflash", "--draft-out", str(folder / "draft")])
    make_model(["--out", str(folder / "plain"), "--weights", "plain"])
    make_model(["--out", str(folder / "bad"), "--bad"])
    return folder


@pytest.fixture(scope="session")
def answers(models: Path) -> dict[str, dict[str, Any]]:
    """What is right, by kind of request."""
    return {one["kind"]: one for one in json.loads((models / "tiny/answers.json").read_text())["answers"]}


@pytest.fixture(scope="module")
def starter(lane: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    """Starts servers that end with the module: `starter(profile, model, **fields of the request)`."""
    started: list[Server] = []

    def begin(profile: str, model: str, **fields: Any) -> Server:
        server = start(lane, tmp_path_factory.mktemp("server"), profile, models / model, **fields)
        started.append(server)
        server.await_healthy()
        return server

    yield begin
    for server in started:
        server.stop()
        server.http.close()
