"""Checks and times every kernel on a machine with a GPU. Needs numpy, a driver and the built objects, no torch.

    sm70-kernels build --timing --output .kernels           # where the toolchain is
    python3 tests/device/run_device.py --objects .kernels --out results

Writes checks.json, bench.json and report.md into the output folder; exits 1 when a check failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "engine"))

from sm70_engine.kernels import build, checks, grid, submission
from sm70_engine.kernels.device import Device


def run_checks(objects: Path, size: checks.Size, seconds: float, families: tuple[str, ...]) -> list[checks.Result]:
    """All checks with the code that this card would run, until the time is up (which counts as a failure)."""
    device, results, start = Device(objects), [], time.monotonic()
    for result in grid.run_all(device, size, families):
        results.append(result)
        if not result.passed:
            print(f"FAIL {result.name}: error / tolerance {result.ratio:.3g} {result.note}", flush=True)
        if time.monotonic() - start > seconds:
            print(f"checks stopped after {seconds} s", flush=True)
            results.append(checks.Result("all checks within their time", float("inf"), 0.0, "stopped"))
            break
    good = sum(result.passed for result in results)
    print(f"{device.name}: {good} of {len(results)} checks passed in {time.monotonic() - start:.0f} s", flush=True)
    return results


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--objects", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", type=checks.Size, default=checks.Size.DEVICE)
    parser.add_argument("--check-seconds", type=float, default=240)
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--families", default="", help="comma-separated prefixes; by default all")
    parser.add_argument("--variants", default="s2t,s3t", help="timing builds to run on 80 multiprocessors")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    families = tuple(x for x in options.families.split(",") if x)
    device = Device(options.objects)
    command = " ".join(["python3", *("results" if x == str(options.out) else x for x in sys.argv)])
    about, say = submission.about(device, command), partial(print, flush=True)
    results = [] if options.no_checks else run_checks(options.objects, options.size, options.check_seconds, families)
    failed = [result.name for result in results if not result.passed]
    text = {"about": about, "failed": failed, "checks": [vars(result) for result in results]}
    (options.out / "checks.json").write_text(json.dumps(text, indent=1) + "\n")
    runs = []
    if device.kernels.capability[0] == 7:
        runs.append(submission.run(device, build.PLAIN, 0, families, say))
    else:
        timed = [variant for variant in build.TIMING if variant.name in options.variants.split(",")]
        runs += [submission.run(Device(options.objects, x.name), x, 80, families, say) for x in timed]
    (options.out / "bench.json").write_text(json.dumps({"about": about, "runs": runs}, indent=1) + "\n")
    report = [f"# {device.name}, {about['date']}", "", f"`{about['command']}`", ""]
    report += [f"{len(results) - len(failed)} of {len(results)} checks passed."]
    for run in runs:
        report += ["", f"## build {run['variant'] or 'plain'}", "", f"{run['calibration']}", "", str(run["table"])]
    (options.out / "report.md").write_text("\n".join(report) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
