"""A machine of the cluster: one set of Linux namespaces that lives and dies with its first process.

Nothing is recorded on disk: processes are found by a variable in their environment, so a
crashed launcher loses nothing. Killing the first process makes the kernel kill all others in
its PID namespace and drop the machine's mounts and network devices with the namespaces. Only
cgroups have to be removed by hand.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from testcluster.errors import CommandError
from testcluster.processes import PROC, kill, marked, namespaced, until

CGROUPS = Path("/sys/fs/cgroup")
MACHINE, DAEMON = "SM70_TEST_MACHINE", "SM70_TEST_DAEMON"
HIDDEN = ("/run", "/var/lib", "/var/log")  # each machine has its own
NAMESPACES = ("--net", "--mount", "--pid", "--ipc", "--uts")
# What a kubelet would otherwise set on the whole host. It is content with files that hold these values.
KERNEL = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
}
# Of the machine's own network. A connection to a machine that lost its power or cable ends after 6 s, not 15 min.
NETWORK = {"net/ipv4/ip_forward": 1, "net/ipv4/tcp_retries2": 4}
# Entering a mount namespace leads to its root, which inside a plain chroot is the host's. Such a machine gets a root
# of its own: the chroot's folder, mounted on itself.
OWN_ROOT = """exec 9</
exec nsenter --mount=/proc/self/ns/mnt sh -ec '
root=$(readlink /proc/self/fd/9)
mount --make-rprivate /
mount --rbind "$root" "$root"
cd "$root"
pivot_root . .
umount --lazy .
exec chroot . sh -c "$1"' sh "$1"
"""


@dataclass(frozen=True)
class Machine:
    folder: Path  # the cluster's
    name: str
    cgroup: str

    @property
    def mark(self) -> str:
        return f"{self.folder}:{self.name}"

    @property
    def disk(self) -> Path:
        """Holds the machine's /var/lib (`lib`) and /var/log (`log`); it survives a power cut."""
        return self.folder / "machines" / self.name

    def pid(self) -> int | None:
        """The machine's first process."""
        for pid in marked(MACHINE, self.mark):
            with contextlib.suppress(OSError):
                ids = namespaced(pid)
                if len(ids) > 1 and ids[-1] == "1" and (PROC / str(pid) / "comm").read_text() == "sleep\n":
                    return pid
        return None

    def daemon(self, name: str) -> int | None:
        """The process of a daemon that runs on this machine; None for a moment while it replaces its program."""
        for pid in marked(DAEMON, f"{self.mark}:{name}"):
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(pid) == pid:  # its children have the mark too, but lead no session
                    return pid
        return None

    def boot(self) -> bool:
        """Starts the machine; False if it runs already."""
        if self.pid():
            return False
        for part in ("lib", "log"):
            (self.disk / part).mkdir(parents=True, exist_ok=True)
        for root in self.cgroup_roots():
            root.mkdir(exist_ok=True)
        script = boot_script(self.name, self.disk)
        with self._log("machine") as log:
            words = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--propagation", "unchanged", "--mount-proc"]
            enter = f'mountpoint -q / && exec sh -c "$1"\n{OWN_ROOT}'
            process = subprocess.Popen(
                [*words, "sh", "-c", enter, "sh", script],
                env=self._environment(),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until(lambda: self.pid() is not None or process.poll() is not None, f"machine {self.name} booted")
        if self.pid() is None:
            raise RuntimeError(f"{self.name} did not boot: {self._last_words('machine')}")
        return True

    def start(self, name: str, command: Sequence[str], extra: Mapping[str, str] | None = None) -> bool:
        """Starts a daemon on the machine; False if it runs already."""
        if self.daemon(name):
            return False
        environment = self._environment() | {DAEMON: f"{self.mark}:{name}"} | dict(extra or {})
        # setsid's child becomes the first process's child: nothing outside waits for it and nothing must reap it.
        # A parent outside would stop with a daemon that is frozen, and hang the machine's end.
        with self._log(name) as log:
            subprocess.run(
                self.command(["setsid", "--fork", *command]),
                env=environment,
                cwd="/",
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self.alive(name)

    def alive(self, name: str) -> bool:
        """True; raises with the last words of a daemon that ended."""
        # The environment of a process is empty for a moment while it replaces its program: look twice.
        try:
            until(lambda: self.daemon(name) is not None, name, seconds=0.5)
        except TimeoutError:
            raise RuntimeError(f"{self.name}: {name} ended: {self._last_words(name)}") from None
        return True

    def signal(self, daemon: str, number: signal.Signals) -> None:
        """Signals a daemon; raises RuntimeError if it does not run."""
        self.alive(daemon)
        pid = self.daemon(daemon)
        if pid is not None:
            kill(pid, number=number)

    def run(self, words: Sequence[str], stdin: str | None = None) -> str:
        """Runs a command in all namespaces of the machine; its standard output. Raises CommandError."""
        done = subprocess.run(
            self.command(words), text=True, env=self._environment(), capture_output=True, input=stdin, check=False
        )
        if done.returncode:
            raise CommandError(words, done.returncode, done.stderr or done.stdout)
        return done.stdout

    def ip(self, *lines: str) -> None:
        """Configures the machine's network with lines for ip(8)."""
        ip(*lines, prefix=self._enter())

    def alias(self, link: str) -> str | None:
        """The alias of one of the machine's network devices; None if there is no such device."""
        return links(self._enter()).get(link)

    def unplug(self, link: str) -> None:
        subprocess.run([*self._enter(), "ip", "link", "delete", link], capture_output=True, check=False)

    def halt(self) -> None:
        """Ends the machine as a power cut would, and removes its cgroups. The disk stays."""
        kill(*marked(MACHINE, self.mark))
        for root in self.cgroup_roots():
            remove_cgroup(root)

    def command(self, words: Sequence[str]) -> list[str]:
        """A command line that runs the words in all namespaces of the machine."""
        return [*self._enter("--mount", "--pid", "--ipc", "--uts"), *words]

    def cgroup_roots(self) -> list[Path]:
        return [hierarchy / self.cgroup for hierarchy in cgroup_hierarchies()]

    def _enter(self, *namespaces: str) -> list[str]:
        pid = self.pid()
        if pid is None:
            raise RuntimeError(f"machine {self.name} is not running")
        return ["nsenter", "--target", str(pid), "--net", *namespaces]

    def _environment(self) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "HOME": "/root", MACHINE: self.mark}

    def _log(self, name: str) -> IO[bytes]:
        folder = self.folder / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / f"{self.name}.{name}.log").open("ab")

    def _last_words(self, name: str) -> str:
        lines = (self.folder / "logs" / f"{self.name}.{name}.log").read_text(errors="replace").splitlines()
        return "\n".join(["", *lines[-5:]])


def boot_script(name: str, disk: Path) -> str:
    """What a machine's first process does before it sleeps for the rest of its life."""
    kernel = "\n".join(
        f"echo {value} >/run/kernel/{path.replace('/', '.')}\n"
        f"mount --bind /run/kernel/{path.replace('/', '.')} /proc/sys/{path}"
        for path, value in KERNEL.items()
    )
    network = "\n".join(f"echo {value} >/proc/sys/{path}" for path, value in NETWORK.items())
    # A launcher that finds the sleeping process finds a whole machine, even if the one that booted it was killed.
    # An ignored SIGCHLD survives exec and makes the kernel reap the machine's orphans.
    return f"""set -e
hostname {name}
mount --make-rprivate /
mount --make-rshared /
mount --bind {shlex.quote(str(disk))}/lib /var/lib
mount --bind {shlex.quote(str(disk))}/log /var/log
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/kernel /run/lock
{kernel}
{network}
ip link set lo up
trap '' CHLD
exec sleep infinity"""


def cgroup_hierarchies() -> list[Path]:
    """The mounted hierarchies: one on a cgroup v2 host, one a controller (and `unified`) on v1."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return [path for path in CGROUPS.iterdir() if path.is_dir() and not path.is_symlink()]


def remove_cgroup(root: Path, seconds: float = 10) -> None:
    """Removes a cgroup and what is below it, once its last process is gone."""
    until(functools.partial(_removed, root), f"cgroup {root} empty", seconds=seconds)


def _removed(root: Path) -> bool:
    for path, _, _ in os.walk(root, topdown=False):
        with contextlib.suppress(OSError):  # the kernel still counts a process that just ended
            Path(path).rmdir()
    return not root.exists()


def ip(*lines: str, prefix: Sequence[str] = ()) -> None:
    """Runs lines of ip(8), all or none reported: raises CommandError with its words."""
    done = subprocess.run(
        [*prefix, "ip", "-batch", "-"], input="\n".join(lines), text=True, capture_output=True, check=False
    )
    if done.returncode:
        raise CommandError(["ip", *lines], done.returncode, done.stderr)


def links(prefix: Sequence[str] = ()) -> dict[str, str]:
    """The network devices of a namespace and their aliases; the caller's namespace unless `prefix` enters another."""
    found = json.loads(subprocess.check_output([*prefix, "ip", "-json", "link"]))
    return {link["ifname"]: link.get("ifalias", "") for link in found}
