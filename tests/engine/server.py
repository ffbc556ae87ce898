"""Starts `sm70-serve` on the CPU lane, waits until it answers, and reads what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from sm70_profiles.catalog import load_profile
from sm70_profiles.report import AccelerationReport, parse_report
from sm70_profiles.routes import Stage
from sm70_profiles.termination import Termination, parse_termination
from sm70_qualify.client import Endpoint

START_SECONDS = 400
"""A cold start on a busy machine; a start that fails ends long before."""
API_KEY = "a-key-for-tests"
GPU = "GPU-11111111-2222-3333-4444-555555555555"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """One running server."""

    process: subprocess.Popen[bytes]
    port: int
    folder: Path
    key: str = API_KEY
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=120, headers={"Authorization": f"Bearer {self.key}"})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def endpoint(self) -> Endpoint:
        return Endpoint(self.url, model="tiny", api_key=self.key)

    def report(self) -> AccelerationReport:
        return parse_report(self.http.get("/v1/sm70/acceleration").raise_for_status().content)

    def dispatches(self) -> dict[tuple[str, Stage], int]:
        return {(row.route, row.stage): row.dispatches for row in self.report().routes if row.dispatches}

    def chat(self, request: dict[str, Any], **more: Any) -> dict[str, Any]:
        """A chat completion, not streamed."""
        response = self.http.post("/v1/chat/completions", json={"model": "tiny", **request, **more})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def await_healthy(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}\n{self.log[-6000:]}"
            try:
                if self.http.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.2)
        raise AssertionError(f"the server did not answer within {START_SECONDS} s\n{self.log[-6000:]}")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Asks for the end; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=120)

    def last_words(self) -> Termination:
        termination = parse_termination((self.folder / "termination-log").read_text())
        assert termination is not None
        return termination


def environment(folder: Path, **more: str) -> dict[str, str]:
    """What a pod's container would have: nothing of this process that concerns the engine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SM70_", "VLLM_", "PYTHON"))}
    return {
        **kept,
        "SM70_TERMINATION_LOG": str(folder / "termination-log"),
        "VLLM_API_KEY": API_KEY,
        "NVIDIA_VISIBLE_DEVICES": GPU,
        **more,
    }


def request(profile: str, model: Path, port: int, **fields: Any) -> dict[str, Any]:
    """A request as the operator hands it to the pod."""
    return {
        "profile": load_profile(profile).model_dump(mode="json", by_alias=True, exclude_none=True),
        "modelPath": str(model),
        "servedName": "tiny",
        "host": "127.0.0.1",
        "port": port,
        "drainTimeoutSeconds": 10,
        **fields,
    }


def start(python: Path, folder: Path, profile: str, model: Path, **fields: Any) -> Server:
    """Starts a server for the request; it may not answer yet."""
    port = free_port()
    document = json.dumps(request(profile, model, port, **fields))
    return Server(run(python, folder, (), SM70_SERVE_REQUEST=document), port, folder)


def type_in(python: Path, folder: Path, model: Path, profile: str, *options: str, **variables: str) -> Server:
    """Starts a server as a person does, by the command line."""
    port = free_port()
    arguments = (str(model), "--profile", profile, "--host", "127.0.0.1", "--port", str(port), *options)
    return Server(run(python, folder, arguments, **variables), port, folder)


def run(python: Path, folder: Path, arguments: Sequence[str], **variables: str) -> subprocess.Popen[bytes]:
    """Starts `sm70-serve` of the lane; what it says goes into the folder's log."""
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [str(python.parent / "sm70-serve"), *arguments],
            env=environment(folder, **variables),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
