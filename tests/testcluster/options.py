"""What a cluster is to be like."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from testcluster.errors import ClusterError

MAX_NODES = 16


class GpuSource(StrEnum):
    """How the nodes offer their fake GPUs."""

    DEVICE_PLUGIN = "device-plugin"
    DRA = "dra"


@dataclass(frozen=True)
class Options:
    """A change of anything but the images needs a new cluster."""

    nodes: int = 2
    gpus: int = 4  # of each node
    gpu_source: GpuSource = GpuSource.DEVICE_PLUGIN
    audit_log: bool = False  # every request to the API server, at level Metadata, in logs/audit.log
    apiserver_args: tuple[str, ...] = ()
    images: tuple[Path, ...] = ()  # OCI archives for every node

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MAX_NODES:
            raise ClusterError(f"a test cluster must have 1 to {MAX_NODES} nodes, not {self.nodes}")
        if not 0 <= self.gpus <= 64:
            raise ClusterError(f"a node must have 0 to 64 GPUs, not {self.gpus}")

    def difference(self, other: Options) -> list[str]:
        """The names of the options, the images aside, that another set has otherwise."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "images"]
        return [name for name in names if getattr(self, name) != getattr(other, name)]

    def dump(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"images": [str(path) for path in self.images]}

    @classmethod
    def load(cls, data: dict[str, Any]) -> Options:
        return cls(
            **data
            | {
                "gpu_source": GpuSource(data["gpu_source"]),
                "apiserver_args": tuple(data["apiserver_args"]),
                "images": tuple(map(Path, data["images"])),
            }
        )


def check_name(name: str) -> str:
    """A cluster's name, which becomes a folder's name."""
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?", name):
        raise ClusterError(f"a cluster's name must be small letters, digits, `.` and `-`, not {name!r}")
    return name
