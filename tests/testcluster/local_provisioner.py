"""Provisions folders of the nodes' disks as volumes: `local_provisioner CLUSTER_FOLDER KUBECONFIG`.

It runs beside the control plane, from where it sees every node's disk. Claims of the default
StorageClass wait for their first pod; a released volume's folder goes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NAME = "sm70.test/local"
CLASS = "local"
STORAGE_CLASS = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {"name": CLASS, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
    "provisioner": NAME,
    "volumeBindingMode": "WaitForFirstConsumer",
    "reclaimPolicy": "Delete",
}
SELECTED_NODE = "volume.kubernetes.io/selected-node"  # the scheduler's choice, on a claim
PROVISIONED_BY = "pv.kubernetes.io/provisioned-by"


def volume_for(claim: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The node and the volume that a claim waits for; None if it waits for neither or is not ours."""
    meta, spec = claim["metadata"], claim["spec"]
    node: str | None = meta.get("annotations", {}).get(SELECTED_NODE)
    if node is None or spec.get("volumeName") or spec.get("storageClassName") != CLASS:
        return None
    name = f"pvc-{meta['uid']}"
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    return node, {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name, "annotations": {PROVISIONED_BY: NAME}},
        "spec": {
            "capacity": {"storage": spec["resources"]["requests"]["storage"]},
            "accessModes": spec["accessModes"],
            "storageClassName": CLASS,
            "persistentVolumeReclaimPolicy": "Delete",
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": meta["namespace"],
                "name": meta["name"],
                "uid": meta["uid"],
            },
            # Of local and hostPath only local makes the kubelet honour a pod's fsGroup.
            "local": {"path": f"/var/lib/volumes/{name}"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
        },
    }


def released_from(volume: dict[str, Any]) -> str | None:
    """The node of a volume that can go; None if it is in use, is to be kept, or is not ours."""
    meta, spec = volume["metadata"], volume["spec"]
    ours = meta.get("annotations", {}).get(PROVISIONED_BY) == NAME
    released = volume.get("status", {}).get("phase") == "Released"
    if not ours or not released or spec["persistentVolumeReclaimPolicy"] != "Delete":
        return None
    node: str = spec["nodeAffinity"]["required"]["nodeSelectorTerms"][0]["matchExpressions"][0]["values"][0]
    return node


class Provisioner:
    def __init__(self, cluster: Path, kubeconfig: str) -> None:
        self.cluster, self.kubectl = cluster, ["kubenode", "kubectl", "--kubeconfig", kubeconfig]

    def apply(self, item: dict[str, Any]) -> None:
        subprocess.run([*self.kubectl, "apply", "-f", "-"], input=json.dumps(item), text=True, check=True)

    def claim(self, claim: dict[str, Any]) -> None:
        if wanted := volume_for(claim):
            node, volume = wanted
            self.folder(node, volume["metadata"]["name"]).mkdir(parents=True, exist_ok=True)
            self.apply(volume)

    def volume(self, volume: dict[str, Any]) -> None:
        node, name = released_from(volume), volume["metadata"]["name"]
        if node is not None:
            shutil.rmtree(self.folder(node, name), ignore_errors=True)
            subprocess.run([*self.kubectl, "delete", "pv", name, "--wait=false", "--ignore-not-found"], check=True)

    def folder(self, node: str, name: str) -> Path:
        return self.cluster / "machines" / node / "lib" / "volumes" / name

    def watch(self, kind: str, handle: Callable[[dict[str, Any]], None]) -> None:
        while True:  # kubectl ends when the API server does
            for item in self.objects(kind):
                try:
                    handle(item)
                except subprocess.CalledProcessError as error:
                    # The next watch lists everything again, and so comes back to this object.
                    print(f"{kind} {item['metadata']['name']}: {error}", flush=True)
                    break
            time.sleep(1)

    def objects(self, kind: str) -> Iterator[dict[str, Any]]:
        command = [*self.kubectl, "get", kind, "-A", "--watch", "-o", "jsonpath={@}{'\\n'}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                yield from map(json.loads, process.stdout)
            finally:
                process.kill()


def main() -> None:
    provisioner = Provisioner(Path(sys.argv[1]), sys.argv[2])
    provisioner.apply(STORAGE_CLASS)
    threading.Thread(target=provisioner.watch, args=("pv", provisioner.volume), daemon=True).start()
    provisioner.watch("pvc", provisioner.claim)


if __name__ == "__main__":
    main()
