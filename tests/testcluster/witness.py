"""Remembers what a running cluster has on this machine, to look afterwards whether anything of it is left."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from testcluster.cluster import Cluster, all_clusters
from testcluster.machine import MACHINE, cgroup_hierarchies, links
from testcluster.network import Network
from testcluster.processes import PROC, variables


@dataclass(frozen=True)
class Witness:
    folder: Path
    network: Network
    namespaces: frozenset[str]  # network namespaces of its machines

    @classmethod
    def of(cls, cluster: Cluster) -> Witness:
        pids = [pid for _, pid, value in variables(MACHINE) if value.startswith(f"{cluster.folder}:")]
        return cls(cluster.folder, cluster.layout.network, frozenset(filter(None, map(_namespace, pids))))

    def traces(self) -> list[str]:
        """What there still is of the cluster: processes, mounts, cgroups, links, routes, namespaces, its claim."""
        return [*self._processes(), *self._mounts(), *self._cgroups(), *self._network(), *self._claims()]

    def _processes(self) -> Iterator[str]:
        for _, pid, value in variables(MACHINE):
            if value.startswith(f"{self.folder}:"):
                yield f"process {pid}"
        for entry in PROC.iterdir():
            if entry.name.isdigit() and _namespace(int(entry.name)) in self.namespaces:
                yield f"process {entry.name} in a network namespace of the cluster"

    def _mounts(self) -> Iterator[str]:
        for line in (PROC / "self" / "mountinfo").read_text().splitlines():
            if str(self.folder) in line:
                yield f"mount {line}"

    def _cgroups(self) -> Iterator[str]:
        for hierarchy in cgroup_hierarchies():
            for path in hierarchy.glob(f"{self.network.link}-*"):
                yield f"cgroup {path}"

    def _network(self) -> Iterator[str]:
        if links().get(self.network.link) == str(self.folder):
            yield f"link {self.network.link}"
        for line in subprocess.check_output(["ip", "route"], text=True).splitlines():
            # The guard over all test networks stays while another cluster is there.
            if f"{self.network.base}." in line and not line.startswith("unreachable"):
                yield f"route {line}"

    def _claims(self) -> Iterator[str]:
        if self.folder in [cluster.folder for cluster in all_clusters()]:
            yield f"cluster {self.folder}"


def _namespace(pid: int) -> str:
    with contextlib.suppress(OSError):  # it may have ended meanwhile
        return str((PROC / str(pid) / "ns" / "net").readlink())
    return ""
