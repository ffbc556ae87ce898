"""A device plugin that offers GPUs which do not exist: `fake_device_plugin NODE COUNT`.

`UNHEALTHY` holds the indexes of broken devices; the plugin reads it at SIGHUP.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from testcluster.gpus import RESOURCE, gpu_uuid
from testcluster.kubelet_api import DEVICE_PLUGIN, messages, serve, service

UNHEALTHY = Path("/var/lib/fake-gpu/unhealthy")


class Devices:
    """The devices of one node and their health, streamed to the kubelet."""

    def __init__(self, node: str, count: int) -> None:
        self.types = messages("v1beta1", DEVICE_PLUGIN)
        self.uuids = [gpu_uuid(node, index) for index in range(count)]
        self.changed = threading.Condition()
        self.generation = 0

    def reload(self) -> None:
        with self.changed:
            self.generation += 1
            self.changed.notify_all()

    def _state(self) -> Any:
        broken = set(UNHEALTHY.read_text().split()) if UNHEALTHY.exists() else set()
        return self.types["ListAndWatchResponse"](
            devices=[
                {"ID": uuid, "health": "Unhealthy" if str(index) in broken else "Healthy"}
                for index, uuid in enumerate(self.uuids)
            ]
        )

    def options(self, _request: Any, _context: grpc.ServicerContext) -> Any:
        return self.types["DevicePluginOptions"]()

    def list_and_watch(self, _request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        context.add_callback(self.reload)  # wakes the wait below when the kubelet hangs up
        while context.is_active():
            with self.changed:
                seen = self.generation
            yield self._state()
            with self.changed:
                while self.generation == seen:
                    self.changed.wait()

    def allocate(self, request: Any, _context: grpc.ServicerContext) -> Any:
        replies = []
        for container in request.container_requests:
            indexes = sorted(self.uuids.index(uuid) for uuid in container.devices_ids)
            replies.append(
                {
                    "envs": {"NVIDIA_VISIBLE_DEVICES": ",".join(self.uuids[index] for index in indexes)},
                    "devices": [
                        {"container_path": f"/dev/nvidia{index}", "host_path": "/dev/null", "permissions": "rw"}
                        for index in indexes
                    ],
                }
            )
        return self.types["AllocateResponse"](container_responses=replies)


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGTERM})
    devices = Devices(sys.argv[1], int(sys.argv[2]))
    empty = devices.types["Empty"]
    server = serve(
        "DevicePlugin",
        RESOURCE,
        ["v1beta1"],
        service(
            "v1beta1.DevicePlugin",
            {
                "GetDevicePluginOptions": (empty, devices.options),
                "ListAndWatch": (empty, devices.list_and_watch),
                "Allocate": (devices.types["AllocateRequest"], devices.allocate),
            },
        ),
    )
    while signal.sigwait({signal.SIGHUP, signal.SIGTERM}) == signal.SIGHUP:
        devices.reload()
    server.stop(grace=None)
    os._exit(0)


if __name__ == "__main__":
    main()
