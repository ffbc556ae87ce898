"""Fixtures of the end-to-end tests: the session's cluster with the product on it."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import images
from cluster.harness import NAMESPACE, SHORT_PERIODS, Stack
from cluster.simulation import Simulation, simulated_cluster
from stack import models
from testcluster.cluster import Cluster
from testcluster.fixtures import KEEP


@pytest.fixture(scope="session")
def built() -> dict[str, images.ImageInfo]:
    return images.image_archives(["operator", "engine-cpu"])


@pytest.fixture(scope="session")
def cluster_images(built: dict[str, images.ImageInfo]) -> Sequence[Path]:
    """The archives that the session's cluster starts with."""
    return [archive for image in built.values() for archive in image.archives]


@pytest.fixture(scope="session")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulation]:
    """A cluster with simulated engines, for stories of many rollouts and for faults."""
    keep = os.environ.get(KEEP) == "1"
    name = "simulation" if keep else f"simulation-{os.getpid()}"
    with simulated_cluster(tmp_path_factory.mktemp("simulation"), name, keep) as found:
        yield found


@pytest.fixture(scope="session")
def stack(cluster: Cluster, built: dict[str, images.ImageInfo], tmp_path_factory: pytest.TempPathFactory) -> Stack:
    engine = built["engine-cpu"].reference
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    key = secrets.token_urlsafe(24)
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "tiny-api-key"},
        "stringData": {"api-key": key},
    }
    cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=json.dumps(secret))
    models.make(cluster, image=engine, namespace=NAMESPACE, arguments=("--out", "/models/tiny"))
    models.make(
        cluster, image=engine, namespace=NAMESPACE, job="mismatch",
        arguments=("--draft", "dflash", "--draft-out", "/models/draft-mismatch", "--mismatched"),
    )  # fmt: skip
    # The generator is deterministic: run here, it writes the answers that the job's model was made to give.
    folder = tmp_path_factory.mktemp("tiny")
    generator = Path(sys.executable).with_name("sm70-tiny-model")
    subprocess.run([str(generator), "--out", str(folder)], check=True, timeout=120)
    answers = {one["kind"]: one for one in json.loads((folder / "answers.json").read_text())["answers"]}
    stack = Stack(
        cluster=cluster, api_key=key, answers=answers, operator_image=built["operator"].reference, engine_image=engine
    )
    stack.install(SHORT_PERIODS)
    return stack
