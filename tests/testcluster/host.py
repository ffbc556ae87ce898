"""Everything of test clusters on this host, whoever made it and however they died."""

from __future__ import annotations

import shutil
from pathlib import Path

from testcluster import network
from testcluster.machine import MACHINE, cgroup_hierarchies, links, remove_cgroup
from testcluster.paths import locked
from testcluster.processes import kill, variables

KEPT = 8  # folders of clusters that are gone, for their logs


def clusters(claims: Path, places: Path) -> set[Path]:
    """The folders of all clusters: from processes, cables, claimed networks and the usual place."""
    found = {Path(value.rpartition(":")[0]) for _, _, value in variables(MACHINE)}
    found |= {Path(alias) for name, alias in links().items() if name.startswith(network.PREFIX) and alias}
    found |= network.claimants(claims)
    found |= {path.parent for path in places.glob(f"*/{network.STATE}")}
    return found


def kill_machines(folder: Path) -> None:
    """Ends all processes of a cluster's machines, whatever its state file says."""
    prefix = f"{folder}:"
    kill(*(pid for _, pid, value in sorted(variables(MACHINE)) if value.startswith(prefix)))


def forget(places: Path, kept: int = KEPT) -> None:
    """Removes the oldest folders, with their logs, of clusters that do not exist any more."""
    gone = [path.parent for path in places.glob("*/lock") if not (path.parent / network.STATE).exists()]
    for folder in sorted(gone, key=lambda path: path.stat().st_mtime, reverse=True)[kept:]:
        with locked(folder / "lock", wait=False) as free:
            if free and not (folder / network.STATE).exists():
                shutil.rmtree(folder)


def sweep() -> list[str]:
    """Removes cgroups that no cluster has any more; what it removed.

    It runs in namespaces, perhaps, that hide the processes of clusters on the same kernel. Their cable shows that they
    are there; a cable without a cluster goes by itself.
    """
    removed, cables = [], links()
    for hierarchy in cgroup_hierarchies():
        for root in hierarchy.glob(f"{network.PREFIX}*"):
            if not any(root.name.startswith(f"{cable}-") for cable in cables):
                remove_cgroup(root)
                removed.append(f"cgroup {root}")
    network.unguard()
    return removed
