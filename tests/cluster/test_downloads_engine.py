"""A gated checkpoint with the image that ships: its `sm70-fetch`, its preflight and its engine, from hub to answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.harness import NAMESPACE, Stack
from sm70_qualify.client import Endpoint
from stack.services import wait_gone, wait_ready
from unit.engine.loopback_hub import COMMIT, REPO, TOKEN, LoopbackHub, serving

pytestmark = [pytest.mark.cluster, pytest.mark.full]
NAME = "downloaded"


def test_the_real_engine_serves_what_it_downloaded(stack: Stack, tmp_path: Path) -> None:
    generator = Path(sys.executable).with_name("sm70-tiny-model")
    subprocess.run([str(generator), "--out", str(tmp_path)], check=True, stdout=subprocess.DEVNULL, timeout=120)
    hub = LoopbackHub(files={path.name: path.read_bytes() for path in tmp_path.iterdir()}, gated=True)
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": NAME}, "stringData": {"token": TOKEN}}
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": NAME},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    stack.cluster.kubectl(
        "apply", "-n", NAMESPACE, "-f", "-",
        stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": [secret, claim]}),
    )  # fmt: skip
    source = {
        "repo": REPO,
        "revision": COMMIT,
        "claimName": NAME,
        "tokenSecretRef": {"name": NAME, "key": "token"},
    }
    with serving(hub, stack.cluster.layout.network.host) as address:
        env = [{"name": "HF_ENDPOINT", "value": address}]
        stack.apply(stack.service(NAME, model={"huggingFace": source, "servedName": "tiny"}, env=env))
        try:
            wait_ready(stack.cluster, NAME, namespace=NAMESPACE, seconds=240)
            with Endpoint(stack.service_url(NAME), model="tiny", api_key=stack.api_key) as server:
                assert server.ask("Tell me about this server.").text == stack.right_answer("text")
            assert {path for path, _ in hub.sent} == {path for path in hub.files if not path.endswith(".md")}
            assert hub.tokens == {f"Bearer {TOKEN}"}
        finally:
            stack.cluster.kubectl("delete", "sm70", NAME, "-n", NAMESPACE, "--ignore-not-found", "--wait")
            wait_gone(stack.cluster, NAME, NAMESPACE)
            stack.cluster.kubectl("delete", "secret,pvc", NAME, "-n", NAMESPACE, "--wait=false")
