"""What keeps the operator small and quick with many services: what is kept is packed, and no write is done twice."""

from __future__ import annotations

import asyncio
import copy
import gc
import platform
from dataclasses import replace
from datetime import timedelta
from typing import Any

import kopf
import pytest
from kopf._core.reactor import orchestration, running

from sm70_operator import handlers
from sm70_operator.act.apply import Written
from sm70_operator.observe.facts import parse_object, parse_pod
from sm70_operator.observe.revisions import parse_revision
from sm70_operator.observe.snapshot import Key, Resource, StoredResource
from sm70_operator.observe.store import Store
from sm70_operator.runtime import heap
from sm70_operator.runtime.expectations import PATIENCE_SECONDS, Expectations
from sm70_operator.runtime.watches import FirstLists, NoDiffs, NoProgress, Watches, told_of_first_lists
from unit.operator.builders import KEY, NOW, SETTINGS, deployment, record, resource, service, serving, spec, target

NAME = target().name


def store(**objects: Any) -> Store:
    kinds = ("resources", "claims", "jobs", "evidence", "deployments", "services", "pods", "revisions")
    empty: dict[str, Any] = {kind: {} for kind in kinds}
    return Store(**empty | {"nodes": None} | objects)


def test_a_resource_is_kept_packed_and_read_as_it_was() -> None:
    found = resource(status={"observedGeneration": 3, "conditions": [{"type": "Ready"}]})
    assert StoredResource.of(found).read() == found
    pins = spec(gpus={"count": 1, "allocation": "DRA", "uuids": ["GPU-1"]})
    kept = {"resources": {KEY: [StoredResource.of(resource(pins))]}}
    assert store(**kept).pinned() == {str(KEY): ("GPU-1",)}
    for idle in (resource(pins | {"replicas": 0}), resource(pins, deleting=True)):
        assert store(resources={KEY: [StoredResource.of(idle)]}).pinned() == {}


class _Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> Any:
        return self.now


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


def test_a_service_is_not_looked_at_before_the_cache_shows_the_last_write(clock: _Clock) -> None:
    expectations, child = Expectations(clock), parse_object(deployment())
    old, new = (store(deployments={KEY: [replace(child, version=one)]}) for one in ("1", "2"))
    expectations.note(KEY, old, Written("Deployment", child.name, "2"), "1")
    assert expectations.waits(KEY, old) == pytest.approx(PATIENCE_SECONDS)
    assert expectations.waits(Key("serving", "another"), old) is None
    assert expectations.waits(KEY, new) is None
    assert expectations.waits(KEY, old) is None, "what was seen once is not waited for again"


def test_made_and_deleted_objects_are_waited_for_too(clock: _Clock) -> None:
    expectations, child = Expectations(clock), parse_object(service(NAME))
    absent, present = store(), store(services={KEY: [child]})
    expectations.note(KEY, absent, Written("Service", child.name, "7"), absent.version_of("Service", KEY, child.name))
    assert expectations.waits(KEY, absent) is not None
    assert expectations.waits(KEY, present) is None
    expectations.note(KEY, present, Written("Service", child.name, ""), child.version)
    assert expectations.waits(KEY, present) is not None
    assert expectations.waits(KEY, absent) is None


def test_a_write_that_changed_nothing_or_is_not_watched_is_not_waited_for(clock: _Clock) -> None:
    expectations, child = Expectations(clock), parse_revision(record())
    there = store(revisions={KEY: [child]})
    before = there.version_of("ControllerRevision", KEY, child.object.name)
    expectations.note(KEY, there, Written("ControllerRevision", child.object.name, child.object.version), before)
    kind = "ResourceClaimTemplate"
    expectations.note(KEY, there, Written(kind, "x", "9"), there.version_of(kind, KEY, "x"))
    assert expectations.waits(KEY, there) is None


def test_a_cache_that_never_shows_it_is_looked_at_after_a_while(clock: _Clock) -> None:
    expectations = Expectations(clock)
    expectations.note(KEY, store(), Written("Job", "x", "2"), "")
    clock.now += timedelta(seconds=PATIENCE_SECONDS - 1)
    assert expectations.waits(KEY, store()) == pytest.approx(1)
    clock.now += timedelta(seconds=1)
    assert expectations.waits(KEY, store()) is None


@pytest.mark.parametrize(
    ("index", "raw"),
    [
        ("resources", {"metadata": {"name": KEY.name, "namespace": KEY.namespace}, "spec": spec(), "status": {"a": 1}}),
        ("deployments", deployment()),
        ("pods", serving(NAME)),
        ("revisions", record()),
        ("nodes", {"metadata": {"name": "n"}, "status": {"allocatable": {"nvidia.com/gpu": "4"}}}),
    ],
)
async def test_kopf_keeps_nothing_of_an_object_but_its_name_and_labels(index: str, raw: dict[str, Any]) -> None:
    raw = copy.deepcopy(raw)
    raw["metadata"].setdefault("managedFields", [{"manager": "x"}])
    raw["metadata"].setdefault("namespace", KEY.namespace)
    expected = copy.deepcopy(raw)
    registry = handlers.registry(SETTINGS, lambda cache, key: None)
    index_of: Any = next(one for one in registry._indexing._handlers if one.id == index).fn
    labels, name = raw["metadata"].get("labels", {}), raw["metadata"]["name"]
    found = index_of(body=_body(raw), labels=labels, namespace=raw["metadata"]["namespace"], name=name)
    (value,) = found.values()
    assert raw["metadata"]["name"] == name
    assert raw["metadata"].get("labels", {}) == labels
    assert "managedFields" not in raw["metadata"]
    assert not any(raw.get(part) for part in ("spec", "status", "data"))
    parsers = {"deployments": parse_object, "pods": parse_pod, "revisions": parse_revision}
    if index in parsers:
        assert value == parsers[index](expected)
    if index == "resources":
        assert value.read() == Resource.parse(expected)


def _body(raw: Any) -> kopf.Body:
    return kopf.Body(raw)


def test_kopf_compares_and_stores_nothing() -> None:
    body, patch = _body({"metadata": {"name": "x"}, "spec": {"a": 1}}), kopf.Patch()
    assert NoDiffs().build(body=body) == {}
    assert NoDiffs().fetch(body=body) is None
    NoDiffs().store(body=body, patch=patch, essence=kopf.BodyEssence())
    NoProgress().store(body=body, patch=patch)
    NoProgress().touch(body=body, patch=patch)
    NoProgress().purge(body=body, patch=patch)
    assert not patch


def _watches(woken: list[Key]) -> Watches:
    return Watches(SETTINGS, woken.append)


def test_no_service_is_woken_before_the_first_lists_are_complete_and_then_all_are() -> None:
    woken: list[Key] = []
    watches, other = _watches(woken), Key("serving", "another")
    caches = store(resources={KEY: [StoredResource.of(resource())], other: []})
    watches._event(caches, KEY)
    assert (watches.store, woken) == (None, [])
    watches._listed()
    assert watches.store is caches
    assert woken == sorted([KEY, other])
    watches._event(caches, other)
    assert woken[-1] == other


def test_an_empty_cluster_is_complete_too() -> None:
    woken: list[Key] = []
    watches = _watches(woken)
    watches._listed()
    watches._event(store(), KEY)
    assert woken == [KEY]
    watches._relisted("/api/v1/pods")
    watches._event(store(), KEY)
    assert (watches.store, woken) == (None, [KEY]), "what vanished between two lists is not known"


def _toggles(module: Any) -> Any:
    """The class by which a module of kopf makes its sets."""
    return module.aiotoggles.ToggleSet


async def test_no_object_of_the_first_lists_waits_for_the_others() -> None:
    complete: list[bool] = []
    with told_of_first_lists(lambda: complete.append(True)):
        lists, pauses = _toggles(orchestration)(all), _toggles(running)(any)
    assert not isinstance(pauses, FirstLists)
    assert _toggles(orchestration) is type(pauses)
    toggles = [await lists.make_toggle(name=str(number)) for number in range(3)]
    for toggle in toggles:
        assert complete == []
        await asyncio.wait_for(lists.wait_for(True), 1)
        await lists.drop_toggle(toggle)
    assert complete == [True]


def test_the_heap_is_tamed_where_glibc_is() -> None:
    assert heap.tame() == (platform.libc_ver()[0] == "glibc")
    assert gc.get_freeze_count() > 10_000, "modules are not searched for garbage"
    gc.unfreeze()
