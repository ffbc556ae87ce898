"""The rollout against a model of the world: random lives, and every place at which one request can go wrong.

What must hold whatever happens: with InPlace never two GPU sets are in use; a revision that is not accelerated or not
qualified gets the public traffic only as its own policy admits; a good revision serves in the end, or the status names
what it waits for; and losing the status at any time changes nothing.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from property.rollout_world import CUSTOM, KEY, SOUND, Behaviour, Fault, Objects, World
from sm70_operator.act.status_writer import without_times
from sm70_operator.api import names
from unit.operator import builders

LENIENT = {"policy": "Report"}
WAIVED = {"policy": "Require", "allowDisabled": [{"path": "reference_gdn", "because": "a test"}]}
EXAMPLES, STEPS = 60, 40
WATCHED = ("Deployment", "Service", "Pod", "ControllerRevision", "Job", names.QUALIFICATION_KIND)


def spec(
    strategy: str = "InPlace",
    qualification: dict[str, Any] | None = None,
    acceleration: dict[str, Any] | None = None,
    behaviour: Behaviour = Behaviour.GOOD,
) -> dict[str, Any]:
    """A service whose engine behaves like this. Its bake time and its deadline are short."""
    return builders.spec(
        gpus={"count": 1},
        rollout={"strategy": strategy, "bakeSeconds": 30, "progressDeadlineSeconds": 60},
        qualification=qualification or {"when": "Never"},
        acceleration=acceleration or {"policy": "Require"},
        env=[{"name": "BEHAVIOUR", "value": str(behaviour)}],
    )


@dataclass(frozen=True)
class Policy:
    """What a life admits; it stays the same from birth to death."""

    strategy: str
    qualification: dict[str, Any]
    acceleration: dict[str, Any]

    def admits(self, behaviour: Behaviour) -> bool:
        """Public traffic may reach such an engine."""
        if behaviour is Behaviour.DISABLED:
            return self.acceleration != {"policy": "Require"}
        judged = self.qualification["when"] != "Never"
        if behaviour is Behaviour.NOISY:
            return not judged or self.qualification.get("onInconclusive") == "Promote"
        return not judged or behaviour is not Behaviour.WRONG

    def is_proven(self, revision: str, objects: Objects) -> bool:
        """The evidence in this world suffices for the revision's first traffic."""
        if self.qualification["when"] == "Never":
            return True
        verdicts = {
            (raw.get("status") or {}).get("verdict")
            for (kind, _), raw in objects.items()
            if kind == names.QUALIFICATION_KIND and raw["spec"]["revision"] == revision
        }
        lenient = self.qualification.get("onInconclusive") == "Promote"
        return "Passed" in verdicts or (lenient and "Inconclusive" in verdicts)


@dataclass
class Watchdog:
    """Checks what must hold at every moment."""

    world: World
    policy: Policy
    admitted: set[str] = field(default_factory=set)
    """Revisions that had the traffic lawfully; to return to one needs no new proof."""
    seen: int = 0

    def check(self) -> None:
        if self.policy.strategy == "InPlace":
            assert len(self.world.holding()) <= 1, "two sets of GPUs are in use"
        for revision, objects in self.world.promotions[self.seen :]:
            if revision not in self.admitted:
                behaviour = self.world.behaviour_of(revision, objects)
                assert behaviour is not None, f"{revision} got the traffic and had no Deployment"
                assert self.policy.admits(behaviour), f"{revision} got the traffic and is {behaviour}"
                assert behaviour not in (Behaviour.CRASHING, Behaviour.HANGING), "it never served"
                assert self.policy.is_proven(revision, objects), f"{revision} got the traffic without evidence"
                self.admitted.add(revision)
        self.seen = len(self.world.promotions)
        for reached in self.world.serving():
            assert self.policy.admits(Behaviour(reached)), f"public traffic reaches an engine that is {reached}"

    def check_rest(self) -> None:
        """After everybody has done what there is to do."""
        self.check()
        world = self.world
        assert not world.look(), "it is not at rest"
        ready, progressing = world.condition("Ready"), world.condition("Progressing")
        told = any(one["message"] and one["reason"] != "Pending" for one in (ready, progressing))
        assert ready["status"] == "True" or told, (ready, progressing)
        revisions, wanted = world.status["revisions"], world.etcd.objects[CUSTOM, KEY.name]["spec"].get("replicas")
        good = revisions.get("lastGood")
        if wanted and good and world.behaviour_of(good) in SOUND and not world.degraded:
            assert world.serving(), f"a good revision exists and nobody serves: {ready} {progressing}"
        if ready["status"] == "True":
            assert world.serving()
        before = timeless(world.status)
        world.lose_status()
        world.restart()
        world.settle()
        assert timeless(world.status) == before, "the status is not derived from the world"


def timeless(status: dict[str, Any]) -> dict[str, Any]:
    """A status without times, and without what only it remembers: last words and counters of pods that are gone."""
    found: dict[str, Any] = without_times(status)
    startup = {key: value for key, value in found.get("startup", {}).items() if key != "since"}
    return {**found, "startup": startup, "routes": None}


POLICIES = st.builds(
    Policy,
    st.sampled_from(["InPlace", "InPlace", "Auto", "Surge"]),
    st.sampled_from(
        [
            {"when": "Never"},
            {"when": "During"},
            {"when": "Before"},
            {"when": "During", "onInconclusive": "Promote", "repeats": 0},
        ]
    ),
    st.sampled_from([{"policy": "Require"}, LENIENT, WAIVED]),
)


class Life(RuleBasedStateMachine):
    """Anybody may act in any order; the operator sees a cache that is some writes old, and any request may fail."""

    @initialize(policy=POLICIES, sets=st.integers(1, 2), first=st.sampled_from(Behaviour))
    def born(self, policy: Policy, sets: int, first: Behaviour) -> None:
        self.world = World(spec(policy.strategy, policy.qualification, policy.acceleration, first), sets)
        self.watchdog = Watchdog(self.world, policy)
        self.past: list[Objects] = []

    @rule(behaviour=st.sampled_from(Behaviour))
    def change(self, behaviour: Behaviour) -> None:
        self.world.behave(behaviour)

    @rule(replicas=st.integers(0, 1))
    def scale(self, replicas: int) -> None:
        self.world.edit(replicas=replicas)

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        rollout = self.world.etcd.objects[CUSTOM, KEY.name]["spec"]["rollout"]
        self.world.edit(rollout={**rollout, "paused": paused})

    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        rollout = dict(self.world.etcd.objects[CUSTOM, KEY.name]["spec"]["rollout"])
        known = [one["metadata"]["labels"][names.REVISION_LABEL] for one in self.world.etcd.of("ControllerRevision")]
        chosen = data.draw(st.sampled_from(["", "0123456789", *known]))
        rollout.pop("rollbackTo", None)
        self.world.edit(rollout={**rollout, **({"rollbackTo": chosen} if chosen else {})})

    @rule()
    def lose_the_status(self) -> None:
        self.world.lose_status()

    @rule(kind=st.sampled_from(["Service", "Deployment", "Pod", "Job", names.QUALIFICATION_KIND]), data=st.data())
    def lose_an_object(self, kind: str, data: st.DataObject) -> None:
        found = [raw["metadata"]["name"] for raw in self.world.etcd.of(kind)]
        if found:
            self.world.etcd.remove(kind, data.draw(st.sampled_from(found)))

    @rule()
    def degrade(self) -> None:
        """A path goes off in every engine that runs, as after a container restart on a sick GPU."""
        self.world.degraded |= {pod["metadata"]["name"] for pod in self.world.etcd.of("Pod")}

    @rule(data=st.data())
    def step_of_a_node(self, data: st.DataObject) -> None:
        self.world.kubelet(lambda found: data.draw(st.sampled_from(found)))

    @rule(which=st.sampled_from(["deployment_controller", "replicaset_controller", "scheduler", "collector"]))
    def step_of_a_controller(self, which: str) -> None:
        getattr(self.world, which)()

    @rule(seconds=st.integers(1, 90))
    def time_passes(self, seconds: int) -> None:
        self.world.now += timedelta(seconds=seconds)

    @rule(seconds=st.integers(-300, 300))
    def the_clock_is_set(self, seconds: int) -> None:
        """The operator's: on another node, or by a time server."""
        self.world.set_clock(timedelta(seconds=seconds))

    @rule(rounds=st.integers(1, 12))
    def everybody(self, rounds: int) -> None:
        for _ in range(rounds):
            self.look(0, 0, None)
            self.world.controllers()
            self.world.kubelet()
            self.world.now += timedelta(seconds=1)
            self.watchdog.check()

    @rule(
        age=st.integers(0, 5),
        late=st.none() | st.sampled_from(WATCHED),
        at=st.integers(0, 12),
        fault=st.none() | st.sampled_from(Fault),
    )
    def look(self, age: int, at: int, fault: Fault | None, late: str | None = None) -> None:
        """On a cache that is `age` looks old, or of which only one kind is, because each kind is watched apart; the
        request of this number, if there is one, meets the fault.
        """
        present = dict(self.world.etcd.objects)
        self.past = [*self.past[-8:], present]
        seen = self.past[max(0, len(self.past) - 1 - age)]
        if late is not None:
            seen = {key: raw for key, raw in present.items() if key[0] != late} | {
                key: raw for key, raw in seen.items() if key[0] == late
            }
        start = self.world.api.requests
        self.world.api.fault = lambda number: fault if number - start == at else None
        self.world.look(seen)
        self.world.api.fault = lambda number: None

    @precondition(lambda self: self.world.etcd.objects)
    @rule()
    def delete_and_make_anew(self) -> None:
        found = self.world.etcd.objects[CUSTOM, KEY.name]
        deleting = {**found["metadata"], "deletionTimestamp": self.world.now.isoformat()}
        self.world.etcd.change(CUSTOM, KEY.name, metadata=deleting)
        for _ in range(2):
            self.look(0, 0, None)  # the model refuses to make anything now
        self.world.collector()
        self.past = []
        self.watchdog.admitted.clear()
        self.world.create()

    @invariant()
    def what_must_hold(self) -> None:
        if hasattr(self, "watchdog"):
            self.watchdog.check()

    def teardown(self) -> None:
        if hasattr(self, "watchdog"):
            self.world.settle(self.watchdog.check)
            self.watchdog.check_rest()


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=int(os.environ.get("SM70_ROLLOUT_LIVES", EXAMPLES)),
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@dataclass(frozen=True)
class Story:
    """A settled service, one edit, and how it ends when nothing goes wrong."""

    name: str
    second: Behaviour
    ends: str
    """The behaviour that serves in the end."""
    strategy: str = "InPlace"
    sets: int = 1
    when: str = "During"
    step: str = "Settled"

    @property
    def policy(self) -> Policy:
        return Policy(self.strategy, {"when": self.when}, {"policy": "Require"})

    def begin(self) -> World:
        world = World(spec(self.strategy, {"when": self.when}), self.sets)
        world.settle()
        assert world.serving() == {"Good"}
        return world


STORIES = (
    Story("a good change in place", Behaviour.OTHER, "Other"),
    Story("a path that is off", Behaviour.DISABLED, "Good", step="RolledBack"),
    Story("a failing gate", Behaviour.WRONG, "Good", step="RolledBack"),
    Story("a judge that cannot decide", Behaviour.NOISY, "Good", step="RolledBack"),
    Story("a crash", Behaviour.CRASHING, "Good", step="RolledBack"),
    Story("a start that stands still", Behaviour.HANGING, "Good", step="RolledBack"),
    Story("a fallback in the bake time", Behaviour.FALLING_BACK, "Good", step="RolledBack"),
    Story("a preflight that fails", Behaviour.UNREADABLE, "Good", step="RolledBack"),
    Story("a good change beside", Behaviour.OTHER, "Other", strategy="Auto", sets=2),
    Story("a failing gate beside", Behaviour.WRONG, "Good", strategy="Auto", sets=2, step="RolledBack"),
    Story("held beside", Behaviour.NOISY, "Good", strategy="Surge", sets=2, step="Held"),
)
KILLS = (Fault.KILLED_BEFORE, Fault.KILLED_AFTER)


def signature(world: World) -> dict[str, Any]:
    """What two worlds must have in common to have come to the same end."""
    records = {
        one["metadata"]["labels"][names.REVISION_LABEL]: sorted(one["metadata"]["annotations"])
        for one in world.etcd.of("ControllerRevision")
    }
    return {
        "selected": world.selected(),
        "serving": world.serving(),
        "holding": world.holding(),
        "deployments": {one["metadata"]["name"]: one["spec"]["replicas"] for one in world.etcd.of("Deployment")},
        "services": sorted(one["metadata"]["name"] for one in world.etcd.of("Service")),
        "records": records,
        "conditions": {one["type"]: (one["status"], one["reason"]) for one in world.status["conditions"]},
    }


def tell(story: Story, base: World, faults: dict[int, Fault]) -> World:
    """The story with faults at these requests, counted from the edit."""
    world = base.resumed()
    watchdog = Watchdog(world, story.policy, admitted={base.selected()})
    world.api.fault = faults.get
    world.behave(story.second)
    world.settle(watchdog.check)
    watchdog.check()
    return world


def undisturbed(story: Story) -> tuple[World, World]:
    base = story.begin()
    return base, tell(story, base, {})


def explore(story: Story, kinds: Sequence[Fault], together: int = 1) -> Iterator[dict[int, Fault]]:
    """Every choice of so many faults; each must lead to the same end. Yields the choices."""
    base, calm = undisturbed(story)
    wanted, requests = signature(calm), calm.api.requests
    for places in itertools.combinations(range(requests), together):
        for chosen in itertools.product(kinds, repeat=together):
            faults = dict(zip(places, chosen, strict=True))
            found = signature(tell(story, base, faults))
            assert found == wanted, f"{story.name}: with {faults} it ends otherwise"
            yield faults


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name.replace(" ", "-"))
def test_how_it_ends(story: Story) -> None:
    base, world = undisturbed(story)
    assert world.serving() == {story.ends}
    assert (world.selected() == base.selected()) == (story.ends == "Good")
    assert world.condition("Ready")["status"] == "True"
    step = world.condition("Progressing")["reason"]
    assert step == story.step or story.step == "Settled", step


def test_killed_at_every_request_of_a_change(record_property: Any) -> None:
    """The story that matters most: in place, judged, promoted. Two places at each request."""
    count = sum(1 for _ in explore(STORIES[0], KILLS))
    record_property("interleavings", count)
    print(f"explored {count} interleavings")
    assert count > 50


@pytest.mark.parametrize(
    "late", [pytest.param(kind, marks=() if kind in ("Pod", "Job") else pytest.mark.full) for kind in WATCHED]
)
def test_a_watch_that_lags(late: str) -> None:
    """All through the story one kind of objects is seen two looks late; it ends the same."""
    base, calm = undisturbed(STORIES[0])
    world = base.resumed()
    watchdog = Watchdog(world, STORIES[0].policy, admitted={base.selected()})
    past = [dict(world.etcd.objects)] * 3

    def seen() -> Objects:
        present = dict(world.etcd.objects)
        past.append(present)
        old = {key: raw for key, raw in past[-3].items() if key[0] == late}
        return {key: raw for key, raw in present.items() if key[0] != late} | old

    world.behave(STORIES[0].second)
    world.settle(watchdog.check, seen)
    assert signature(world) == signature(calm)


@pytest.mark.full
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name.replace(" ", "-"))
def test_every_fault_at_every_request(story: Story, record_property: Any) -> None:
    count = sum(1 for _ in explore(story, list(Fault)))
    record_property("interleavings", count)
    print(f"explored {count} interleavings")
    assert count > 50


def test_a_rollback_to_a_proven_revision_needs_no_second_run() -> None:
    story = STORIES[0]
    base, world = undisturbed(story)
    runs = len(world.etcd.of(names.QUALIFICATION_KIND))
    rollout = world.etcd.objects[CUSTOM, KEY.name]["spec"]["rollout"]
    world.edit(rollout={**rollout, "rollbackTo": base.selected()})
    world.settle(Watchdog(world, story.policy, admitted={base.selected(), world.selected()}).check)
    assert world.selected() == base.selected()
    assert world.serving() == {"Good"}
    assert len(world.etcd.of(names.QUALIFICATION_KIND)) == runs


def test_a_rejected_revision_is_tried_again_only_when_the_spec_changes() -> None:
    base = STORIES[1].begin()
    world = tell(STORIES[1], base, {})
    starts = len(world.promotions)
    world.settle()
    assert len(world.promotions) == starts
    world.edit(overrides={"maxNumSeqs": 4}, env=[{"name": "BEHAVIOUR", "value": "Good"}])
    world.settle()
    assert world.serving() == {"Good"}
    assert world.selected() != base.selected()
