"""The Helm chart: linted, rendered and compared, bad values refused, rights least."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from sm70_operator.settings import Settings
from testcluster import build
from testcluster.paths import cache

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "sm70-operator"
GOLDEN = Path(__file__).parent / "golden"
CASES: dict[str, tuple[str, ...]] = {
    "defaults": (),
    "namespaced": (
        "--set", "namespaces={team-a,team-b}", "--set", "observeNodes=false", "--set", "metrics.service=false",
    ),
    "everything": (
        "--set-string", "image.repository=registry.test/operator,image.tag=1,engineImages.cpu=registry.test/cpu:1",
        "--set-string", "engineImages.sm70=registry.test/sm70@sha256:00,settings.pollSeconds=1",
        "--set", "replicas=2,settings.workers=4,image.pullSecrets={pull},priorityClassName=high",
        "--set-json", 'podLabels={"team":"x"}', "--set-json", 'podAnnotations={"note":"y"}',
        "--set-json", 'nodeSelector={"zone":"a"}', "--set-json", 'tolerations=[{"operator":"Exists"}]',
        "--set-json", 'serviceAccount={"create":true,"name":"other","annotations":{"a":"b"}}',
        "--set", "monitoring.podMonitor.enabled=true,monitoring.podMonitor.labels.release=prometheus",
        "--set", "monitoring.dashboard.enabled=true",
    ),
}  # fmt: skip


@pytest.fixture(scope="session")
def helm() -> Path:
    """The program helm, built from its Go module when it is not there yet."""
    return build.build(build.helm(), cache()) / "helm"


def run(helm: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(helm), *words], capture_output=True, text=True, timeout=60, check=False)


def template(helm: Path, *values: str) -> str:
    done = run(helm, "template", "sm70-operator", str(CHART), "--namespace", "sm70-system", *values)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(text: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(text) if one]


def one(text: str, kind: str, name: str = "sm70-operator") -> dict[str, Any]:
    (found,) = [each for each in objects(text) if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


def test_lint(helm: Path) -> None:
    done = run(helm, "lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("case", CASES)
def test_rendering(helm: Path, case: str) -> None:
    found = template(helm, *CASES[case])
    golden = GOLDEN / f"{case}.yaml"
    if os.environ.get("SM70_UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(found)
    assert found == golden.read_text()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (("--set", "settings.pollSecond=1"), "pollSecond"),
        (("--set-string", "settings.pollSeconds=soon"), "pollSeconds"),
        (("--set", "replicas=-1"), "replicas"),
        (("--set", "namespaces={Team_A}"), "namespaces"),
        (("--set-string", "engineImages.cpu=not an image"), "engineImages"),
        (("--set", "typo=1"), "typo"),
        (("--set-string", "monitoring.podMonitor.interval=often"), "interval"),
        (("--set", "serviceAccount.create=false"), "serviceAccount.name"),
    ],
)
def test_values_that_do_not_fit_are_refused(helm: Path, values: tuple[str, ...], words: str) -> None:
    done = run(helm, "template", "sm70-operator", str(CHART), *values)
    assert done.returncode != 0
    assert words in done.stderr


def test_every_value_is_in_the_schema_with_its_default() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(values) == set(schema["properties"]) - {"global"}


@pytest.mark.parametrize("case", CASES)
def test_the_rights_are_no_more_than_the_work_needs(helm: Path, case: str) -> None:
    rules = [rule for each in objects(template(helm, *CASES[case])) for rule in each.get("rules", ())]
    assert rules
    for rule in rules:
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        assert not {"secrets", "pods/log", "pods/exec", "pods/attach", "roles"} & set(rule["resources"])
        assert "deletecollection" not in rule["verbs"]
    deletable = [resource for rule in rules if "delete" in rule["verbs"] for resource in rule["resources"]]
    # The history's surplus, ended preflights and the candidate's Service; never a volume claim with a user's data.
    surplus = {"deployments", "controllerrevisions", "resourceclaimtemplates"}
    assert set(deletable) == {*surplus, "jobs", "services"}
    writable = {
        resource for rule in rules if {"update", "patch"} & set(rule["verbs"]) for resource in rule["resources"]
    }
    assert writable == {
        "sm70inferenceservices/status", "sm70inferenceservices/finalizers", "sm70qualifications",
        "sm70qualifications/status", "deployments", "controllerrevisions", "jobs", "services",
        "persistentvolumeclaims", "resourceclaimtemplates", "leases",
    }  # fmt: skip


def test_a_namespaced_installation_has_no_cluster_wide_right(helm: Path) -> None:
    found = objects(template(helm, *CASES["namespaced"]))
    assert not [each for each in found if each["kind"].startswith("Cluster")]
    assert {each["metadata"]["namespace"] for each in found if each["kind"] == "Role"} == {
        "team-a", "team-b", "sm70-system",
    }  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_pod_is_restricted(helm: Path, case: str) -> None:
    pod = one(template(helm, *CASES[case]), "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
    }
    assert {"memory"} <= container["resources"]["limits"].keys()
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"


def test_the_settings_reach_the_operator(helm: Path) -> None:
    pod = one(template(helm, *CASES["everything"]), "Deployment")["spec"]["template"]["spec"]
    environment = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}

    settings = Settings.from_environment({name: value for name, value in environment.items() if value is not None})
    assert (settings.poll_seconds, settings.workers, settings.engine_image_cpu) == (1, 4, "registry.test/cpu:1")
    assert settings.lease_name == "sm70-operator"


def test_the_crd_stays_when_the_chart_goes(helm: Path) -> None:
    assert "CustomResourceDefinition" not in template(helm)
    shown = run(helm, "show", "crds", str(CHART)).stdout
    for definition in objects(shown):
        assert definition["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
