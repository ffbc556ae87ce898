"""GPUs by claims, on a real scheduler and kubelet: the very devices are selected, held, waited for and given back.

The pods are rendered as the operator renders them; a small program stands for the engine, and no operator runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.harness import gpu_device_class
from sm70_operator.api import crd, names
from sm70_operator.api.conditions import ConditionType, Reason
from sm70_operator.observe.facts import PodFacts, parse_pod
from sm70_operator.observe.snapshot import Key, Resource, Snapshot
from sm70_operator.plan.explain import Views, judge_startup
from sm70_operator.plan.intent import Target, read_intent
from sm70_operator.render.deployment import render_deployment
from sm70_operator.render.objects import Owner
from sm70_operator.render.resource_claim import render_claim_template
from sm70_operator.settings import Settings
from sm70_profiles.facts import Interconnect
from sm70_profiles.resolver import ResolvedGpus
from testcluster import build
from testcluster.cluster import Cluster
from testcluster.gpus import PRODUCT, gpu_uuid
from testcluster.options import GpuSource, Options
from testcluster.paths import cache
from testcluster.processes import until

pytestmark = pytest.mark.cluster

NAMESPACE = "claims"
SETTINGS = Settings(engine_image_sm70=build.IMAGES["probe"])
PINNED = [gpu_uuid("node-1", 1), gpu_uuid("node-1", 3)]
SMALL = {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "256Mi"}}


@pytest.fixture(scope="module")
def claims() -> Iterator[Cluster]:
    """A cluster whose GPUs are offered by a DRA driver, with our resources and the class that NVIDIA's driver makes."""
    archive = build.build(build.kubernetes(), cache()) / "probe.tar"
    cluster = Cluster.named(f"dra-{os.getpid()}", Options(nodes=1, gpu_source=GpuSource.DRA, images=(archive,)))
    try:
        cluster.up()
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}, gpu_device_class())
        cluster.kubectl("apply", "--server-side", "-f", "-", stdin="---\n".join(crd.render_all().values()))
        cluster.kubectl("wait", "--for=condition=Established", "--timeout=30s", f"crd/{names.PLURAL}.{names.GROUP}")
        yield cluster
    finally:
        cluster.down()


def serve(cluster: Cluster, name: str, model: dict[str, Any] | None = None, **gpus: Any) -> str:
    """Makes a service and what the operator would make of it. Returns the revision."""
    spec = {
        "profile": "custom",
        "model": model or {"hostPath": {"path": "/var"}},
        "overrides": {"tensorParallelSize": 2, "maxModelLen": 4096},
        "gpus": {"allocation": "DRA", "count": 2, **gpus},
        "auth": {"allowAnonymous": True},
        "engine": {"imagePullPolicy": "Never"},
        "pod": {"resources": SMALL, "sharedMemory": "16Mi"},
    }
    document = {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": spec,
    }
    made = json.loads(
        cluster.kubectl("create", "--validate=strict", "-o", "json", "-f", "-", stdin=json.dumps(document))
    )
    uid = made["metadata"]["uid"]
    intent = read_intent(Snapshot(Resource(Key(NAMESPACE, name), uid, 1, False, made["spec"], {})), SETTINGS)
    assert isinstance(intent, Target), intent
    owner = Owner(NAMESPACE, name, uid)
    template = render_claim_template(owner, intent.name, intent.revision)
    assert template is not None
    deployment = render_deployment(owner, intent.name, intent.revision, 1)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    container["args"] = ["serve", f":{names.HTTP_PORT}"]
    for probe in ("startupProbe", "readinessProbe"):
        container[probe]["periodSeconds"] = 1
    del container["lifecycle"]  # nobody's requests have to end
    cluster.apply(template, deployment)
    return intent.name


def pod_of(cluster: Cluster, service: str) -> PodFacts | None:
    found = cluster.items("pods", NAMESPACE, f"{names.SERVICE_LABEL}={service}")
    return parse_pod(found[0]) if found else None


def serving(cluster: Cluster, service: str) -> PodFacts:
    until(lambda: (pod := pod_of(cluster, service)) is not None and pod.ready, f"{service} is ready")
    found = pod_of(cluster, service)
    assert found is not None
    return found


def uuids_of(cluster: Cluster, pod: PodFacts) -> set[str]:
    words = ("exec", "-n", NAMESPACE, pod.name, "--", "/probe", "env", "NVIDIA_VISIBLE_DEVICES")
    return set(cluster.kubectl(*words).strip().split(","))


def told(pod: PodFacts, *holders: PodFacts) -> tuple[Reason, str]:
    """What the operator would say of `GPUsAllocated`."""
    gpus = ResolvedGpus(
        count=2, products=(PRODUCT,), min_memory=None, interconnect=Interconnect.ANY, resource_name="nvidia.com/gpu"
    )
    views = Views(replicas=1, gpus=gpus, nodes=None, holders=holders, words={}, pods_refused="")
    finding = judge_startup([pod], views)[ConditionType.GPUS_ALLOCATED]
    return finding.reason, finding.message


def test_pinned_devices_are_selected_held_waited_for_and_given_back(claims: Cluster) -> None:
    revision = serve(claims, "first", uuids=PINNED, products=[PRODUCT], minMemory="16Gi")
    first = serving(claims, "first")
    assert uuids_of(claims, first) == set(PINNED)
    assert first.claims

    serve(claims, "second", uuids=PINNED)
    until(lambda: (pod := pod_of(claims, "second")) is not None and bool(pod.scheduling_message), "it waits")
    waiting = pod_of(claims, "second")
    assert waiting is not None
    reason, message = told(waiting, first)
    assert reason is Reason.WAITING_FOR_GPU, message
    assert "`claims/first` on `node-1`" in message

    # An OCI image as a volume: the runtime mounts it, or the container is not made.
    serve(claims, "elsewhere", {"image": {"reference": build.IMAGES["probe"]}})
    assert uuids_of(claims, serving(claims, "elsewhere")).isdisjoint(PINNED)

    claims.kubectl("delete", names.PLURAL, "first", "-n", NAMESPACE, "--cascade=foreground", "--timeout=60s")
    assert uuids_of(claims, serving(claims, "second")) == set(PINNED)
    assert claims.get("resourceclaimtemplate", names.claim_template_name("first", revision), NAMESPACE) is None
    held = claims.items("resourceclaims", NAMESPACE)
    assert len(held) == 2, "a claim for each pod that is left"


def test_a_product_that_is_not_there_is_waited_for(claims: Cluster) -> None:
    serve(claims, "other", products=["Tesla-V100-SXM2-32GB"])
    until(lambda: (pod := pod_of(claims, "other")) is not None and bool(pod.scheduling_message), "it waits")
    waiting = pod_of(claims, "other")
    assert waiting is not None
    assert told(waiting)[0] is Reason.WAITING_FOR_GPU
    claims.kubectl("delete", names.PLURAL, "other", "-n", NAMESPACE)
