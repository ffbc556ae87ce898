"""Everything of vLLM that we hook into, in one place: what must exist, and what is registered on it.

Nothing of vLLM is replaced in memory on the CPU lane: every entry below is an interface that vLLM offers to plugins, or
a class that we derive from. Checked against vLLM 0.32; with another version, or with one of these gone, the server does
not start and says which.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

from sm70_engine.acceleration.capabilities import provide
from sm70_engine.acceleration.routes import attach
from sm70_engine.session import session_folder

VLLM_VERSIONS = "0.32"


@dataclass(frozen=True)
class Hook:
    """A name in vLLM that we depend on."""

    module: str
    attribute: str
    used_for: str

    def exists(self) -> bool:
        try:
            found: object = importlib.import_module(self.module)
            for part in self.attribute.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            return False
        return True


_CPU_ATTENTION = "vllm.v1.attention.backends.cpu_attn"
_GDN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
HOOKS = (
    Hook("vllm.platforms.cpu", "CpuPlatform.check_and_update_config", "the platform"),
    Hook("vllm.platforms.cpu", "CpuPlatform.get_attn_backend_cls", "choosing the attention backend"),
    Hook("vllm.v1.worker.cpu_worker", "CPUWorker.execute_model", "the worker"),
    Hook("vllm.v1.attention.backends.registry", "AttentionBackendEnum.CUSTOM", "the attention backend"),
    Hook("vllm.v1.attention.backends.registry", "register_backend", "the attention backend"),
    Hook(_CPU_ATTENTION, "CPUAttentionBackend", "the attention backend"),
    Hook(_CPU_ATTENTION, "CPUAttentionBackendImpl.forward", "the attention backend"),
    Hook("vllm.model_executor.kernels.linear", "NvFp4LinearKernel", "NVFP4 linear layers"),
    Hook("vllm.model_executor.kernels.linear", "register_linear_kernel", "NVFP4 linear layers"),
    Hook("vllm.model_executor.layers.quantization", "register_quantization_config", "the ModelOpt configuration"),
    Hook("vllm.model_executor.layers.quantization.modelopt", "ModelOptNvFp4Config", "the ModelOpt configuration"),
    Hook("vllm.model_executor.custom_op", "PluggableLayer.register_oot", "the gated delta net"),
    Hook(_GDN, "QwenGatedDeltaNetAttention._output_projection", "the gated delta net"),
    Hook(_GDN, "QwenGatedDeltaNetAttention.fix_query_key_value_ordering", "the gated delta net"),
    Hook("vllm.model_executor.layers.mamba.ops.cpu.gdn_attention", "cpu_gdn_attention_core", "the gated delta net"),
)


class MissingHookError(RuntimeError):
    """This vLLM is not one that the plugin was made for."""


def check(wanted: Sequence[Hook] = HOOKS) -> None:
    """Raises MissingHookError, which names every missing hook."""
    import vllm

    if not vllm.__version__.startswith(f"{VLLM_VERSIONS}."):
        raise MissingHookError(f"sm70_engine needs vLLM {VLLM_VERSIONS}; found {vllm.__version__}")
    missing = [f"{hook.module}.{hook.attribute} ({hook.used_for})" for hook in wanted if not hook.exists()]
    if missing:
        raise MissingHookError(f"sm70_engine: vLLM {vllm.__version__} lacks the hooks {', '.join(missing)}")
    from vllm.platforms import current_platform

    from sm70_engine.plugin.platform import CpuReferencePlatform

    # vLLM swallows an error of a platform plugin and goes on with its own platform: that must not pass unseen.
    if not isinstance(current_platform, CpuReferencePlatform):
        raise MissingHookError(f"sm70_engine: vLLM chose the platform {type(current_platform).__name__}, not ours")


def register_operators() -> None:
    """Registers the operators of the CPU lane and makes this process count into the session's counters."""
    folder = session_folder()
    assert folder is not None
    attach(folder.counters)
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "sm70_engine.attention.reference.ReferenceAttentionBackend")
    provide("attention")

    from sm70_engine.ops import linear_nvfp4_vllm

    linear_nvfp4_vllm.register()
    provide("nvfp4_linear")

    from sm70_engine.quantization import modelopt

    modelopt.register()

    from sm70_engine.ops import gdn

    gdn.register()
    provide("gdn")
