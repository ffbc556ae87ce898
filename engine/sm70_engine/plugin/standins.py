"""Modules in the place of vLLM's compiled ones, which the build without extensions lacks.

vLLM imports them by name on its CUDA path and asks them for names and versions; the operators themselves are defined in
`sm70_engine.ops.extension`. Must be installed before `vllm.platforms.cuda` is imported.
"""

from __future__ import annotations

import sys
import types
from typing import Any

EXTENSIONS = ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch")
FLASH_ATTENTION = "vllm.vllm_flash_attn"
WHY = "vLLM was built without CUDA extensions"


def install() -> None:
    """Puts the stand-ins where nothing of that name was imported."""
    for name in EXTENSIONS:
        sys.modules.setdefault(name, types.ModuleType(name, WHY))
    if FLASH_ATTENTION in sys.modules:
        return
    package, interface = types.ModuleType(FLASH_ATTENTION, WHY), types.ModuleType(f"{FLASH_ATTENTION}.interface", WHY)
    package.__path__ = []
    for module in (package, interface):
        vars(module).update(_NAMES)
    vars(package)["flash_attn_interface"] = interface
    sys.modules[FLASH_ATTENTION] = package
    sys.modules[f"{FLASH_ATTENTION}.flash_attn_interface"] = interface


def _absent(*_: Any, **__: Any) -> Any:
    raise RuntimeError(f"vLLM's flash attention cannot be called: {WHY}")


_NAMES: dict[str, object] = {
    "FA2_AVAILABLE": False,
    "FA3_AVAILABLE": False,
    "compile_flash_attn_varlen_func_from_specs": None,
    "flash_attn_varlen_func": _absent,
    "get_scheduler_metadata": _absent,
    "fa_version_unsupported_reason": lambda *_: WHY,
    "is_fa_version_supported": lambda *_: False,
}
