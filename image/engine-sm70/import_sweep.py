"""How much of vLLM can be imported in the image for V100 GPUs, without a GPU: a check of versions, not of computation.

vLLM is there without its CUDA extensions. A module that looks for one of their operators when it is imported finds a
stand-in here, as it will find the plugin's on a GPU; so what fails does so for another reason, which is printed.

    python import_sweep.py      prints one JSON object; needs nothing but the image's own environment
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import os
import pkgutil
import sys
import types
from collections import Counter
from typing import Any

PACKAGES = (
    *("v1", "model_executor", "compilation", "entrypoints", "config", "engine", "distributed", "lora", "multimodal"),
    *("parser", "reasoning", "tool_parsers", "models", "transformers_utils", "utils"),
)
# Other devices, command lines that run when imported, and kernel libraries for newer GPUs.
LEFT_OUT = ("vllm.v1.worker.cpu", "vllm.v1.worker.xpu", "vllm.v1.worker.tpu", "vllm.entrypoints.cli.benchmark")
LEFT_OUT_PARTS = (".amd", "rocm", ".xpu", "__main__")


class StandIn:
    """An operator that is not there: it can be named and asked whether it is supported, and is not."""

    def __call__(self, *_: Any, **__: Any) -> bool:
        return False

    def __getattr__(self, name: str) -> StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


def stand_in_for_extensions() -> None:
    """Puts stand-ins where vLLM's compiled modules and their operators would be."""
    import torch

    for name in ("_C", "_C_stable_libtorch", "_moe_C", "_moe_C_stable_libtorch"):
        sys.modules[f"vllm.{name}"] = types.ModuleType(f"vllm.{name}")
    attention = types.ModuleType("vllm.vllm_flash_attn")
    attention.__path__ = []
    # As an instance answers: any name but those that Python itself asks a module for (`__file__` must be a path).
    attention.__getattr__ = StandIn().__getattr__  # type: ignore[method-assign]
    sys.modules[attention.__name__] = attention
    sys.modules[attention.__name__ + ".flash_attn_interface"] = attention

    namespace = type(torch.ops._C)
    original = namespace.__getattr__

    def lookup(self: Any, name: str) -> Any:
        try:
            return original(self, name)
        except AttributeError:
            if self.name in ("_C", "_moe_C") and not name.startswith("__"):
                return StandIn()
            raise

    namespace.__getattr__ = lookup

    register_fake = torch.library.register_fake

    def register_fake_if_there(operator: Any, *arguments: Any, **options: Any) -> Any:
        """vLLM asks `hasattr(torch.ops._C, …)` before it describes an operator; a stand-in answers yes."""
        if isinstance(operator, str) and operator.partition("::")[0] in ("_C", "_moe_C"):
            return lambda function: function
        return register_fake(operator, *arguments, **options)

    torch.library.register_fake = register_fake_if_there


def pretend_platform() -> None:
    """Makes vLLM take its CUDA path, as on a V100."""
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Pretended(NonNvmlCudaPlatform):  # type: ignore[misc]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(7, 0)

        @classmethod
        def import_kernels(cls) -> None:
            return None

    vllm.platforms._current_platform = Pretended()


def sweep() -> tuple[int, dict[str, str]]:
    """The number of modules that could be imported, and of the others the reason."""
    imported, failed = 0, {}

    def walk(package: types.ModuleType) -> None:
        nonlocal imported
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            if module.name.startswith(LEFT_OUT) or any(part in module.name for part in LEFT_OUT_PARTS):
                continue
            try:
                found = importlib.import_module(module.name)
            except BaseException as error:  # SystemExit of a command line, too
                failed[module.name] = f"{type(error).__name__}: {str(error)[:160]}"
                continue
            imported += 1
            if module.ispkg:
                walk(found)

    for name in PACKAGES:
        walk(importlib.import_module(f"vllm.{name}"))
    return imported, failed


def main() -> None:
    """Prints what was found."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.disable(logging.WARNING)
    # What modules print when they are imported is no part of the result.
    result = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    import triton

    stand_in_for_extensions()
    import vllm

    pretend_platform()
    imported, failed = sweep()
    reasons = Counter(reason.split("\n")[0] for reason in failed.values())
    report = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "vllm": importlib.metadata.version("vllm"),
        "python": sys.version.split()[0],
        "architectures": torch.cuda.get_arch_list() or torch._C._cuda_getArchFlags(),
        "imported": imported,
        "failed": len(failed),
        "reasons": dict(reasons.most_common()),
        "modules": failed,
    }
    json.dump(report, result, indent=1)
    result.flush()
    del vllm


if __name__ == "__main__":
    main()
