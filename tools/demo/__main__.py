"""The demo's story, step by step; see README.md for what it prints."""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import images
from demo.report import ConditionWatcher, Report, fail
from sm70_qualify.client import Endpoint
from stack import models, operator, services
from testcluster.cluster import Cluster
from testcluster.options import Options
from testcluster.target import Capability, ClusterKind, TargetCluster, target_cluster

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny.yaml"
NAMESPACE = "default"
SERVICE = "tiny"
PROMPT = "Tell me about yourself."


def main() -> None:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--cluster", type=ClusterKind, choices=list(ClusterKind), default=ClusterKind.EMBEDDED)
    parser.add_argument("--operator-image", help="a pullable image, for --cluster current (make demo OPERATOR_IMAGE=…)")
    parser.add_argument("--engine-image", help="a pullable image, for --cluster current (make demo ENGINE_IMAGE=…)")
    options = parser.parse_args()
    report = Report()
    with report.step("Images: operator and CPU engine"):
        built = _images(options.cluster, options.operator_image, options.engine_image)
    with report.step(f"Kubernetes ({options.cluster})"):
        cluster = _start(options.cluster, built.archives)
    with report.step("Operator, by its Helm chart"):
        operator.install(cluster, operator_image=built.operator, engine_cpu_image=built.engine)
    with report.step("Model: made on the spot, nothing is downloaded"):
        models.make(cluster, image=built.engine, namespace=NAMESPACE)
    with report.step("kubectl apply -f examples/tiny.yaml, and wait until it is Ready"):
        key = _api_key(cluster)
        cluster.kubectl("apply", "-n", NAMESPACE, "-f", str(EXAMPLE))
        watcher = ConditionWatcher(report)
        service = services.wait_ready(cluster, SERVICE, namespace=NAMESPACE, seconds=300, seen=watcher)
    _show(cluster, service)
    with report.step("A streamed answer through the public Service"):
        _talk(cluster, service, key)
    report.summary()
    print("\nThe cluster stays up. Look around:")
    print(f"  export KUBECONFIG={cluster.kubeconfig} PATH={cluster.kubectl_path.parent}:$PATH")
    print(f"  kubectl describe sm70 {SERVICE}\nand remove it with `make clean-cluster`.")


@dataclass(frozen=True)
class Images:
    """What the nodes run: references, and the archives that bring them there (none where nodes pull)."""

    operator: str
    engine: str
    archives: tuple[Path, ...]


def _images(kind: ClusterKind, operator_image: str | None, engine_image: str | None) -> Images:
    """Builds the images, save for the current cluster, whose nodes must pull them from a registry of its own."""
    if kind is ClusterKind.CURRENT:
        if not (operator_image and engine_image):
            fail(
                "the current cluster needs images that its nodes can pull; found none named. Build and push "
                "image/operator and image/engine-cpu, then: make demo CLUSTER=current OPERATOR_IMAGE=… ENGINE_IMAGE=…"
            )
        return Images(str(operator_image), str(engine_image), ())
    built = images.image_archives(["operator", "engine-cpu"])
    archives = tuple(path for image in built.values() for path in image.archives)
    if kind is ClusterKind.KIND:
        # kind loads each archive by itself, so each must be complete.
        archives = tuple(images.folder() / f"{image.name}-{image.key}-complete.tar" for image in built.values())
        for name, archive in zip(built, archives, strict=True):
            if not archive.exists():
                images.save(name, archive)
    return Images(built["operator"].reference, built["engine-cpu"].reference, archives)


def _start(kind: ClusterKind, archives: tuple[Path, ...]) -> TargetCluster:
    """The demo's cluster, up, with the images on its nodes; an earlier demo with other images goes first."""
    cluster = target_cluster(kind, "demo", Options(images=archives, audit_log=True))
    if isinstance(cluster, Cluster) and cluster.exists and set(cluster.options.images) != set(archives):
        cluster.down()
        cluster = target_cluster(kind, "demo", Options(images=archives, audit_log=True))
    cluster.up()
    return cluster


def _api_key(cluster: TargetCluster) -> str:
    """The key of the secret that the example names; made at the first run. It never stands in an argument list."""
    found = cluster.get("secret", "tiny-api-key", NAMESPACE)
    if found is None:
        document = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "tiny-api-key"},
            "stringData": {"api-key": secrets.token_urlsafe(24)},
        }
        cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=json.dumps(document))
    words = cluster.kubectl(
        "get", "secret", "-n", NAMESPACE, "tiny-api-key", "-o", 'go-template={{index .data "api-key" | base64decode}}'
    )
    return words.strip()


def _show(cluster: TargetCluster, service: dict[str, Any]) -> None:
    print("\n$ kubectl get sm70")
    print(cluster.kubectl("get", "sm70", "-n", NAMESPACE))
    for place in service["status"].get("placement", []):
        uuids = ", ".join(place.get("gpuUUIDs", [])) or "no GPU"
        print(f"placement: pod {place['pod']} on {place['node']}: {uuids} (by {place.get('source', 'unknown')})")
    paths = service["status"]["acceleration"]
    print(f"acceleration: {paths['summary']} expected paths enabled")
    shown = [path for path in paths["paths"] if path["expected"] or path["state"] != "NotApplicable"]
    for path in shown:
        mark = "expected" if path["expected"] else ""
        print(f"  {path['name']:<26} {mark:<9} {path['state']:<9} {path.get('reason', '')}".rstrip())
    print(f"  and {len(paths['paths']) - len(shown)} paths of other engines, which are not applicable here")
    print()


def _talk(cluster: TargetCluster, service: dict[str, Any], key: str) -> None:
    with _reach(cluster, service) as url:
        print(f"  {PROMPT}\n  → ", end="", flush=True)
        with Endpoint(url, model=SERVICE, api_key=key) as server:
            answer = server.ask(PROMPT, seen=lambda piece: print(piece, end="", flush=True))
        speed = f"{answer.completion_tokens} tokens in {answer.seconds:.1f} s, finish reason {answer.finish_reason}"
        print(f"\n  ({speed}; from {url})")
    if not answer.text:
        fail("the server sent no text")


@contextlib.contextmanager
def _reach(cluster: TargetCluster, service: dict[str, Any]) -> Iterator[str]:
    """An address of the public Service from here: its cluster IP where that is routed, else a port-forward."""
    if Capability.HOST_ROUTES in cluster.capabilities:
        address = cluster.get("service", SERVICE, NAMESPACE)
        assert address is not None
        port = address["spec"]["ports"][0]["port"]
        yield f"http://{address['spec']['clusterIP']}:{port}"
        return
    command = [str(cluster.kubectl_path), "port-forward", "-n", NAMESPACE, f"service/{SERVICE}", ":http"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=cluster.environment()) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()  # Forwarding from 127.0.0.1:PORT -> …
            yield "http://" + line.split(" -> ")[0].removeprefix("Forwarding from ").strip()
        finally:
            process.terminate()


if __name__ == "__main__":
    try:
        main()
    except (RuntimeError, TimeoutError, images.ImageError) as error:
        print(f"demo: {error}", file=sys.stderr)
        raise SystemExit(1) from None
