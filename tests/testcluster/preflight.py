"""Says, before anything is started, what this machine lacks for a cluster, and what a first start costs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from testcluster import build
from testcluster.errors import ClusterError
from testcluster.images import Archive
from testcluster.machine import CGROUPS, HIDDEN, NAMESPACES
from testcluster.paths import SOURCE
from testcluster.progress import say

COMMANDS = {  # by the Debian package that has it
    "iproute2": ("ip",),
    "iptables": ("iptables", "iptables-restore"),
    "util-linux": ("unshare", "nsenter", "setsid", "mountpoint", "pivot_root"),
    "mount": ("mount", "umount"),
    "runc": ("runc",),
}
CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "pids", "devices", "blkio", "freezer")  # of cgroup v1
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/kmsg")  # the kubelet reads the kernel's log
RESERVE = 0.5  # GB that must stay free for logs, volumes and container layers


@dataclass(frozen=True)
class Need:
    """One line of the disk budget."""

    what: str
    gigabytes: float


def check(folder: Path) -> None:
    """Raises ClusterError with everything that is missing, each with what was found and what to do."""
    problems = [problem for finder in _finders(folder) for problem in finder()]
    if problems:
        raise ClusterError("this machine cannot run the test cluster:\n" + "\n".join(f"  - {p}" for p in problems))


def _finders(folder: Path) -> Sequence[Callable[[], Iterable[str]]]:
    if os.geteuid() != 0:
        # Nothing else can be looked at without root.
        return [lambda: [f"it needs root (network namespaces, mounts, cgroups); this is uid {os.geteuid()}; use sudo"]]
    return [commands, lambda: hidden(folder), proc, cgroups, namespaces, nat]


def commands() -> Iterable[str]:
    for package, names in COMMANDS.items():
        missing = [name for name in names if shutil.which(name) is None]
        if missing:
            yield f"{', '.join(missing)} must be in PATH; install Debian's {package} (tools/bootstrap.sh does)"


def hidden(folder: Path) -> Iterable[str]:
    """A machine has its own /run, /var/lib and /var/log, so what its daemons need must lie elsewhere."""
    for what, path in (("the cluster's folder", folder), ("this repository", SOURCE)):
        for place in HIDDEN:
            if path.is_relative_to(place):
                yield f"{what} must not lie under {place}, but is {path}; set SM70_CACHE or use another folder"


def proc() -> Iterable[str]:
    if not Path("/proc/self/environ").exists():
        yield "/proc must be mounted, but is not; `mount -t proc proc /proc`"
    if not Path("/sys/class/net").exists():
        yield "/sys must be mounted, but is not; `mount -t sysfs sysfs /sys`"
    if missing := [name for name in DEVICES if not Path(name).is_char_device()]:
        advice = "in a chroot run, outside of it, `mount --rbind /dev ROOT/dev`"
        yield f"the devices {', '.join(missing)} must be there, but are not; {advice}"


def cgroups() -> Iterable[str]:
    """The kubelet and runc need a writable hierarchy, v2 or v1."""
    if (CGROUPS / "cgroup.controllers").exists():
        found = (CGROUPS / "cgroup.controllers").read_text().split()
        missing = sorted({"cpu", "cpuset", "memory", "pids", "io"} - set(found))
        if missing:
            yield f"cgroup v2 must have the controllers {', '.join(missing)}; {CGROUPS} has {' '.join(found) or 'none'}"
        return
    missing = [name for name in CONTROLLERS if not (CGROUPS / name / "tasks").exists()]
    if missing:
        offered = Path("/proc/cgroups").read_text() if Path("/proc/cgroups").exists() else ""
        yield (
            f"the cgroup hierarchies {', '.join(missing)} must be mounted below {CGROUPS}, but are not; "
            + mount_advice(missing, offered)
        )


def mount_advice(missing: Sequence[str], offered: str) -> str:
    """The commands that mount what is missing; `offered` is /proc/cgroups, with lines `controller hierarchy …`."""
    on_v1 = {fields[0] for line in offered.splitlines() if (fields := line.split())[1:2] not in ([], ["0"])}
    if on_v1.issuperset(missing):
        names = " ".join(missing)
        inside = f"for c in {names}; do mkdir -p {CGROUPS}/$c; mount -t cgroup -o $c cgroup {CGROUPS}/$c; done"
    else:
        inside = f"mount -t cgroup2 none {CGROUPS}"
    return f"in a chroot run, outside of it, `mount --rbind /sys ROOT/sys`; or, inside, `{inside}`"


def namespaces() -> Iterable[str]:
    if shutil.which("unshare") is None:
        return
    words = ["unshare", *NAMESPACES, "--propagation", "unchanged", "--fork", "true"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        yield (
            f"root must be able to make namespaces (CAP_SYS_ADMIN, CAP_NET_ADMIN), but unshare says:"
            f" {done.stderr.strip()}; in a container run it privileged"
        )


def nat() -> Iterable[str]:
    if shutil.which("iptables") is None or shutil.which("unshare") is None:
        return
    done = subprocess.run(
        ["unshare", "--net", "iptables", "-w", "-t", "nat", "-S"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        yield f"iptables must have the table nat (for kube-proxy), but says: {done.stderr.strip()}; load iptable_nat"


def budget(cache: Path, new_archives: Sequence[Archive]) -> list[Need]:
    """What the next start will add to the disk of the cache folder."""
    needs = []
    missing = build.missing(cache)
    if missing:
        size = {"programs": 0.31, "helm": 0.09}
        needs.append(Need("programs", sum(size[recipe.kind] for recipe in missing)))
        caches = {"mod": Need("Go's module cache", 1.6), "build": Need("Go's build cache", 5.5)}
        needs += [need for folder, need in caches.items() if not (cache / "go" / folder).exists()]
    if new_archives:
        needs.append(Need("images", sum(archive.unpacking for archive in new_archives) / 1e9))
    return [*needs, Need("reserve", RESERVE)] if needs else []


def check_disk(cache: Path, needs: Sequence[Need]) -> None:
    """Prints the budget, if there is one, and raises ClusterError if the disk is too full for it."""
    if not needs:
        return
    free = shutil.disk_usage(cache).free / 1e9
    total = sum(need.gigabytes for need in needs)
    lines = ", ".join(f"{need.what} {need.gigabytes:.1f} GB" for need in needs)
    say(f"disk: {lines}; together {total:.1f} GB of {free:.1f} GB free in {cache}")
    if free < total:
        raise ClusterError(
            f"{total:.1f} GB must be free in {cache} ({lines}), but {free:.1f} GB are;"
            " free some (`make clean-cache`), or set SM70_CACHE to a folder on a larger disk"
        )
