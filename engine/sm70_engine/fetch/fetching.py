"""A download from listing to marker: pure decisions in other modules, the order of things here."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from sm70_engine.fetch import marker as markers
from sm70_engine.fetch.checks import fault
from sm70_engine.fetch.errors import FetchError, of_disk
from sm70_engine.fetch.hubs import Hub, HubName
from sm70_engine.fetch.marker import MarkedFile, Marker
from sm70_engine.fetch.selection import RemoteFile, Selection, select
from sm70_profiles.reasons import TerminationReason

LOCK = ".sm70-fetch.lock"
SECONDS_A_LINE = 1.0
SPARE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Progress:
    """How far a download is. Bytes of the whole, files that are complete."""

    bytes: int
    total_bytes: int
    files: int
    total_files: int
    file: str | None = None


Tell = Callable[[Progress], None]


@dataclass(frozen=True)
class Job:
    """What is to lie where."""

    hub: HubName
    repo: str
    revision: str
    folder: Path
    selection: Selection = field(default_factory=Selection)
    demanded: Mapping[str, str] = field(default_factory=dict)
    workers: int = 4
    verify: bool = False


def fetch(job: Job, opened: Callable[[], Hub], tell: Tell = lambda _progress: None) -> Progress:
    """Makes the folder complete. Asks nothing of the network when it is already. Raises FetchError."""
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        with _alone(job.folder):
            done = _already(job)
            return done if done is not None else _download(job, opened(), tell)
    except OSError as error:
        raise of_disk(error) or FetchError(TerminationReason.CACHE_UNWRITABLE, f"`{job.folder}`: {error}") from error


def _already(job: Job) -> Progress | None:
    """The end of a download that was made before; None when something is to do."""
    marker = markers.read(job.folder)
    if marker is None:
        return None
    if not marker.same_source((job.hub, job.repo, job.revision)):
        raise FetchError(
            TerminationReason.CACHE_UNWRITABLE,
            f"`{job.folder}` holds {marker.repo} at {marker.revision[:12]}, and two models must not be mixed",
            "Use another folder, or empty this one.",
        )
    if (marker.include, marker.exclude) != (job.selection.include, job.selection.exclude):
        return None
    if any(path not in marker.files or marker.files[path].sha256 != sum_ for path, sum_ in job.demanded.items()):
        return None
    if job.verify or not markers.untouched(job.folder, marker):
        return None
    total = sum(file.bytes for file in marker.files.values())
    return Progress(total, total, len(marker.files), len(marker.files))


def _download(job: Job, hub: Hub, tell: Tell) -> Progress:
    files = select(hub.files(), job.selection, job.demanded)
    total = sum(file.size for file in files.values())
    (job.folder / markers.NAME).unlink(missing_ok=True)
    state = _State(total, len(files))
    wanted = []
    for file in files.values():
        wrong, digest = fault(job.folder / file.path, file)
        if wrong is None:
            state.finished(file, digest)
        else:
            wanted.append(file)
    _require_room(job.folder, sum(file.size for file in wanted) - hub.partial_bytes(job.folder))
    with _telling(state, lambda: hub.partial_bytes(job.folder), tell):
        _download_all(job, hub, wanted, state)
    hub.clean(job.folder)
    marker = Marker(
        schema_version=1,
        hub=job.hub,
        repo=job.repo,
        revision=job.revision,
        include=job.selection.include,
        exclude=job.selection.exclude,
        finished_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        files=dict(sorted(state.complete.items())),
    )
    markers.write(job.folder, marker)
    return Progress(total, total, len(files), len(files))


def _download_all(job: Job, hub: Hub, wanted: list[RemoteFile], state: _State) -> None:
    """Every file, the largest first; the first that fails ends it, and what has come so far stays."""
    stop = threading.Event()

    def one(file: RemoteFile) -> None:
        if stop.is_set():
            return
        try:
            state.file = file.path
            _one(job.folder, hub, file, state)
        except FetchError:
            stop.set()
            raise

    with ThreadPoolExecutor(max(1, min(job.workers, len(wanted) or 1))) as pool:
        futures = [pool.submit(one, file) for file in sorted(wanted, key=lambda file: -file.size)]
        for future in futures:
            future.result()


def _one(folder: Path, hub: Hub, file: RemoteFile, state: _State) -> None:
    target = folder / file.path
    # What is there is not the file: libraries would take its size or time for proof.
    target.unlink(missing_ok=True)
    hub.download(file, folder)
    wrong, digest = fault(target, file)
    if wrong is not None:
        target.unlink(missing_ok=True)
        raise FetchError(TerminationReason.CHECKSUM_MISMATCH, f"`{file.path}`: {wrong}")
    with target.open("rb") as written:
        os.fsync(written.fileno())
    state.finished(file, digest)


class _State:
    """What is complete, by several threads."""

    def __init__(self, total_bytes: int, total_files: int) -> None:
        self.total_bytes, self.total_files = total_bytes, total_files
        self.complete: dict[str, MarkedFile] = {}
        self.file: str | None = None
        self._lock = threading.Lock()

    def finished(self, file: RemoteFile, digest: str) -> None:
        with self._lock:
            self.complete[file.path] = MarkedFile(bytes=file.size, sha256=digest)

    def progress(self, partial: int) -> Progress:
        with self._lock:
            complete = sum(file.bytes for file in self.complete.values())
            so_far = min(self.total_bytes, complete + partial)
            return Progress(so_far, self.total_bytes, len(self.complete), self.total_files, self.file)


@contextlib.contextmanager
def _telling(state: _State, partial: Callable[[], int], tell: Tell) -> Iterator[None]:
    """Tells at the beginning, once a second, and at the end. Sizes on the disk count, whatever a library reports."""
    ended = threading.Event()

    def loop() -> None:
        while not ended.wait(SECONDS_A_LINE):
            tell(state.progress(partial()))

    tell(state.progress(partial()))
    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        tell(state.progress(partial()))


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One download a folder at a time, where the file system has locks; a second waits and finds the work done."""
    with (folder / LOCK).open("ab") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _require_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > 0 and free < needed + SPARE_BYTES:
        raise FetchError(
            TerminationReason.DISK_FULL,
            f"`{folder}` must have room for {needed} bytes and {SPARE_BYTES} to spare; {free} are free",
        )
