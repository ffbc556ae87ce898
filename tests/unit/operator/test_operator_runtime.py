"""The process around the planner: one look at a service, honest health, watches that start anew when they must."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any

import aiohttp
import kopf
import pytest

from sm70_operator import handlers
from sm70_operator.__main__ import Process
from sm70_operator.act.apply import Executor, NotLeaderError
from sm70_operator.act.events import EventRecorder
from sm70_operator.act.status_writer import StatusWriter
from sm70_operator.api import names
from sm70_operator.observe.facts import parse_node, parse_object, parse_pod
from sm70_operator.observe.revisions import parse_revision
from sm70_operator.observe.snapshot import EngineAnswer, Key, StoredResource
from sm70_operator.observe.store import Store
from sm70_operator.runtime.health import Check, HealthServer, WatchClock
from sm70_operator.runtime.metrics import Metrics
from sm70_operator.runtime.poller import Poller
from sm70_operator.runtime.reconciler import Reconciler, RetryError
from unit.operator.builders import (
    KEY,
    NOW,
    SETTINGS,
    deployment,
    placed,
    pod,
    record,
    report,
    resource,
    service,
    serving,
    spec,
    target,
)
from unit.operator.fake_api import FakeApi

NAME = target().name


class Voice:
    async def read(self, address: str) -> EngineAnswer:
        return EngineAnswer(report=report())

    async def read_phase(self, address: str) -> EngineAnswer:
        return EngineAnswer(phase="LoadingWeights")


class Bench:
    """A reconciler over a cache that a test fills by hand."""

    def __init__(self) -> None:
        self.api = FakeApi()
        self.may_act = True
        self.synced = True
        self.awake = asyncio.Event()
        self.poller = Poller(Voice(), lambda key: self.awake.set(), poll_seconds=3600, grace_seconds=60)
        self.cache: dict[str, dict[Any, list[Any]]] = {
            "resources": {KEY: [StoredResource.of(resource())]},
            "deployments": {}, "pods": {}, "services": {}, "claims": {}, "nodes": {},
            "revisions": {}, "jobs": {}, "evidence": {},
        }  # fmt: skip
        self.reconciler = Reconciler(
            api=self.api,
            executor=Executor(self.api, lambda: self.may_act),
            status_writer=StatusWriter(self.api),
            events=EventRecorder(self.api, "operator-1", lambda: self.may_act),
            poller=self.poller,
            store=lambda: Store(**self.cache) if self.synced else None,
            settings=SETTINGS,
            metrics=Metrics(),
            may_act=lambda: self.may_act,
            clock=lambda: NOW,
        )
        self.worker = asyncio.create_task(self.poller.work())

    def shows(self, kind: str, items: Iterable[Any]) -> None:
        self.cache[kind] = {KEY: list(items)}

    def serves(self) -> None:
        self.shows("deployments", [parse_object(deployment())])
        self.shows("services", [parse_object(service(NAME))])
        self.shows("pods", [parse_pod(serving(NAME))])
        self.shows("revisions", [parse_revision(record())])


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    made.worker.cancel()


async def test_a_new_service_is_made_and_told(bench: Bench) -> None:
    wake = await bench.reconciler.reconcile(KEY)
    assert bench.api.writes == [
        ("apply", "ControllerRevision", f"{KEY.name}-{NAME}"),
        ("apply", "Service", KEY.name),
        ("apply", "Service", f"{KEY.name}-candidate"),
        ("apply", "Deployment", f"{KEY.name}-{NAME}"),
        ("apply/status", names.KIND, KEY.name),
        ("create", "events.k8s.io/Event", bench.api.writes[-1][2]),
    ]
    assert wake is not None


async def test_nothing_is_said_of_a_running_service_before_its_engine_was_heard(bench: Bench) -> None:
    bench.serves()
    assert await bench.reconciler.reconcile(KEY) is None
    assert bench.api.calls == []
    await bench.awake.wait()
    await bench.reconciler.reconcile(KEY)
    assert [verb for verb, *_ in bench.api.writes] == ["apply/status", "create"]


async def test_a_second_look_writes_nothing(bench: Bench) -> None:
    bench.serves()
    await bench.reconciler.reconcile(KEY)
    await bench.awake.wait()
    await bench.reconciler.reconcile(KEY)
    written = len(bench.api.calls)
    for _ in range(30):
        await bench.reconciler.reconcile(KEY)
    assert len(bench.api.calls) == written


async def test_incomplete_caches_and_a_lost_lease_stop_everything(bench: Bench) -> None:
    bench.synced = False
    assert await bench.reconciler.reconcile(KEY) == pytest.approx(1)
    bench.synced, bench.may_act = True, False
    assert await bench.reconciler.reconcile(KEY) == pytest.approx(1)
    assert bench.api.calls == []


async def test_a_service_that_is_gone_is_forgotten(bench: Bench) -> None:
    bench.serves()
    await bench.reconciler.reconcile(KEY)
    bench.cache["resources"] = {}
    assert await bench.reconciler.reconcile(KEY) is None
    assert bench.poller.answers(KEY) == {}


async def test_an_obstacle_enters_the_status_and_is_tried_again_later(bench: Bench) -> None:
    bench.api.put("Service", KEY.name, {"spec": {}})
    with pytest.raises(RetryError, match="does not belong"):
        await bench.reconciler.reconcile(KEY)
    status = next(body["status"] for verb, *_, body in bench.api.calls if verb == "apply/status")
    ready = next(one for one in status["conditions"] if one["type"] == "Ready")
    assert ready["reason"] == "Obstructed"


async def test_the_profiles_config_map_is_read_and_remembered(bench: Bench) -> None:
    reference = {"configMap": {"name": "mine", "key": "p.yaml"}}
    bench.cache["resources"] = {KEY: [StoredResource.of(resource(spec(profile=None, profileRef=reference)))]}
    await bench.reconciler.reconcile(KEY)
    status = next(body["status"] for verb, *_, body in bench.api.calls if verb == "apply/status")
    assert "`mine`" in next(one["message"] for one in status["conditions"] if one["type"] == "Accepted")
    await bench.reconciler.reconcile(KEY)
    assert [call[:3] for call in bench.api.calls if call[0] == "get"] == [("get", "ConfigMap", "mine")]


async def test_events_are_read_only_of_pods_that_are_being_prepared(bench: Bench) -> None:
    bench.shows("deployments", [parse_object(deployment())])
    bench.shows("services", [parse_object(service(NAME))])
    waiting = placed(NAME, {"state": {"waiting": {"reason": "ContainerCreating"}}})
    bench.shows("pods", [parse_pod(waiting)])
    bench.api.put("Event", "1", {"reason": "Pulling", "lastTimestamp": "2026-11-30T12:00:00Z"})
    bench.api.put("Event", "0", {"reason": "Scheduled", "lastTimestamp": "2026-11-30T11:00:00Z"})
    await bench.reconciler.reconcile(KEY)
    status = next(body["status"] for verb, *_, body in bench.api.calls if verb == "apply/status")
    assert next(one["reason"] for one in status["conditions"] if one["type"] == "EngineStarted") == "PullingImage"
    bench.shows("pods", [parse_pod(pod(NAME))])
    before = len([call for call in bench.api.calls if call[1] == "Event"])
    await bench.reconciler.reconcile(KEY)
    assert len([call for call in bench.api.calls if call[1] == "Event"]) == before


async def test_who_holds_the_gpus_is_looked_up_only_for_a_pod_that_waits(bench: Bench) -> None:
    bench.shows("pods", [parse_pod(pod(NAME))])
    node = parse_node(
        {
            "metadata": {"name": "n", "labels": {"nvidia.com/gpu.product": "Tesla-V100-SXM2-16GB"}},
            "status": {"allocatable": {"nvidia.com/gpu": "4"}, "conditions": [{"type": "Ready", "status": "True"}]},
        }
    )
    bench.cache["nodes"] = {"n": [node]}
    await bench.reconciler.reconcile(KEY)
    assert Store(**bench.cache).all_nodes() == (node,)
    assert replace(Store(**bench.cache), nodes=None).all_nodes() is None
    held = replace(parse_pod(serving(NAME)), gpus={"nvidia.com/gpu": 1})
    bench.shows("pods", [held, parse_pod(pod(NAME, "other"))])
    assert Store(**bench.cache).gpu_holders() == (held,)


def test_everything_that_is_watched_is_cached_first() -> None:
    registry = handlers.registry(SETTINGS, lambda store, key: None)
    watched = {handler.selector for handler in registry._watching.get_all_handlers()}
    indexed = {handler.selector for handler in registry._indexing.get_all_handlers()}
    assert watched <= indexed
    assert len(indexed) == 9
    assert not list(registry._changing.get_all_handlers()), "only events: no finalizer, no annotation"
    assert not list(registry._spawning.get_all_handlers())
    few = handlers.registry(SETTINGS.model_copy(update={"observe_nodes": False}), lambda store, key: None)
    assert len(list(few._indexing.get_all_handlers())) == 8


def test_a_child_without_our_label_belongs_to_nobody() -> None:
    index = handlers._indexer(parse_object)
    assert index(body=kopf.Body({}), labels={}, namespace="a") == {}
    labels = {names.SERVICE_LABEL: "tiny"}
    assert list(index(body=kopf.Body({"metadata": {"labels": labels}}), labels=labels, namespace="a")) == [
        Key("a", "tiny")
    ]


def test_watches_tell_their_age_and_a_second_list_is_noticed() -> None:
    now = [100.0]
    lists: list[str] = []
    clock = WatchClock(handlers.PLURALS, clock=lambda: now[0], relisted=lists.append)
    clock.note("/api/v1/pods", {}, 200)
    clock.note("/api/v1/pods", {"continue": "x"}, 200)
    clock.note("/api/v1/pods", {"watch": "true"}, 200)
    clock.note("/api/v1", {}, 200)
    clock.note("/api/v1", {}, 200)
    now[0] = 160
    assert clock.ages() == {"/api/v1/pods": 60}
    clock.note("/api/v1/pods", {"watch": "true"}, 410)
    assert clock.ages() == {"/api/v1/pods": 60}
    assert lists == []
    clock.note("/api/v1/pods", {}, 200)
    assert lists == ["/api/v1/pods"]
    clock.reset()
    clock.note("/api/v1/pods", {}, 200)
    assert len(lists) == 1


async def test_health_says_what_is_wrong() -> None:
    trouble: list[str | None] = [None]
    metrics = Metrics()
    metrics.reconciles.labels("success").inc(3)
    server = HealthServer(metrics, [Check("watches", lambda: trouble[0])], [Check("apiServer", lambda: None)])
    await server.start("127.0.0.1", 0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session:
        async with session.get("/healthz") as answer:
            assert (answer.status, json.loads(await answer.text())) == (200, {"watches": "ok"})
        trouble[0] = "not renewed for 180 s"
        async with session.get("/healthz") as answer:
            assert (answer.status, json.loads(await answer.text())) == (503, {"watches": "not renewed for 180 s"})
        async with session.get("/readyz") as answer:
            assert answer.status == 200
        async with session.get("/metrics") as answer:
            assert 'sm70_operator_reconciles_total{result="success"} 3.0' in await answer.text()
    await server.stop()


async def test_a_service_that_hangs_or_breaks_delays_no_other_and_none_is_looked_at_twice_at_once() -> None:
    process = Process(SETTINGS.model_copy(update={"leader_election": False, "workers": 2}), FakeApi(), "operator-1")
    slow, broken, quick = (Key("serving", name) for name in ("slow", "broken", "quick"))
    release, again = asyncio.Event(), asyncio.Event()
    seen, at_once = dict.fromkeys((slow, broken, quick), 0), set[Key]()

    async def reconcile(key: Key) -> float | None:
        assert key not in at_once
        at_once.add(key)
        try:
            seen[key] += 1
            if key == slow and seen[slow] == 2:
                again.set()
            if key == slow:
                await release.wait()
            if key == broken:
                raise RuntimeError("a fault of the operator")
        finally:
            at_once.discard(key)
        return None

    process.reconciler.reconcile = reconcile  # type: ignore[method-assign]
    workers = [asyncio.create_task(process._worker()) for _ in range(2)]
    for key in (slow, broken, quick):
        process.queue.add(key)
    while seen[quick] < 5:
        await asyncio.sleep(0)
        process.queue.add(slow)
        process.queue.add(quick)
    assert seen[slow] == 1, "it is still at it"
    assert seen[broken] == 1, "it is not tried again without a pause"
    release.set()
    await again.wait()
    for worker in workers:
        worker.cancel()
    process.queue.close()
    await process.engines.close()


async def test_what_a_late_renewal_of_the_lease_interrupts_is_taken_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sm70_operator.__main__.SOON_SECONDS", 0.0)
    process = Process(SETTINGS.model_copy(update={"leader_election": False}), FakeApi(), "operator-1")
    looks, finished = 0, asyncio.Event()

    async def reconcile(key: Key) -> float | None:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise NotLeaderError("the lease is not held any more")
        finished.set()
        return None

    process.reconciler.reconcile = reconcile  # type: ignore[method-assign]
    worker = asyncio.create_task(process._worker())
    process.queue.add(KEY)
    await asyncio.wait_for(finished.wait(), 10)
    worker.cancel()
    process.queue.close()
    await process.engines.close()


async def test_a_status_that_the_lease_did_not_let_be_written_is_due_soon(bench: Bench) -> None:
    bench.serves()
    await bench.reconciler.reconcile(KEY)
    await bench.awake.wait()
    held = iter([True, False, False])  # at the start of the look, and when its status is to be written
    bench.reconciler._may_act = lambda: next(held)
    assert await bench.reconciler.reconcile(KEY) == pytest.approx(1)
    assert bench.api.writes == []
