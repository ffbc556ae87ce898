"""The judge: the Sm70Qualification that a run fills, and the Job that runs it.

The judge runs in the operator's image, without a GPU, and talks to the candidate Service and nothing else. Its report
comes back as the container's termination message; how the container ended decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import PurePosixPath

from sm70_operator.api import names
from sm70_operator.api.pod import KeyReference, LocalReference
from sm70_operator.api.qualification import (
    QualificationSpec,
    QualificationStatus,
    ServiceReference,
    broken_status,
    finished_status,
    qualification_name,
)
from sm70_operator.render.fetch_step import restricted
from sm70_operator.render.objects import Manifest, Owner
from sm70_profiles.base import ProfileName, printable
from sm70_profiles.identity import QualificationIdentity
from sm70_profiles.qualification import QualificationError, parse_qualification

PROGRAM = "sm70-qualify"
SUITE_FILE = "/suite/suite.yaml"
UID = 65532
TRIES = 3
"""Pods of one run: a judge that was evicted, or whose node was lost, has judged nothing."""
KEPT_SECONDS = 3600
"""How long an ended Job stays for people to look at; its result is in the Sm70Qualification by then."""
DEFAULT_SECONDS = 3600
RESOURCES: Manifest = {"requests": {"cpu": "250m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}


@dataclass(frozen=True)
class JudgeRun:
    """One run of a suite against a candidate."""

    revision: str
    key: QualificationIdentity
    suite: ProfileName
    attempt: int
    image: str
    """The operator's own image, which holds `sm70-qualify`."""
    served_name: str
    api_key: KeyReference | None = None
    image_pull_policy: str | None = None
    image_pull_secrets: Sequence[LocalReference] = ()
    timeout_seconds: int = DEFAULT_SECONDS
    thresholds: Mapping[str, str] = field(default_factory=dict)
    """Floors in place of the suite's, by gate."""
    suite_digest: str | None = None
    suite_config: KeyReference | None = None
    """Where the user's own suite is. Its digest is what it was when it was read; the judge's report tells its own."""

    def spec(self, service: str) -> QualificationSpec:
        """What the evidence says was to be judged."""
        return QualificationSpec(
            service_ref=ServiceReference(name=service),
            revision=self.revision,
            key=self.key,
            suite=self.suite,
            suite_digest=self.suite_digest,
            thresholds=dict(self.thresholds),
            attempt=self.attempt,
        )

    def name(self, service: str) -> str:
        """The name of the evidence and of the Job."""
        return qualification_name(service, self.spec(service))


def render_qualification(owner: Owner, run: JudgeRun) -> Manifest:
    """The Sm70Qualification: made before its Job, so that a run is never forgotten."""
    spec = run.spec(owner.name).model_dump(mode="json", by_alias=True, exclude_none=True)
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.QUALIFICATION_KIND,
        "metadata": owner.metadata(
            run.name(owner.name),
            {names.COMPONENT_LABEL: names.QUALIFICATION_COMPONENT, names.FOR_REVISION_LABEL: run.revision},
        ),
        "spec": {name: value for name, value in spec.items() if value != {}},
    }


def render_qualification_job(owner: Owner, run: JudgeRun) -> Manifest:
    """The Job of one run. It has the evidence's name."""
    candidate = f"http://{names.candidate_name(owner.name)}.{owner.namespace}.svc:{names.HTTP_PORT}"
    environment: list[Manifest] = [{"name": names.HOME_VARIABLE, "value": "/tmp"}]  # noqa: S108
    if run.api_key is not None:
        reference = {"name": run.api_key.name, "key": run.api_key.key}
        environment.append({"name": names.API_KEY_VARIABLE, "valueFrom": {"secretKeyRef": reference}})
    suite = run.suite if run.suite_config is None else SUITE_FILE
    container: Manifest = {
        "name": names.JOB_CONTAINER,
        "image": run.image,
        "command": [PROGRAM],
        "args": [
            *("run", "--url", candidate, "--suite", suite, "--model", run.served_name),
            *("--out", "/tmp/report.json", "--termination-log", names.TERMINATION_LOG),  # noqa: S108
            *(word for gate in sorted(run.thresholds) for word in ("--threshold", f"{gate}={run.thresholds[gate]}")),
        ],
        "env": environment,
        "terminationMessagePolicy": "File",
        "resources": RESOURCES,
        "securityContext": restricted(),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108
    }
    if run.image_pull_policy is not None:
        container["imagePullPolicy"] = run.image_pull_policy
    pod: Manifest = {
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "256Mi"}}],
        **job_pod(),
    }
    if run.suite_config is not None:
        items = [{"key": run.suite_config.key, "path": PurePosixPath(SUITE_FILE).name}]
        pod["volumes"].append({"name": "suite", "configMap": {"name": run.suite_config.name, "items": items}})
        container["volumeMounts"].append(
            {"name": "suite", "mountPath": str(PurePosixPath(SUITE_FILE).parent), "readOnly": True}
        )
    if run.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": one.name} for one in run.image_pull_secrets]
    return render_job(
        owner,
        name=run.name(owner.name),
        component=names.QUALIFICATION_COMPONENT,
        revision=run.revision,
        pod=pod,
        seconds=run.timeout_seconds,
    )


def job_pod() -> Manifest:
    """What the pods of all our Jobs have in common. They satisfy the `restricted` pod security standard."""
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 30,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": UID,
            "runAsGroup": UID,
            "fsGroup": UID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def render_job(
    owner: Owner,
    *,
    name: str,
    component: str,
    revision: str,
    pod: Manifest,
    seconds: int,
    tries: int = TRIES,
    hopeless: Mapping[str, Sequence[int]] | None = None,
) -> Manifest:
    """A Job of one pod at a time. Its program has said all it has to say when it ends by itself, whatever its status:
    only a pod that was disrupted is replaced, and only a few times.

    hopeless: exit statuses of init containers, by name, after which no other try will do better.
    """
    marks = {names.COMPONENT_LABEL: component, names.FOR_REVISION_LABEL: revision}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": owner.metadata(name, marks),
        "spec": {
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": tries - 1,
            "activeDeadlineSeconds": seconds,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [
                    {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {
                        "action": "FailJob",
                        "onExitCodes": {
                            "containerName": names.JOB_CONTAINER,
                            "operator": "NotIn",
                            # Killed from outside: by the kubelet at the end of the grace period, or for memory.
                            "values": [0, 137, 143],
                        },
                    },
                    *(
                        {
                            "action": "FailJob",
                            "onExitCodes": {"containerName": step, "operator": "In", "values": list(statuses)},
                        }
                        for step, statuses in (hopeless or {}).items()
                    ),
                ]
            },
            "template": {"metadata": {"labels": {**names.labels(owner.name), **marks}}, "spec": pod},
        },
    }


def read_verdict(messages: Sequence[str], asked: QualificationSpec, problem: str, now: datetime) -> QualificationStatus:
    """The status of a run whose Job has ended.

    messages: the termination messages of the Job's pods, the newest last. asked: what was to be judged. problem: why
    the Job failed by its controller's word, empty if it did not. A report that is missing, broken or of another suite
    makes the verdict Error: nothing was proven.
    """
    wrong = problem
    for text in reversed([text for text in messages if text.strip()]):
        try:
            report = parse_qualification(text)
        except QualificationError as error:
            wrong = wrong or str(error)
            continue
        if report.suite.name != asked.suite:
            wrong = f"the report is of suite `{report.suite.name}`, `{asked.suite}` was to be run"
            continue
        if asked.suite_digest not in (None, report.suite.digest):
            wrong = f"the document of suite `{asked.suite}` was changed before the judge read it"
            continue
        return finished_status(report, now)
    why = printable(wrong, 600) or "the judge left no report"
    return broken_status(f"The judge's Job ended without a usable report: {why}", now)
