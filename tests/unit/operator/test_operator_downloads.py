"""A download's progress reaches the status: from the pod that is asked while its init container runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from sm70_operator.api.conditions import ConditionType, Reason
from sm70_operator.api.types import StartupPhase
from sm70_operator.observe.facts import PodFacts, parse_pod
from sm70_operator.observe.snapshot import EngineAnswer, Key
from sm70_operator.plan.plan import Plan
from sm70_operator.runtime.engine_client import EngineClient
from sm70_operator.runtime.poller import Poller
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.termination import Termination, TerminationKind
from unit.operator.builders import KEY, condition, deployment, placed, planned, record, resource, snapshot, spec, target

HUB = {"repo": "owner/name", "revision": "0" * 40, "claimName": "downloads"}
DOCUMENT = spec(model={"huggingFace": HUB})


def fetching(**state: Any) -> dict[str, Any]:
    raw = placed(target(DOCUMENT).name, {"state": {"waiting": {"reason": "PodInitializing"}}})
    step = {"name": "fetch-model", "containerID": "c://f", "restartCount": 0, "state": state or {"running": {}}}
    raw["status"]["initContainerStatuses"] = [step]
    return raw


Answering = Callable[[bytes], Awaitable[EngineClient]]


@pytest.fixture
async def answering() -> AsyncIterator[Answering]:
    """A server that answers everything with one body, and a client that takes it for a pod's status port."""
    made: list[tuple[asyncio.Server, EngineClient]] = []

    async def make(body: bytes) -> EngineClient:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = EngineClient(timeout_seconds=5, status_port=server.sockets[0].getsockname()[1])
        made.append((server, client))
        return client

    yield make
    for server, client in made:
        server.close()
        await client.close()


@pytest.mark.parametrize(
    ("members", "progress"),
    [
        ('"doneBytes": 1200000000, "totalBytes": 18300000000', "1.2 of 18.3 GB (6 %)"),
        ('"doneBytes": 5000000, "totalBytes": 4000000', "4.0 of 4.0 MB (100 %)"),
        ('"doneBytes": 0, "totalBytes": 0', ""),
        ('"totalBytes": 7', ""),
    ],
)
async def test_progress_is_read_for_people(answering: Answering, members: str, progress: str) -> None:
    client = await answering(f'{{"phase": "Downloading", "since": "x", {members}}}'.encode())
    found = await client.read_phase("127.0.0.1")
    assert (found.phase, found.progress) == ("Downloading", progress)


class Reader:
    """Says the next of its answers each time; the last one again and again."""

    def __init__(self, *answers: EngineAnswer) -> None:
        self.answers = list(answers)
        self.told = asyncio.Event()

    async def read(self, address: str) -> EngineAnswer:
        raise AssertionError("nothing serves yet")

    async def read_phase(self, address: str) -> EngineAnswer:
        if len(self.answers) == 1:
            self.told.set()
            return self.answers[0]
        return self.answers.pop(0)


async def test_a_pod_is_asked_while_it_downloads_and_news_wakes_its_service() -> None:
    first, second = (EngineAnswer(phase="Downloading", progress=f"{percent} %") for percent in (1, 2))
    reader, woken = Reader(first, first, second), list[Key]()
    poller = Poller(reader, woken.append, poll_seconds=0, grace_seconds=1)
    worker = asyncio.create_task(poller.work())
    try:
        pod: PodFacts = parse_pod(fetching())
        assert poller.follow(KEY, [pod]), "nobody waits for a pod that serves nothing"
        await reader.told.wait()
        await asyncio.sleep(0)
        assert poller.answers(KEY)[pod.uid] == second
        assert woken == [KEY, KEY], "once for each piece of news"
        poller.follow(KEY, [parse_pod(fetching(terminated={"exitCode": 0}))])
        assert not poller.answers(KEY)
    finally:
        worker.cancel()


def test_the_status_says_how_far_it_is_and_the_start_does_not_stand_still() -> None:
    raw = fetching()
    world = snapshot([deployment(DOCUMENT)], [raw], records=[record(DOCUMENT, good=False)], of=resource(DOCUMENT))
    world = replace(world, answers={"uid-pod-1": EngineAnswer(phase="Downloading", progress="1.2 of 18.3 GB (6 %)")})
    found = planned(world)
    model = condition(found, ConditionType.MODEL_AVAILABLE)
    assert model.reason is Reason.DOWNLOADING
    assert "1.2 of 18.3 GB (6 %)" in model.message
    assert found.status is not None
    assert found.status.startup is not None
    assert found.status.startup.phase is StartupPhase.DOWNLOADING
    late = planned(world, seconds=100_000)
    assert condition(late, ConditionType.MODEL_AVAILABLE).reason is Reason.DOWNLOADING
    assert condition(late, ConditionType.PROGRESSING).reason is not Reason.DEADLINE_EXCEEDED


def interrupted(raw: dict[str, Any]) -> dict[str, Any]:
    """The same pod, whose download was broken off and waits for its next try."""
    words = Termination(
        kind=TerminationKind.FAILURE, reason=TerminationReason.DOWNLOAD_FAILED, message="connection lost", remedy=""
    )
    state = {"terminated": {"exitCode": 1, "message": words.encode().decode()}}
    (step,) = raw["status"]["initContainerStatuses"]
    return {**raw, "status": {**raw["status"], "initContainerStatuses": [{**step, "state": state}]}}


def test_the_deadline_of_a_download_is_for_bytes_and_an_interruption_after_hours_is_none() -> None:
    def look(earlier: Plan | None, seconds: float, raw: dict[str, Any], done: int | None) -> Plan:
        raw_resource = resource(DOCUMENT)
        if earlier is not None:
            assert earlier.status is not None
            raw_resource = replace(raw_resource, status=earlier.status.model_dump(mode="json", by_alias=True))
        world = snapshot([deployment(DOCUMENT)], [raw], records=[record(DOCUMENT, good=False)], of=raw_resource)
        said = EngineAnswer(phase="Downloading", progress="x", done_bytes=done)
        return planned(replace(world, answers={} if done is None else {"uid-pod-1": said}), seconds)

    raw, hours = fetching(), 3600
    found = look(None, 0, raw, 10)
    found = look(found, 5 * hours, raw, 30)
    found = look(found, 5 * hours + 60, interrupted(raw), None)
    assert condition(found, ConditionType.MODEL_AVAILABLE).reason is Reason.DOWNLOAD_FAILED
    assert condition(found, ConditionType.PROGRESSING).reason is not Reason.DEADLINE_EXCEEDED
    # Its next try begins with less, as the part that broke is lost, and gets no further.
    again = look(found, 5 * hours + 120, raw, 25)
    assert again.status is not None
    assert again.status.startup is not None
    assert again.status.startup.downloaded_bytes == 30
    late = look(again, 6 * hours, interrupted(raw), None)
    late_condition = condition(late, ConditionType.PROGRESSING)
    assert late_condition.reason is Reason.DEADLINE_EXCEEDED
    assert "since the download last went on" in late_condition.message
