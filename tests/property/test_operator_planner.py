"""The planner over random lives of a service: edits, refusals, losses, kills and old snapshots, in any order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sm70_operator.act.status_writer import without_times
from sm70_operator.api.conditions import ConditionStatus, ConditionType
from sm70_operator.observe.snapshot import Snapshot
from sm70_operator.plan.plan import Apply, Plan, Scale
from unit.operator import builders
from unit.operator.world import World

AT_ONCE = {"bakeSeconds": 0}
SPECS: tuple[dict[str, Any], ...] = (
    builders.spec(rollout=AT_ONCE),
    builders.spec(rollout=AT_ONCE, overrides={"maxNumSeqs": 4}),
    builders.spec(rollout=AT_ONCE, compileCache={"size": "2Gi"}),
    builders.spec(overrides={"maxNumSeqs": 64, "maxNumBatchedTokens": 8}),  # refused
    builders.spec(profile="no_such"),
    builders.spec(teleport=True),  # not readable
)
ROUNDS = 60
"""More than any life needs to come to rest."""


class Life(RuleBasedStateMachine):
    """The operator acts on the newest snapshot or on one that is some steps old, and may die after any action."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.seen: list[Snapshot] = []
        self.seconds = 0.0

    @initialize(document=st.sampled_from(SPECS))
    def born(self, document: dict[str, Any]) -> None:
        self.world.edit(spec=document)

    @rule(document=st.sampled_from(SPECS), replicas=st.integers(0, 2))
    def edit(self, document: dict[str, Any], replicas: int) -> None:
        self.world.edit(spec=document | {"replicas": replicas})

    @rule()
    def lose_the_status(self) -> None:
        self.world.edit(status={})

    @precondition(lambda self: self.world.service is not None)
    @rule()
    def lose_the_service(self) -> None:
        self.world.service = None

    @precondition(lambda self: self.world.deployments)
    @rule(data=st.data())
    def lose_a_deployment(self, data: st.DataObject) -> None:
        del self.world.deployments[data.draw(st.sampled_from(sorted(self.world.deployments)))]

    @precondition(lambda self: self.world.pods)
    @rule(data=st.data())
    def lose_a_pod(self, data: st.DataObject) -> None:
        del self.world.pods[data.draw(st.sampled_from(sorted(self.world.pods)))]

    @rule(data=st.data())
    def step_of_a_pod(self, data: st.DataObject) -> None:
        self.world.kubelet(lambda names: data.draw(st.sampled_from(names)))

    @rule()
    def step_of_the_deployment_controller(self) -> None:
        self.world.deployment_controller()

    @rule()
    def step_of_the_replicaset_controller(self) -> None:
        self.world.replicaset_controller()

    @rule(rounds=st.integers(1, 8))
    def time_passes(self, rounds: int) -> None:
        """Everybody does what there is to do."""
        for _ in range(rounds):
            self.reconcile(0, None)
            self.world.controllers()
            self.world.kubelet()

    @rule(age=st.integers(0, 4), limit=st.one_of(st.none(), st.integers(0, 3)))
    def reconcile(self, age: int, limit: int | None) -> None:
        """On a snapshot that is `age` steps old; killed after `limit` actions."""
        self.seen.append(self.world.snapshot())
        self.world.act(self.plan(self.seen[max(0, len(self.seen) - 1 - age)]), limit)

    @rule()
    def delete(self) -> None:
        made = len(self.world.made)
        self.world.edit(deleting=True)
        for _ in range(3):
            self.world.act(self.plan(self.world.snapshot()))
            self.world.controllers()
        assert len(self.world.made) == made
        self.world = World(builders.resource(SPECS[0], uid=f"uid-of-another-{self.world.serial}"))
        self.seen = []

    @invariant()
    def never_two_revisions(self) -> None:
        assert len(self.world.running()) <= 1
        assert len(self.world.holding()) <= 1, "pods of two revisions would want two sets of GPUs"

    def plan(self, snapshot: Snapshot) -> Plan:
        self.seconds += 1
        return builders.planned(snapshot, self.seconds)

    def teardown(self) -> None:
        """Left alone, the world comes to rest: no action, no write, nothing to say that was not said."""
        for _ in range(ROUNDS):
            before = self.world.writes
            plan = self.plan(self.world.snapshot())
            self.world.act(plan)
            self.world.controllers()
            moved = self.world.kubelet()
            if not moved and self.world.writes == before and not plan.actions:
                break
        else:
            pytest.fail(f"no rest within {ROUNDS} rounds: {plan.actions}")
        self.at_rest(plan)

    def at_rest(self, plan: Plan) -> None:
        world, status = self.world, plan.status
        assert status is not None
        again = self.plan(world.snapshot())
        assert (again.actions, again.events) == ((), ())
        conditions = {one.type: one for one in status.conditions}
        accepted = conditions[ConditionType.ACCEPTED].status is ConditionStatus.TRUE
        wanted = world.resource.spec["replicas"]
        if accepted:
            assert world.running() == ({status.revisions.target} if wanted else set())
            assert len(world.pods) == wanted
        if accepted and wanted:
            assert status.revisions.active == status.revisions.target == status.revisions.last_good
        ready = conditions[ConditionType.READY]
        assert ready.status is ConditionStatus.TRUE or ready.message, "it must say what it waits for"
        if accepted and wanted:
            assert ready.status is ConditionStatus.TRUE, ready.message
        # The status is derived: losing it changes nothing but the times in it.
        world.edit(status={})
        rebuilt = self.plan(world.snapshot()).status
        assert rebuilt is not None
        assert dump(rebuilt) == dump(status)


def dump(status: Any) -> Any:
    """Without times: a lost status cannot tell since when a phase lasts."""
    found = without_times(status.model_dump(mode="json", by_alias=True))
    if found.get("startup"):
        del found["startup"]["since"]
    return found


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_a_killed_operator_goes_on_where_the_world_stands() -> None:
    """Every place of a change of revision at which the operator can die: the world that it comes to is the same one."""
    ends = set()
    for killed in range(12):
        world, acted = World(), 0
        world.edit(spec=SPECS[0])
        settle(world)
        world.edit(spec=SPECS[1])
        while True:
            plan = builders.planned(world.snapshot())
            left = killed - acted
            if left <= len(plan.actions):
                world.act(plan, max(left, 0))
                break
            acted, before = acted + len(plan.actions), world.writes
            world.act(plan)
            world.controllers()
            if not world.kubelet() and world.writes == before:
                break
        settle(world)
        assert len(world.running()) == 1
        ends.add((tuple(sorted(world.running())), tuple(sorted(world.deployments)), len(world.pods)))
    assert len(ends) == 1


def settle(world: World) -> None:
    for _ in range(ROUNDS):
        plan, before = builders.planned(world.snapshot()), world.writes
        world.act(plan)
        world.controllers()
        if not world.kubelet() and world.writes == before:
            return
    pytest.fail("no rest")


def test_in_place_the_new_one_starts_when_the_earlier_pods_are_gone_and_gets_the_traffic_when_it_serves() -> None:
    world = World()
    settle(world)
    before = world.snapshot()
    world.edit(spec=SPECS[1])
    while True:
        plan = builders.planned(world.snapshot())
        if any(isinstance(one, Apply | Scale) and one.starts for one in plan.actions):
            assert world.pods == {}
        if any(isinstance(one, Apply) and one.promotes for one in plan.actions):
            assert [pod["status"]["phase"] for pod in world.pods.values()] == ["Running"]
            break
        assert world.snapshot().service == before.service
        world.act(plan)
        world.controllers()
        world.kubelet()
