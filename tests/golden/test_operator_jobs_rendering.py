"""Golden manifests of what stands beside a revision's Deployment: preflight, judge, evidence, claims and downloads.

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
from sm70_operator.api.pod import KeyReference
from sm70_operator.observe.snapshot import Resource, Snapshot
from sm70_operator.plan.intent import Target, read_intent
from sm70_operator.render.deployment import render_deployment
from sm70_operator.render.objects import Manifest
from sm70_operator.render.preflight_job import Look, render_preflight_job
from sm70_operator.render.qualification_job import JudgeRun, render_qualification, render_qualification_job
from sm70_operator.render.resource_claim import render_claim_template
from sm70_operator.render.revision import Revision
from sm70_profiles.identity import QualificationIdentity
from unit.operator.builders import KEY, OWNER, SETTINGS, UID

FOLDER = Path(__file__).parent / "operator-jobs"
NAME = "REVISION"
MODEL = {"persistentVolumeClaim": {"claimName": "models", "path": "tiny"}}
HUB = {
    "repo": "owner/model",
    "revision": "0123456789abcdef0123456789abcdef01234567",
    "claimName": "downloads",
    "tokenSecretRef": {"name": "hub-token", "key": "token"},
}
SPEC: dict[str, Any] = {
    "profile": "tiny_hybrid_reference",
    "model": MODEL,
    "auth": {"apiKeySecretRef": {"name": "tiny-api-key", "key": "api-key"}},
}
RUN = JudgeRun(
    revision="0123456789",
    key=QualificationIdentity(
        image_digest=f"sha256:{'1' * 64}",
        model="claim models/tiny",
        profile_hash="2" * 64,
        resolution_hash="3" * 64,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        gpu_product="cpu",
        driver_branch="cpu",
    ),
    suite="smoke",
    attempt=1,
    image="registry.test/operator:1",
    served_name="tiny",
    api_key=KeyReference(name="tiny-api-key", key="api-key"),
)


def revision(**changes: Any) -> Revision:
    intent = read_intent(Snapshot(Resource(KEY, UID, 1, False, SPEC | changes, {})), SETTINGS)
    assert isinstance(intent, Target), intent
    return intent.revision


def claims() -> list[Manifest]:
    pinned = revision(
        gpus={
            "allocation": "DRA",
            "count": 2,
            "products": ["Tesla-V100-SXM2-16GB", "Tesla-V100-SXM2-32GB"],
            "minMemory": "16Gi",
            "uuids": ["GPU-0001", "GPU-0002", "GPU-0003"],
        },
        overrides={"tensorParallelSize": 2},
    )
    template = render_claim_template(OWNER, NAME, pinned)
    assert template is not None
    return [template, render_deployment(OWNER, NAME, pinned, 1)]


CASES = {
    "judge": lambda: [render_qualification(OWNER, RUN), render_qualification_job(OWNER, RUN)],
    "preflight": lambda: [render_preflight_job(OWNER, NAME, revision(), Look(node="node-1"))],
    "downloads": lambda: [render_deployment(OWNER, NAME, revision(model={"huggingFace": HUB}), 1)],
    "claims": claims,
}


def shown(manifests: list[Manifest]) -> str:
    """YAML, with the request cut out: other golden files and the catalogue show it."""
    plain: list[dict[str, Any]] = json.loads(json.dumps(manifests))  # parts that two places share would become anchors
    for manifest in plain:
        template = manifest.get("spec", {}).get("template", {}).get("spec", {})
        for container in template.get("containers", ()):
            for variable in container.get("env", ()):
                if variable["name"] == names.SERVE_REQUEST_VARIABLE:
                    variable["value"] = "REQUEST"
    return yaml.safe_dump_all(plain, sort_keys=False, width=120)


@pytest.mark.parametrize("case", CASES)
def test_rendering(case: str) -> None:
    found = shown(CASES[case]())
    golden = FOLDER / f"{case}.yaml"
    if os.environ.get("SM70_UPDATE_GOLDEN"):
        golden.write_text(found)
    assert found == golden.read_text()


def test_no_file_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(CASES)


def test_a_device_plugin_needs_no_claim() -> None:
    assert render_claim_template(OWNER, NAME, revision()) is None
    cpu_only = revision(gpus={"allocation": "DRA", "count": 0})
    assert render_claim_template(OWNER, NAME, cpu_only) is None
    pod = render_deployment(OWNER, NAME, cpu_only, 1)["spec"]["template"]["spec"]
    assert "resourceClaims" not in pod
