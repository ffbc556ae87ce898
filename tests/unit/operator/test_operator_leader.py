"""Leadership: one at a time, by the own clock only, given back at the end."""

from __future__ import annotations

import pytest

from sm70_operator.act.client import ApiError
from sm70_operator.runtime.leader import Leadership
from unit.operator.fake_api import FakeApi


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def api() -> FakeApi:
    return FakeApi()


def candidate(api: FakeApi, name: str, clock: Clock) -> Leadership:
    return Leadership(api, "sm70-system", "sm70-operator", name, seconds=15, clock=clock)


async def test_the_first_one_leads_and_the_second_waits(api: FakeApi) -> None:
    clock = Clock()
    one, other = candidate(api, "one", clock), candidate(api, "other", clock)
    assert await one.attempt()
    assert not await other.attempt()
    assert (one.leads(), other.leads()) == (True, False)


async def test_a_lease_that_is_renewed_is_never_taken(api: FakeApi) -> None:
    clock = Clock()
    one, other = candidate(api, "one", clock), candidate(api, "other", clock)
    await one.attempt()
    for _ in range(20):
        clock.now += 5
        assert await one.attempt()
        assert not await other.attempt()


async def test_a_dead_leaders_lease_is_taken_after_its_time_and_never_before(api: FakeApi) -> None:
    clock = Clock()
    one, other = candidate(api, "one", clock), candidate(api, "other", clock)
    await one.attempt()
    assert not await other.attempt()
    clock.now += 14
    assert not one.leads(), "the old leader stops before the new one may start"
    assert not await other.attempt()
    clock.now += 2
    assert await other.attempt()
    assert not await one.attempt()


async def test_a_clock_that_is_wrong_elsewhere_takes_no_lease(api: FakeApi) -> None:
    await candidate(api, "one", Clock()).attempt()
    api.objects["Lease", "sm70-operator"]["spec"]["renewTime"] = "1999-01-01T00:00:00.000000Z"
    assert not await candidate(api, "other", Clock()).attempt()


async def test_an_unreachable_api_server_ends_leadership_in_time(api: FakeApi) -> None:
    clock = Clock()
    one = candidate(api, "one", clock)
    await one.attempt()

    def silent(verb: str, kind: str, name: str) -> None:
        raise ApiError(0, "no answer")

    api.fail = silent
    clock.now += 10
    await one.attempt()
    assert one.leads(), "one lost request is not the end"
    clock.now += 5
    assert not one.leads()


async def test_a_lease_that_is_given_back_is_free_at_once(api: FakeApi) -> None:
    clock = Clock()
    one, other = candidate(api, "one", clock), candidate(api, "other", clock)
    await one.attempt()
    await one.release()
    assert not one.leads()
    assert await other.attempt()
    assert api.objects["Lease", "sm70-operator"]["spec"]["leaseTransitions"] == 1


async def test_a_restarted_container_has_its_own_lease_at_once(api: FakeApi) -> None:
    await candidate(api, "pod-1", Clock()).attempt()
    assert await candidate(api, "pod-1", Clock()).attempt()
