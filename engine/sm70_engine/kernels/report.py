"""The static report: what the sm_70 machine code of every kernel is, as tables for a terminal and for the docs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from . import v100
from .build import FamilyFacts, KernelFacts
from .errors import KernelError
from .families import FAMILIES
from .plans import CHAIN_TILES, EXPAND_SHARED, LINEAR_TILES, VERIFY_TILES, CacheLayout, DecodePlan, KvFormat, VerifyPlan
from .prefill import PREFILL_DIMS, prefill_shared_bytes

BEGIN, END = "<!-- generated: sm70-kernels report --write -->", "<!-- end of the generated part -->"


def shared_bytes(kernel: str) -> int:
    """Dynamic shared memory that the plans ask for; 0 for kernels without any."""
    tiles_of_linears = [tile for _, *pair in LINEAR_TILES for tile in pair]
    sizes = {name: tile.shared_bytes for tile in tiles_of_linears for name in (tile.kernel, tile.gated)}
    sizes |= {tile.kernel: tile.shared_bytes for _, tile in CHAIN_TILES} | {"nvfp4_expand": EXPAND_SHARED}
    for kv_format in KvFormat:
        for dim in (64, 128, 256):
            for group in (8, 16):
                plan = DecodePlan(CacheLayout.split(kv_format, 16, 1, dim), 1, group, 80)
                sizes[plan.kernel] = plan.shared_bytes
            for tiles in VERIFY_TILES.get(dim, ()):
                verify = VerifyPlan(CacheLayout.split(kv_format, 16, 1, dim), 1, tiles, 80, queries=8)
                sizes[verify.kernel] = verify.shared_bytes
                sizes[f"verify_combine_{kv_format}_d{dim}"] = VerifyPlan.COMBINE_WARPS * 1088 + 80 * 32
            if dim in PREFILL_DIMS:
                sizes[f"prefill_{kv_format}_d{dim}"] = prefill_shared_bytes(dim)
    return sizes.get(kernel, 0)


def _row(name: str, facts: KernelFacts) -> str:
    shared = shared_bytes(name)
    ctas = v100.ctas_per_sm(facts.registers, facts.threads, shared)
    occupancy = ctas * facts.threads / v100.THREADS
    matrix = facts.opcodes.get("HMMA.884", 0)
    needed = v100.loop_bytes(name)
    share, binds, each = "", "", ""
    cost = v100.cost(name, facts)
    if cost:
        each = f"{cost.bytes}, {cost.instructions:.0f}"
        budget = v100.loop_budget(facts, needed)
        shown = ("issue", budget.issue), *((u, budget.units.get(u, 0.0)) for u in ("tensor", "lsu", "alu", "fma"))
        share, binds = ", ".join(f"{unit} {value:.2f}" for unit, value in shown), budget.binds
    return (
        f"| `{name}` | {facts.registers} | {shared + facts.static_shared} | {facts.spills} | {ctas} ({occupancy:.0%}) "
        f"| {facts.instructions} | {matrix} | {facts.loop_instructions or ''} | {each} | {share} | {binds} |"
    )


def table(families: Iterable[FamilyFacts]) -> str:
    """A markdown table per family."""
    lines = []
    for family in families:
        lines += [f"### {family.name}", "", family.contract + ".", ""]
        lines += [
            "| kernel | registers | shared bytes | spills | CTAs per SM (occupancy) | instructions | HMMA.884 "
            "| loop | bytes, instructions each | share of a V100's units while 900 GB/s flow | limit by the model |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        lines += [_row(name, facts) for name, facts in family.kernels.items()]
        lines.append("")
    return "\n".join(lines)


def listing() -> str:
    """Families, contracts and kernels, without building anything."""
    lines = []
    for family in FAMILIES:
        lines.append(f"{family.name}: {family.contract}")
        lines += [f"    {kernel.name}" for kernel in family.kernels]
    return "\n".join(lines)


def embed(document: str, generated: str) -> str:
    """The document with its generated part replaced. Raises `KernelError` without the two marks."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise KernelError(f"the document must hold the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{generated}\n{END}{after}"


def write(path: Path, families: Iterable[FamilyFacts]) -> None:
    """Replaces the generated part of a document."""
    path.write_text(embed(path.read_text(), table(families)))
