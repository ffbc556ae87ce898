"""pytest fixtures: one cluster for a whole session, made when the first test asks for it.

A conftest.py takes them over with `pytest_plugins = ["testcluster.fixtures"]` or by import, and
overrides `cluster_images` to have images on the nodes.

SM70_KEEP_CLUSTER=1 leaves the cluster running, under a fixed name, for the next session to use again.
CLUSTER=kind or CLUSTER=current runs the tests that take `target` elsewhere; tests that take
`cluster` need the embedded one and are skipped then.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from testcluster.cluster import Cluster
from testcluster.options import Options
from testcluster.target import ClusterKind, Embedded, TargetCluster, parse_kind, target_cluster

KEEP = "SM70_KEEP_CLUSTER"


@pytest.fixture(scope="session")
def cluster_images() -> Sequence[Path]:
    """OCI archives that the session's cluster shall have; override it."""
    return ()


@pytest.fixture(scope="session")
def target(cluster_images: Sequence[Path]) -> Iterator[TargetCluster]:
    """The session's cluster, of the kind that the variable CLUSTER names."""
    keep = os.environ.get(KEEP) == "1"
    name = "pytest" if keep else f"pytest-{os.getpid()}"
    options = Options(images=tuple(cluster_images), audit_log=True)
    wanted = target_cluster(parse_kind(os.environ.get("CLUSTER")), name, options)
    try:
        wanted.up()
        yield wanted
    finally:
        if not keep:
            wanted.down()


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Cluster:
    """The session's embedded cluster, with its faults and its audit log: two nodes with four GPUs each."""
    if parse_kind(os.environ.get("CLUSTER")) is not ClusterKind.EMBEDDED:
        pytest.skip("needs the embedded cluster (faults, audit log), but CLUSTER names another")
    found = request.getfixturevalue("target")
    assert isinstance(found, Embedded)
    return found
