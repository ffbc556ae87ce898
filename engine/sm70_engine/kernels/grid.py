"""Every check of every family, in one sequence: what `sm70-kernels check` and the device lane run."""

from __future__ import annotations

from collections.abc import Iterator

from . import checks, checks_prefill
from .backend import Backend
from .checks import Result, Size


def run_all(backend: Backend, size: Size, families: tuple[str, ...] = ()) -> Iterator[Result]:
    """KV cache, decode, verify and draft, linears, prefill. `families`: prefixes of families, those alone."""
    if not families:
        yield from checks.run_all(backend, size)
        yield from checks_prefill.check_prefills(backend, size)
        return
    for case in (*checks.decode_cases(size), *checks.verify_cases(size)):
        family = f"attention_{'verify' if case.queries else 'decode'}_{case.format}"
        if family.startswith(families):
            yield checks.check_attention(backend, case)
    for family, work in (
        ("kv_cache", checks.check_kv_cache(backend, size)),
        ("nvfp4_linear", (checks.check_linear(backend, case) for case in checks.linear_cases(size))),
        ("nvfp4_chain", (checks.check_chain(backend, case) for case in checks.chain_cases(size))),
        ("nvfp4_expand", checks.check_many_rows(backend, size)),
    ):
        if family.startswith(families):
            yield from work
    for prefill in checks_prefill.prefill_cases(size):
        if prefill.plan.family.startswith(families):
            yield from checks_prefill.check_prefill(backend, prefill, sample=16 if size is Size.DEVICE else 0)
