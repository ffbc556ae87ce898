"""One run of the benchmarks as a document: what ran where, every figure, and the peers beside them.

`sm70-kernels bench --all --submit-file out.json` writes it; `results.py` reads it, so that a file from a real V100 in
docs/engine/device replaces predictions. It names the card, the driver and the sources; nothing of the user.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import bench, bench_prefill, build, driver, many_rows, peers, v100
from .device import Device

SCHEMA = 1
Say = Callable[[str], None]


def about(device: Device, command: str) -> dict[str, Any]:
    """Card, driver, date and the hashes of the sources that ran."""
    version = ctypes.c_int()
    driver.call("cuDriverGetVersion", ctypes.byref(version))
    return {
        "device": device.name,
        "multiprocessors": device.multiprocessors,
        "capability": list(device.kernels.capability),
        "cuda": f"{version.value // 1000}.{version.value % 1000 // 10}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "model": v100.fingerprint(),
        "sources": {name: facts.source_hash for name, facts in device.kernels.facts.items()},
    }


def run(device: Device, variant: build.Variant, sms: int, families: Sequence[str], say: Say) -> dict[str, Any]:
    """Calibration and figures of one build on `sms` multiprocessors (0: all)."""
    volta = device.kernels.capability[0] == 7
    kind = f"prediction ({variant.name})" if variant.name else bench.MEASURED
    runner = bench.Bench(device, variant.spread, sms, kind)
    calibration = runner.calibrate()
    say(f"{variant.name or 'plain'} build on {calibration['multiprocessors']:.0f} multiprocessors: {calibration}")
    rows, prefills = [], []
    for row in runner.run(tuple(families)):
        rows.append(row)
        say(
            f"{row.kernel:22s} {row.case:44s} {row.microseconds:9.2f} us, share of 900 GB/s {row.share:.3f} {row.error}"
        )
    for prefill in bench_prefill.prefill_rows(runner, tuple(families)):
        prefills.append(prefill)
        say(f"{prefill.kernel:22s} {prefill.case:44s} {prefill.milliseconds:9.3f} ms, {prefill.tflops} TFLOP/s")
    return {
        "variant": variant.name,
        "measured_v100": volta and not variant.name,
        "calibration": calibration,
        "linear_totals": bench.linear_totals(rows),
        "rows": [row.as_dict() for row in rows],
        "prefill": [row.as_dict() for row in prefills],
        "table": bench.markdown(rows) + "\n" + bench_prefill.markdown(prefills),
    }


def collect(
    objects: Path,
    families: Sequence[str],
    proxy: bool,
    beside: bool,
    command: str = "",
    say: Say | None = None,
    alone: bool = False,
    keep: Callable[[dict[str, Any]], None] | None = None,
    peer_seconds: float = float("inf"),
) -> dict[str, Any]:
    """The document. `proxy`: also, or on Volta never, the timing builds on 80 multiprocessors; `beside`: the peers.

    `alone`: nothing but the peers, with our kernels beside them. `keep` gets the document as far as it is, after each
    case of the peers; `peer_seconds` limits them.
    """
    tell = say or (lambda text: print(text, file=sys.stderr, flush=True))
    plain = Device(objects)
    runs = [] if alone else [run(plain, build.PLAIN, 0, families, tell)]
    if proxy and not alone and plain.kernels.capability[0] > 7:
        timed = [variant for variant in build.TIMING if variant.spread > 1]
        runs += [run(Device(objects, variant.name), variant, 80, families, tell) for variant in timed]
    found = peers.Comparison()
    many: list[many_rows.ManyRows] = []

    def document() -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "about": about(plain, command),
            "runs": runs,
            "peers": [x.as_dict() for x in found.rows],
            "absent": found.absent,
            "peers_table": peers.markdown(found) if found.rows else "",
            "many_rows": [row.as_dict() for row in many],
            "many_rows_table": many_rows.markdown(many) if many else "",
        }

    def so_far(comparison: peers.Comparison) -> None:
        nonlocal found
        found = comparison
        if keep:
            keep(document())

    if beside:
        found = peers.measure(plain, objects, families, tell, so_far, peer_seconds)
    if beside and find_spec("torch") and "nvfp4_expand".startswith(tuple(families) or ("",)):
        for row in many_rows.measure(plain, objects):
            many.append(row)
            tell(f"M{row.m} N{row.n} K{row.k}: {row.total} us, unpacking {row.unpack}, product {row.product}")
    return document()
