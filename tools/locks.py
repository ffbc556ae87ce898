"""Makes the lock files that lanes and images install from: exact versions, with hashes, without addresses.

    .venv/bin/python tools/locks.py [--upgrade] [NAME ...]

A version that a lock names already is kept as long as it fits, except with --upgrade.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

from toolbox import ROOT, ToolError, step, uv


@dataclass(frozen=True)
class Lock:
    """One lock file: what goes in, and the extras of this distribution that it must satisfy."""

    sources: tuple[str, ...]
    extras: tuple[str, ...] = ()
    overrides: str | None = None
    left_out: str | None = None  # a package whose dependencies count and which is installed otherwise
    dependencies: bool = True


LOCKS = {
    "dev": Lock(("../pyproject.toml",), ("dev",)),
    "operator": Lock(("../pyproject.toml",), ("operator", "qualify")),
    "cpu-lane": Lock(("cpu-lane.in", "../pyproject.toml"), ("engine", "fetch"), "cpu-lane.overrides"),
    "sm70-lane": Lock(
        ("sm70-lane.in", "../pyproject.toml"), ("engine", "fetch"), "sm70-lane.overrides", left_out="vllm"
    ),
    "sm70-build": Lock(("sm70-build.in",), dependencies=False),
    "sm70-vllm": Lock(("sm70-vllm.in",), dependencies=False),
}


def compile_lock(name: str, upgrade: bool) -> None:
    """Writes requirements/NAME.lock for CPython 3.11 on x86-64 Linux, the only platform of the images."""
    lock = LOCKS[name]
    folder = ROOT / "requirements"
    arguments = ["--generate-hashes", "--no-emit-index-url", "--no-emit-find-links", "--no-header", "--no-annotate"]
    arguments += ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_36"]
    for extra in lock.extras:
        arguments += ["--extra", extra]
    if lock.overrides:
        arguments += ["--override", str(folder / lock.overrides)]
    if lock.left_out:
        arguments += ["--no-emit-package", lock.left_out]
    if not lock.dependencies:
        arguments.append("--no-deps")
    if upgrade:
        arguments.append("--upgrade")
    with step(f"{name}.lock"):
        sources = [folder / source for source in lock.sources]
        uv("pip", "compile", "-q", *arguments, "-o", folder / f"{name}.lock", *sources)


def main() -> int:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Makes the lock files of lanes and images.")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of {', '.join(LOCKS)}; by default all")
    options = parser.parse_args()
    if unknown := set(options.names) - set(LOCKS):
        parser.error(f"no such lock: {', '.join(sorted(unknown))}; there are {', '.join(LOCKS)}")
    try:
        for name in options.names or LOCKS:
            compile_lock(name, options.upgrade)
    except ToolError as error:
        print(f"locks: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
