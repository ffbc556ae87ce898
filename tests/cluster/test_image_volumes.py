"""Checkpoints that are shipped as OCI images, on a real kubelet: mounted read-only, and no registry is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.simulation import Simulation
from simulated_engine import image
from sm70_engine.tinymodel.chains import TEXT
from sm70_qualify.client import Endpoint
from stack.services import condition

pytestmark = [pytest.mark.cluster, pytest.mark.full]
REFERENCE = "sm70.test/tiny-checkpoint:1"
ABSENT = "sm70.test/absent-checkpoint:1"
IN_PLACE = {"strategy": "InPlace", "drainTimeoutSeconds": 5, "progressDeadlineSeconds": 60, "bakeSeconds": 1}


@pytest.fixture(scope="module")
def shipped(simulation: Simulation, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model as an image that every node has; its files lie in `models/tiny`."""
    place = simulation.cluster.node_folder("node-1") / "sm70-models/tiny"
    files = {f"models/tiny/{path.name}": path.read_bytes() for path in sorted(place.iterdir())}
    folder: Path = tmp_path_factory.mktemp("shipped")
    simulation.cluster.load_image(image.files_only(REFERENCE, folder, files))
    return REFERENCE


def model(reference: str, path: str = "models/tiny") -> dict[str, Any]:
    return {"image": {"reference": reference, "path": path}, "servedName": "tiny"}


@pytest.fixture
def serving(simulation: Simulation, shipped: str) -> Iterator[tuple[str, str]]:
    """A service whose model is such an image, and its revision."""
    name = "shipped"
    with simulation.serving(name, model=model(shipped), rollout=IN_PLACE) as revision:
        simulation.says(name, "Progressing", "Settled")
        yield name, revision


def answer(simulation: Simulation, name: str) -> str:
    with Endpoint(simulation.service_url(name), model="tiny") as server:
        return server.ask("Recite.").text


def test_a_checkpoint_in_an_image_is_served(simulation: Simulation, serving: tuple[str, str]) -> None:
    name, before = serving
    assert answer(simulation, name) == TEXT
    (pod,) = simulation.pods(name)
    (volume,) = [one for one in pod["spec"]["volumes"] if "image" in one]
    assert volume["image"]["reference"] == REFERENCE
    assert condition(simulation.get(name), "ModelAvailable").reason == "Present"

    # A change in place of such a service is looked at before, with the same volume.
    simulation.behave(name, variant="next")
    simulation.ready(name, other_than=before, seconds=90)
    assert answer(simulation, name) == TEXT


@pytest.mark.parametrize(
    ("source", "words"),
    [(model(ABSENT), ABSENT), (model(REFERENCE, path="not/there"), "not/there")],
    ids=["image", "path"],
)
def test_what_the_preflight_does_not_find(
    simulation: Simulation, serving: tuple[str, str], source: dict[str, Any], words: str
) -> None:
    name, before = serving
    uids = {pod["metadata"]["uid"] for pod in simulation.pods(name)}
    simulation.patch(name, model=source)

    def told(service: dict[str, Any]) -> bool:
        said = condition(service, "Progressing")
        return said.reason in ("Preflight", "RolledBack") and words in said.message

    found = simulation.until(name, told, seconds=90)
    print(f"\n{condition(found, 'Progressing')}")
    assert simulation.selected(name) == before
    assert {pod["metadata"]["uid"] for pod in simulation.pods(name)} == uids
    assert answer(simulation, name) == TEXT


def test_a_first_start_without_its_image(simulation: Simulation, shipped: str) -> None:
    name = "not-shipped"
    simulation.apply(simulation.service(name, model=model(ABSENT), rollout=IN_PLACE))
    try:
        said = simulation.says(name, "ModelAvailable", "CheckpointNotPulled", seconds=90)
        print(f"\n{said}")
        assert f"`{ABSENT}` of the model" in said.message
        assert "image.reference" in said.message
        assert condition(simulation.get(name), "Ready").reason == "CheckpointNotPulled"

        # With the right one it starts, whatever became of the first.
        simulation.patch(name, model=model(shipped))
        simulation.ready(name, seconds=90)
    finally:
        simulation.remove(name)
