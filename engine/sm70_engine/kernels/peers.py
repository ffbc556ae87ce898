"""What others need for the same work on the same card, in the same run and on the same data.

Beside each case of the benchmarks: torch (SDPA, cuBLAS products in FP16), Triton as it compiles for a V100, and
FlashInfer and flash-attn where the machine has them; what it lacks is named. Results are compared with ours, so that a
fast wrong answer shows. Buffers rotate through more than the L2 holds; a figure is the median of the replays of a
graph. On a card newer than Volta the plain build of ours says nothing about speed (its matrix instruction is a
subroutine there); the stand-in build `s2`, where it was built, runs beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .bench import ATTENTION_CASES, LINEAR_CASES, AttentionBench, LinearBench
from .bench_prefill import PREFILL_CASES, PrefillBench
from .device import Device
from .errors import KernelError

OURS, STAND_IN = "ours", "ours, stand-in s2"
OTHERS = {"torch": "torch", "triton": "Triton", "flashinfer": "FlashInfer", "flash_attn": "flash-attn"}
REPLAYS, BUDGET_MS, GRAPH_MS = 7, 150.0, 30.0
SLOW_MS = 500.0  # a call that takes longer is timed twice, without a graph
LARGEST_PREFILL = 1 << 28  # query tokens times context: Triton's FP32 code takes seconds for more, and is left out


@dataclass(frozen=True)
class PeerRow:
    """Microseconds of one call, lowest and highest; `bytes` that it must read; the case's name as in bench.py.

    `difference`: the largest from our result on the same data, over its root mean square; None where there is nothing
    to compare.
    """

    peer: str
    family: str
    case: str
    microseconds: float
    low: float
    high: float
    bytes: int
    difference: float | None = None

    @property
    def gbs(self) -> float:
        """Useful bytes a second."""
        return self.bytes / self.microseconds * 1e-3

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass
class Comparison:
    """All rows, and what is not there: a peer's name, the case (empty: all), and the reason."""

    rows: list[PeerRow] = field(default_factory=list)
    absent: list[dict[str, str]] = field(default_factory=list)


def time_graph(call: Callable[[int], Any], copies: int) -> list[float]:
    """Microseconds a call, of each replay of a graph that goes through the copies once; fewer replays when slow."""
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call(0)
    begin.record()
    call(0)
    end.record()
    end.synchronize()
    if begin.elapsed_time(end) > SLOW_MS:
        first = 1e3 * begin.elapsed_time(end)
        begin.record()
        call(0)
        end.record()
        end.synchronize()
        return [first, 1e3 * begin.elapsed_time(end)]
    # A call that takes long reads far more than the L2 holds by itself.
    copies = max(1, min(copies, int(GRAPH_MS / max(begin.elapsed_time(end), 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            call(i)
    times: list[float] = []
    while len(times) <= REPLAYS and (len(times) < 4 or sum(times) * copies * 1e-3 < BUDGET_MS):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / copies)
    return times[1:]


def _measure(
    found: Comparison, family: str, case: str, copies: int, makers: Iterable[tuple[str, Callable[[], Any]]],
    say: Callable[[str], None], deadline: float,
) -> None:  # fmt: skip
    import torch

    ours: torch.Tensor | None = None
    for kind, make in makers:
        if time.monotonic() > deadline:
            found.absent.append({"peer": OTHERS.get(kind, kind), "case": case, "reason": "the time was up"})
            continue
        try:
            way = make()
            result = way.call(0)
            torch.cuda.synchronize()
            value = None if result is None else result.float().reshape(-1).clone()
            times = time_graph(way.call, copies)
        except KernelError:
            raise
        except Exception as error:  # a peer may refuse a case in any way; that is no failure of ours
            torch.cuda.synchronize()
            reason = f"{type(error).__name__}: {(str(error).splitlines() or ['?'])[0][:150]}"
            found.absent.append({"peer": OTHERS.get(kind, kind), "case": case, "reason": reason})
            say(f"{OTHERS.get(kind, kind)} left out of {case}: {reason}")
            continue
        difference = None
        if value is not None and ours is not None:
            difference = float(f"{((value - ours).abs().max() / ours.square().mean().sqrt()).item():.2e}")
        elif value is not None:
            ours = value
        middle = statistics.median(times)
        row = PeerRow(
            way.name, family, case, round(middle, 2), round(min(times), 2), round(max(times), 2), way.bytes, difference
        )
        found.rows.append(row)
        say(f"{row.peer:32s} {row.case:44s} {row.microseconds:10.2f} us {'' if difference is None else difference}")


def _attention(device: Device, stand_in: Device | None, case: AttentionBench | PrefillBench) -> Any:
    from . import peers_attention as way

    data = way.Data(way.Case.of(case))
    makers: list[tuple[str, Callable[[], Any]]] = [(OURS, partial(way.own, data, device, OURS))]
    if stand_in is not None:
        makers.append((STAND_IN, partial(way.own, data, stand_in, STAND_IN, True)))

    def everything() -> Iterator[tuple[str, Callable[[], Any]]]:
        yield from makers
        for name, make in way.peers(data, 4 * device.multiprocessors):
            if name == "triton" and data.case.kind == "prefill" and case.queries * data.case.context > LARGEST_PREFILL:
                yield name, _too_large
            elif find_spec(name) is not None:
                yield name, make

    return data.copies, everything()


def _too_large() -> Any:
    raise ValueError(f"takes seconds: more than {LARGEST_PREFILL} query tokens times context")


def _linear(device: Device, stand_in: Device | None, case: LinearBench) -> Any:
    from . import peers_linear

    return peers_linear.ways(device, stand_in, case, OURS, STAND_IN)


def _works(device: Device, stand_in: Device | None) -> list[tuple[str, str, Callable[[], Any]]]:
    """Family, case and what makes its ways; those that a limited time should reach come first."""
    ordered: list[tuple[bool, str, str, Callable[[], Any]]] = []
    for case in ATTENTION_CASES:
        if not case.window:
            later = (case.format, case.dim, case.group, case.page) != ("e4m3", 256, 6, 2048)
            ordered.append((later, case.family, case.name, partial(_attention, device, stand_in, case)))
    for chunk in PREFILL_CASES:
        later = (chunk.format, chunk.dim) != ("e4m3", 256)
        family = f"attention_prefill_{chunk.format}"
        ordered.append((later, family, chunk.name, partial(_attention, device, stand_in, chunk)))
    ordered.extend(
        (product.gated, "nvfp4_linear", product.name, partial(_linear, device, stand_in, product))
        for product in LINEAR_CASES
    )
    return [work for later in (False, True) for first, *work in ordered if first is later]  # type: ignore[misc]


def measure(
    device: Device,
    objects: Path,
    families: Sequence[str],
    say: Callable[[str], None],
    keep: Callable[[Comparison], None] = lambda _: None,
    seconds: float = float("inf"),
) -> Comparison:
    """Every peer that this machine has, in the cases of the named families.

    `keep` gets what there is after each case; past `seconds` the rest is named as absent.
    """
    found, deadline = Comparison(), time.monotonic() + seconds
    for name, title in OTHERS.items():
        if find_spec(name) is None:
            found.absent.append({"peer": title, "case": "", "reason": "not installed here"})
            say(f"{title}: not installed here")
    if find_spec("torch") is None:
        say("no peers without torch: it holds the data and the clock")
        return found
    newer = device.kernels.capability[0] > 7
    stand_in = Device(objects, "s2") if newer and (objects / "kv_cache.s2.ptx").exists() else None
    wanted = tuple(families) or ("",)
    for family, name, make in _works(device, stand_in):
        if not family.startswith(wanted):
            continue
        if time.monotonic() > deadline:
            found.absent.append({"peer": "all", "case": name, "reason": f"the time of {seconds:.0f} s was up"})
            continue
        copies, makers = make()
        _measure(found, family, name, copies, makers, say, deadline)
        keep(found)
    return found


def markdown(found: Comparison) -> str:
    """The rows as a table, and what is absent."""
    ours = {(row.family, row.case): row.microseconds for row in found.rows if row.peer == OURS}
    lines = [
        "| family | case | by | us (low, high) | GB/s it reads | time over ours | difference from ours |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found.rows:
        reference = ours.get((row.family, row.case))
        ratio = f"{row.microseconds / reference:.2f}" if reference else ""
        difference = "" if row.difference is None else f"{row.difference:.1e}"
        spread = f"{row.microseconds:.2f} ({row.low:.2f}, {row.high:.2f})"
        lines.append(f"| {row.family} | {row.case} | {row.peer} | {spread} | {row.gbs:.0f} | {ratio} | {difference} |")
    lines.append("")
    lines += [f"{x['peer']}{' in ' + x['case'] if x['case'] else ''}: {x['reason']}" for x in found.absent]
    return "\n".join(lines) + "\n"
