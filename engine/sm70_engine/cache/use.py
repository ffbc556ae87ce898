"""How one start uses the compile cache: what is prepared before vLLM starts, and what is done when it has started.

vLLM, Inductor and Triton write into a folder of this server, which is filled from the cache's newest entry before and
published as a new one afterwards if the start added to it. Its path is the same at every start with the same key,
since compiled code remembers where it lies. Nothing that is wrong with the volume keeps a server from starting: it
starts cold, and says why.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sm70_engine.cache import store
from sm70_profiles.base import Document, printable
from sm70_profiles.identity import CompileCacheIdentity
from sm70_profiles.profile import EngineFlavour
from sm70_profiles.report import CacheState, CompileCacheReport
from sm70_profiles.resolver import Resolution

FOLDER = "sm70-compile"
"""Below the cache home, on the volume."""
PARTS = ("vllm/torch_compile_cache", "vllm/modelinfos", "inductor", "triton")
"""What an entry keeps. The rest of vLLM's cache depends on the devices that a server happens to hold."""
WORK_FOLDERS = 8
"""Servers with the same key on one machine that have a folder each."""


class CacheUse(Document):
    """What was decided and found before the start."""

    enabled: bool
    identity: CompileCacheIdentity | None = None
    volume: str | None = None
    work: str | None = None
    """Where this server's compiled code goes; None leaves vLLM its own places."""
    files_before: int = 0
    message: str = ""
    """Why the start is cold, where it is not for want of an entry."""

    @property
    def key(self) -> str | None:
        return self.identity.key if self.identity is not None else None

    def variables(self) -> dict[str, str]:
        """What vLLM, Inductor and Triton are told."""
        if self.work is None:
            return {}
        places = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
        return {variable: f"{self.work}/{place}" for variable, place in places.items()}

    def files_added(self) -> int:
        """Files that were not there before the start."""
        if self.work is None:
            return 0
        return max(0, sum(1 for _ in store.files_below(Path(self.work), PARTS)) - self.files_before)

    def warming(self) -> CompileCacheReport:
        """The report while the start is not over."""
        state = CacheState.WARMING if self.enabled else CacheState.OFF
        return self._report(state, None, self.message)

    def finish(self) -> CompileCacheReport:
        """Publishes what the start added, and says what the cache did for it. Called once, when the engine is there."""
        if not self.enabled or self.work is None or self.volume is None or self.identity is None:
            state = CacheState.COLD if self.enabled else CacheState.OFF
            return self._report(state, None, self.message)
        added = self.files_added()
        if self.files_before and not added:
            return self._report(CacheState.WARM, 0, f"{self.files_before} files were there and none was added")
        if not added:
            return self._report(CacheState.COLD, 0, self.message or "nothing was compiled")
        found = f"{added} files were added to {self.files_before}"
        why = f"{self.message}; {found}" if self.message else found
        try:
            published = store.publish(Path(self.volume), self.identity, Path(self.work), PARTS)
        except store.StoreError as error:
            message = f"{why}; the cache at {self.volume} cannot be written: {error}"
            return self._report(CacheState.UNWRITABLE, added, message)
        return self._report(CacheState.COLD, added, f"{why}; {published} are published for the next start")

    def extend(self) -> int:
        """Publishes what requests have compiled since the start; returns how many files more there are.

        Called when the server has ended as it was asked to: then no file is half written. An entry is only ever
        extended: what a start could not publish stays unpublished.
        """
        if self.work is None or self.volume is None or self.identity is None or self.key is None:
            return 0
        published = store.entry_size(Path(self.volume), self.key)
        more = sum(1 for _ in store.files_below(Path(self.work), PARTS)) - published
        if not published or more <= 0:
            return 0
        try:
            store.publish(Path(self.volume), self.identity, Path(self.work), PARTS)
        except store.StoreError:
            return 0
        return more

    def _report(self, state: CacheState, added: int | None, message: str) -> CompileCacheReport:
        return CompileCacheReport(
            enabled=self.enabled,
            state=state,
            key=self.key,
            directory=self.volume,
            files_before=self.files_before,
            files_added=added,
            files_added_at_last_start=added,
            message=printable(message, 1000),
        )


def cache_home(environment: Mapping[str, str]) -> Path:
    """Where this user's caches lie: the volume that the operator mounts, or the usual place."""
    if home := environment.get("XDG_CACHE_HOME"):
        return Path(home)
    return Path(environment.get("HOME", "/")) / ".cache"


def switched_off(resolution: Resolution, environment: Mapping[str, str]) -> str | None:
    """Why nothing is kept between starts, or None."""
    settings = resolution.settings
    if settings.compilation is not None and settings.compilation.cache is False:
        return "`compilation.cache` is false"
    for variable in ("VLLM_DISABLE_COMPILE_CACHE", "TORCHINDUCTOR_FORCE_DISABLE_CACHES"):
        if environment.get(variable, "0").lower() not in ("", "0", "false"):
            return f"{variable} is set"
    if environment.get("VLLM_CACHE_ROOT"):
        return "VLLM_CACHE_ROOT is set: vLLM keeps its cache there, by its own rules"
    if settings.enforce_eager and resolution.flavour is EngineFlavour.CPU:
        return "`enforceEager`: nothing is compiled"
    return None


@contextmanager
def prepared(
    resolution: Resolution, identity: CompileCacheIdentity | None, environment: Mapping[str, str]
) -> Iterator[CacheUse]:
    """The cache for one start, its folder filled; the folder goes when the context ends. Never fails."""
    volume = cache_home(environment) / FOLDER
    off = switched_off(resolution, environment)
    if off is not None:
        yield CacheUse(enabled=False, message=off)
        return
    if identity is None or identity.key is None:
        missing = ", ".join(identity.missing) if identity is not None else "everything"
        yield CacheUse(enabled=True, identity=identity, volume=str(volume), message=f"no key: {missing} is not known")
        return
    try:
        work, lock = _work_folder(Path(environment.get("TMPDIR", "/tmp")), identity.key)  # noqa: S108
    except OSError as error:
        why = f"no folder for compiled code: {error.strerror or error}"
        yield CacheUse(enabled=True, identity=identity, volume=str(volume), message=why)
        return
    try:
        yield _filled(volume, work, identity)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(lock)


def _filled(volume: Path, work: Path, identity: CompileCacheIdentity) -> CacheUse:
    use = CacheUse(enabled=True, identity=identity, volume=str(volume), work=str(work))
    assert identity.key is not None
    try:
        found = store.restore(volume, identity.key, work)
    except store.EntryError as error:
        return use.model_copy(update={"message": f"a cold start: {error}"})
    return use.model_copy(update={"files_before": found})


def _work_folder(parent: Path, key: str) -> tuple[Path, int]:
    """An empty folder for this server alone, and the lock that keeps it so. Raises OSError."""
    place = parent / f"sm70-cache-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    if place.is_symlink() or place.stat().st_uid != os.getuid():
        raise OSError(f"{place} belongs to another user")
    for number in range(WORK_FOLDERS):
        work = place / f"{key[:16]}-{number}"
        lock = os.open(f"{work}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        try:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
        except OSError:
            os.close(lock)
            raise
        return work, lock
    raise OSError(f"{WORK_FOLDERS} servers of this key are running")
