"""One server of the reference profile: what it answers, what it says of itself, and how it ends."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.conftest import Starter
from engine.judge import faults
from engine.qualified import QUICK, bench, failed, qualify
from engine.server import GPU, Server
from sm70_profiles.catalog import load_profile
from sm70_profiles.identity import digest
from sm70_profiles.qualification import load_suite
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.report import CacheState, PathState, StartupPhase, UuidSource
from sm70_profiles.routes import ROUTES, Stage
from sm70_profiles.schemas import schema
from sm70_profiles.termination import TerminationKind

pytestmark = pytest.mark.engine
PROFILE = "tiny_hybrid_reference"
KINDS = ["text", "toolCall", "json"]
GDN_LAYERS, ATTENTION_LAYERS = 3, 1
LINEARS_A_STEP = 2 * 4 + 2
"""Two a layer in the MLPs, and two in the layer with full attention."""


@pytest.fixture(scope="module")
def server(starter: Starter) -> Server:
    paced = {"mixedPrefillStepLatencyMilliseconds": 200}
    return starter(PROFILE, "tiny", overrides={"promptTokensDetails": True, **paced})


def test_the_engine_is_ready(server: Server) -> None:
    assert server.http.get("/health").status_code == 200
    answer = server.http.get("/sm70/ready", headers={"Authorization": ""})
    assert answer.status_code == 200
    assert answer.json()["ready"] is True


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [
        ("/v1/sm70/acceleration", None, 401),
        ("/v1/sm70/acceleration", "Bearer wrong", 401),
        ("/v1/models", None, 401),
        ("/sm70/acceleration", None, 200),
        ("/sm70/ready", None, 200),
        ("/metrics", None, 200),
    ],
)
def test_the_key_guards_what_it_should(server: Server, path: str, header: str | None, status: int) -> None:
    headers = {} if header is None else {"Authorization": header}
    answer = httpx.get(f"{server.url}{path}", headers=headers, timeout=60)
    assert answer.status_code == status
    assert server.key not in answer.text


def test_the_report_says_what_serves(server: Server) -> None:
    report, profile = server.report(), load_profile(PROFILE)
    assert report.profile.name == PROFILE
    assert report.profile.hash == digest(profile)
    assert report.engine.vllm == "0.32.0+cpu"
    assert report.expected_acceleration == profile.expected_acceleration
    assert report.summary.enabled == report.summary.total == len(profile.expected_acceleration)
    assert report.device.name == "CPU"
    assert (report.device.uuids, report.device.uuid_source) == ((GPU,), UuidSource.ENVIRONMENT)
    assert report.effective.argv[0].endswith("/tiny")
    assert report.worker_facts["attention_backends"] == "CUSTOM,GDN_ATTN"
    assert report.worker_facts["block_size"] == 128
    assert report.compile_cache is not None
    assert (report.compile_cache.enabled, report.compile_cache.state) == (False, CacheState.OFF)
    assert report.capacity is not None
    assert report.capacity.block_size == 128
    assert report.capacity.max_model_len == 4096
    assert report.capacity.kv_tokens // 4096 == report.capacity.residents_at_max_len >= 1
    assert report.startup is not None
    assert report.startup.phase is StartupPhase.SERVING
    assert {StartupPhase.STARTING, StartupPhase.LOADING_WEIGHTS, StartupPhase.COMPILING} <= set(report.startup.seconds)
    assert [(one.what, one.verdict) for one in report.checkpoints] == [("model", "unverified")]


def test_the_report_fits_the_schema_that_the_wheel_ships(server: Server) -> None:
    document = server.http.get("/v1/sm70/acceleration").json()
    jsonschema.Draft202012Validator(schema("acceleration-report")).validate(document)
    json.dumps(document, allow_nan=False)


def test_no_path_of_a_gpu_recipe_is_pretended(server: Server) -> None:
    for path in server.report().paths:
        if not path.name.startswith("reference_"):
            assert (path.state, path.expected) == (PathState.NOT_APPLICABLE, False)


def test_the_twins_agree(server: Server) -> None:
    guarded, open_ = (server.http.get(path).json() for path in ("/v1/sm70/acceleration", "/sm70/acceleration"))
    for volatile in ("observedAt", "compileCache"):
        guarded.pop(volatile), open_.pop(volatile)
    assert guarded == open_


def test_the_report_is_in_the_log_once(server: Server) -> None:
    assert server.log.count("acceleration report: {") == 1
    assert server.log.count(f"profile {PROFILE}, device CPU") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_it_answers_right(server: Server, answers: dict[str, dict[str, Any]], kind: str) -> None:
    answer = server.chat(answers[kind]["request"])
    assert faults(answer, answers[kind]["expected"]) == []


def test_right_answers_are_many_at_once_too(server: Server, answers: dict[str, dict[str, Any]]) -> None:
    requests = [answers[kind] for kind in KINDS * 3]
    with ThreadPoolExecutor(len(requests)) as pool:
        found = list(pool.map(lambda one: server.chat(one["request"]), requests))
    assert [faults(answer, one["expected"]) for answer, one in zip(found, requests, strict=True)] == [[]] * len(
        requests
    )


def test_sixty_four_requests_at_once(server: Server, answers: dict[str, dict[str, Any]]) -> None:
    one = answers["text"]
    request = {**one["request"], "max_tokens": 4}

    def ask(number: int) -> tuple[str, int]:
        answer = server.chat(request, seed=number)
        return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]

    with ThreadPoolExecutor(64) as pool:
        found = set(pool.map(ask, range(64)))
    ((text, tokens),) = found
    assert tokens == 4
    assert one["expected"]["content"].startswith(text)


def test_several_choices_of_one_request(server: Server, answers: dict[str, dict[str, Any]]) -> None:
    one = answers["text"]
    answer = server.chat({**one["request"], "max_tokens": 12}, n=3, temperature=0.01, seed=7)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice in answer["choices"]:
        assert one["expected"]["content"].startswith(choice["message"]["content"])
    assert answer["usage"]["completion_tokens"] == 3 * 12


def test_a_json_schema_binds_an_answer_that_would_be_another(
    server: Server, answers: dict[str, dict[str, Any]]
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "color", "schema": {"enum": ["red", "green"]}}}
    request = {**answers["text"]["request"], "max_tokens": 16}
    answer = server.chat(request, response_format=form)["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert json.loads(answer["message"]["content"]) in ("red", "green")


def test_a_client_that_goes_away_frees_its_place(server: Server, answers: dict[str, dict[str, Any]]) -> None:
    request = {**answers["text"]["request"], "model": "tiny", "stream": True, "max_tokens": 3000, "ignore_eos": True}
    with server.http.stream("POST", "/v1/chat/completions", json=request) as response:
        next(response.iter_lines())
        assert running(server) == 1
    deadline = time.monotonic() + 60
    while running(server) and time.monotonic() < deadline:
        pass  # each question is a request to the server
    assert running(server) == 0
    assert faults(server.chat(answers["text"]["request"]), answers["text"]["expected"]) == []


def running(server: Server) -> int:
    """Requests that the engine is working on, as its metrics say."""
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        if family.name == "vllm:num_requests_running":
            return int(sum(sample.value for sample in family.samples))
    raise AssertionError("no such metric")


def test_a_long_prompt_beside_a_running_answer_disturbs_neither(
    server: Server, answers: dict[str, dict[str, Any]]
) -> None:
    one = answers["text"]
    long = {"messages": [{"role": "user", "content": "y" * 3000}], "max_tokens": 2, "temperature": 0}
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(server.chat, {**one["request"], "max_tokens": 40})
        prompt = pool.submit(server.chat, long)
        assert one["expected"]["content"].startswith(beside.result()["choices"][0]["message"]["content"])
        assert prompt.result()["usage"]["prompt_tokens"] > 1000
    assert "PacedAsyncScheduler" in server.log or "PacedScheduler" in server.log


def test_a_stream_comes_in_pieces(server: Server, answers: dict[str, dict[str, Any]]) -> None:
    one = answers["text"]
    with server.endpoint() as endpoint:
        answer = endpoint.ask(one["request"]["messages"])
    assert answer.text == one["expected"]["content"]
    assert answer.finish_reason == "stop"
    assert answer.completion_tokens == one["expected"]["completionTokens"]
    assert answer.pieces > 10


def test_a_tool_call_is_streamed(server: Server, answers: dict[str, dict[str, Any]]) -> None:
    one = answers["toolCall"]
    with server.endpoint() as endpoint:
        answer = endpoint.ask(one["request"]["messages"], tools=one["request"]["tools"])
    (call,) = answer.tool_calls
    assert call.name == one["expected"]["toolCall"]["name"]
    assert json.loads(call.arguments) == one["expected"]["toolCall"]["arguments"]
    assert answer.finish_reason == "tool_calls"


def test_a_conversation_goes_on_after_the_tool(server: Server, answers: dict[str, dict[str, Any]]) -> None:
    one = answers["toolCall"]["request"]
    message = server.chat(one)["choices"][0]["message"]
    told = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "all well"}
    asked = {**one, "messages": [*one["messages"], message, told], "max_tokens": 8}
    answer = server.chat(asked)["choices"][0]["message"]["content"]
    assert answers["text"]["expected"]["content"].startswith(answer)


def test_a_repeated_prefix_is_not_computed_again(server: Server) -> None:
    prompt = {"messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 2, "temperature": 0}
    usages = [server.chat(prompt)["usage"] for _ in range(2)]
    assert usages[0]["prompt_tokens_details"]["cached_tokens"] == 0
    assert usages[1]["prompt_tokens_details"]["cached_tokens"] >= 256
    assert usages[0]["prompt_tokens"] == usages[1]["prompt_tokens"]


def test_a_prompt_outside_of_the_chains_gets_the_text(server: Server, answers: dict[str, dict[str, Any]]) -> None:
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4, "temperature": 0}
    answer = server.http.post("/v1/completions", json=body).json()
    assert answers["text"]["expected"]["content"].startswith(answer["choices"][0]["text"])


def test_the_judge_passes_it(server: Server, tmp_path: Path) -> None:
    report = qualify(server, tmp_path, QUICK)
    assert failed(report) == set(), report.message
    assert [gate.name for gate in report.gates] == list(QUICK)
    assert (report.profile, report.profile_hash) == (PROFILE, server.report().profile.hash)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_whole_smoke_suite_passes_it_and_the_benchmark_counts_its_tokens(server: Server, tmp_path: Path) -> None:
    report = qualify(server, tmp_path)
    assert failed(report) == set(), report.message
    assert [gate.name for gate in report.gates] == [check.name for check in load_suite("smoke").gates]
    for interface in ([], ["--chat"]):
        result = bench(server, tmp_path, "--prompt-tokens", "256,1K", "--requests", "1", *interface)
        for level in result.levels:
            assert (level.completed, level.total_output_tokens) == (1, 16)
            assert level.contract.input_len_exact
            assert level.token_source == ("token ids",)


def test_every_dispatch_is_counted(server: Server, answers: dict[str, dict[str, Any]]) -> None:
    before = server.dispatches()
    tokens = server.chat(answers["text"]["request"])["usage"]["completion_tokens"]
    after = server.dispatches()
    moved = {key: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key, 0)}
    decoded = tokens - 1  # the first token comes out of the prefill
    layers = {
        "gdn_reference": GDN_LAYERS,
        "attention_e4m3_reference": ATTENTION_LAYERS,
        "nvfp4_linear_reference": LINEARS_A_STEP,
    }
    prefills = {(route, Stage.PREFILL): count for route, count in layers.items()}
    assert moved == prefills | {(route, Stage.DECODE): count * decoded for route, count in layers.items()}


def test_no_fallback_was_taken(server: Server) -> None:
    assert not [route for route, _ in server.dispatches() if ROUTES[route].fallback]


def test_the_metrics_say_what_the_report_says(server: Server) -> None:
    metrics = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(server.http.get("/metrics").text)
        for sample in family.samples
        if sample.name.startswith("sm70_")
    }
    report = server.report()
    for path in report.paths:
        assert metrics[("sm70_acceleration_path", *sorted((path.state, path.name)))] == 1
    for row in report.routes:
        assert metrics[("sm70_route_dispatch_total", *sorted((row.route, row.stage)))] == row.dispatches
    # Each reason that this engine can have is there before its first dispatch.
    assert report.fallbacks
    for why in report.fallbacks:
        assert metrics[("sm70_route_fallback_total", *sorted((why.route, why.stage, why.reason)))] == 0


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b'{"model": "tiny"}', 400),
        (b'{"model": "other", "messages": [{"role": "user", "content": "x"}]}', 404),
        (json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x" * 9000}]}).encode(), 400),
    ],
    ids=["no JSON", "no messages", "another model", "too long"],
)
def test_a_bad_request_is_refused_as_vllm_does(server: Server, body: bytes, status: int) -> None:
    headers = {"Content-Type": "application/json"}
    assert server.http.post("/v1/chat/completions", content=body, headers=headers).status_code == status


def test_it_ends_with_last_words(server: Server) -> None:
    """The module's last test: it ends the server that the others used."""
    counts, engine = server.dispatches(), Path(f"/proc/{server.report().worker_facts['pid']}")
    documents = Path("/dev/shm").glob("sm70-*/session.json")
    (session,) = (path for path in documents if f'"port":{server.port}' in path.read_text())
    assert server.stop() == 0
    words = server.last_words()
    assert (words.kind, words.reason) == (TerminationKind.SHUTDOWN, TerminationReason.SHUTDOWN)
    assert {(row.route, row.stage): row.dispatches for row in words.routes} == counts
    assert "sm70: routes at shutdown: " in server.log
    assert not session.exists()
    assert not engine.exists()
