"""The time of one speculative round on four V100s, summed over kernels, launches, collectives: docs/engine/round.md.

A line is `proxy` when its kernel was timed by the proxy in that very case, `modelled` when it follows from such cases
or from bytes, and `open` when no kernel of ours exists yet: then a bound or an assumption stands in, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from .results import Predicted, Results
from .v100 import MEMORY_GBS

CONTEXTS = (2048, 4096, 8192, 32768, 65536, 131072, 262144)
GOAL_MS, GOAL_CONTEXT = 10.0, 32768
REFERENCE_MS = 17.38
"""The project's measure: the 1.5 engine's round on this model, four V100s (17.36 after a prompt of 32K)."""
STREAM = 0.92
"""Of 900 GB/s: what a V100 is known to stream."""
LAYERS, FULL, GDN, HIDDEN, ROWS, VOCABULARY = 64, 16, 48, 5120, 8, 62080
"""The 27B model per rank at TP4; 8 rows: 7 drafts and the token before them."""
DRAFT_BYTES = 3.85e9 / 4
GAP_US, PROXY_GAP_US = 1.5, 0.8
"""Assumed: between two kernels of a graph on a V100. In the proxy's times: 0.6 us at the H200's clock."""
ALL_REDUCE_US = 8.0
"""Assumed: 80 KiB one-shot over NVLink among four cards; not measured."""


class Kind(StrEnum):
    """How a line is known."""

    MEASURED = "measured"
    PROXY = "proxy"
    MODELLED = "modelled"
    OPEN = "open"


@dataclass(frozen=True)
class Line:
    """`count` times `low` to `high` microseconds; `launches`: kernels of one."""

    name: str
    count: int
    low: float
    high: float
    kind: Kind
    source: str
    launches: int = 1

    @property
    def milliseconds(self) -> tuple[float, float]:
        """Of all of them."""
        return self.count * self.low / 1e3, self.count * self.high / 1e3


def _bytes_us(size: float) -> float:
    return size / (MEMORY_GBS * STREAM) / 1e3


def _kind(found: Predicted) -> Kind:
    return Kind.MEASURED if found.measured else Kind.PROXY


def _linear(results: Results, name: str, count: int, n: int, k: int, gated: bool = False) -> Line:
    case = f"M{ROWS} N{n} K{k}{' gated' if gated else ''}"
    found = results.times[("nvfp4_linear", case)]
    return Line(name, count, found.low, found.high, _kind(found), f"`{found.kernel}`, {case}")


def _attention(results: Results, context: int) -> Line:
    """By length between the cases that were timed, along their last line beyond them."""
    family, cases = "attention_verify_e4m3", []
    for length in (4096, 32768, 131072, 262144):
        found = results.times.get((family, f"d256 g6 B1 context {length} page 2048 q{ROWS}"))
        if found:
            cases.append((length, found))
    name = "verify attention, E4M3, 6 heads, 8 queries"
    exact = dict(cases).get(context)
    if exact:
        return Line(name, FULL, exact.low, exact.high, _kind(exact), f"`{exact.kernel}`, {exact.case}", 2)
    below = [case for case in cases if case[0] < context][-1:] or cases[:1]
    above = [case for case in cases if case[0] > context][:1] or cases[-1:]
    if below == cases[-1:]:
        below = cases[-2:-1]
    if above == cases[:1]:
        above = cases[1:2]
    (a, first), (b, second) = below[0], above[0]

    def between(x: float, y: float) -> float:
        return max(x + (y - x) * (context - a) / (b - a), cases[0][1].low / 2)

    low, high = between(first.low, second.low), between(first.high, second.high)
    return Line(name, FULL, low, high, Kind.MODELLED, f"a line through {a} and {b} tokens", 2)


def _scaled(found: Predicted, share: float) -> tuple[float, float]:
    """A linear with this share of the bytes: 2.5 us of every launch stay."""
    return 2.5 + (found.low - 2.5) * share, 2.5 + (found.high - 2.5) * share


def lines(results: Results, context: int) -> tuple[Line, ...]:
    """One round after a prompt of `context` tokens. Raises KeyError when the results lack a case."""
    near = results.times[("nvfp4_linear", f"M{ROWS} N4128 K5120")]
    low, high = _scaled(near, 3584 / 4128)
    draft = results.times[("attention_verify_f16", "d128 g4 B1 context 131072 page 2048 q8 window 2048")]
    head = _bytes_us(VOCABULARY * HIDDEN)
    norms = 2 * LAYERS + 1
    known = (
        _linear(results, "gate and up with SwiGLU", LAYERS, 4352, 5120, gated=True),
        _linear(results, "down", LAYERS, 5120, 4352),
        _linear(results, "GDN in (qkvz, b, a)", GDN, 4128, 5120),
        _linear(results, "GDN out, attention out", LAYERS, 5120, 1536),
        Line("attention in (q, gate, k, v)", FULL, low, high, Kind.MODELLED, "3584 columns, by bytes from 4128"),
        _attention(results, context),
        Line("KV cache write", FULL, 2.5, 2.5, Kind.MODELLED, "one small launch"),
        Line(
            "draft attention, 5 layers, window 2048", 5, draft.low, draft.high, _kind(draft),
            f"`{draft.kernel}`, {draft.case}", 2,
        ),
        Line(
            "GDN verify, 8 tokens", GDN, 3.5, 8.0, Kind.OPEN,
            "no kernel yet; 1.75 us is the state read and written once, 3.5 us a sketch's single token, 8 us eight",
        ),
        Line("GDN convolution and gates", GDN, 2.0, 3.0, Kind.OPEN, "no kernel yet; assumed one small launch"),
        Line("norms with residual", norms, 2.0, 3.0, Kind.OPEN, "no kernel yet; assumed one small launch each"),
        Line(
            "draft model's weights, 5 layers FP16", 1, _bytes_us(DRAFT_BYTES), _bytes_us(DRAFT_BYTES) * 1.2, Kind.OPEN,
            "3.85 GB over four ranks; no kernel yet; bytes at 0.92 of 900 GB/s, +20 %", 40,
        ),
        Line(
            "LM head, drafts and target", 2, head, head * 1.2, Kind.OPEN,
            "62,080 x 5120 at one byte a weight; no kernel yet; bytes at 0.92 of 900 GB/s, +20 %",
        ),
        Line(
            "all-reduce, 80 KiB over 4 cards", 2 * LAYERS, ALL_REDUCE_US, 1.5 * ALL_REDUCE_US, Kind.OPEN,
            "assumed, one-shot over NVLink; waiting for a late rank is not in it",
        ),
        Line("selector, rejection, sampling", 1, 150.0, 400.0, Kind.OPEN, "assumed; no kernel yet", 10),
    )  # fmt: skip
    launches = sum(line.count * line.launches for line in known)
    gap = GAP_US - PROXY_GAP_US
    return (
        *known,
        Line(
            "gaps between launches beyond the proxy's", launches, gap, 2 * gap, Kind.OPEN,
            f"assumed: {GAP_US} us from kernel to kernel of a graph, of which {PROXY_GAP_US} are in the times above", 0,
        ),
    )  # fmt: skip


def total(found: Sequence[Line], kinds: Sequence[Kind] = tuple(Kind)) -> tuple[float, float]:
    """Milliseconds of the lines of these kinds."""
    chosen = [line.milliseconds for line in found if line.kind in kinds]
    return sum(low for low, _ in chosen), sum(high for _, high in chosen)


def document(results: Results) -> str:
    """The whole of docs/engine/round.md."""
    at_goal = lines(results, GOAL_CONTEXT)
    low, high = total(at_goal)
    text = [
        "# The time of one round",
        "",
        "Generated by `sm70-kernels round --write` from the device lane's results (docs/engine/device).",
        "No V100 was measured.",
        "",
        "One round of the 27B model with DFlash2 on four V100s (TP4), one request: 7 drafts, then 8 rows through the",
        "target. Two figures are what the stand-ins s2 and s3 of [v100_model.md](v100_model.md) say, or the ends of an",
        "assumption.",
        "",
        "- **measured**: on a V100 (none yet, unless a row says so);",
        "- **proxy**: this kernel in this case was timed by the proxy on one NVIDIA H200;",
        "- **modelled**: from such cases or from bytes;",
        "- **open**: no kernel of ours yet; a bound or an assumption stands in, and the line is no evidence.",
        "",
        f"At {GOAL_CONTEXT:,} tokens: {low:.1f} to {high:.1f} ms; goal {GOAL_MS:.0f} ms; the 1.5 engine measured "
        f"{REFERENCE_MS} ms on V100s.",
        "Time of the host between graphs, and ranks that wait for each other, are not in it.",
        "",
        f"| line, at {GOAL_CONTEXT:,} tokens | times | us each | ms | known by | from |",
        "|---|---|---|---|---|---|",
    ]
    for line in at_goal:
        first, last = line.milliseconds
        text.append(
            f"| {line.name} | {line.count} | {line.low:.1f} / {line.high:.1f} | {first:.2f} / {last:.2f} | {line.kind} "
            f"| {line.source} |"
        )
    text += ["", "| context | measured ms | proxy ms | modelled ms | open ms | sum ms |", "|---|---|---|---|---|---|"]
    for context in CONTEXTS:
        found = lines(results, context)
        parts = [total(found, (kind,)) for kind in Kind] + [total(found)]
        text.append(f"| {context:,} | " + " | ".join(f"{a:.2f} / {b:.2f}" for a, b in parts) + " |")
    text += ["", "Tokens a second are the tokens that a round keeps over its time: 3.6 kept at 10 ms are 360 a second."]
    return "\n".join(text) + "\n"
