"""What others need for the same work on the same card, in the same run: torch, and attention libraries that are there.

Peers read FP16 weights and a dense FP16 KV cache, since none of them reads ours on every card; so a peer moves more
bytes, and its time says what a user has without these kernels, not which code is better. Buffers rotate through more
than the L2 holds; a figure is the median of seven replays of a graph.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from .bench import ATTENTION_CASES, LINEAR_CASES, AttentionBench, LinearBench

ROTATE_BYTES = 1 << 29


@dataclass(frozen=True)
class PeerRow:
    """Microseconds of one call, lowest and highest; `bytes` that it must read; the case's name as in bench.py."""

    peer: str
    family: str
    case: str
    microseconds: float
    low: float
    high: float
    bytes: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def _time(call: Callable[[int], Any], copies: int) -> list[float]:
    import torch

    for i in range(min(copies, 3)):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            call(i)
    times = []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / copies)
    return times[1:]


def _row(peer: str, family: str, case: str, times: list[float], size: int) -> PeerRow:
    middle = statistics.median(times)
    return PeerRow(peer, family, case, round(middle, 2), round(min(times), 2), round(max(times), 2), size)


def _linear(case: LinearBench) -> Iterator[PeerRow]:
    import torch

    n = case.n * (2 if case.gated else 1)
    size = n * case.k * 2
    weights = torch.randn(max(1, ROTATE_BYTES // size), n, case.k, dtype=torch.float16, device="cuda")
    x = torch.randn(case.m, case.k, dtype=torch.float16, device="cuda")
    times = _time(lambda i: torch.nn.functional.linear(x, weights[i]), len(weights))
    name = f"M{case.m} N{case.n} K{case.k}{' gated' if case.gated else ''}"
    yield _row("torch linear, FP16 weights", "nvfp4_linear", name, times, size)


def _attention(case: AttentionBench) -> Iterator[PeerRow]:
    import torch

    queries, heads = case.queries or 1, case.heads * case.group
    size = 2 * case.sequences * case.context * case.heads * case.dim * 2
    copies = max(1, ROTATE_BYTES // size)
    shape = (copies, 2, case.sequences, case.heads, case.context, case.dim)
    kv = torch.randn(shape, dtype=torch.float16, device="cuda")
    q = torch.randn(case.sequences, heads, queries, case.dim, dtype=torch.float16, device="cuda")
    # The last queries see all but each other's later tokens; a mask costs SDPA its fast paths, so none is given.
    attend = torch.nn.functional.scaled_dot_product_attention

    def sdpa(i: int) -> Any:
        return attend(q, kv[i, 0], kv[i, 1], enable_gqa=True)

    name = f"d{case.dim} g{case.group} B{case.sequences} context {case.context} page {case.page}"
    name += f" q{case.queries}" if case.queries else ""
    yield _row("torch SDPA, dense FP16", case.family, name, _time(sdpa, copies), size)
    flash = _optional("flash_attn")
    if flash is not None:
        rows, pairs = q.transpose(1, 2), kv.transpose(3, 4)
        call = flash.flash_attn_with_kvcache
        times = _time(lambda i: call(rows, pairs[i, 0], pairs[i, 1], causal=True), copies)
        yield _row("flash-attn, dense FP16", case.family, name, times, size)


def _optional(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def measure(families: Sequence[str], say: Callable[[str], None]) -> list[PeerRow]:
    """Every peer that this machine has, in the cases of the named families; says what is missing."""
    if _optional("torch") is None:
        say("no peers: torch is not installed here")
        return []
    for name in ("flash_attn",):
        if _optional(name) is None:
            say(f"peer left out: {name} is not installed here")
    wanted = tuple(families) or ("",)
    found: list[PeerRow] = []
    works: list[tuple[str, Callable[[], Iterator[PeerRow]]]] = [
        (case.family, partial(_attention, case))
        for case in ATTENTION_CASES
        if case.family.startswith(wanted) and not case.window
    ]
    if "nvfp4_linear".startswith(wanted):
        works += [("nvfp4_linear", partial(_linear, product)) for product in LINEAR_CASES]
    for family, work in works:
        try:
            for row in work():
                found.append(row)
                say(f"{row.peer:28s} {row.case:44s} {row.microseconds:9.2f} us")
        except RuntimeError as error:  # a peer that refuses a shape is no failure of ours
            say(f"peer left out of a case of {family}: {str(error).splitlines()[0][:150]}")
    return found
