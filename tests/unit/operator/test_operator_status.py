"""The status: what it shows, when it moves, and that counters cause no stream of writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sm70_operator.api.conditions import ConditionType
from sm70_operator.api.types import PathState as Shown
from sm70_operator.api.types import Status
from sm70_operator.observe.snapshot import CountWindow, EngineAnswer
from sm70_operator.plan.plan import Plan
from sm70_profiles.report import AccelerationReport, CacheState, CapacityReport, CompileCacheReport, PathState
from unit.operator.builders import (
    SETTINGS,
    condition,
    planned,
    report,
    resource,
    running,
    serving,
    snapshot,
    spec,
    target,
    with_path,
    with_routes,
)

FIRST = with_routes(("gdn_reference", "decode", 5, False))
MORE = with_routes(("gdn_reference", "decode", 900, False))
OTHER = with_routes(("gdn_reference", "decode", 900, False), ("attention_reference", "prefill", 1, False))


def status_of(plan: Plan) -> Status:
    assert plan.status is not None
    return plan.status


def after(earlier: Plan, answer: AccelerationReport, seconds: float) -> Plan:
    """The plan some seconds later, when the engine says this."""
    raw = status_of(earlier).model_dump(mode="json", by_alias=True, exclude_none=True)
    return planned(running(of=resource(status=raw), answer=answer), seconds)


def test_what_a_serving_service_shows() -> None:
    status = status_of(planned(running()))
    name = target().name
    assert (status.replicas, status.ready_replicas, status.observed_generation) == (1, 1, 1)
    assert status.selector == f"inference.sm70.io/service=tiny,inference.sm70.io/revision={name}"
    assert status.url == "http://tiny.serving.svc:8000"
    assert (status.revisions.active, status.revisions.target) == (name, name)
    assert status.acceleration is not None
    assert status.acceleration.summary == "3/3"
    assert {path.state for path in status.acceleration.paths} == {Shown.ENABLED}
    (place,) = status.placement
    assert (place.pod, place.node, place.gpu_uuids, str(place.source)) == (
        "pod-1",
        "node-1",
        ("GPU-1",),
        "NVIDIA_VISIBLE_DEVICES",
    )
    assert status.effective is not None
    assert "--kv-cache-dtype" in status.effective.args
    assert {"SM70_SERVE_REQUEST", "HOME"} <= set(status.effective.env)
    assert (status.display.profile, status.display.nodes) == ("tiny_hybrid_reference", "node-1")
    assert status.display.gpus.startswith("1 x ")


def test_no_value_of_a_variable_is_shown() -> None:
    document = spec(
        env=[{"name": "TOKEN", "value": "s3cret"}], auth={"apiKeySecretRef": {"name": "keys", "key": "api"}}
    )
    status = status_of(planned(running(document)))
    assert status.effective is not None
    assert {"TOKEN", "VLLM_API_KEY"} <= set(status.effective.env)
    assert "s3cret" not in status.model_dump_json()


def test_a_condition_keeps_its_time_until_its_status_flips() -> None:
    first = planned(running())
    later = after(first, report(), 300)
    assert condition(later, ConditionType.READY) == condition(first, ConditionType.READY)
    broken = after(later, with_path("reference_gdn", PathState.DISABLED, "x"), 600)
    moved = condition(broken, ConditionType.ACCELERATION_COMPLETE).last_transition_time
    assert moved > condition(first, ConditionType.ACCELERATION_COMPLETE).last_transition_time
    worse = after(broken, with_path("reference_gdn", PathState.DISABLED, "y"), 900)
    assert condition(worse, ConditionType.ACCELERATION_COMPLETE).last_transition_time == moved


def test_counters_are_written_at_most_once_a_minute() -> None:
    first = planned(running(answer=FIRST))
    soon = after(first, MORE, 25)
    assert status_of(soon).routes == status_of(first).routes
    assert soon.wake_after_seconds == 35, "what was held back is written when its time comes"
    late = status_of(after(first, MORE, 61)).routes
    assert late is not None
    assert [item.dispatches for item in late.items] == [900]


def test_a_new_route_is_written_at_once() -> None:
    first = planned(running(answer=FIRST))
    routes = status_of(after(first, OTHER, 5)).routes
    assert routes is not None
    assert [item.route for item in routes.items] == ["attention_reference", "gdn_reference"]


def test_idle_counters_cause_no_change_ever() -> None:
    first = planned(running(answer=FIRST))
    later = after(first, FIRST, 3600)
    assert status_of(later) == status_of(first)
    assert later.wake_after_seconds == SETTINGS.resync_seconds


def test_routes_that_were_not_taken_are_left_out() -> None:
    status = status_of(planned(running(answer=with_routes(("gdn_reference", "decode", 0, False)))))
    assert status.routes is not None
    assert status.routes.items == ()


def test_over_several_pods_counters_add_up_and_the_worst_state_counts() -> None:
    document = spec(replicas=2)
    name = target(document).name
    bad = with_path("reference_gdn", PathState.DISABLED, "kv_dtype").model_copy(update={"routes": FIRST.routes})
    answers: dict[str, Any] = {"uid-a": EngineAnswer(report=FIRST), "uid-b": EngineAnswer(report=bad)}
    world = snapshot([], [serving(name, "a"), serving(name, "b")], selected=name, of=resource(document))
    world = type(world)(**{**vars(world), "answers": answers})
    status = status_of(planned(world))
    assert status.acceleration is not None
    assert status.acceleration.summary == "2/3"
    assert status.routes is not None
    assert [item.dispatches for item in status.routes.items] == [10]
    assert len(status.placement) == 2


def test_a_status_that_cannot_be_read_is_as_good_as_lost() -> None:
    world = running(of=resource(status={"conditions": [{"type": "Teleported"}], "replicas": "many"}))
    assert status_of(planned(world)).replicas == 1


def test_what_an_engine_says_is_stripped_and_bounded() -> None:
    wild = with_path("reference_gdn", PathState.DISABLED, "\x1b[31m" + "r" * 100, "m\x00" * 500)
    status = status_of(planned(running(answer=wild)))
    assert status.acceleration is not None
    for path in status.acceleration.paths:
        assert path.message.isprintable()
        assert (path.reason or "").isprintable()
    assert condition(planned(running(answer=wild)), ConditionType.ACCELERATION_COMPLETE).message.isprintable()


def test_capacity_and_cache_are_told_by_the_engines() -> None:
    cache = CompileCacheReport(
        enabled=True, state=CacheState.COLD, key="k" * 64, files_before=0, files_added=9, files_added_at_last_start=7
    )
    capacity = CapacityReport(kv_tokens=4096, block_size=16, max_model_len=512, residents_at_max_len=8)
    status = planned(running(answer=report(compile_cache=cache, capacity=capacity))).status
    assert status is not None
    assert status.compile_cache is not None
    assert (status.compile_cache.state, status.compile_cache.files_added_at_last_start) == ("Cold", 7)
    assert status.capacity is not None
    assert (status.capacity.kv_tokens, status.capacity.residents_at_max_len) == (4096, 8)
    off = CompileCacheReport(enabled=True, state=CacheState.OFF)
    without = planned(running(answer=report(compile_cache=off))).status
    assert without is not None
    assert without.compile_cache is None


def test_the_window_of_the_counters_is_summed_over_pods() -> None:
    document = spec(replicas=2)
    name = target(document).name
    world = running(document, pods=[serving(name, "a"), serving(name, "b")])
    windows = (CountWindow(60, 100, 1), CountWindow(30, 200, 2, resets=1))
    answers = {
        pod.uid: EngineAnswer(report=report(), window=window) for pod, window in zip(world.pods, windows, strict=True)
    }
    status = planned(replace(world, answers=answers)).status
    assert status is not None
    assert status.routes is not None
    window = status.routes.window
    assert window is not None
    assert (window.seconds, window.dispatches, window.fallback_percent, window.resets) == (60, 300, 1, 1)
