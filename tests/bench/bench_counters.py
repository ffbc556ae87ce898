"""What one count of a route costs the thread that runs the model. A benchmark: it prints and asserts nothing.

python tests/bench/bench_counters.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from sm70_engine.acceleration import routes
from sm70_profiles.routes import Stage

CALLS, ROUNDS = 200_000, 9
BATCHES = {"no batch": (), "one stage": (Stage.DECODE,), "three stages": (Stage.PREFILL, Stage.DECODE, Stage.VERIFY)}


def nanoseconds_a_call(stages: tuple[Stage, ...]) -> float:
    """Median over rounds of the CPU time of one call, the loop's own time taken off."""
    routes.set_stages(stages)
    rounds = []
    for _ in range(ROUNDS):
        started = time.thread_time_ns()
        for _ in range(CALLS):
            routes.count("gdn_reference")
        counted = time.thread_time_ns() - started
        started = time.thread_time_ns()
        for _ in range(CALLS):
            pass
        rounds.append((counted - (time.thread_time_ns() - started)) / CALLS)
    return statistics.median(rounds)


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # where a session's counters lie
        file = Path(folder) / "routes"
        routes.create_counters(file)
        print(f"not attached   {nanoseconds_a_call(BATCHES['one stage']):7.0f} ns")
        routes.attach(file)
        for name, stages in BATCHES.items():
            print(f"{name:<14} {nanoseconds_a_call(stages):7.0f} ns")
        started = time.perf_counter()
        for _ in range(100):
            routes.read_counters(file)
        print(f"reading all    {(time.perf_counter() - started) * 1e4:7.0f} us")


if __name__ == "__main__":
    main()
