"""A Kubernetes cluster inside network namespaces of one Linux machine: its life, its API and its faults."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Self

from testcluster import build, daemons, host, network, preflight
from testcluster.client import Client
from testcluster.errors import ClusterError
from testcluster.files import Files
from testcluster.images import Archive, read_archive
from testcluster.launcher import Launcher
from testcluster.layout import Layout
from testcluster.machine import Machine
from testcluster.options import GpuSource, Options, check_name
from testcluster.paths import cache, locked
from testcluster.progress import step
from testcluster.store import Stores, abandon, import_archive


class Cluster(Client):
    """The cluster in a folder; the object itself knows nothing that is not there too.

    `options` say what `up` shall make; without them it is what the folder says, or the default.
    """

    def __init__(self, folder: Path, options: Options | None = None) -> None:
        self.folder = folder.resolve()
        self.files = Files(self.folder)
        self._wanted = options

    @classmethod
    def named(cls, name: str, options: Options | None = None) -> Self:
        """The cluster in `$SM70_CACHE/clusters/NAME`."""
        return cls(_places() / check_name(name), options)

    # What it is

    @property
    def exists(self) -> bool:
        return self._state_file.exists()

    @property
    def layout(self) -> Layout:
        """Raises ClusterError if there is no such cluster."""
        try:
            return Layout.read(self._state_file)
        except FileNotFoundError:
            raise ClusterError(f"there must be a cluster in {self.folder}, but there is none; run `up` first") from None

    @property
    def options(self) -> Options:
        return self.layout.options if self.exists else self._wanted or Options()

    @property
    def kubeconfig(self) -> Path:
        return self.files.kubeconfig

    @property
    def kubectl_path(self) -> Path:
        return self.files.bin / "kubectl"

    @property
    def helm_path(self) -> Path:
        return self.files.bin / "helm"

    @property
    def audit_log(self) -> Path:
        """Is only written with the option `audit_log`; testcluster.audit reads it."""
        return self.files.audit_log

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.layout.nodes)

    def node_folder(self, node: str) -> Path:
        """The node's /var/lib, seen from the host."""
        return self.machine(node).disk / "lib"

    def machine(self, name: str) -> Machine:
        machines = self.layout.machines
        if name not in machines:
            raise ClusterError(f"a machine must be one of {', '.join(machines)}, not {name!r}")
        return machines[name]

    def status(self) -> dict[str, dict[str, bool]]:
        """Machine to daemon to whether it runs; empty when there is no cluster."""
        if not self.exists:
            return {}
        layout = self.layout
        wanted = {"hub": daemons.HUB} | {node.name: daemons.node_daemons(layout.options) for node in layout.nodes}
        return {
            name: {daemon: machine.daemon(daemon) is not None for daemon in wanted[name]}
            for name, machine in layout.machines.items()
        }

    # Its life

    def up(self) -> None:
        """Starts what does not run, and waits until every node is Ready with its GPUs, which takes some 5 s.

        The first time, programs are built (see `build.build`), and a new set of images is unpacked.
        Raises ClusterError if this machine cannot run a cluster, or if one with other options is here.
        """
        preflight.check(self.folder)
        host.forget(_places())
        with locked(self._lock), step(f"cluster {self.folder.name} up"):
            options = self._agreed_options()
            archives = [read_archive(path.resolve()) for path in options.images]
            preflight.check_disk(cache(), preflight.budget(cache(), self._unknown(archives)))
            programs, helm = (build.build(recipe, cache()) for recipe in (build.kubernetes(), build.helm()))
            layout, fresh = self._claim(options, programs)
            Launcher(layout, helm, _stores()).start(archives, fresh)
            images = {str(archive.path): archive.digest for archive in archives}
            replace(layout, images=images).write(self._state_file)

    def down(self) -> None:
        """Ends everything, whatever state it is in, and keeps only the logs. Twice is as good as once."""
        if self.folder.exists():
            with locked(self._lock), locked(_networks_lock()):
                host.kill_machines(self.folder)
                layout = self.layout if self.exists else None
                for machine in layout.machines.values() if layout else ():
                    machine.halt()
                network.unplug(self.folder, layout.network if layout else None)
                network.release(self.folder, _claims())
                network.unguard()
                for name in ("machines", "pki", "conf", "bin"):
                    shutil.rmtree(self.folder / name, ignore_errors=True)
                self.kubeconfig.unlink(missing_ok=True)
                self._state_file.unlink(missing_ok=True)
        abandon(_stores())

    def load_image(self, archive: Path) -> None:
        """Unpacks an OCI archive on each node; images given to `up` are unpacked once for all, so prefer that."""
        layout, found = self.layout, read_archive(archive.resolve())
        with ThreadPoolExecutor() as pool:
            for load in [pool.submit(import_archive, node, layout.programs, found) for node in layout.nodes]:
                load.result()

    def raw(self, path: str) -> str | None:
        """GET as the administrator, without kubectl's 0.1 s; None for any answer but 200."""
        return self.layout.api.get(path)

    # Its faults. `up` heals all of them but a pulled cable, sick GPUs and a frozen daemon.

    def freeze(self, machine: str, daemon: str) -> None:
        """Stops a daemon where it is, as a hang would; its connections stay open."""
        self.signal(machine, daemon, signal.SIGSTOP)

    def thaw(self, machine: str, daemon: str) -> None:
        self.signal(machine, daemon, signal.SIGCONT)

    def kill(self, machine: str, daemon: str) -> None:
        self.signal(machine, daemon, signal.SIGKILL)

    def signal(self, machine: str, daemon: str, number: signal.Signals) -> None:
        """Raises RuntimeError, with the daemon's last words, if it does not run."""
        self.machine(machine).signal(daemon, number)

    def crash(self, machine: str) -> None:
        """Cuts the machine's power: its processes end at once, its disk stays."""
        layout = self.layout
        self.machine(machine).halt()
        # A dead machine's network outlives it while TCP retries; without the cable all others see the same at once.
        if machine == layout.hub.name:
            network.unplug(self.folder)
        elif layout.hub.pid() is not None:
            layout.hub.unplug(machine)

    def partition(self, node: str) -> None:
        """Pulls a node's cable. The host reaches Services through node-1, so rather take another."""
        self._plug(node, "down")

    def heal(self, node: str) -> None:
        self._plug(node, "up")

    def break_gpus(self, node: str, *indexes: int) -> None:
        """Makes exactly these of the node's GPUs unhealthy; none makes all well again."""
        options = self.layout.options
        if options.gpu_source is not GpuSource.DEVICE_PLUGIN or not options.gpus:
            raise ClusterError("only GPUs of a device plugin can be made sick, and this cluster has none")
        if wrong := [index for index in indexes if not 0 <= index < options.gpus]:
            raise ClusterError(f"a GPU must be one of 0 to {options.gpus - 1}, not {wrong[0]}")
        folder = self.node_folder(node) / "fake-gpu"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "unhealthy").write_text(" ".join(map(str, indexes)))
        self.signal(node, daemons.GPU_PLUGIN, signal.SIGHUP)

    def run(self, machine: str, *words: str, stdin: str | None = None) -> str:
        """A command inside a machine: its standard output. Raises CommandError."""
        return self.machine(machine).run(words, stdin)

    # How

    @property
    def _state_file(self) -> Path:
        return self.folder / network.STATE

    @property
    def _lock(self) -> Path:
        return self.folder / "lock"

    def _agreed_options(self) -> Options:
        if not self.exists or self._wanted is None:
            return self.options
        there = self.layout.options
        if other := there.difference(self._wanted):
            raise ClusterError(
                f"the cluster in {self.folder} must have the same options, but has other {', '.join(other)};"
                " take it down first, or use another name"
            )
        # What is on the nodes stays there; its archive may have been replaced by a newer image's since.
        kept = [path for path in there.images if path.exists()]
        return replace(there, images=tuple(dict.fromkeys([*kept, *self._wanted.images])))

    def _unknown(self, archives: Sequence[Archive]) -> list[Archive]:
        """Those that will be unpacked now."""
        known = {digest for content in Stores.contents(_stores()).values() for digest in content.archives}
        if self.exists:
            known |= set(self.layout.images.values())
        return [archive for archive in archives if archive.digest not in known]

    def _claim(self, options: Options, programs: Path) -> tuple[Layout, bool]:
        """Takes a network for as long as the cluster exists, and boots the hub on it; whether that is new."""
        with locked(_networks_lock()):
            network.guard()
            images = self.layout.images if self.exists else {}
            layout = Layout(self.folder, network.claim(self.folder, _claims()), options, programs, images)
            layout.write(self._state_file)
            booted = layout.hub.boot()
            routes = {node.pods: node.address for node in layout.nodes}
            plugged = network.plug(layout.network, self.folder, layout.hub, routes)
            return layout, booted or plugged

    def _plug(self, node: str, way: str) -> None:
        if node not in self.nodes:
            raise ClusterError(f"only a node has a cable: {', '.join(self.nodes)}, not {node!r}")
        self.layout.hub.ip(f"link set {node} {way}")


def build_all() -> None:
    """Builds what `up` needs, which takes minutes the first time; a test's time limit is shorter than that."""
    preflight.check_disk(cache(), preflight.budget(cache(), []))
    for recipe in (build.kubernetes(), build.helm()):
        build.build(recipe, cache())


def all_clusters() -> list[Cluster]:
    """Every cluster of this host, also one that has lost its launcher, its machines or its state file."""
    return [Cluster(folder) for folder in sorted(host.clusters(_claims(), _places()))]


def down_all() -> list[str]:
    """Takes every cluster of this host down, and removes what none of them knows of; what it removed."""
    clusters = all_clusters()
    for cluster in clusters:
        cluster.down()
    host.kill_machines(_stores())  # an image store's loader whose launcher lives; nobody waits for it any more
    with locked(_networks_lock()):  # against a cluster that starts now
        return [f"cluster {cluster.folder}" for cluster in clusters] + host.sweep()


def _places() -> Path:
    return cache() / "clusters"


def _stores() -> Path:
    return cache() / "image-stores"


def _claims() -> Path:
    return cache() / "networks"


def _networks_lock() -> Path:
    return cache() / "networks.lock"
