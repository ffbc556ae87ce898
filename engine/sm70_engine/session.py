"""What `sm70-serve` hands to the processes of the server it starts: one folder with one document and the counters.

The folder's path is in the environment, which every vLLM process inherits. Its presence is also what activates the
plugin: in a vLLM that something else started there is no session, and the plugin stands aside.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from pydantic import ValidationError

from sm70_engine.acceleration.strict import StrictRefusal
from sm70_engine.cache.use import CacheUse
from sm70_profiles.base import Document
from sm70_profiles.profile import EngineFlavour
from sm70_profiles.report import CheckpointReport, CompileCacheReport
from sm70_profiles.resolver import Facts, ServeRequest
from sm70_profiles.spec import Overrides

SESSION_ENVIRONMENT = "SM70_SESSION"
_DOCUMENT, _COUNTERS, _ANNOUNCED, _STARTUP = "session.json", "routes", "announced", "startup"
_REFUSAL, _CACHE = "refusal.json", "cache.json"


class SessionError(RuntimeError):
    """The environment names a session that cannot be read."""


class Session(Document):
    """How this server was started."""

    request: ServeRequest
    facts: Facts
    """What the checkpoints said of themselves."""
    settings: Overrides
    """The profile's settings with the overrides applied."""
    argv: tuple[str, ...]
    """The arguments of `vllm serve`."""
    profile_hash: str
    env_hash: str
    strict: bool = False
    """Whether it must end when an expected path is not enabled."""
    cache: CacheUse = CacheUse(enabled=False)
    checkpoints: tuple[CheckpointReport, ...] = ()

    @property
    def flavour(self) -> EngineFlavour:
        return self.request.profile.engine.flavour


class SessionFolder:
    """The folder of a session."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, environment: Mapping[str, str]) -> SessionFolder:
        """A new private folder: in shared memory where there is one, else where temporary files go."""
        for parent in (Path("/dev/shm"), Path(environment.get("TMPDIR", "/tmp"))):  # noqa: S108
            if os.access(parent, os.W_OK | os.X_OK):
                return cls(Path(tempfile.mkdtemp(prefix="sm70-", dir=parent)))
        raise SessionError("neither /dev/shm nor $TMPDIR can be written; mount an emptyDir at /tmp")

    @property
    def counters(self) -> Path:
        return self.path / _COUNTERS

    def write(self, session: Session) -> None:
        (self.path / _DOCUMENT).write_text(session.model_dump_json(by_alias=True, exclude_none=True))

    def read(self) -> Session:
        """Raises SessionError."""
        try:
            return Session.model_validate_json((self.path / _DOCUMENT).read_bytes())
        except (OSError, ValidationError) as error:
            raise SessionError(f"{SESSION_ENVIRONMENT}={self.path} holds no session: {error}") from None

    @property
    def startup(self) -> Path:
        """The phases of the start (`acceleration.startup`)."""
        return self.path / _STARTUP

    def announce_once(self) -> bool:
        """True for the first caller among all processes of the server, False afterwards."""
        return self._first(_ANNOUNCED)

    def finish_once(self) -> bool:
        """The same for what is done once when the engine is there."""
        return self._first("finished")

    def refuse(self, refusal: StrictRefusal) -> None:
        """Leaves the reason of a refused start for `sm70-serve`, whole: a log line is not."""
        self._replace(_REFUSAL, refusal.model_dump_json(by_alias=True))

    def refusal(self) -> StrictRefusal | None:
        """Why a process of the server refused to start, if one did."""
        try:
            return StrictRefusal.model_validate_json((self.path / _REFUSAL).read_bytes())
        except (OSError, ValidationError):
            return None

    def write_cache(self, report: CompileCacheReport) -> None:
        """Keeps what the compile cache did for this start, for every API server's report."""
        self._replace(_CACHE, report.model_dump_json(by_alias=True))

    def cache(self) -> CompileCacheReport | None:
        """What was kept; None while the start is not over."""
        try:
            return CompileCacheReport.model_validate_json((self.path / _CACHE).read_bytes())
        except (OSError, ValidationError):
            return None

    def _first(self, name: str) -> bool:
        try:
            (self.path / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _replace(self, name: str, text: str) -> None:
        new = self.path / f"{name}.{os.getpid()}"
        new.write_text(text)
        new.replace(self.path / name)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def session_folder() -> SessionFolder | None:
    """The folder of the session that this process belongs to; None outside of `sm70-serve`."""
    path = os.environ.get(SESSION_ENVIRONMENT)
    return SessionFolder(Path(path)) if path else None


@cache
def current_session() -> Session:
    """The session that this process belongs to. Raises SessionError, also when there is none."""
    folder = session_folder()
    if folder is None:
        raise SessionError("this process was not started by `sm70-serve`")
    return folder.read()
