"""Unpacks images once and shares them between nodes and clusters by hard links.

A store is the folder of a stopped containerd. containerd never changes a blob or a committed
snapshot in place, so nodes can have them as hard links; its databases it does change, so those
are copied. A store holds one set of images. A new set starts from the store that has most of
it, so that one changed image is the only one to be unpacked, and of that only the new layers.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from testcluster.errors import ClusterError
from testcluster.images import Archive
from testcluster.machine import Machine
from testcluster.paths import locked
from testcluster.processes import until
from testcluster.progress import say, step

KEPT = 3
RECORD = "sm70-images.json"  # inside a store: what was unpacked into it
CONTAINERD = "containerd"


@dataclass(frozen=True)
class Content:
    """What a store holds: the names and the size of each archive, by digest."""

    archives: Mapping[str, tuple[tuple[str, ...], int]]

    @classmethod
    def of(cls, archives: Iterable[Archive]) -> Content:
        return cls({archive.digest: (archive.names, archive.size) for archive in archives})

    @classmethod
    def read(cls, store: Path) -> Content:
        found = json.loads((store / RECORD).read_text())
        return cls({digest: (tuple(entry["names"]), entry["size"]) for digest, entry in found.items()})

    def write(self, store: Path) -> None:
        record = {digest: {"names": names, "size": size} for digest, (names, size) in self.archives.items()}
        (store / RECORD).write_text(json.dumps(record, indent=1))

    def key(self) -> str:
        return "images-" + sha256("\n".join(sorted(self.archives)).encode()).hexdigest()[:16]

    def shared(self, other: Content) -> int:
        """The bytes of archives that both have."""
        return sum(size for digest, (_, size) in self.archives.items() if digest in other.archives)

    def names(self) -> set[str]:
        return {name for names, _ in self.archives.values() for name in names}


def best_base(wanted: Content, stores: Mapping[Path, Content]) -> Path | None:
    """The store that saves the most unpacking; among equals the one with the least to throw away."""

    def value(store: Path) -> tuple[int, int]:
        content = stores[store]
        return content.shared(wanted), -len(content.archives)

    useful = [store for store in sorted(stores) if stores[store].shared(wanted)]
    return max(useful, key=value, default=None)


def outdated(stores: Mapping[Path, float], current: Path, kept: int = KEPT) -> list[Path]:
    """All but the newest stores, by the time of their last use; never the current one."""
    others = sorted((store for store in stores if store != current), key=lambda store: -stores[store])
    return others[kept - 1 :]


def others(listing: str, names: set[str]) -> list[str]:
    """What to remove so that only images of these names stay, from `ctr images ls` (name, type, digest, …).

    containerd also knows each image by its identity, as a name of its own that would hold its files.
    """
    found = {fields[0]: fields[2] for line in listing.splitlines()[1:] if (fields := line.split())}
    kept = {digest for name, digest in found.items() if name in names}
    return sorted(name for name, digest in found.items() if name not in names and digest not in kept)


def ctr(machine: Machine, programs: Path, *words: str) -> str:
    return machine.run([str(programs / "ctr"), "-n", "k8s.io", *words])


def start_containerd(machine: Machine, programs: Path, config: Path, path: Mapping[str, str]) -> None:
    """Returns when containerd answers."""
    machine.start(CONTAINERD, [str(programs / "containerd"), "--config", str(config)], path)

    def answers() -> bool:
        machine.alive(CONTAINERD)
        command = machine.command([str(programs / "ctr"), "version"])
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    until(answers, f"{machine.name}: containerd answers")


def import_archive(machine: Machine, programs: Path, archive: Archive, *options: str) -> None:
    """Raises ClusterError if an image is then not known by the name that its archive gives it."""
    ctr(machine, programs, "images", "import", "--local", *options, str(archive.path))
    known = set(ctr(machine, programs, "images", "ls", "-q").split())
    if unknown := set(archive.names) - known:
        raise ClusterError(
            f"{archive.path} must name its images in full (registry/name:tag), but {', '.join(sorted(unknown))}"
            f" became something else; known are {', '.join(sorted(known))}"
        )


@dataclass(frozen=True)
class Stores:
    """The image stores of a cache folder; one process at a time makes one."""

    folder: Path
    programs: Path
    config: Path
    path: Mapping[str, str]

    @property
    def loader(self) -> Machine:
        return loader(self.folder)

    @staticmethod
    def contents(folder: Path) -> dict[Path, Content]:
        """The stores that a folder has; one without its record was cut short and does not count."""
        return {path.parent: Content.read(path.parent) for path in folder.glob(f"images-*/{RECORD}")}

    def provide(self, archives: Sequence[Archive], targets: Sequence[Path]) -> None:
        """Gives each target, a folder that does not exist, these images as containerd's folder."""
        wanted = Content.of(archives)
        store = self.folder / wanted.key()
        with locked(self.folder / "lock"):
            if not (store / RECORD).exists():
                self._make(store, wanted, archives)
            (store / RECORD).touch()  # the time of its last use
            with step(f"images linked to {len(targets)} node{'s' if len(targets) > 1 else ''}"):
                for target in targets:
                    clone(store, target)
            used = {path: (path / RECORD).stat().st_mtime for path in self.contents(self.folder)}
            for old in outdated(used, store):
                say(f"removing the image store {old.name}, which was not used for the longest time")
                shutil.rmtree(old)

    def _make(self, store: Path, wanted: Content, archives: Sequence[Archive]) -> None:
        machine, stores = self.loader, self.contents(self.folder)
        base = best_base(wanted, stores)
        machine.halt()
        shutil.rmtree(machine.disk, ignore_errors=True)
        shutil.rmtree(store, ignore_errors=True)
        content = stores[base] if base else Content({})
        state = machine.disk / "lib" / "containerd"
        if base:
            state.parent.mkdir(parents=True)
            clone(base, state)
        machine.boot()
        try:
            start_containerd(machine, self.programs, self.config, self.path)
            for archive in archives:
                if archive.digest not in content.archives:
                    with step(f"unpacked {', '.join(archive.names)} ({archive.size / 1e9:.2f} GB), once for all nodes"):
                        # Old images go afterwards: layers that a new one shares with them are not unpacked again.
                        import_archive(machine, self.programs, archive, "--discard-unpacked-layers")
            if unwanted := others(ctr(machine, self.programs, "images", "ls"), wanted.names()):
                ctr(machine, self.programs, "images", "rm", "--sync", *unwanted)
            ctr(machine, self.programs, "content", "prune", "references")  # frees the packed layers now
            machine.signal(CONTAINERD, signal.SIGTERM)
        finally:
            machine.halt()
        state.rename(store)
        wanted.write(store)
        shutil.rmtree(machine.disk, ignore_errors=True)


def loader(folder: Path) -> Machine:
    """The throwaway machine that unpacks images into stores of this folder."""
    return Machine(folder, "loader", "sm70-test-loader")


def abandon(folder: Path) -> None:
    """Ends a loader whose launcher died; one that still has its launcher goes on."""
    with locked(folder / "lock", wait=False) as mine:
        if mine:
            loader(folder).halt()


def clone(store: Path, target: Path) -> None:
    """Copies a stopped containerd's folder by hard links (for real onto another file system)."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    same_disk = store.stat().st_dev == target.parent.stat().st_dev
    subprocess.run(["cp", "-al" if same_disk else "-a", str(store), str(partial)], check=True)
    (partial / RECORD).unlink(missing_ok=True)
    for database in partial.glob("*/*.db"):  # of containerd's plugins; deeper ones are files of images
        if same_disk:
            copy = database.with_suffix(".copy")
            shutil.copyfile(database, copy)
            copy.replace(database)
    partial.rename(target)
