"""Everything of vLLM that we build on or replace in memory, in one place, each with the versions it was checked with.

`HOOKS` are interfaces that vLLM offers or classes that we derive from. `REPLACEMENTS` are the few things that are put
in the place of vLLM's own (or Triton's) when a process starts; no file of vLLM is changed. With another version, or
with one of these gone, the server does not start and says which.

This module imports nothing of vLLM until it is asked to.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sm70_engine.acceleration.capabilities import provide
from sm70_engine.acceleration.routes import attach
from sm70_engine.plugin.settings import EngineSettings, read_settings
from sm70_engine.session import current_session, session_folder
from sm70_profiles.profile import EngineFlavour

VLLM_VERSIONS = "0.32"


@dataclass(frozen=True)
class Hook:
    """A name in vLLM that we depend on. `versions`: the release series (`0.32`) that it was checked with."""

    module: str
    attribute: str
    used_for: str
    versions: tuple[str, ...] = (VLLM_VERSIONS,)

    def exists(self) -> bool:
        try:
            found: object = importlib.import_module(self.module)
            for part in self.attribute.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            return False
        return True

    def checked_with(self, version: str) -> bool:
        return any(version.startswith(f"{series}.") for series in self.versions)

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute} ({self.used_for})"


@dataclass(frozen=True)
class Replacement:
    """What is replaced in memory, why, and how. `hook`: what must be there for the replacement to make sense."""

    hook: Hook
    why: str
    apply: Callable[[EngineSettings], None]


_CPU_ATTENTION = "vllm.v1.attention.backends.cpu_attn"
_LINEAR = "vllm.model_executor.kernels.linear"
_QUANTIZATION = "vllm.model_executor.layers.quantization"
_GDN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
_COMMON = (
    Hook("vllm.v1.attention.backends.registry", "AttentionBackendEnum.CUSTOM", "the attention backend"),
    Hook("vllm.v1.attention.backends.registry", "register_backend", "the attention backend"),
    Hook(_LINEAR, "NvFp4LinearKernel", "NVFP4 linear layers"),
    Hook(_LINEAR, "register_linear_kernel", "NVFP4 linear layers"),
    Hook(_QUANTIZATION, "register_quantization_config", "the ModelOpt configuration"),
    Hook(f"{_QUANTIZATION}.modelopt", "ModelOptNvFp4Config", "the ModelOpt configuration"),
    Hook(f"{_QUANTIZATION}.modelopt", "ModelOptMixedPrecisionConfig", "the ModelOpt configuration"),
    Hook(f"{_QUANTIZATION}.kv_cache", "BaseKVCacheMethod.create_weights", "the KV cache's scales"),
    Hook("vllm.model_executor.custom_op", "PluggableLayer.register_oot", "the gated delta net"),
)
HOOKS = (
    Hook("vllm.platforms.cpu", "CpuPlatform.check_and_update_config", "the platform"),
    Hook("vllm.platforms.cpu", "CpuPlatform.get_attn_backend_cls", "choosing the attention backend"),
    Hook("vllm.v1.worker.cpu_worker", "CPUWorker.execute_model", "the worker"),
    Hook(_CPU_ATTENTION, "CPUAttentionBackend", "the attention backend"),
    Hook(_CPU_ATTENTION, "CPUAttentionBackendImpl.forward", "the attention backend"),
    *_COMMON,
    Hook(_GDN, "QwenGatedDeltaNetAttention._output_projection", "the gated delta net"),
    Hook(_GDN, "QwenGatedDeltaNetAttention.fix_query_key_value_ordering", "the gated delta net"),
    Hook("vllm.model_executor.layers.mamba.ops.cpu.gdn_attention", "cpu_gdn_attention_core", "the gated delta net"),
)
CUDA_HOOKS = (
    Hook("vllm.platforms.cuda", "CudaPlatform.check_and_update_config", "the platform"),
    Hook("vllm.platforms.cuda", "CudaPlatform.get_attn_backend_cls", "choosing the attention backend"),
    Hook("vllm.platforms.cuda", "CudaPlatform.get_default_ir_op_priority", "operators without CUDA extensions"),
    Hook("vllm.platforms.cuda", "CudaPlatform.import_kernels", "operators without CUDA extensions"),
    Hook("vllm.v1.worker.gpu_worker", "Worker.execute_model", "the worker"),
    Hook("vllm.v1.worker.gpu_worker", "Worker.compile_or_warm_up_model", "the worker"),
    Hook("vllm.v1.attention.backends.triton_attn", "TritonAttentionImpl.do_kv_cache_update", "writing the KV cache"),
    Hook("vllm.v1.attention.backend", "AttentionMetadataBuilder.build", "the attention backend"),
    Hook("vllm.v1.attention.backend", "AttentionCGSupport.UNIFORM_BATCH", "CUDA graphs"),
    Hook("vllm.v1.attention.backends.triton_attn", "TritonAttentionImpl.forward", "counting the fallback"),
    Hook("vllm.model_executor.layers.linear", "MergedColumnParallelLinear", "gate and up with their activation"),
    Hook("vllm.model_executor.layers.activation", "SiluAndMul", "gate and up with their activation"),
    Hook("vllm.v1.worker.gpu_worker", "Worker.load_model", "gate and up with their activation"),
    *_COMMON,
    Hook(_GDN, "QwenGatedDeltaNetAttention._forward_core", "counting the gated delta net"),
)


class MissingHookError(RuntimeError):
    """This vLLM is not one that the plugin was made for."""


def check(wanted: Sequence[Hook] | None = None, *, activated: bool = True) -> None:
    """Raises MissingHookError, which names every missing hook and an unchecked version.

    Only once our platform has been chosen (`activated`): with vLLM's own CPU or CUDA platform other things are there.
    """
    import vllm

    version = str(vllm.__version__)
    hooks = tuple(wanted) if wanted is not None else wanted_hooks()
    faults = []
    if not all(hook.checked_with(version) for hook in hooks):
        series = " or ".join(sorted({name for hook in hooks for name in hook.versions}))
        faults.append(f"it was checked with vLLM {series} only")
    missing = [str(hook) for hook in hooks if not hook.exists()]
    if missing:
        faults.append(f"this vLLM lacks the hooks {', '.join(missing)}")
    if faults:
        raise MissingHookError(
            f"sm70_engine cannot work with vLLM {version}: {'; '.join(faults)}. "
            f"Use the engine image, which holds vLLM {VLLM_VERSIONS}."
        )
    if activated:
        _check_platform()


def wanted_hooks() -> tuple[Hook, ...]:
    """The hooks of this session's flavour."""
    if _flavour() is EngineFlavour.SM70:
        return (*CUDA_HOOKS, *(replacement.hook for replacement in REPLACEMENTS))
    return HOOKS


def _flavour() -> EngineFlavour:
    return EngineFlavour.CPU if session_folder() is None else current_session().flavour


def _check_platform() -> None:
    """vLLM swallows an error of a platform plugin and goes on with its own platform: that must not pass unseen."""
    from vllm.platforms import current_platform

    if not getattr(current_platform, "sm70_platform", False):
        raise MissingHookError(
            f"sm70_engine: vLLM chose the platform {type(current_platform).__name__}, not ours; the sm70 engine needs "
            "a GPU of compute capability 7.0 (or SM70_PRETEND=1 on 8.x and 9.x), the cpu engine vLLM's CPU build"
        )


# ---------------------------------------------------------------- what is replaced in memory


def stand_in() -> None:
    """Before `vllm.platforms.cuda` is imported: modules in the place of the extensions, and their operators."""
    from sm70_engine.plugin import standins

    standins.install()
    from sm70_engine.ops import extension

    extension.register()


def _stand_in(_: EngineSettings) -> None:
    stand_in()


def _nvfp4_first(_: EngineSettings) -> None:
    from sm70_engine.ops import linear_nvfp4_vllm

    linear_nvfp4_vllm.register_first()


_WEIGHT_ONLY = (
    f"{_QUANTIZATION}.modelopt",
    f"{_QUANTIZATION}.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4",
)


def _weight_only(name: str) -> Callable[[EngineSettings], None]:
    """For the module of that name, which holds the function under its own name."""

    def apply(_: EngineSettings) -> None:
        from sm70_engine.ops import linear_nvfp4_vllm

        module: Any = importlib.import_module(name)
        module.init_nvfp4_linear_kernel = linear_nvfp4_vllm.choosing(module.init_nvfp4_linear_kernel)

    return apply


def _admit_compressed_tensors(_: EngineSettings) -> None:
    scheme = importlib.import_module(_WEIGHT_ONLY[1]).CompressedTensorsW4A4Fp4
    scheme.get_min_capability = classmethod(lambda cls: 70)


def _prune_autotune(settings: EngineSettings) -> None:
    if settings.prune_autotune:
        from sm70_engine.plugin import autotune

        autotune.prune()


REPLACEMENTS = (
    Replacement(
        Hook("vllm._custom_ops", "apply_repetition_penalties_torch", "operators without CUDA extensions"),
        "the modules _C_stable_libtorch, _moe_C_stable_libtorch and vllm_flash_attn and the operators of torch.ops._C "
        "and torch.ops._moe_C do not exist in a build without extensions",
        _stand_in,
    ),
    Replacement(
        Hook(_LINEAR, "_POSSIBLE_NVFP4_KERNELS", "NVFP4 linear layers"),
        "a registered kernel is asked after vLLM's emulation, which takes every layer; ours goes first",
        _nvfp4_first,
    ),
    *(
        Replacement(
            Hook(name, "init_nvfp4_linear_kernel", "NVFP4 linear layers without an input scale"),
            "vLLM admits a fixed list of kernels for them, none of which runs on compute capability 7.0",
            _weight_only(name),
        )
        for name in _WEIGHT_ONLY
    ),
    Replacement(
        Hook(_WEIGHT_ONLY[1], "CompressedTensorsW4A4Fp4.get_min_capability", "NVFP4 in compressed-tensors checkpoints"),
        "vLLM asks for 7.5, which its own kernels need and ours do not",
        _admit_compressed_tensors,
    ),
    Replacement(
        Hook("triton.runtime.autotuner", "Autotuner.run", "pruning Triton's autotuning"),
        "a full sweep of the gated delta net's kernels is minutes of compiling for compute capability 7.0",
        _prune_autotune,
    ),
)


# ---------------------------------------------------------------- what is registered


def register_operators() -> None:
    """Registers this session's operators and makes this process count into its counters."""
    folder = session_folder()
    assert folder is not None
    attach(folder.counters)
    from sm70_engine.quantization import modelopt

    modelopt.register()
    if current_session().flavour is EngineFlavour.SM70:
        _register_cuda(read_settings(os.environ))
    else:
        _register_cpu()


def _attention(name: str, path: str) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    member: Any = AttentionBackendEnum[name]
    register_backend(member, path)


def _register_cpu() -> None:
    _attention("CUSTOM", "sm70_engine.attention.reference.ReferenceAttentionBackend")
    provide("attention")

    from sm70_engine.ops import linear_nvfp4_vllm

    linear_nvfp4_vllm.register()
    provide("nvfp4_linear")

    from sm70_engine.ops import gdn

    gdn.register()
    provide("gdn")


def _register_cuda(settings: EngineSettings) -> None:
    for replacement in REPLACEMENTS:
        replacement.apply(settings)
    _attention("CUSTOM", "sm70_engine.attention.backend.FlashAttnV100Backend")
    # vLLM's own backend stays what it is; this one also counts, since a fallback must show.
    _attention("TRITON_ATTN", "sm70_engine.attention.triton.CountedTritonBackend")

    from sm70_engine.ops import gdn_triton

    gdn_triton.register()
    from sm70_engine.attention.present import operators_present

    for operator in operators_present():
        provide(operator)
