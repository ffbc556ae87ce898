"""What engines say is bounded in time and size, and a service is woken only when they say something new."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from aiohttp import web

from sm70_operator.observe.facts import ContainerFacts, PodFacts, parse_pod
from sm70_operator.observe.snapshot import CountWindow, EngineAnswer, Key
from sm70_operator.runtime.engine_client import EngineClient
from sm70_operator.runtime.poller import Poller
from sm70_profiles.report import MAX_REPORT_BYTES
from unit.operator.builders import KEY, placed, report, serving, with_routes


class Engine:
    """A server at 127.0.0.1 that answers with what it was given."""

    def __init__(self) -> None:
        self.status, self.body, self.hang = 200, b"", False
        self.headers: dict[str, str] = {}
        self.over = asyncio.Event()

    async def handle(self, _request: web.Request) -> web.Response:
        if self.hang:
            await self.over.wait()
        return web.Response(body=self.body, status=self.status, headers=self.headers)


@pytest.fixture
async def engine() -> AsyncIterator[tuple[Engine, EngineClient]]:
    served = Engine()
    application = web.Application()
    application.router.add_get("/{any:.*}", served.handle)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    client = EngineClient(timeout_seconds=0.5, port=runner.addresses[0][1])
    yield served, client
    served.over.set()
    await client.close()
    await runner.cleanup()


async def test_a_report_is_read(engine: tuple[Engine, EngineClient]) -> None:
    served, client = engine
    served.body = report().model_dump_json(by_alias=True).encode()
    assert (await client.read("127.0.0.1")).report == report()


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (200, b"<html>", "schema"),
        (200, b'{"schemaVersion": 1}', "schema"),
        (200, b"x" * (MAX_REPORT_BYTES + 1), "exceeds"),
        (503, b"", "503"),
        (302, b"", "302"),
    ],
)
async def test_anything_else_is_an_explained_absence(
    engine: tuple[Engine, EngineClient], status: int, body: bytes, words: str
) -> None:
    served, client = engine
    served.status, served.body, served.headers = status, body, {"Location": "http://127.0.0.1:1/"}
    answer = await client.read("127.0.0.1")
    assert answer.report is None
    assert words in answer.error


async def test_a_hanging_engine_costs_only_the_timeout(engine: tuple[Engine, EngineClient]) -> None:
    served, client = engine
    served.hang = True
    assert "no answer within" in (await client.read("127.0.0.1")).error


async def test_an_engine_that_is_not_there_is_an_explained_absence() -> None:
    client = EngineClient(timeout_seconds=5, port=1)
    assert (await client.read("127.0.0.1")).error == "ClientConnectorError"
    await client.close()


class Voices:
    """Stands for the network: each address says what it was told to say."""

    def __init__(self) -> None:
        self.words: dict[str, EngineAnswer] = {}
        self.asked: list[str] = []
        self.heard = asyncio.Event()

    async def read(self, address: str) -> EngineAnswer:
        self.asked.append(address)
        self.heard.set()
        return self.words[address]

    async def read_phase(self, address: str) -> EngineAnswer:
        return await self.read(address)


class Listening:
    """A poller with one worker, and the services that it woke."""

    def __init__(self, grace_seconds: float = 60) -> None:
        self.voices = Voices()
        self.woken: list[Key] = []
        self.poller = Poller(self.voices, self.woken.append, poll_seconds=0, grace_seconds=grace_seconds)
        self.worker = asyncio.create_task(self.poller.work())

    async def polls(self, count: int) -> None:
        """Returns when the engine has been asked so many times more, and the last answer is dealt with."""
        goal = len(self.voices.asked) + count
        while len(self.voices.asked) < goal:
            self.voices.heard.clear()
            await self.voices.heard.wait()
        await asyncio.sleep(0)


@pytest.fixture
async def listening() -> AsyncIterator[Listening]:
    made = Listening()
    yield made
    made.worker.cancel()


def pod(**changes: object) -> PodFacts:
    return replace(parse_pod(serving("r1")), **changes)  # type: ignore[arg-type]


async def test_a_service_waits_for_the_first_answer_of_each_pod(listening: Listening) -> None:
    listening.voices.words["10.0.0.7"] = EngineAnswer(report=report())
    assert not listening.poller.follow(KEY, [pod()])
    await listening.polls(1)
    assert listening.woken == [KEY]
    assert listening.poller.follow(KEY, [pod()])
    assert listening.poller.answers(KEY)["uid-pod-1"].report == report()


async def test_only_news_wake_the_service(listening: Listening) -> None:
    listening.voices.words["10.0.0.7"] = EngineAnswer(report=report())
    listening.poller.follow(KEY, [pod()])
    await listening.polls(1)
    listening.voices.words["10.0.0.7"] = EngineAnswer(report=report(observed_at="2027-01-01T00:00:00Z"))
    await listening.polls(2)
    assert listening.woken == [KEY]
    listening.voices.words["10.0.0.7"] = EngineAnswer(report=with_routes(("gdn_reference", "decode", 3, False)))
    await listening.polls(2)
    assert listening.woken == [KEY, KEY]


async def test_a_busy_engine_may_miss_a_poll(listening: Listening) -> None:
    listening.voices.words["10.0.0.7"] = EngineAnswer(report=report())
    listening.poller.follow(KEY, [pod()])
    await listening.polls(1)
    listening.voices.words["10.0.0.7"] = EngineAnswer(error="no answer")
    await listening.polls(3)
    assert listening.woken == [KEY]
    assert listening.poller.answers(KEY)["uid-pod-1"].report is not None


async def test_after_the_grace_its_silence_is_told() -> None:
    listening = Listening(grace_seconds=0)
    listening.voices.words["10.0.0.7"] = EngineAnswer(report=report())
    listening.poller.follow(KEY, [pod()])
    await listening.polls(1)
    listening.voices.words["10.0.0.7"] = EngineAnswer(error="no answer")
    await listening.polls(2)
    assert listening.poller.answers(KEY)["uid-pod-1"] == EngineAnswer(error="no answer")
    assert len(listening.woken) == 2
    listening.worker.cancel()


async def test_a_restarted_container_is_asked_anew(listening: Listening) -> None:
    listening.voices.words["10.0.0.7"] = EngineAnswer(report=report())
    listening.poller.follow(KEY, [pod()])
    await listening.polls(1)
    old = pod().container
    assert old is not None
    assert not listening.poller.follow(KEY, [pod(container=replace(old, id="c://2"))])
    assert listening.poller.answers(KEY) == {}


@pytest.mark.parametrize("seen", ["between containers", "not between containers"])
async def test_counters_that_a_restart_has_emptied_are_no_lack_of_traffic(listening: Listening, seen: str) -> None:
    words, box = listening.voices.words, pod().container
    assert box is not None
    words["10.0.0.7"] = EngineAnswer(report=with_routes(("fast", "decode", 90, False)))
    listening.poller.follow(KEY, [pod()])
    await listening.polls(2)
    words["10.0.0.7"] = EngineAnswer(report=report())
    if seen == "between containers":
        ended = replace(box, running=False, started=False, waiting_reason="CrashLoopBackOff")
        listening.poller.follow(KEY, [pod(container=ended)])
        listening.poller.follow(KEY, [pod(container=ended)])
    starting = replace(box, id="c://2", started=False)
    for container in (starting, replace(starting, started=True)):
        listening.poller.follow(KEY, [pod(container=container)])
        await listening.polls(2)
    assert listening.poller.answers(KEY)["uid-pod-1"].window == CountWindow(0, 0, 0, resets=1)
    words["10.0.0.7"] = EngineAnswer(report=with_routes(("slow", "decode", 3, True)))
    await listening.polls(2)
    found = listening.poller.answers(KEY)["uid-pod-1"].window
    assert found is not None
    assert (found.dispatches, found.fallbacks, found.resets) == (3, 3, 1), "all of it is new"


async def test_pods_that_are_gone_or_not_started_are_not_asked(listening: Listening) -> None:
    loading = parse_pod(placed("r1", {"started": False}))
    assert listening.poller.follow(KEY, [loading, pod(deleting=True)])
    listening.voices.words["10.0.0.7"] = EngineAnswer(report=report())
    listening.poller.follow(KEY, [pod()])
    await listening.polls(1)
    assert listening.poller.follow(KEY, [])
    assert listening.poller.answers(KEY) == {}
    listening.poller.forget(KEY)


async def test_a_starting_engine_tells_its_phase_and_is_not_waited_for(listening: Listening) -> None:
    starting = pod(container=ContainerFacts(id="c://1", running=True))
    listening.voices.words[starting.ip] = EngineAnswer(phase="Compiling")
    assert listening.poller.follow(KEY, [starting]), "nothing has to be heard of it first"
    await listening.polls(1)
    assert listening.woken == [KEY]
    assert listening.poller.answers(KEY)[starting.uid].phase == "Compiling"
    served = pod()
    listening.voices.words[served.ip] = EngineAnswer(report=report())
    assert not listening.poller.follow(KEY, [served]), "once it serves, its report is"


async def test_the_window_holds_what_was_dispatched_lately_and_notices_a_restart(listening: Listening) -> None:
    async def heard(count: int, fallbacks: int) -> CountWindow | None:
        routes = (("fast", "decode", count, False), ("slow", "decode", fallbacks, True))
        listening.voices.words["10.0.0.7"] = EngineAnswer(report=with_routes(*routes))
        await listening.polls(2)
        return listening.poller.answers(KEY)["uid-pod-1"].window

    listening.voices.words["10.0.0.7"] = EngineAnswer(report=with_routes(("fast", "decode", 90, False)))
    listening.poller.follow(KEY, [pod()])
    await listening.polls(1)
    assert listening.poller.answers(KEY)["uid-pod-1"].window is None, "one look is no window"
    found = await heard(97, 3)
    assert found is not None
    assert (found.dispatches, found.fallbacks, found.resets) == (10, 3, 0)
    assert await heard(97, 3) == found, "what was seen last stands while nothing is dispatched"
    again = await heard(4, 0)
    assert again is not None
    assert again.resets == 1
    assert await heard(8, 0) is not None


@pytest.mark.parametrize(
    ("body", "phase"),
    [
        (b'{"phase": "LoadingWeights", "since": "2026-11-30T12:00:00Z", "seconds": {}}', "LoadingWeights"),
        (b'{"phase": "Dancing", "since": ""}', ""),
        (b"[]", ""),
    ],
)
async def test_a_phase_is_read_or_absent(engine: tuple[Engine, EngineClient], body: bytes, phase: str) -> None:
    served, client = engine
    served.status, served.body = 200, body
    told = EngineClient(timeout_seconds=5, status_port=client._port)
    assert (await told.read_phase("127.0.0.1")).phase == phase
    await told.close()
