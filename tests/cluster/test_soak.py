"""Long runs, for `make test-full`: the promises of the short tests in real time and with the periods of production."""

from __future__ import annotations

import time

import pytest

from cluster.harness import NAMESPACE, SHORT_PERIODS, Stack
from stack import operator
from stack.services import wait_gone, wait_ready
from testcluster import audit

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(1200)]
MINUTES = 5


def test_five_idle_minutes_without_a_write(stack: Stack) -> None:
    """The operator with its own defaults, a serving pod, nobody asking: nothing is written, and it lives."""
    stack.install()
    stack.apply(stack.example("tiny"))
    wait_ready(stack.cluster, "tiny", namespace=NAMESPACE, seconds=240)
    stack.rest("tiny", seconds=90)
    start = audit.position(stack.cluster.audit_log)
    polls = stack.operator_metric("sm70_operator_engine_polls_total")
    time.sleep(60 * MINUTES)  # the length of the idleness is what is tested
    seen = list(audit.requests(stack.cluster.audit_log, start))
    account = operator.ACCOUNT
    assert [one for one in seen if one.write and one.user == account and one.resource != "leases"] == []
    assert [one for one in seen if one.write and one.user == account and one.resource == "leases"] != []
    assert [one for one in seen if one.write and one.namespace == NAMESPACE and one.name.startswith("tiny")] == []
    assert stack.operator_metric("sm70_operator_engine_polls_total") > polls
    stack.cluster.kubectl("delete", "sm70", "tiny", "-n", NAMESPACE, "--wait")
    wait_gone(stack.cluster, "tiny", NAMESPACE)
    stack.install(SHORT_PERIODS)
