"""Golden manifests: what a spec renders to, file by file. A change of a file here restarts every such service.

SM70_UPDATE_GOLDEN=1 .venv/bin/pytest tests/golden      # writes the files anew; read what changed
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from sm70_operator.api import names
from sm70_operator.api.hashing import revision_name
from sm70_operator.observe.revisions import parse_revision
from sm70_operator.observe.snapshot import Resource, Snapshot
from sm70_operator.plan.intent import Target, read_intent
from sm70_operator.render.cache import render_cache_claim
from sm70_operator.render.deployment import render_deployment
from sm70_operator.render.history import render_controller_revision
from sm70_operator.render.objects import Manifest
from sm70_operator.render.service import render_service
from unit.operator.builders import KEY, OWNER, SETTINGS, UID

FOLDER = Path(__file__).parent / "operator"
CASES = sorted(path.name.removesuffix(".spec.yaml") for path in FOLDER.glob("*.spec.yaml"))


def rendered(spec: dict[str, Any]) -> list[Manifest]:
    intent = read_intent(Snapshot(Resource(KEY, UID, 1, False, spec, {})), SETTINGS)
    assert isinstance(intent, Target), intent
    claim = render_cache_claim(OWNER, intent.spec)
    # The revision's name changes with every profile; its place in the manifests does not.
    manifests = [render_service(OWNER, "REVISION"), render_deployment(OWNER, "REVISION", intent.revision, 1)]
    return [*([claim] if claim is not None else []), *manifests]


def shown(manifests: list[Manifest]) -> str:
    """YAML, with the profile inside the request cut out: it is the catalogue's business."""
    for manifest in manifests:
        if manifest["kind"] == "Deployment":
            container = manifest["spec"]["template"]["spec"]["containers"][0]
            for variable in container["env"]:
                if variable["name"] == names.SERVE_REQUEST_VARIABLE:
                    request = yaml.safe_load(variable["value"])
                    variable["value"] = {**request, "profile": request["profile"]["name"]}
    plain = json.loads(json.dumps(manifests))  # parts that two places share would become anchors
    return yaml.safe_dump_all(plain, sort_keys=False, width=120)


@pytest.mark.parametrize("case", CASES)
def test_rendering(case: str) -> None:
    found = shown(rendered(yaml.safe_load((FOLDER / f"{case}.spec.yaml").read_text())))
    golden = FOLDER / f"{case}.manifests.yaml"
    if os.environ.get("SM70_UPDATE_GOLDEN"):
        golden.write_text(found)
    assert found == golden.read_text()


@pytest.mark.parametrize("case", CASES)
def test_a_stored_revision_is_read_back_as_it_was(case: str) -> None:
    """Pods are rendered from the ControllerRevision: what it loses, they lose."""
    spec = yaml.safe_load((FOLDER / f"{case}.spec.yaml").read_text())
    intent = read_intent(Snapshot(Resource(KEY, UID, 1, False, spec, {})), SETTINGS)
    assert isinstance(intent, Target), intent
    stored = render_controller_revision(OWNER, intent.name, intent.revision, 1, intent.source)
    found = parse_revision(json.loads(json.dumps(stored)))
    assert found.document is not None
    again = render_deployment(OWNER, intent.name, found.document, 1)
    assert again == render_deployment(OWNER, intent.name, intent.revision, 1)
    assert revision_name(found.document) == intent.name


def test_there_are_cases() -> None:
    assert len(CASES) >= 4


@pytest.mark.parametrize("case", CASES)
def test_what_holds_for_every_pod(case: str) -> None:
    manifests = rendered(yaml.safe_load((FOLDER / f"{case}.spec.yaml").read_text()))
    (deployment,) = (one for one in manifests if one["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert "args" not in container
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
    }
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    selector = deployment["spec"]["selector"]["matchLabels"]
    assert set(selector) == {names.SERVICE_LABEL, names.REVISION_LABEL}
    assert selector.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    sources = [volume.get("persistentVolumeClaim", {}) for volume in pod["volumes"]]
    claims = [source["claimName"] for source in sources if source]
    assert len(claims) == len(set(claims)), "a claim that is mounted by two volumes never mounts"
    by_name = {volume["name"]: volume for volume in pod["volumes"]}
    assert by_name["shared-memory"]["emptyDir"]["medium"] == "Memory"
    for mount in container["volumeMounts"]:
        if mount["mountPath"].startswith("/models/"):
            assert mount["readOnly"] is True
    grace = pod["terminationGracePeriodSeconds"]
    (request,) = (one["value"] for one in container["env"] if one["name"] == names.SERVE_REQUEST_VARIABLE)
    assert grace > yaml.safe_load(request)["drainTimeoutSeconds"]
    order = [variable["name"] for variable in container["env"]]
    assert len(order) == len(set(order))
