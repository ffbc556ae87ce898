"""Checkpoints of a hub, on a real cluster: `sm70-fetch` as an init step, and a hub on the cluster's own network.

The hub pauses in the middle of a file, so what the status says meanwhile can be awaited.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.harness import NAMESPACE
from cluster.simulation import Simulation
from sm70_engine.tinymodel.chains import TEXT
from sm70_qualify.client import Endpoint
from stack import operator
from stack.services import condition
from testcluster.processes import until
from unit.engine.loopback_hub import COMMIT, REPO, TOKEN, LoopbackHub, serving

pytestmark = [pytest.mark.cluster, pytest.mark.full]

PART = 10 * 1024 * 1024
"""What the library writes at once: what is in a part that breaks comes again."""
LARGE, LARGE_BYTES = "notes.txt", 3 * PART + 12345
PAUSE_AT = 2 * PART + 54321
SECRET = "hub-token"
IN_PLACE = {"strategy": "InPlace", "drainTimeoutSeconds": 5, "progressDeadlineSeconds": 60, "bakeSeconds": 1}


@pytest.fixture(scope="module")
def checkpoint(simulation: Simulation) -> dict[str, bytes]:
    """The tiny model's files, and one that is large enough to be interrupted."""
    place = simulation.cluster.node_folder("node-1") / "sm70-models/tiny"
    files = {path.name: path.read_bytes() for path in place.iterdir()}
    return {**files, LARGE: b"0123456789abcdef" * (LARGE_BYTES // 16 + 1)}


@pytest.fixture
def hub(simulation: Simulation, checkpoint: dict[str, bytes]) -> Iterator[LoopbackHub]:
    hub = LoopbackHub(files=dict(checkpoint))
    yield hub
    hub.resume()


@pytest.fixture
def address(simulation: Simulation, hub: LoopbackHub) -> Iterator[str]:
    """Where pods find the hub: the host's end of the cluster's cable, which leads nowhere else."""
    with serving(hub, simulation.cluster.layout.network.host) as url:
        yield url


@pytest.fixture
def claim(simulation: Simulation, request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"downloads-{request.node.name.removeprefix('test_').replace('_', '-')[:30].strip('-')}"
    document = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    simulation.cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=json.dumps(document))
    yield name
    simulation.cluster.kubectl("delete", "pvc", name, "-n", NAMESPACE, "--wait=false")


def hugging_face(claim: str, **members: Any) -> dict[str, Any]:
    return {"huggingFace": {"repo": REPO, "revision": COMMIT, "claimName": claim, **members}, "servedName": "tiny"}


def mirrored(address: str) -> list[dict[str, str]]:
    return [
        {"name": "SIMULATED_ENGINE", "value": "{}"},
        {"name": "HF_ENDPOINT", "value": address},
        {"name": "MODELSCOPE_ENDPOINT", "value": address},
    ]


def engine_pod(simulation: Simulation, name: str) -> dict[str, Any]:
    found = simulation.cluster.items("pods", NAMESPACE, f"inference.sm70.io/service={name},inference.sm70.io/revision")
    (pod,) = [one for one in found if "deletionTimestamp" not in one["metadata"]]
    return pod


def progress(files: dict[str, bytes], without: str = "") -> str:
    """What the status says while the hub pauses: two parts of the large file, and all others that are right."""
    total = sum(len(data) for data in files.values())
    done = 2 * PART + sum(len(data) for path, data in files.items() if path not in (LARGE, without))
    return f"{done / 1e6:.1f} of {total / 1e6:.1f} MB ({100 * done // total} %)"


def answer(simulation: Simulation, name: str) -> str:
    with Endpoint(simulation.service_url(name), model="tiny") as server:
        return server.ask("Recite.").text


def everything_said(simulation: Simulation, name: str) -> str:
    """All that anybody with a right to read could read of a service: objects, events, logs."""
    words = [
        simulation.cluster.kubectl("get", kinds, "-n", NAMESPACE, "-o", "yaml")
        for kinds in ("sm70,deployments,replicasets,pods,jobs,configmaps,controllerrevisions.apps", "events")
    ]
    words += [
        simulation.cluster.kubectl("logs", "-n", NAMESPACE, pod["metadata"]["name"], "--all-containers")
        for pod in simulation.cluster.items("pods", NAMESPACE, f"inference.sm70.io/service={name}")
    ]
    words.append(simulation.cluster.kubectl("logs", "-n", operator.NAMESPACE, f"deploy/{operator.RELEASE}"))
    return "\n".join(words)


def test_a_gated_repository_is_downloaded_in_pieces_and_served(
    simulation: Simulation, hub: LoopbackHub, address: str, claim: str, checkpoint: dict[str, bytes]
) -> None:
    """Refused without a token, then held, hung up on and killed in the middle, and at last complete."""
    name = "gated"
    hub.gated, hub.pause_in, hub.pause_at = True, LARGE, PAUSE_AT
    env, rollout = mirrored(address), IN_PLACE
    simulation.apply(simulation.service(name, model=hugging_face(claim), env=env, rollout=rollout))
    try:
        refused = simulation.says(name, "ModelAvailable", "RepositoryUnavailable")
        assert "gated" in refused.message
        assert "token" in refused.message
        assert hub.tokens == {None}

        model = hugging_face(claim, tokenSecretRef={"name": SECRET, "key": "token"})
        simulation.patch(name, model=model)
        assert SECRET in simulation.says(name, "EngineStarted", "ContainerRefused").message
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "stringData": {"token": TOKEN}}
        simulation.cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=json.dumps(secret))
        # The library has written two parts; the rest of what came is still in its hands.
        far = progress(checkpoint)
        told = simulation.until(name, lambda one: far in condition(one, "ModelAvailable").message)
        said = condition(told, "ModelAvailable")
        print(f"\n{said}")
        assert (said.status, said.reason) == ("False", "Downloading")
        assert told["status"]["startup"]["phase"] == "Downloading"
        assert condition(told, "Ready").status == "False"

        hub.hang_up()
        until(lambda: hub.pauses >= 2, seconds=60, what="the library asks for the rest by itself")
        pod = engine_pod(simulation, name)["metadata"]["name"]
        simulation.cluster.kubectl("delete", "pod", pod, "-n", NAMESPACE, "--grace-period=0", "--force")
        until(lambda: hub.pauses >= 3, seconds=60, what="another pod asks for the rest")
        assert engine_pod(simulation, name)["metadata"]["name"] != pod
        hub.resume()
        simulation.ready(name, seconds=120)
        assert answer(simulation, name) == TEXT
        asked = [one for path, one in hub.sent if path == LARGE]
        assert asked == [None, f"bytes={2 * PART}-", f"bytes={2 * PART}-"]
        assert [one for path, one in hub.sent if path != LARGE and one is not None] == []
        print(f"ranges given: {[one for one in hub.ranges if one[0] == LARGE]}")
        assert TOKEN not in everything_said(simulation, name)
        assert hub.tokens == {None, f"Bearer {TOKEN}"}

        # Another pod of it asks the hub for nothing.
        asked_before = hub.asked
        pod = engine_pod(simulation, name)["metadata"]["name"]
        simulation.cluster.kubectl("delete", "pod", pod, "-n", NAMESPACE, "--grace-period=0", "--force")
        simulation.until(name, lambda one: condition(one, "Ready").status == "False")
        simulation.ready(name)
        assert hub.asked == asked_before
    finally:
        simulation.remove(name)
        simulation.cluster.kubectl("delete", "secret", SECRET, "-n", NAMESPACE, "--ignore-not-found")


def test_a_change_downloads_before_anything_stops(
    simulation: Simulation, hub: LoopbackHub, address: str, claim: str
) -> None:
    """In the preflight: its progress is told, wrong bytes are refused, and the server that serves is not touched."""
    name = "preflights"
    with simulation.serving(name, model=hugging_face(claim), env=mirrored(address), rollout=IN_PLACE) as before:
        simulation.says(name, "Progressing", "Settled")
        (pod,) = simulation.pods(name)
        hub.pause_in, hub.pause_at, hub.corrupt = LARGE, PAUSE_AT, "model.safetensors"
        simulation.patch(name, model=hugging_face(claim, path="other"))
        far = progress(hub.files, without="model.safetensors")
        told = simulation.until(name, lambda one: f"It downloads: {far}" in condition(one, "Progressing").message)
        print(f"\n{condition(told, 'Progressing')}")
        assert condition(told, "Progressing").reason == "Preflight"
        hub.resume()

        def refused(service: dict[str, Any]) -> bool:
            found = service["status"]["revisions"].get("rejected") or [{}]
            return bool(found[0].get("reason") == "PreflightFailed")

        found = simulation.until(name, refused, seconds=90)["status"]["revisions"]
        print(found["rejected"])
        assert "ChecksumMismatch" in found["rejected"][0]["message"]
        assert "model.safetensors" in found["rejected"][0]["message"]
        assert found["active"] == before
        assert [one["metadata"]["uid"] for one in simulation.pods(name)] == [pod["metadata"]["uid"]]
        assert answer(simulation, name) == TEXT


def test_a_hub_that_is_down(simulation: Simulation, hub: LoopbackHub, claim: str) -> None:
    """Tried again by itself, with a reason meanwhile; served once the hub is there."""
    name = "hub-down"
    with serving(hub, simulation.cluster.layout.network.host) as url:
        pass  # a port that was free
    document = simulation.service(name, model=hugging_face(claim), env=mirrored(url), rollout=IN_PLACE)
    simulation.apply(document)
    try:
        simulation.says(name, "ModelAvailable", "DownloadFailed")
        pod = engine_pod(simulation, name)["metadata"]["name"]
        hub.pause_in, hub.pause_at = LARGE, PAUSE_AT
        with serving(hub, simulation.cluster.layout.network.host, port=int(url.rpartition(":")[2])):
            far = progress(hub.files)
            told = simulation.until(name, lambda one: far in condition(one, "ModelAvailable").message, seconds=120)
            print(f"\n{condition(told, 'ModelAvailable')}")
            assert condition(told, "ModelAvailable").reason == "Downloading"
            assert engine_pod(simulation, name)["metadata"]["name"] == pod, "another try of the same pod"
            hub.resume()
            simulation.ready(name, seconds=120)
    finally:
        simulation.remove(name)


def test_modelscope(simulation: Simulation, hub: LoopbackHub, address: str, claim: str) -> None:
    name = "modelscope"
    source = {"repo": REPO, "revision": "v1.0", "claimName": claim}
    model = {"modelScope": source, "servedName": "tiny"}
    with simulation.serving(name, model=model, env=mirrored(address), rollout=IN_PLACE):
        assert answer(simulation, name) == TEXT
        assert {path for path, _ in hub.sent} == set(hub.files)


def test_a_repository_that_is_not_there(simulation: Simulation, address: str, claim: str) -> None:
    name = "absent-repository"
    model = hugging_face(claim, repo="owner/absent")
    simulation.apply(simulation.service(name, model=model, env=mirrored(address), rollout=IN_PLACE))
    try:
        said = simulation.says(name, "ModelAvailable", "RepositoryUnavailable")
        assert "owner/absent" in said.message
    finally:
        simulation.remove(name)
