"""Checks the installed vLLM and torch before anything is started with them."""

from __future__ import annotations

import re
from collections.abc import Callable

from sm70_engine.acceleration.report import version_of
from sm70_engine.serve.failure import ServeError
from sm70_profiles.profile import EngineFlavour
from sm70_profiles.reasons import TerminationReason

VLLM = re.compile(r"^0\.32\.\d+")
TORCH = re.compile(r"^2\.13\.\d+")


def check_versions(flavour: EngineFlavour, installed: Callable[[str], str | None] = version_of) -> None:
    """Raises ServeError when this installation cannot serve the flavour."""
    if flavour is not EngineFlavour.CPU:
        raise _unsupported(
            f"a profile of the {flavour} engine", "this build of sm70_engine serves the cpu engine alone"
        )
    vllm, torch = installed("vllm"), installed("torch")
    if vllm is None or not VLLM.match(vllm):
        raise _unsupported("vLLM 0.32", f"found {vllm or 'none'}")
    if "cpu" not in vllm:
        raise _unsupported("the CPU build of vLLM", f"found {vllm}")
    if torch is None or not TORCH.match(torch):
        raise _unsupported("torch 2.13", f"found {torch or 'none'}")


def _unsupported(need: str, found: str) -> ServeError:
    return ServeError(
        TerminationReason.ENGINE_UNSUPPORTED,
        f"the engine needs {need}; {found}",
        "Use the engine image that belongs to the profile's flavour.",
    )
