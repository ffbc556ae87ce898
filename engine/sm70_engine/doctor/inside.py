"""Imports torch and vLLM and loads our kernels, in a process of its own; prints what it finds as one line of JSON.

python -m sm70_engine.doctor.inside cpu|sm70
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from typing import Any

from sm70_engine.acceleration.versions import version_of
from sm70_profiles.base import printable


def look(flavour: str) -> dict[str, Any]:
    """What is found; each part stands for itself, so that one that breaks hides no other."""
    found: dict[str, Any] = {"vllm": version_of("vllm"), "torch": version_of("torch")}
    if flavour != "cpu":
        found["kernels"] = kernels()
    for part in (torch, hooks):
        try:
            found.update(part(flavour))
        except Exception as error:
            found.setdefault("problem", _said(error))
    return found


def torch(_flavour: str) -> dict[str, Any]:
    """torch's version, its CUDA and the architectures that it holds code for."""
    import torch

    # Without a GPU `torch.cuda.get_arch_list` is empty; the build's own list is not.
    flags = torch._C._cuda_getArchFlags() if hasattr(torch._C, "_cuda_getArchFlags") else None
    return {
        "torch": str(torch.__version__),
        "torch_cuda": torch.version.cuda,
        "architectures": (flags or "").split(),
    }


def hooks(flavour: str) -> dict[str, Any]:
    """Which of vLLM's hooks are missing. Our platform is not active here, so each is asked for by itself."""
    from sm70_engine.plugin.hooks import CUDA_HOOKS, HOOKS, REPLACEMENTS, stand_in

    if flavour != "cpu" and importlib.util.find_spec("vllm._C") is None:
        stand_in()  # As our platform does before it imports vLLM's: without extensions nothing of it can be imported.
    wanted = HOOKS if flavour == "cpu" else (*CUDA_HOOKS, *(replacement.hook for replacement in REPLACEMENTS))
    return {"missing_hooks": [str(hook) for hook in wanted if not hook.exists()]}


def kernels() -> dict[str, Any]:
    """Whether each family of our kernels loads on the first GPU."""
    from sm70_engine.kernels import driver
    from sm70_engine.kernels.build import read_export
    from sm70_engine.kernels.errors import KernelError
    from sm70_engine.kernels.loader import Kernels, objects_folder

    folder = objects_folder()
    found: dict[str, Any] = {"folder": str(folder), "families": {}}
    try:
        facts = read_export(folder)
    except (KernelError, OSError, ValueError, KeyError) as error:
        return {**found, "problem": str(error)}
    try:
        device, _ = driver.primary_context(0)
        loaded = Kernels(folder, device)
    except KernelError:
        return found  # No driver or GPU: others say so.
    for name, family in facts.items():
        try:
            loaded.get(name, next(iter(family.kernels)))
            found["families"][name] = None
        except (KernelError, OSError, StopIteration) as error:
            found["families"][name] = _said(error)
    return found


def _said(error: Exception) -> str:
    return printable(" ".join(f"{type(error).__name__}: {error}".split()), 300)


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        result = look(sys.argv[1])
    print(json.dumps(result))
