"""Judge and preflight: what their Jobs look like, where they may run, and what is made of their last words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from sm70_engine.fetch.errors import FetchError
from sm70_operator.api import names
from sm70_operator.api.pod import KeyReference
from sm70_operator.api.qualification import parse_evidence
from sm70_operator.observe.facts import parse_pod
from sm70_operator.render.objects import Manifest
from sm70_operator.render.preflight_job import ClaimFacts, Look, claim_names, preflight_look, render_preflight_job
from sm70_operator.render.qualification_job import (
    JudgeRun,
    read_verdict,
    render_qualification,
    render_qualification_job,
)
from sm70_profiles.identity import QualificationIdentity
from sm70_profiles.qualification import Gate, QualificationReport, SuiteReference, Verdict
from sm70_profiles.reasons import TerminationReason
from unit.operator.builders import NOW, OWNER, spec, target

IDENTITY = QualificationIdentity(
    image_digest=f"sha256:{'1' * 64}",
    model="claim models/tiny",
    profile_hash="p",
    resolution_hash="r",
    tensor_parallel_size=1,
    pipeline_parallel_size=1,
    gpu_product="cpu",
    driver_branch="cpu",
)
SECRET = KeyReference(name="tiny-api-key", key="api-key")
RUN = JudgeRun(
    revision="0123456789",
    key=IDENTITY,
    suite="smoke",
    attempt=2,
    image="registry.test/operator:1",
    served_name="tiny",
    api_key=SECRET,
)
HUB = {"repo": "owner/name", "revision": "0" * 40, "claimName": "downloads"}


def report(*gates: Gate, suite: str = "smoke") -> str:
    found = QualificationReport(
        schema_version=1,
        suite=SuiteReference(name=suite, version=1, digest="d" * 64),
        tool_version="0.1.0",
        started_at="2026-11-30T12:00:00Z",
        finished_at="2026-11-30T12:01:00Z",
        verdict=min((gate.verdict for gate in gates), key=lambda one: one is Verdict.PASSED),
        gates=gates,
        raw_digest="e" * 64,
    )
    return found.encode().decode()


def gate(name: str = "decode", verdict: Verdict = Verdict.PASSED, measured: str = "0") -> Gate:
    return Gate(name=name, verdict=verdict, measured=measured, threshold="0", unit="answers", samples=3)


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for one in value.values():
            yield from texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from texts(one)
    else:
        yield str(value)


def only(job: Manifest) -> Manifest:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    found: Manifest = container
    return found


def preflight(document: dict[str, Any] | None = None, look: Look = Look()) -> Manifest:  # noqa: B008
    wanted = target(document)
    return render_preflight_job(OWNER, wanted.name, wanted.revision, look)


JOBS = {
    "judge": render_qualification_job(OWNER, RUN),
    "preflight": preflight(spec(auth={"apiKeySecretRef": SECRET.model_dump()})),
    "preflight with downloads": preflight(spec(model={"huggingFace": HUB | {"tokenSecretRef": SECRET.model_dump()}})),
}


@pytest.mark.parametrize("name", JOBS)
def test_what_holds_for_every_job(name: str) -> None:
    job = JOBS[name]
    pod = job["spec"]["template"]["spec"]
    assert job["metadata"]["ownerReferences"] == [OWNER.reference()]
    assert (pod["restartPolicy"], pod["automountServiceAccountToken"]) == ("Never", False)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert names.REVISION_LABEL not in labels, "it would be an endpoint of a Service"
    assert labels[names.FOR_REVISION_LABEL]
    assert len(job["metadata"]["name"]) <= 63
    bounds = job["spec"]
    assert bounds["activeDeadlineSeconds"] > 0
    assert bounds["backoffLimit"] <= 6
    assert bounds["ttlSecondsAfterFinished"] > 0
    for container in [*pod["containers"], *pod.get("initContainers", ())]:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]
        assert not [key for key in container["resources"]["limits"] if "/" in key], "no GPU"
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted <= {volume["name"] for volume in pod["volumes"]}


def test_the_judge_asks_the_candidate_and_has_the_key_by_reference() -> None:
    job = JOBS["judge"]
    words = only(job)["args"]
    assert words[words.index("--url") + 1] == "http://tiny-candidate.serving.svc:8000"
    assert words[words.index("--suite") + 1] == "smoke"
    (key,) = (one for one in only(job)["env"] if one["name"] == names.API_KEY_VARIABLE)
    assert key["valueFrom"]["secretKeyRef"] == {"name": "tiny-api-key", "key": "api-key"}
    evidence = render_qualification(OWNER, RUN)
    assert evidence["metadata"]["name"] == job["metadata"]["name"]
    read = parse_evidence(evidence)
    assert read is not None
    assert (read.spec.key, read.spec.attempt, read.owner, read.finished) == (IDENTITY, 2, OWNER.uid, False)


def test_the_same_run_has_the_same_name_and_another_one_another() -> None:
    name = RUN.name("tiny")
    assert name == RUN.name("tiny")
    other = JudgeRun(**vars(RUN) | {"key": IDENTITY.model_copy(update={"driver_branch": "580"})})
    later = JudgeRun(**vars(RUN) | {"attempt": 3})
    assert len({name, other.name("tiny"), later.name("tiny")}) == 3
    assert len(RUN.name("n" * names.MAX_NAME_LENGTH)) <= 63


def test_a_verdict_is_the_reports() -> None:
    found = read_verdict([report(gate(), gate("parity", Verdict.FAILED, "2"))], RUN.spec("tiny"), "exit code 1", NOW)
    assert (found.verdict, found.summary) == (Verdict.FAILED, "1/2")
    assert [one.measured for one in found.gates] == ["0", "2"]
    assert found.conditions[0].reason == "Failed"
    assert read_verdict(["", report(gate())], RUN.spec("tiny"), "", NOW).verdict is Verdict.PASSED


@pytest.mark.parametrize(
    ("messages", "problem", "words"),
    [
        ([], "Job was active longer than specified deadline", "longer than specified deadline"),
        ([], "", "left no report"),
        (["Traceback: \x1b[31mboom"], "", "no qualification report"),
        ([report(gate(), suite="release")], "", "`release`"),
        ([report(gate())[:-9]], "", "no qualification report"),
    ],
)
def test_what_is_no_report_proves_nothing(messages: list[str], problem: str, words: str) -> None:
    found = read_verdict(messages, RUN.spec("tiny"), problem, NOW)
    assert found.verdict is Verdict.ERROR
    assert words in found.message
    assert found.message.isprintable()


OWN = replace(RUN, suite="mine", suite_digest="d" * 64, suite_config=KeyReference(name="suites", key="mine.yaml"))


def test_a_suite_of_the_users_own_is_mounted_and_named_by_its_content() -> None:
    job, evidence = render_qualification_job(OWNER, OWN), render_qualification(OWNER, OWN)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    words = container["args"]
    file = words[words.index("--suite") + 1]
    mounted = next(one for one in pod["volumes"] if one["name"] == "suite")["configMap"]
    assert mounted == {"name": "suites", "items": [{"key": "mine.yaml", "path": file.rpartition("/")[2]}]}
    mount = next(one for one in container["volumeMounts"] if one["name"] == "suite")
    assert (mount["mountPath"], mount["readOnly"]) == (file.rpartition("/")[0], True)
    assert (evidence["spec"]["suite"], evidence["spec"]["suiteDigest"]) == ("mine", "d" * 64)
    changed, builtin = replace(OWN, suite_digest="e" * 64), replace(RUN, suite="mine")
    assert len({one.name("tiny") for one in (OWN, changed, builtin)}) == 3, "other content is other evidence"


def test_a_suite_that_was_changed_before_the_judge_read_it_proves_nothing() -> None:
    said = report(gate(), suite="mine")
    assert read_verdict([said], OWN.spec("tiny"), "", NOW).verdict is Verdict.PASSED
    found = read_verdict([said], replace(OWN, suite_digest="e" * 64).spec("tiny"), "", NOW)
    assert (found.verdict, "was changed" in found.message) == (Verdict.ERROR, True)


def test_a_preflight_is_the_engines_pod_without_gpu_and_key() -> None:
    document = spec(
        gpus={"count": 4}, overrides={"tensorParallelSize": 4}, auth={"apiKeySecretRef": SECRET.model_dump()}
    )
    document["compileCache"] = {"size": "1Gi"}
    job = preflight(document)
    container, pod = only(job), job["spec"]["template"]["spec"]
    assert container["args"] == ["--preflight"]
    assert "command" not in container, "the image's own entry point, as the server has it"
    assert names.SERVE_REQUEST_VARIABLE in [one["name"] for one in container["env"]]
    assert not [text for text in texts(job) if "tiny-api-key" in text]
    assert "readinessProbe" not in container
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert volumes["model"]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    assert volumes["cache"] == {"name": "cache", "emptyDir": {}}, "the server that runs has the claim"


def test_a_preflight_runs_where_its_claim_is_and_else_rather_where_the_server_is() -> None:
    wanted = [{"key": "metadata.name", "operator": "In", "values": ["node-2"]}]
    affinity = preflight(look=Look(node="node-2", required=True))["spec"]["template"]["spec"]["affinity"]
    (term,) = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchFields"] == wanted
    document = spec(gpus={"count": 1, "products": ["Tesla-V100-SXM2-16GB"]})
    affinity = preflight(document, Look(node="node-2"))["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    (wish,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert wish["preference"]["matchFields"] == wanted
    assert affinity["requiredDuringSchedulingIgnoredDuringExecution"], "the node labels of the GPU stay demanded"


@pytest.mark.parametrize(
    ("claims", "node", "skip", "where", "required"),
    [
        ({}, "node-1", "", "node-1", False),
        ({"models": ClaimFacts(("ReadWriteMany",), True)}, "node-1", "", "node-1", False),
        ({"models": ClaimFacts(("ReadWriteOnce",), True)}, "node-1", "", "node-1", True),
        ({"models": ClaimFacts(("ReadWriteOnce",), True)}, "", "", "", False),
        ({"models": ClaimFacts(("ReadWriteOncePod",), True)}, "node-1", "`models` is ReadWriteOncePod", "", False),
        ({"models": ClaimFacts(("ReadWriteOncePod",), True)}, "", "", "", False),
        ({"models": ClaimFacts(("ReadWriteOnce",), False)}, "", "`models` is not bound yet", "", False),
    ],
)
def test_where_a_preflight_may_look(
    claims: dict[str, ClaimFacts], node: str, skip: str, where: str, required: bool
) -> None:
    look = preflight_look(target().revision, claims, node)
    assert skip in look.skip
    assert bool(look.skip) == bool(skip)
    assert (look.node, look.required) == (where, required)


def test_a_download_fills_the_claim_and_the_server_only_reads_it() -> None:
    draft = {"persistentVolumeClaim": {"claimName": "downloads", "path": "draft"}, "sha256": {"config.json": "a" * 64}}
    token = HUB | {"tokenSecretRef": SECRET.model_dump()}
    document = spec(profile="tiny_hybrid_reference_dflash", model={"huggingFace": token}, draft=draft)
    document["env"] = [{"name": "HF_ENDPOINT", "value": "http://mirror"}, {"name": "OTHER", "value": "x"}]
    pod = preflight(document)["spec"]["template"]["spec"]
    (step,) = pod["initContainers"]
    folder = f"/models/target/owner--name-{'0' * 40}"
    assert step["args"][step["args"].index("--to") + 1] == folder
    assert step["args"][step["args"].index("--revision") + 1] == "0" * 40
    variables = {one["name"]: one for one in step["env"]}
    assert set(variables) == {"HOME", "SM70_STATUS_PORT", "HF_ENDPOINT", "HF_TOKEN"}
    assert variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == "tiny-api-key"
    (claim,) = (one for one in pod["volumes"] if "persistentVolumeClaim" in one)
    assert claim["persistentVolumeClaim"] == {"claimName": "downloads"}, "one volume, writable"
    mounts = {one["mountPath"]: one for one in pod["containers"][0]["volumeMounts"]}
    assert mounts["/models/target"]["readOnly"] is True
    assert mounts["/models/draft"]["readOnly"] is True
    assert "readOnly" not in step["volumeMounts"][0]
    assert target(document).revision.request.model_path == folder
    assert claim_names(target(document).revision) == ("downloads",)


def test_a_broken_download_is_tried_again_and_a_hopeless_one_is_not() -> None:
    policy = preflight(spec(model={"huggingFace": HUB}))["spec"]
    assert policy["backoffLimit"] > preflight()["spec"]["backoffLimit"]
    (rule,) = [
        one["onExitCodes"]
        for one in policy["podFailurePolicy"]["rules"]
        if one.get("onExitCodes", {}).get("containerName") == "fetch-model"
    ]
    assert rule["operator"] == "In"
    broken, hopeless = TerminationReason.DOWNLOAD_FAILED, TerminationReason.REPOSITORY_NOT_FOUND
    assert FetchError(broken, "").exit_status not in rule["values"]
    assert FetchError(hopeless, "").exit_status in rule["values"]


def test_a_drafts_checksums_are_checked_at_the_download() -> None:
    hub = {"repo": "owner/draft", "revision": "v1", "claimName": "downloads"}
    document = spec(
        profile="tiny_hybrid_reference_dflash", draft={"modelScope": hub, "sha256": {"config.json": "a" * 64}}
    )
    (step,) = preflight(document)["spec"]["template"]["spec"]["initContainers"]
    assert step["args"][step["args"].index("--hub") + 1] == "modelscope"
    assert step["args"][step["args"].index("--sha256") + 1] == f"config.json={'a' * 64}"


def test_an_image_is_a_volume() -> None:
    document = spec(model={"image": {"reference": "registry.test/model@sha256:0", "path": "tiny"}})
    pod = preflight(document)["spec"]["template"]["spec"]
    (volume,) = (one for one in pod["volumes"] if "image" in one)
    assert volume["image"] == {"reference": "registry.test/model@sha256:0"}
    assert target(document).revision.request.model_path == "/models/target/tiny"


def test_the_pods_of_jobs_are_read_like_others() -> None:
    status = {"name": names.JOB_CONTAINER, "imageID": "x", "state": {"terminated": {"exitCode": 1, "message": "{}"}}}
    raw = {"metadata": {"name": "p"}, "spec": {}, "status": {"containerStatuses": [status]}}
    found = parse_pod(json.loads(json.dumps(raw)))
    assert found.container is not None
    assert found.container.exit is not None
    assert (found.container.exit.code, found.container.exit.message) == (1, "{}")
