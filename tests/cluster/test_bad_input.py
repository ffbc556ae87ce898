"""What a user gets wrong ends in one clear word: refused by the API server, or a condition with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cluster.harness import NAMESPACE, Stack
from stack.services import condition, wait, wait_gone
from testcluster.errors import CommandError

pytestmark = pytest.mark.cluster
SOURCE = {"persistentVolumeClaim": {"claimName": "models", "path": "tiny"}, "servedName": "tiny"}


@pytest.fixture
def name(stack: Stack, request: pytest.FixtureRequest) -> Iterator[str]:
    """A service name for one test, whose service is gone afterwards."""
    chosen = request.node.name.removeprefix("test_").replace("_", "-")[:40].rstrip("-")
    yield chosen
    stack.cluster.kubectl("delete", "sm70", chosen, "-n", NAMESPACE, "--ignore-not-found", "--wait")
    wait_gone(stack.cluster, chosen, NAMESPACE)


def refused(stack: Stack, document: dict[str, Any]) -> str:
    with pytest.raises(CommandError) as caught:
        stack.apply(document)
    return str(caught.value)


def ends_with(stack: Stack, name: str, kind: str, reason: str, seconds: float = 90) -> str:
    """The message of a condition once it is False for this reason; Ready carries the same reason."""

    def there(service: dict[str, Any]) -> bool:
        one = condition(service, kind)
        return (one.status, one.reason) == ("False", reason) and condition(service, "Ready").reason == reason

    service = wait(stack.cluster, name, there, namespace=NAMESPACE, seconds=seconds)
    assert condition(service, "Ready").status == "False"
    return condition(service, kind).message


def test_two_model_sources(stack: Stack, name: str) -> None:
    words = refused(stack, stack.service(name, model={**SOURCE, "hostPath": {"path": "/data/x"}}))
    assert "exactly one of" in words
    assert "persistentVolumeClaim" in words


def test_no_model_source(stack: Stack, name: str) -> None:
    assert "exactly one of" in refused(stack, stack.service(name, model={"servedName": "tiny"}))


def test_two_profiles(stack: Stack, name: str) -> None:
    reference = {"configMap": {"name": "mine", "key": "profile.yaml"}}
    assert "profileRef" in refused(stack, stack.service(name, profileRef=reference))


def test_key_and_anonymous(stack: Stack, name: str) -> None:
    auth = {"apiKeySecretRef": {"name": "tiny-api-key", "key": "api-key"}, "allowAnonymous": True}
    assert "allowAnonymous" in refused(stack, stack.service(name, auth=auth))


def test_a_flag_that_a_field_owns(stack: Stack, name: str) -> None:
    words = refused(stack, stack.service(name, extraArgs=["--max-model-len=512"]))
    assert "--max-model-len" in words
    assert "overrides.maxModelLen" in words


def test_unknown_profile(stack: Stack, name: str) -> None:
    stack.apply(stack.service(name, profile="no_such_profile"))
    message = ends_with(stack, name, "Accepted", "ProfileNotFound")
    assert "no_such_profile" in message
    assert "tiny_hybrid_reference" in message


def test_several_refusals_at_once(stack: Stack, name: str) -> None:
    wrong = {"maxNumSeqs": 64, "maxNumBatchedTokens": 8, "tensorParallelSize": 2}
    stack.apply(stack.service(name, overrides=wrong))
    message = ends_with(stack, name, "Accepted", "Refused")
    assert "gpus.count" in message
    assert "maxNumBatchedTokens" in message


def test_a_path_that_is_not_in_the_volume(stack: Stack, name: str) -> None:
    source = {"persistentVolumeClaim": {"claimName": "models", "path": "not-there"}, "servedName": "tiny"}
    stack.apply(stack.service(name, model=source))
    message = ends_with(stack, name, "ModelAvailable", "PathNotFound")
    assert "not-there" in message


def test_a_draft_of_another_model(stack: Stack, name: str) -> None:
    stack.apply(
        stack.service(
            name,
            profile="tiny_hybrid_reference_dflash",
            draft={"persistentVolumeClaim": {"claimName": "models", "path": "draft-mismatch"}},
        )
    )
    message = ends_with(stack, name, "ModelAvailable", "DraftIncompatible")
    assert "vocabulary" in message


def test_more_gpus_than_any_node_has(stack: Stack, name: str) -> None:
    stack.apply(stack.service(name, gpus={"count": 8}, overrides={"tensorParallelSize": 8}))
    message = ends_with(stack, name, "GPUsAllocated", "TopologyUnsuitable")
    assert "8" in message
    assert "4" in message


def test_an_image_that_cannot_be_pulled(stack: Stack, name: str) -> None:
    stack.apply(stack.service(name, engine={"image": "sm70.test/no-such-image:1"}))
    message = ends_with(stack, name, "EngineStarted", "PullingImage")
    assert "sm70.test/no-such-image:1" in message


def test_a_pod_that_is_killed_for_its_memory(stack: Stack, name: str) -> None:
    # Far less, and the kernel would long reread the libraries' pages instead of killing anything.
    small = {"memory": "900Mi"}
    stack.apply(stack.service(name, pod={"resources": {"limits": small, "requests": small}}))
    message = ends_with(stack, name, "EngineStarted", "OutOfMemory", seconds=240)
    assert "memory" in message
