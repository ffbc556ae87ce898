"""Every rule of the CRDs, by the API server itself (dry run): what it refuses, and in which words.

And whether it admits what the operator renders, at the pod security level `restricted`.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from golden.test_operator_jobs_rendering import CASES
from sm70_operator.api import crd, names
from testcluster.cluster import Cluster
from testcluster.errors import CommandError
from unit.operator.builders import KEY as SERVICE

pytestmark = pytest.mark.cluster

CLAIM = {"persistentVolumeClaim": {"claimName": "models", "path": "tiny"}}
SPEC: dict[str, Any] = {"profile": "tiny_hybrid_reference", "model": CLAIM, "auth": {"allowAnonymous": True}}
ONE_OF_TWO = "exactly one of `apiKeySecretRef` and `allowAnonymous: true`"
KEY = {"name": "keys", "key": "api"}
REFERENCE = {"configMap": {"name": "mine", "key": "profile.yaml"}}

HUB = {"repo": "owner/name", "revision": "0" * 40, "claimName": "models"}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two profiles": ({"profileRef": REFERENCE}, "exactly one of `profile`, `profileRef`"),
    "no profile": ({"profile": None}, "exactly one of `profile`, `profileRef`"),
    "two models": ({"model": {**CLAIM, "hostPath": {"path": "/x"}}}, "exactly one of `persistentVolumeClaim`"),
    "no model": ({"model": {"servedName": "x"}}, "exactly one of `persistentVolumeClaim`"),
    "two drafts": ({"draft": {**CLAIM, "hostPath": {"path": "/x"}}}, "exactly one of `persistentVolumeClaim`"),
    "the model as its own draft": ({"draft": CLAIM}, "another checkpoint than `model`"),
    "a draft for nothing": (
        {"draft": {"hostPath": {"path": "/x"}}, "overrides": {"speculation": {"method": "None"}}},
        "`draft` must be absent",
    ),
    "a way out of the volume": (
        {"model": {"persistentVolumeClaim": {"claimName": "models", "path": "a/../../b"}}},
        "must not contain `..`",
    ),
    "a way out of a folder": ({"model": {"hostPath": {"path": "/data/../etc"}}}, "must not contain `..`"),
    "no authentication": ({"auth": None}, "spec.auth: Required value"),
    "neither key nor anonymous": ({"auth": {}}, ONE_OF_TWO),
    "anonymous: false alone": ({"auth": {"allowAnonymous": False}}, ONE_OF_TWO),
    "key and anonymous": (
        {"auth": {"allowAnonymous": True, "apiKeySecretRef": KEY}},
        ONE_OF_TWO,
    ),
    "an owned flag": (
        {"extraArgs": ["--max-model-len=8"]},
        "`--max-model-len`, which is set by `overrides.maxModelLen`",
    ),
    "an owned flag with underscores": ({"extraArgs": ["--kv_cache_dtype", "fp8"]}, "`overrides.kvCacheDtype`"),
    "an owned variable": ({"env": [{"name": "VLLM_API_KEY", "value": "x"}]}, "that the operator sets"),
    "value and reference": (
        {"env": [{"name": "A", "value": "x", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]},
        "`value` and `valueFrom`",
    ),
    "two references": (
        {"env": [{"name": "A", "valueFrom": {"secretKeyRef": KEY, "configMapKeyRef": KEY}}]},
        "exactly one of `configMapKeyRef`",
    ),
    "a variable twice": ({"env": [{"name": "A", "value": "x"}, {"name": "A", "value": "y"}]}, "uplicate"),
    "GPUs that do not multiply": (
        {"gpus": {"count": 3}, "overrides": {"tensorParallelSize": 2, "pipelineParallelSize": 2}},
        "`gpus.count` must equal",
    ),
    "GPUs among the resources": ({"pod": {"resources": {"limits": {"nvidia.com/gpu": 1}}}}, "asked for in `gpus`"),
    "named GPUs of a device plugin": (
        {"gpus": {"uuids": ["GPU-1"]}},
        "`uuids` needs `allocation: DRA`: a device plugin hands out GPUs by number only",
    ),
    "a device class of a device plugin": ({"gpus": {"deviceClassName": "v100"}}, "`deviceClassName` needs"),
    "fewer named GPUs than replicas take": (
        {"replicas": 2, "gpus": {"allocation": "DRA", "count": 2, "uuids": ["GPU-1", "GPU-2", "GPU-3"]}},
        "`gpus.uuids` must name at least `gpus.count` x `replicas`",
    ),
    "a branch of a repository": ({"model": {"huggingFace": HUB | {"revision": "main"}}}, "revision"),
    "a download without a place": (
        {"model": {"huggingFace": {"repo": "a/b", "revision": "0" * 40}}},
        "claimName: Required value",
    ),
    "a claim and a repository": (
        {"model": {**CLAIM, "modelScope": HUB | {"revision": "v1"}}},
        "exactly one of `persistentVolumeClaim`",
    ),
    "the repository as its own draft": (
        {"model": {"huggingFace": HUB}, "draft": {"huggingFace": HUB}},
        "another checkpoint than `model`",
    ),
    "two caches": ({"compileCache": {"existingClaim": "c", "hostPath": "/c"}}, "exclude each other"),
    "a size for an existing claim": ({"compileCache": {"existingClaim": "c", "size": "1Gi"}}, "exclude each other"),
    "the model's claim as cache": (
        {"compileCache": {"existingClaim": "models"}},
        "another claim than the",
    ),
    "our labels": ({"pod": {"labels": {"inference.sm70.io/revision": "x"}}}, "`labels` must not begin with"),
    "a floor with an exponent": ({"qualification": {"thresholds": {"decode-rate": "6e1"}}}, "decode-rate"),
    "a floor of no gate's name": ({"qualification": {"thresholds": {"Decode Rate": "60"}}}, "a key must match"),
    "a float": ({"replicas": 1.5}, "replicas"),
    "an unknown field": ({"replica": 1}, "unknown field"),
    "an unknown word": ({"overrides": {"kvCacheDtype": "fp3"}}, "Unsupported value"),
}
ADMITTED: dict[str, dict[str, Any]] = {
    "the smallest": {},
    "a key": {"auth": {"apiKeySecretRef": KEY}},
    "a profile of one's own": {"profile": None, "profileRef": REFERENCE},
    "two folders of one claim": {"draft": {"persistentVolumeClaim": {"claimName": "models", "path": "draft"}}},
    "no GPU": {"gpus": {"count": 0}, "overrides": {"tensorParallelSize": 1, "pipelineParallelSize": 1}},
    "a flag that nobody owns": {"extraArgs": ["--seed", "1", "--max-model-length-of-mine"]},
    "whole CPUs": {"pod": {"resources": {"limits": {"cpu": 2, "memory": "4Gi"}}}},
    "claims": {"gpus": {"allocation": "DRA", "count": 1, "uuids": ["GPU-1"], "deviceClassName": "v100"}},
    "a repository": {"model": {"huggingFace": HUB | {"tokenSecretRef": KEY}}},
    "a repository's tag": {"model": {"modelScope": HUB | {"revision": "v1.0"}}},
    "an image and a pinned draft": {
        "model": {"image": {"reference": "registry.test/model:1"}},
        "draft": {"hostPath": {"path": "/x"}, "sha256": {"config.json": "0" * 64}},
    },
    "a judgement by default": {"qualification": {}},
    "other floors": {"qualification": {"thresholds": {"decode-rate": "60.5"}}},
    "a cache of one's own": {"compileCache": {"existingClaim": "cache"}},
}


@pytest.fixture(scope="module")
def definition(cluster: Cluster) -> Cluster:
    cluster.kubectl(
        "apply", "--server-side", "--force-conflicts", "-f", "-", stdin="---\n".join(crd.render_all().values())
    )
    for plural in (names.PLURAL, names.QUALIFICATION_PLURAL):
        cluster.kubectl("wait", "--for=condition=Established", "--timeout=30s", f"crd/{plural}.{names.GROUP}")
    return cluster


def dry_run(cluster: Cluster, changes: dict[str, Any], name: str = "rules") -> str:
    spec = {key: value for key, value in (SPEC | changes).items() if value is not None}
    document = {
        "apiVersion": "inference.sm70.io/v1alpha1",
        "kind": "Sm70InferenceService",
        "metadata": {"name": name, "namespace": "default"},
        "spec": spec,
    }
    return cluster.kubectl(
        "create", "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-", stdin=json.dumps(document)
    )  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(definition: Cluster, name: str) -> None:
    changes, words = REFUSED[name]
    with pytest.raises(CommandError) as caught:
        dry_run(definition, changes)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ADMITTED)
def test_admitted(definition: Cluster, name: str) -> None:
    spec = json.loads(dry_run(definition, ADMITTED[name]))["spec"]
    assert (spec["replicas"], spec["rollout"]["drainTimeoutSeconds"]) == (1, 120)
    assert spec["acceleration"]["policy"] == "Require"
    # Omitted, nothing is asked for; given, it means something.
    assert spec["qualification"]["when"] == ("During" if "qualification" in ADMITTED[name] else "Never")


@pytest.mark.parametrize("name", ["dotted.name", "9starts-with-a-digit", "n" * 41])
def test_names_that_cannot_be_a_service(definition: Cluster, name: str) -> None:
    with pytest.raises(CommandError) as caught:
        dry_run(definition, {}, name)
    assert "the name must have at most 40 characters" in str(caught.value)


def test_evidence_is_written_once(definition: Cluster) -> None:
    """Spec and verdict never change, by the API server's own rules, whoever asks."""
    document: dict[str, Any] = {
        "apiVersion": names.API_VERSION,
        "kind": names.QUALIFICATION_KIND,
        "metadata": {"name": "rules-q0123456789-1", "namespace": "default"},
        "spec": {
            "serviceRef": {"name": "rules"},
            "revision": "0123456789",
            "suite": "smoke",
            "attempt": 1,
            "key": {
                "imageDigest": f"sha256:{'0' * 64}",
                "model": "claim models/tiny",
                "profileHash": "a",
                "resolutionHash": "b",
                "tensorParallelSize": 1,
                "pipelineParallelSize": 1,
                "gpuProduct": "cpu",
                "driverBranch": "cpu",
            },
        },
    }
    name = document["metadata"]["name"]
    definition.kubectl("create", "--validate=strict", "-f", "-", stdin=json.dumps(document))
    try:
        patch = ("patch", names.QUALIFICATION_SHORT_NAME, name, "--type=merge", "-p")
        with pytest.raises(CommandError, match="the spec must not change"):
            definition.kubectl(*patch, '{"spec":{"key":{"driverBranch":"570"}}}')
        verdict = {"verdict": "Failed", "summary": "3/4", "gates": [{"name": "decode", "verdict": "Failed"}]}
        definition.kubectl(*patch, json.dumps({"status": verdict}), "--subresource=status")
        with pytest.raises(CommandError, match="a verdict is given once"):
            definition.kubectl(*patch, '{"status":{"verdict":"Passed"}}', "--subresource=status")
        with pytest.raises(CommandError, match="a verdict is given once"):
            definition.kubectl(*patch, '{"status":{"verdict":null}}', "--subresource=status")
        shown = definition.kubectl("get", names.QUALIFICATION_SHORT_NAME, name)
        assert shown.splitlines()[0].split() == ["NAME", "VERDICT", "GATES", "SUITE", "SERVICE", "REVISION", "AGE"]
        assert shown.splitlines()[1].split()[1:3] == ["Failed", "3/4"]
    finally:
        definition.kubectl("delete", names.QUALIFICATION_SHORT_NAME, name)


@pytest.fixture(scope="module")
def restricted(definition: Cluster) -> Cluster:
    """The namespace of the golden manifests, in which nothing but `restricted` pods is admitted."""
    levels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SERVICE.namespace, "labels": levels}}
    definition.apply(namespace)
    return definition


@pytest.mark.parametrize("case", CASES)
def test_what_is_rendered_is_admitted(restricted: Cluster, case: str) -> None:
    manifests = CASES[case]()
    assert {manifest["metadata"]["namespace"] for manifest in manifests} == {SERVICE.namespace}
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
    text = text.replace("REVISION", "0123456789")
    restricted.kubectl(
        "create", "--dry-run=server", "--validate=strict", "--warnings-as-errors", "-f", "-", stdin=text
    )  # fmt: skip
