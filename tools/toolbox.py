"""What the tools beside this module share: the cache folder, content keys, a lock between processes, and uv."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class ToolError(Exception):
    """A tool cannot go on; the text says what must hold, what was found and what to do."""


def cache_root() -> Path:
    """The folder for everything that is made once and used again: `$SM70_CACHE`, by default ~/.cache/sm70."""
    configured = os.environ.get("SM70_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "sm70"


def content_key(parts: Iterable[tuple[str, bytes]]) -> str:
    """16 hexadecimal digits that depend on every name and content, and on nothing else.

    The order of the parts is of no account, and no part can run into the next one.
    """
    digest = hashlib.sha256()
    for name, data in sorted(parts):
        for piece in (name.encode(), data):
            digest.update(len(piece).to_bytes(8, "big"))
            digest.update(piece)
    return digest.hexdigest()[:16]


def files_under(root: Path, paths: Iterable[str]) -> list[tuple[str, bytes]]:
    """Name (relative to `root`) and content of each file that `paths` name, folders with everything below.

    Compiled Python is left out: it comes and goes with the running of the programs.
    Raises `ToolError` for a path that does not exist.
    """
    found = []
    for path in paths:
        start = root / path
        if not start.exists():
            raise ToolError(f"`{path}` must exist in {root}: it is part of a content key")
        for file in [start] if start.is_file() else sorted(start.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                # Whether a file may be executed shows in an image, its other modes do not.
                kind = "x" if os.access(file, os.X_OK) else "-"
                found.append((f"{kind} {file.relative_to(root)}", file.read_bytes()))
    return found


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds the lock file `path` against every other process, waiting for it first (and saying so)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that holds {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(text: str) -> None:
    """Prints a line of progress. It goes to stderr: stdout is for results."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def step(title: str) -> Iterator[None]:
    """Says what begins, and how many seconds it took."""
    say(f"{title} ...")
    start = time.monotonic()
    yield
    say(f"{title}: {time.monotonic() - start:.1f} s")


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without what would change how a Python environment is filled.

    PYTHONDONTWRITEBYTECODE would leave out the bytecode, and every later start would pay for it.
    """
    dropped = {"PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, **(extra or {})}


def run(command: Sequence[str | Path], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Runs a command and returns its standard output; raises `ToolError` with the end of what it said when it fails."""
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        words = " ".join(str(word) for word in command)
        said = f"{result.stdout}\n{result.stderr}".strip()
        raise ToolError(f"`{words}` ended with status {result.returncode}:\n{said[-4000:]}")
    return result.stdout


def uv(*arguments: str | Path) -> str:
    """Runs the uv that tools/bootstrap.sh installed."""
    program = cache_root() / "uv" / "bin" / "uv"
    if not program.exists():
        raise ToolError(f"uv must be at {program}, and is not: run tools/bootstrap.sh first")
    return run([program, *arguments], env=clean_environment({"UV_NO_PROGRESS": "1", "UV_HTTP_TIMEOUT": "300"}))


def build_wheel(project: Path, target: Path, *, editable: bool = False) -> Path:
    """Builds the wheel of a hatchling project with this interpreter's hatchling, and returns its path.

    The same sources give the same bytes: times inside are fixed.
    """
    kind = "wheel:editable" if editable else "wheel"
    environment = clean_environment({"SOURCE_DATE_EPOCH": "315532800"})
    run([sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", target], cwd=project, env=environment)
    (wheel,) = target.glob("*.whl")
    return wheel
