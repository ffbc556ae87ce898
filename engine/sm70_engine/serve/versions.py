"""Checks the installed vLLM and torch before anything is started with them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sm70_engine.acceleration.versions import version_of
from sm70_engine.serve.failure import ServeError
from sm70_profiles.profile import EngineFlavour
from sm70_profiles.reasons import TerminationReason

PRETEND = "SM70_PRETEND"


@dataclass(frozen=True)
class Needs:
    """What an engine flavour serves with. `build` must be in vLLM's version."""

    vllm: str
    build: str
    build_name: str
    torch: str


CPU = Needs("0.32", "cpu", "the CPU build of vLLM", "2.13")
SM70 = Needs("0.32", "empty", "the build of vLLM without CUDA extensions (VLLM_TARGET_DEVICE=empty)", "2.10")
PRETENDING = Needs(SM70.vllm, SM70.build, SM70.build_name, "2.11")
"""On a newer GPU, for tests: there torch 2.10 has no code for it."""


def check_versions(
    flavour: EngineFlavour,
    installed: Callable[[str], str | None] = version_of,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Raises ServeError, with every fault, when this installation cannot serve the flavour."""
    needs = _needs(flavour, environment)
    vllm, torch = installed("vllm"), installed("torch")
    faults = []
    if not _is(vllm, needs.vllm):
        faults.append(f"vLLM {needs.vllm}; found {vllm or 'none'}")
    elif needs.build not in str(vllm):
        faults.append(f"{needs.build_name}; found {vllm}")
    if not _is(torch, needs.torch):
        faults.append(f"torch {needs.torch}; found {torch or 'none'}")
    if faults:
        raise _unsupported(" and ".join(faults))


def _needs(flavour: EngineFlavour, environment: Mapping[str, str]) -> Needs:
    if flavour is EngineFlavour.CPU:
        return CPU
    if flavour is EngineFlavour.SM70:
        return PRETENDING if environment.get(PRETEND) in ("1", "true") else SM70
    raise _unsupported(f"a profile of the cpu or sm70 engine; found one of the {flavour} engine")


def _is(version: str | None, series: str) -> bool:
    return version is not None and re.match(rf"{re.escape(series)}\.\d+", version) is not None


def _unsupported(need: str) -> ServeError:
    return ServeError(
        TerminationReason.ENGINE_UNSUPPORTED,
        f"the engine needs {need}",
        "Use the engine image that belongs to the profile's flavour.",
    )
