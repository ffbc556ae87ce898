"""How long the contract takes to import and to resolve. A benchmark, not a test: it prints and asserts nothing.

python tests/bench/bench_profiles.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

ROUNDS = 15


PROGRAM = """
{before}
import time
start = time.perf_counter(), time.process_time()
import {module}
print(time.perf_counter() - start[0], time.process_time() - start[1])
"""
PYDANTIC = """
import pydantic
class Model(pydantic.BaseModel):
    member: int
"""
"""What every user of pydantic pays: its import, and the machinery that its first model loads."""


def import_seconds(before: str, module: str) -> tuple[float, float]:
    """Median wall and CPU time of an import in a fresh process, after other code."""
    code = PROGRAM.format(before=before, module=module)
    rows = []
    for _ in range(ROUNDS):
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        rows.append([float(word) for word in out.split()])
    wall, cpu = (statistics.median(column) for column in zip(*rows, strict=True))
    return wall, cpu


def resolve_seconds() -> dict[str, float]:
    """Median wall time of one resolution by profile, warm."""
    from sm70_profiles.catalog import load_profile, profile_names
    from sm70_profiles.resolver import ServeRequest, resolve

    result = {}
    for name in profile_names():
        profile = load_profile(name)
        local = profile.draft.required and profile.draft.checkpoint is None
        request = ServeRequest(profile=profile, model_path="/m", draft_path="/d" if local else None, served_name="m")
        resolve(request)
        times = []
        for _ in range(50):
            started = time.perf_counter()
            resolve(request)
            times.append(time.perf_counter() - started)
        result[name] = statistics.median(times)
    return result


def main() -> None:
    """Prints the figures in milliseconds."""
    for module in ("resolver", "catalog", "cli"):
        wall, cpu = (1000 * one for one in import_seconds(PYDANTIC, f"sm70_profiles.{module}"))
        print(f"import sm70_profiles.{module:<10} {wall:7.1f} ms wall, {cpu:7.1f} ms CPU over pydantic's own")
    for name, seconds in sorted(resolve_seconds().items(), key=lambda item: -item[1]):
        print(f"resolve {name:<40} {1000 * seconds:7.2f} ms")


if __name__ == "__main__":
    main()
