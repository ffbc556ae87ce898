"""A DRA driver that offers GPUs which do not exist: `fake_dra_driver NODE COUNT KUBECONFIG`.

It publishes one ResourceSlice for the node and hands a claim's devices to the
container runtime as CDI devices, whose specification sets the environment.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc

from testcluster.gpus import PRODUCT, gpu_uuid
from testcluster.kubelet_api import DRA, messages, serve, service

DRIVER = "gpu.nvidia.com"
CDI = Path("/run/cdi")


class Driver:
    def __init__(self, node: str, count: int, kubeconfig: str) -> None:
        self.node, self.kubectl = node, ["kubenode", "kubectl", "--kubeconfig", kubeconfig]
        self.uuids = {f"gpu-{index}": gpu_uuid(node, index) for index in range(count)}
        self.types = messages("k8s.io.kubelet.pkg.apis.dra.v1", DRA)

    def node_uid(self) -> str:
        """Waits for the kubelet, which starts at the same time, to register the node."""
        command = [*self.kubectl, "get", "node", self.node, "--ignore-not-found", "-o", "jsonpath={.metadata.uid}"]
        while not (uid := subprocess.run(command, capture_output=True, text=True, check=False).stdout):
            time.sleep(0.2)
        return uid

    def publish(self) -> None:
        devices = [
            {
                "name": name,
                "attributes": {
                    "type": {"string": "gpu"},
                    "uuid": {"string": uuid},
                    "productName": {"string": PRODUCT.replace("Tesla-", "Tesla ")},
                    "architecture": {"string": "Volta"},
                    "brand": {"string": "Tesla"},
                    "cudaComputeCapability": {"version": "7.0.0"},
                    "driverVersion": {"version": "570.124.6"},
                    "index": {"int": int(name.rpartition("-")[2])},
                },
                "capacity": {"memory": {"value": "16Gi"}},
            }
            for name, uuid in self.uuids.items()
        ]
        pool = {"name": self.node, "generation": 1, "resourceSliceCount": 1}
        owner = {"apiVersion": "v1", "kind": "Node", "name": self.node, "uid": self.node_uid()}
        subprocess.run(
            [*self.kubectl, "apply", "-f", "-"],
            check=True,
            text=True,
            input=json.dumps(
                {
                    "apiVersion": "resource.k8s.io/v1",
                    "kind": "ResourceSlice",
                    "metadata": {"name": f"{self.node}-{DRIVER}", "ownerReferences": [owner]},
                    "spec": {"driver": DRIVER, "nodeName": self.node, "pool": pool, "devices": devices},
                }
            ),
        )

    def prepare(self, request: Any, _context: grpc.ServicerContext) -> Any:
        return self.types["NodePrepareResourcesResponse"](
            claims={claim.uid: self._prepare(claim) for claim in request.claims}
        )

    def _prepare(self, claim: Any) -> Any:
        reply = self.types["NodePrepareResourceResponse"]
        text = subprocess.run(
            [*self.kubectl, "get", "resourceclaim", "-n", claim.namespace, claim.name, "-o", "json"],
            capture_output=True,
            text=True,
        )
        if text.returncode:
            return reply(error=text.stderr)
        results = [
            result
            for result in json.loads(text.stdout)["status"]["allocation"]["devices"]["results"]
            if result["driver"] == DRIVER
        ]
        uuids = ",".join(self.uuids[result["device"]] for result in results)
        device = f"{DRIVER}/claim={claim.uid}"
        CDI.mkdir(parents=True, exist_ok=True)
        (CDI / f"{DRIVER}-{claim.uid}.json").write_text(
            json.dumps(
                {
                    "cdiVersion": "0.6.0",
                    "kind": f"{DRIVER}/claim",
                    "devices": [{"name": claim.uid, "containerEdits": {"env": [f"NVIDIA_VISIBLE_DEVICES={uuids}"]}}],
                }
            )
        )
        return reply(
            devices=[
                {
                    "request_names": [result["request"].partition("/")[0]],
                    "pool_name": result["pool"],
                    "device_name": result["device"],
                    "cdi_device_ids": [device],
                }
                for result in results
            ]
        )

    def unprepare(self, request: Any, _context: grpc.ServicerContext) -> Any:
        for claim in request.claims:
            (CDI / f"{DRIVER}-{claim.uid}.json").unlink(missing_ok=True)
        done = self.types["NodeUnprepareResourceResponse"]
        return self.types["NodeUnprepareResourcesResponse"](claims={claim.uid: done() for claim in request.claims})


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    driver = Driver(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    driver.publish()
    server = serve(
        "DRAPlugin",
        DRIVER,
        ["v1.DRAPlugin"],
        service(
            "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin",
            {
                "NodePrepareResources": (driver.types["NodePrepareResourcesRequest"], driver.prepare),
                "NodeUnprepareResources": (driver.types["NodeUnprepareResourcesRequest"], driver.unprepare),
            },
        ),
    )
    signal.sigwait({signal.SIGTERM})
    server.stop(grace=None)
    os._exit(0)


if __name__ == "__main__":
    main()
