"""The edge: actions are guarded, statuses written only when they say something else, events bounded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sm70_operator.act.apply import Executor, NotLeaderError, NotYetError, ObstacleError
from sm70_operator.act.client import ApiError
from sm70_operator.act.events import EventRecorder
from sm70_operator.act.status_writer import StatusWriter
from sm70_operator.api import names
from sm70_operator.plan.plan import Apply, Conclude, Delete, Event, EventType, Record, Scale
from unit.operator.builders import KEY, NOW, UID, deployment, planned, resource, running, service, serving, spec, target
from unit.operator.fake_api import FakeApi

NAME = target().name
START = Apply(deployment(), "it starts", known=True, runs=NAME, starts=True)


@pytest.fixture
def api() -> FakeApi:
    return FakeApi()


@pytest.fixture
def executor(api: FakeApi) -> Executor:
    return Executor(api, lambda: True)


def saying(code: int, message: str) -> object:
    def fail(verb: str, kind: str, name: str) -> None:
        if verb not in ("get", "list"):
            raise ApiError(code, message)

    return fail


async def test_a_revision_starts_only_when_no_other_one_runs(api: FakeApi, executor: Executor) -> None:
    other = deployment(spec(overrides={"maxNumSeqs": 4}))
    api.put("Deployment", other["metadata"]["name"], other)
    with pytest.raises(NotYetError, match="still runs"):
        await executor.run(START, resource())
    assert api.writes == []


async def test_nor_while_a_pod_of_another_one_ends(api: FakeApi, executor: Executor) -> None:
    api.put("Pod", "pod-1", serving("other"))
    with pytest.raises(NotYetError, match="still ends"):
        await executor.run(START, resource())
    api.put("Pod", "pod-1", serving(NAME))
    await executor.run(START, resource())
    assert [write[0] for write in api.writes] == ["apply"]


async def test_a_second_set_admits_the_one_that_serves_and_no_third(api: FakeApi, executor: Executor) -> None:
    beside = replace(START, beside=frozenset({"other"}))
    api.put("Pod", "pod-1", serving("other"))
    await executor.run(beside, resource())
    assert [write[0] for write in api.writes] == ["apply"]
    api.put("Pod", "pod-2", serving("third", "pod-2"))
    with pytest.raises(NotYetError, match="pod-2 still ends"):
        await executor.run(beside, resource())


async def test_a_pod_that_judges_holds_no_gpu(api: FakeApi, executor: Executor) -> None:
    job = serving("other")
    job["metadata"]["labels"][names.COMPONENT_LABEL] = names.QUALIFICATION_COMPONENT
    api.put("Pod", "judge", job)
    await executor.run(START, resource())
    assert len(api.writes) == 1


async def test_traffic_moves_only_from_what_was_seen(api: FakeApi, executor: Executor) -> None:
    await executor.run(Apply(service(NAME), "traffic", known=True, promotes=NAME, version="7"), resource())
    ((*_, body),) = api.calls
    assert body["metadata"]["resourceVersion"] == "7"


async def test_decisions_and_verdicts_are_recorded_on_exactly_the_object_that_was_seen(
    api: FakeApi, executor: Executor
) -> None:
    await executor.run(Record("tiny-1", "u1", "7", {"a": "b", "c": None}, "it is good"), resource())
    await executor.run(Conclude("tiny-q1-1", "u2", {"verdict": "Passed"}, "it has ended"), resource())
    (first, second) = ((verb, kind, body) for verb, kind, _, body in api.calls)
    assert first[:2] == ("merge", "ControllerRevision")
    assert first[2]["metadata"] == {"uid": "u1", "resourceVersion": "7", "annotations": {"a": "b", "c": None}}
    assert second[:2] == ("apply/status", "Sm70Qualification")
    assert second[2]["metadata"]["uid"] == "u2"


async def test_a_name_that_another_service_holds_is_an_obstacle(api: FakeApi, executor: Executor) -> None:
    """`tiny-candidate` may be a service of its own."""
    theirs = service(NAME)
    theirs["metadata"]["labels"][names.SERVICE_LABEL] = "tiny-candidate"
    theirs["metadata"]["ownerReferences"][0]["uid"] = "another"
    api.put("Service", KEY.name, theirs)
    with pytest.raises(ObstacleError, match="does not belong to this service"):
        await executor.run(Apply(service(NAME), "traffic", known=False), resource())


async def test_a_name_that_somebody_else_has_is_an_obstacle(api: FakeApi, executor: Executor) -> None:
    api.put("Service", KEY.name, {"spec": {"ports": []}})
    with pytest.raises(ObstacleError, match="does not belong to this service"):
        await executor.run(Apply(service(NAME), "traffic", known=False), resource())
    assert api.writes == []


async def test_an_own_object_that_the_cache_has_not_seen_is_no_obstacle(api: FakeApi, executor: Executor) -> None:
    api.put("Service", KEY.name, service(NAME))
    await executor.run(Apply(service(NAME), "traffic", known=False), resource())
    assert [write[0] for write in api.writes] == ["apply"]


async def test_changes_rest_on_the_state_that_was_seen(api: FakeApi, executor: Executor) -> None:
    await executor.run(Scale("tiny-1", "u1", "7", 0, "it stops"), resource())
    await executor.run(Delete("tiny-1", "u1", "8", "it has stopped"), resource())
    bodies = [body for *_, body in api.calls]
    assert bodies[0]["metadata"] == {"uid": "u1", "resourceVersion": "7"}
    assert bodies[1] == {"uid": "u1", "resourceVersion": "8"}


@pytest.mark.parametrize(
    ("code", "error"), [(403, ObstacleError), (422, ObstacleError), (409, NotYetError), (500, ApiError), (0, ApiError)]
)
async def test_what_the_api_server_says_is_told_apart(
    api: FakeApi, executor: Executor, code: int, error: type[Exception]
) -> None:
    api.fail = saying(code, "quota exceeded")  # type: ignore[assignment]
    with pytest.raises(error, match="quota exceeded"):
        await executor.run(Scale("tiny-1", "u1", "7", 0, "it stops"), resource())


async def test_nothing_is_done_without_the_lease(api: FakeApi) -> None:
    with pytest.raises(NotLeaderError):
        await Executor(api, lambda: False).run(Scale("tiny-1", "u1", "7", 0, "it stops"), resource())
    assert api.writes == []


async def test_a_status_is_written_once(api: FakeApi) -> None:
    writer = StatusWriter(api)
    status = planned(running()).status
    assert status is not None
    assert await writer.write(resource(), status)
    ((verb, _, name, body),) = api.calls
    assert (verb, name) == ("apply/status", KEY.name)
    assert body["metadata"]["uid"] == UID

    seen = resource(status=body["status"], version="2")
    later = planned(running(of=seen), seconds=100).status
    assert later is not None
    assert not await writer.write(seen, later)
    assert len(api.calls) == 1


async def test_only_other_times_are_no_reason_to_write(api: FakeApi) -> None:
    status = planned(running()).status
    assert status is not None
    raw = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    moved = [one.model_copy(update={"last_transition_time": NOW.replace(year=2027)}) for one in status.conditions]
    assert not await StatusWriter(api).write(
        resource(status=raw), status.model_copy(update={"conditions": tuple(moved)})
    )


async def test_a_cache_that_lags_behind_the_last_write_causes_no_second_one(api: FakeApi) -> None:
    writer, stale = StatusWriter(api), resource()
    status = planned(running(of=stale)).status
    assert status is not None
    assert await writer.write(stale, status)
    current = writer.current(stale)
    again = planned(running(of=current), seconds=1)
    assert again.status is not None
    assert not await writer.write(current, again.status)
    assert again.events == ()
    # Once the cache has moved on, it is what counts.
    assert writer.current(resource(version="9")).status == {}


async def test_a_service_that_is_gone_is_no_error_for_the_status(api: FakeApi) -> None:
    api.fail = saying(404, "not found")  # type: ignore[assignment]
    status = planned(running()).status
    assert status is not None
    assert not await StatusWriter(api).write(resource(), status)


async def test_an_event_has_what_the_api_demands_and_fits(api: FakeApi) -> None:
    recorder = EventRecorder(api, "operator-1", lambda: True)
    await recorder.post(resource(), Event(EventType.WARNING, "Refused", "AcceptedChanged", "ü" * 2000), NOW)
    ((verb, kind, _, body),) = api.calls
    assert (verb, kind) == ("create", "events.k8s.io/Event")
    assert len(body["note"].encode()) <= 1024
    assert body["eventTime"] == "2026-11-30T12:00:00.000000Z"
    assert {"reportingController", "reportingInstance", "action", "reason", "type", "regarding"} <= body.keys()


async def test_an_event_that_is_refused_stops_nobody(api: FakeApi) -> None:
    api.fail = saying(403, "forbidden")  # type: ignore[assignment]
    await EventRecorder(api, "operator-1", lambda: True).post(
        resource(), Event(EventType.NORMAL, "Serving", "ReadyChanged", "x"), NOW
    )


async def test_what_is_not_watched_is_deleted_as_it_is_now_and_only_if_it_is_ours(
    api: FakeApi, executor: Executor
) -> None:
    forget = Delete("tiny-gpus-1", "", "", "it is forgotten", "ResourceClaimTemplate")
    await executor.run(forget, resource())
    ours = deployment()["metadata"]["ownerReferences"]
    for owners in ([], [{**ours[0], "uid": "another"}]):
        api.put(forget.kind, forget.name, {"metadata": {"uid": "u-1", "ownerReferences": owners}})
        await executor.run(forget, resource())
    assert api.writes == []
    api.put(forget.kind, forget.name, {"metadata": {"uid": "u-2", "ownerReferences": ours}})
    await executor.run(forget, resource())
    (verb, kind, name, body) = api.calls[-1]
    assert (verb, kind, name) == ("delete", forget.kind, forget.name)
    assert body == {"uid": "u-2", "resourceVersion": str(api.version)}
