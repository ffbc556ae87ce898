"""Provisions folders of the nodes' disks as volumes: `local_provisioner.py CLUSTER_FOLDER KUBECONFIG`.

It runs beside the control plane, from where it sees every node's disk. Claims of
the default StorageClass wait for their first pod; a released volume's folder goes.
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


class Provisioner:
    def __init__(self, cluster: Path, kubeconfig: str) -> None:
        self.cluster, self.kubectl = cluster, ["kubenode", "kubectl", "--kubeconfig", kubeconfig]

    def apply(self, item: dict[str, Any]) -> None:
        subprocess.run([*self.kubectl, "apply", "-f", "-"], input=json.dumps(item), text=True, check=True)

    def claim(self, claim: dict[str, Any]) -> None:
        meta, spec = claim["metadata"], claim["spec"]
        node = meta.get("annotations", {}).get("volume.kubernetes.io/selected-node")
        if node is None or spec.get("volumeName") or spec.get("storageClassName") != CLASS:
            return
        name = f"pvc-{meta['uid']}"
        self.folder(node, name).mkdir(parents=True, exist_ok=True)
        reference = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "namespace": meta["namespace"],
            "name": meta["name"],
            "uid": meta["uid"],
        }
        here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
        self.apply(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": name, "annotations": {"pv.kubernetes.io/provisioned-by": NAME}},
                "spec": {
                    "capacity": {"storage": spec["resources"]["requests"]["storage"]},
                    "accessModes": spec["accessModes"],
                    "storageClassName": CLASS,
                    "persistentVolumeReclaimPolicy": "Delete",
                    "claimRef": reference,
                    "local": {"path": f"/var/lib/volumes/{name}"},
                    "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
                },
            }
        )

    def volume(self, volume: dict[str, Any]) -> None:
        meta, spec = volume["metadata"], volume["spec"]
        if meta.get("annotations", {}).get("pv.kubernetes.io/provisioned-by") != NAME:
            return
        if volume["status"].get("phase") == "Released" and spec["persistentVolumeReclaimPolicy"] == "Delete":
            terms = spec["nodeAffinity"]["required"]["nodeSelectorTerms"]
            shutil.rmtree(self.folder(terms[0]["matchExpressions"][0]["values"][0], meta["name"]), ignore_errors=True)
            command = [*self.kubectl, "delete", "pv", meta["name"], "--wait=false", "--ignore-not-found"]
            subprocess.run(command, check=True)

    def folder(self, node: str, name: str) -> Path:
        return self.cluster / "machines" / node / "lib" / "volumes" / name

    def watch(self, kind: str, handle: Callable[[dict[str, Any]], None]) -> None:
        while True:  # kubectl ends when the API server does
            for item in self.objects(kind):
                handle(item)
            time.sleep(1)

    def objects(self, kind: str) -> Iterator[dict[str, Any]]:
        command = [*self.kubectl, "get", kind, "-A", "--watch", "-o", "jsonpath={@}{'\\n'}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            yield from map(json.loads, process.stdout)


def main() -> None:
    provisioner = Provisioner(Path(sys.argv[1]), sys.argv[2])
    provisioner.apply(STORAGE_CLASS)
    threading.Thread(target=provisioner.watch, args=("pv", provisioner.volume), daemon=True).start()
    provisioner.watch("pvc", provisioner.claim)


if __name__ == "__main__":
    main()
