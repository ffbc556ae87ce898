"""The simulated engine itself: a client cannot tell it from the real one, and each fault is what it says."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from simulated_engine.behaviour import Behaviour
from sm70_engine.tinymodel.chains import answers
from sm70_engine.tinymodel.cli import main as make_model
from sm70_engine.tinymodel.tokenizer import END_OF_TURN
from sm70_profiles.catalog import load_profile
from sm70_profiles.identity import digest
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.report import AccelerationReport, CacheState, ReportError, parse_report
from sm70_profiles.termination import Termination, TerminationKind, parse_termination
from sm70_qualify.client import Endpoint

PROFILE = "tiny_hybrid_reference"
KEY = "a-key-for-tests"
TESTS = Path(__file__).resolve().parents[1]
RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())
"""What the real engine answered; `python -m simulated_engine.record` writes it."""


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    port: int
    folder: Path

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=10, headers={"Authorization": f"Bearer {KEY}"})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def report(self) -> AccelerationReport:
        return parse_report(self.http.get("/sm70/acceleration").content)

    def change(self, **members: Any) -> None:
        assert self.http.post("/simulated", json=members).status_code == 200

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=20)

    def last_words(self) -> Termination | None:
        return parse_termination((self.folder / "termination").read_text())


Starter = Callable[..., Running]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint: a simulated engine reads its head as the real one does."""
    folder = tmp_path_factory.mktemp("model")
    make_model(["--out", str(folder)])
    return folder


@pytest.fixture(scope="module")
def start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    """Starts one, with members of its behaviour; `wait` for it to listen."""
    started: list[Running] = []

    def go(
        wait: bool = True,
        request: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        arguments: Sequence[str] = (),
        **behaviour: Any,
    ) -> Running:
        folder = tmp_path_factory.mktemp("engine")
        (folder / "termination").touch()
        document = {
            "profile": load_profile(PROFILE).model_dump(mode="json", by_alias=True, exclude_none=True),
            "modelPath": str(model),
            "servedName": "tiny",
            "host": "127.0.0.1",
            "drainTimeoutSeconds": 5,
            **(request or {}),
        }
        port = _free_port()
        variables = _variables(folder, document | {"port": port}, behaviour) | (environment or {})
        running = Running(_process(folder, variables, arguments), port, folder)
        started.append(running)
        deadline = time.monotonic() + 20
        while wait:
            assert running.process.poll() is None, (folder / "log").read_text()
            try:
                running.http.get("/health")
            except httpx.TransportError:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            else:
                break
        return running

    yield go
    for one in started:
        one.process.kill()
        one.process.wait()


@pytest.fixture(scope="module")
def shared(start: Starter) -> Running:
    return start()


@pytest.fixture
def engine(shared: Running) -> Running:
    """One engine for many tests; it is a good one again at the begin of each."""
    shared.change(**Behaviour().model_dump(mode="json", by_alias=True))
    return shared


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _variables(folder: Path, document: dict[str, Any], behaviour: dict[str, Any]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SM70_", "VLLM_"))}
    return kept | {
        "PYTHONPATH": str(TESTS),
        "SM70_SERVE_REQUEST": json.dumps(document),
        "SM70_TERMINATION_LOG": str(folder / "termination"),
        "SIMULATED_ENGINE": json.dumps(behaviour),
        "SIMULATED_ENGINE_KEPT": str(folder / "kept.json"),
        "VLLM_API_KEY": KEY,
        "XDG_CACHE_HOME": str(folder / "cache"),
        "NVIDIA_VISIBLE_DEVICES": "GPU-1",
    }


def _process(folder: Path, variables: dict[str, str], arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "simulated_engine", *arguments]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, env=variables, stdout=log, stderr=log)


def test_it_speaks_like_the_real_engine(engine: Running) -> None:
    """Every document has the members of the recorded one, and its words where they do not depend on the machine."""
    ours, ready = (engine.http.get(path).json() for path in ("/v1/sm70/acceleration", "/sm70/ready"))
    real = RECORDED["report"]
    assert set(real) == set(ours) == {field.alias for field in AccelerationReport.model_fields.values()}
    for member in ("engine", "profile", "device", "effective", "compileCache", "capacity", "startup"):
        assert set(real[member]) == set(ours[member]), member
    for member in ("schemaVersion", "expectedAcceleration", "summary", "paths", "checkpoints"):
        assert real[member] == ours[member], member
    routes = {(one["route"], one["stage"]) for one in ours["routes"]}
    assert {(one["route"], one["stage"]) for one in real["routes"]} == routes
    assert set(real["startup"]["seconds"]) == set(ours["startup"]["seconds"])
    assert RECORDED["ready"] == ready
    assert RECORDED["profileHash"] == ours["profile"]["hash"] == digest(load_profile(PROFILE))


def test_its_series_are_the_real_ones(engine: Running) -> None:
    text = engine.http.get("/metrics").text
    ours = {family.name for family in text_string_to_metric_families(text) if family.name.startswith("sm70_")}
    assert ours == {name for name in RECORDED["series"] if name.startswith("sm70_")}


def test_the_key_guards_what_it_should(engine: Running) -> None:
    url = engine.url
    for path, status in RECORDED["withoutKey"].items():
        assert httpx.get(f"{url}{path}").status_code == status, path


@pytest.mark.parametrize("kind", ["text", "toolCall", "json"])
def test_it_recites_what_the_tiny_model_recites(engine: Running, kind: str) -> None:
    known = {one["kind"]: one for one in answers(0, "tiny", END_OF_TURN)["answers"]}[kind]
    whole = engine.http.post("/v1/chat/completions", json={"model": "tiny", **known["request"]}).json()
    assert set(whole) >= {"id", "object", "created", "model", "choices", "usage"}
    message, expected = whole["choices"][0]["message"], known["expected"]
    assert whole["choices"][0]["finish_reason"] == expected["finishReason"]
    assert whole["usage"]["completion_tokens"] == expected["completionTokens"]
    if kind == "toolCall":
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == expected["toolCall"]["arguments"]
    else:
        assert message["content"] == expected["content"]
    request = {
        key: value for key, value in known["request"].items() if key not in ("messages", "temperature", "max_tokens")
    }
    with Endpoint(engine.url, model="tiny", api_key=KEY) as endpoint:
        streamed = endpoint.ask(known["request"]["messages"], **request)
    assert streamed.text == (message["content"] or "")
    assert streamed.completion_tokens == expected["completionTokens"]
    assert streamed.finish_reason == expected["finishReason"]


def test_ids_are_returned_and_add_up(engine: Running) -> None:
    body = {"model": "tiny", "prompt": "x" * 300, "max_tokens": 8, "return_token_ids": True}
    first, second = (engine.http.post("/v1/completions", json=body).json() for _ in range(2))
    assert len(first["choices"][0]["token_ids"]) == first["usage"]["completion_tokens"] == 8
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 256


@pytest.mark.parametrize("case", RECORDED["refused"], ids=lambda case: str(case["name"]))
def test_a_bad_request_is_refused_as_the_real_one_does(engine: Running, case: dict[str, Any]) -> None:
    headers = {"Content-Type": "application/json"}
    answer = engine.http.post("/v1/chat/completions", content=case["body"].encode(), headers=headers)
    assert answer.status_code == case["status"]


def test_requests_are_counted(engine: Running) -> None:
    def counted() -> dict[tuple[str, str], int]:
        return {(row.route, str(row.stage)): row.dispatches for row in engine.report().routes}

    before = counted()
    engine.change(fallbacks={"attention_e5m2_reference": 2})
    engine.http.post("/v1/chat/completions", json={"model": "tiny", "messages": [{"role": "user", "content": "x"}]})
    moved = {key: count - before.get(key, 0) for key, count in counted().items()}
    assert moved["gdn_reference", "prefill"] == 1
    assert moved["gdn_reference", "decode"] > 10
    assert moved["attention_e5m2_reference", "prefill"] == 2


def test_a_disabled_path_is_not_ready_and_says_why(engine: Running, start: Starter) -> None:
    engine.change(disabled={"reference_gdn": "operator_missing:gdn"})
    answer = engine.http.get("/sm70/ready")
    assert answer.status_code == 503
    assert answer.json()["path"] == "reference_gdn"
    assert engine.http.get("/health").status_code == 200
    assert str(engine.report().summary) == "2/3"
    allowed = {"acceleration": {"policy": "Require", "allowDisabled": [{"path": "reference_gdn", "because": "test"}]}}
    assert start(request=allowed, disabled={"reference_gdn": "x"}).http.get("/sm70/ready").status_code == 200
    assert (
        start(request={"acceleration": {"policy": "Report"}}, disabled={"reference_gdn": "x"})
        .http.get("/sm70/ready")
        .status_code
        == 200
    )


def test_faults_can_be_set_while_it_runs_and_outlive_the_container(engine: Running) -> None:
    engine.change(disabled={"reference_gdn": "x"}, healthStatus=404)
    assert engine.http.get("/sm70/ready").status_code == 503
    assert engine.http.get("/health").status_code == 404
    assert engine.http.post("/simulated", json={"nonsense": 1}).status_code == 400
    assert json.loads((engine.folder / "kept.json").read_text())["disabled"] == {"reference_gdn": "x"}


@pytest.mark.parametrize("report", ["Absent", "Garbage"])
def test_a_report_that_cannot_be_had(engine: Running, report: str) -> None:
    engine.change(report=report)
    answer = engine.http.get("/sm70/acceleration")
    assert answer.status_code == (404 if report == "Absent" else 200)
    with pytest.raises(ReportError):
        parse_report(answer.content)


def test_a_report_of_another_profile(engine: Running) -> None:
    engine.change(report="OtherProfile")
    assert engine.report().profile.hash == "0" * 64


@pytest.mark.parametrize("kind", ["Wrong", "Varying"])
def test_answers_that_are_not_right(engine: Running, kind: str) -> None:
    engine.change(answers=kind)
    with Endpoint(engine.url, model="tiny", api_key=KEY) as endpoint:
        texts = {endpoint.ask("Recite your paragraph.").text for _ in range(3)}
    assert not any(text.startswith("This tiny model recites") for text in texts)
    assert len(texts) == (1 if kind == "Wrong" else 3)


def test_a_stream_in_flight_is_finished_before_it_ends(start: Starter) -> None:
    running = start(tokenSeconds=0.01)
    done: list[str] = []
    began = threading.Event()

    def ask() -> None:
        with Endpoint(running.url, model="tiny", api_key=KEY) as endpoint:
            done.append(endpoint.ask("Recite.", seen=lambda _piece: began.set()).text)

    thread = threading.Thread(target=ask)
    thread.start()
    assert began.wait(10)
    assert running.stop() == 0
    thread.join(10)
    assert done[0].endswith("done honest jobs.")
    words = running.last_words()
    assert words is not None
    assert (words.kind, words.reason) == (TerminationKind.SHUTDOWN, TerminationReason.SHUTDOWN)
    assert any(row.dispatches for row in words.routes)


def test_a_stream_that_is_too_slow_to_drain_is_cut(start: Starter) -> None:
    running = start(request={"drainTimeoutSeconds": 0}, tokenSeconds=0.05)
    began, cut = threading.Event(), threading.Event()

    def ask() -> None:
        with Endpoint(running.url, model="tiny", api_key=KEY) as endpoint:
            try:
                endpoint.ask("Recite.", seen=lambda _piece: began.set())
            except httpx.TransportError:
                cut.set()

    thread = threading.Thread(target=ask)
    thread.start()
    assert began.wait(10)
    assert running.stop() == 0
    thread.join(10)
    assert cut.is_set()
    words = running.last_words()
    assert words is not None
    assert "1 requests were cut off" in words.message


def test_it_dies_with_the_words_it_was_given(start: Starter) -> None:
    running = start(wait=False, dies={"reason": "ChecksumMismatch", "message": "another sum", "exitCode": 2})
    assert running.process.wait(timeout=20) == 2
    words = running.last_words()
    assert words is not None
    assert (words.reason, words.message) == (TerminationReason.CHECKSUM_MISMATCH, "another sum")


def test_it_dies_without_words_while_it_serves(start: Starter) -> None:
    running = start()
    running.change(dies={"at": "Serving", "exitCode": 3})
    assert running.process.wait(timeout=20) == 3
    assert running.last_words() is None
    assert json.loads((running.folder / "kept.json").read_text())["dies"] is None


def test_what_is_not_there_or_refused_ends_as_with_the_real_one(start: Starter) -> None:
    gone = start(wait=False, request={"modelPath": "/not/there"})
    assert gone.process.wait(timeout=20) == 2
    refused = start(wait=False, request={"overrides": {"maxNumSeqs": 64, "maxNumBatchedTokens": 8}})
    assert refused.process.wait(timeout=20) == 2
    words = [one.last_words() for one in (gone, refused)]
    assert [one.reason for one in words if one] == [TerminationReason.PATH_NOT_FOUND, TerminationReason.REFUSED]


def test_it_can_be_ended_before_it_listens_unless_it_is_deaf(start: Starter) -> None:
    running = start(wait=False, stuckIn="LoadingWeights")
    _await_alive(running)
    assert running.stop() == 0
    deaf = start(deaf=True)
    deaf.process.send_signal(signal.SIGTERM)
    assert deaf.http.get("/health").status_code == 200


def _await_alive(running: Running) -> None:
    """Until Python handles signals: before that a SIGTERM ends it as any process."""
    status = Path(f"/proc/{running.process.pid}/status")
    deadline = time.monotonic() + 20
    caught = 0
    while not caught >> (signal.SIGTERM - 1) & 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
        caught = next(int(line.split()[1], 16) for line in status.read_text().splitlines() if line.startswith("SigCgt"))


def test_a_first_start_fills_the_cache_and_the_next_finds_it(start: Starter, tmp_path: Path) -> None:
    compiles = {"overrides": {"enforceEager": False}}
    found = []
    for _ in range(2):
        running = start(request=compiles, environment={"XDG_CACHE_HOME": str(tmp_path)}, cacheFiles=4)
        found.append(running.report().compile_cache)
        assert running.stop() == 0
    assert [(one.state, one.files_before, one.files_added) for one in found if one] == [
        (CacheState.COLD, 0, 4),
        (CacheState.WARM, 4, 0),
    ]


def test_the_phases_of_a_start_can_be_watched(start: Starter) -> None:
    port = _free_port()
    start(wait=False, environment={"SM70_STATUS_PORT": str(port)}, stuckIn="Compiling")
    deadline = time.monotonic() + 20
    phase = ""
    while phase != "Compiling":
        assert time.monotonic() < deadline
        try:
            phase = httpx.get(f"http://127.0.0.1:{port}/sm70/startup").json().get("phase", "")
        except httpx.TransportError:
            time.sleep(0.02)


def test_a_preflight_finds_what_the_real_one_finds(start: Starter) -> None:
    well = start(wait=False, arguments=["--preflight"])
    assert well.process.wait(timeout=20) == 0
    wrong = start(wait=False, arguments=["--preflight"], request={"modelPath": "/not/there"})
    assert wrong.process.wait(timeout=20) == 2
    words = [one.last_words() for one in (well, wrong)]
    assert [(one.kind, one.reason) for one in words if one] == [
        (TerminationKind.PREFLIGHT, TerminationReason.PASSED),
        (TerminationKind.PREFLIGHT, TerminationReason.PATH_NOT_FOUND),
    ]
