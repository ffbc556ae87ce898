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

from sm70_profiles.base import Document
from sm70_profiles.profile import EngineFlavour
from sm70_profiles.resolver import Facts, ServeRequest
from sm70_profiles.spec import Overrides

SESSION_ENVIRONMENT = "SM70_SESSION"
_DOCUMENT, _COUNTERS, _ANNOUNCED = "session.json", "routes", "announced"


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
    cache_directory: str
    cache_files_before: int

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

    def announce_once(self) -> bool:
        """True for the first caller among all processes of the server, False afterwards."""
        try:
            (self.path / _ANNOUNCED).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

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
