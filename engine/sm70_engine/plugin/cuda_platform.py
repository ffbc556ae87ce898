"""The platform of the sm70 engine: vLLM's CUDA platform for a build without CUDA extensions on compute capability 7.0.

On a newer GPU (`SM70_PRETEND=1`) it says 7.0 as well, so that vLLM decides everything as it would on a V100.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.platforms.cuda import CudaPlatform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from sm70_engine.plugin.announce import announce
from sm70_engine.plugin.pacing_option import add_option, choose_scheduler
from sm70_engine.plugin.settings import read_settings

logger = init_logger("vllm.sm70")
VOLTA = (7, 0)
DTYPES = {"half": torch.float16, "float16": torch.float16, "float32": torch.float32}
FUSIONS = (
    "fuse_norm_quant",
    "fuse_act_quant",
    "fuse_attn_quant",
    "fuse_allreduce_rms",
    "enable_qk_norm_rope_fusion",
    "fuse_qk_norm_rope_kvcache",
    "fuse_rope_kvcache",
    "fuse_act_padding",
    "fuse_rope_kvcache_cat_mla",
    "fuse_mla_dual_rms_norm",
)
"""Passes of vLLM's compiler whose results are operators of the CUDA extension."""


class Sm70Platform(CudaPlatform):  # type: ignore[misc]
    """Stays CUDA for vLLM (`is_cuda()` holds); only the choices below are ours."""

    sm70_platform = True

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """The first is what a checkpoint becomes that asks for none of them, as all in bfloat16 do."""
        wanted = DTYPES[read_settings(os.environ).dtype]
        return [wanted, *(dtype for dtype in dict.fromkeys(DTYPES.values()) if dtype is not wanted)]

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> Any:
        return DeviceCapability(*VOLTA)

    @classmethod
    def is_arch_support_pdl(cls) -> bool:
        return False  # vLLM asks the GPU itself, which may be a newer one

    @classmethod
    def import_kernels(cls) -> None:
        """Nothing: the operators are defined in `sm70_engine.ops.extension`."""

    @classmethod
    def use_custom_allreduce(cls) -> bool:
        return False  # an operator of the extension

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: Any) -> Any:
        from vllm.config.kernel import IrOpPriorityConfig

        return IrOpPriorityConfig.with_default(["native"])

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        super().pre_register_and_update(parser)
        add_option(parser)

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """vLLM calls it when the configuration is complete, before any worker starts."""
        settings = read_settings(os.environ)
        parallel, compilation = vllm_config.parallel_config, vllm_config.compilation_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = "sm70_engine.plugin.cuda_worker.Sm70Worker"
        super().check_and_update_config(vllm_config)
        choose_scheduler(vllm_config)
        compilation.custom_ops = ["none" if name == "all" else name for name in compilation.custom_ops]
        for name in FUSIONS:
            if getattr(compilation.pass_config, name, None):
                setattr(compilation.pass_config, name, False)
        if vllm_config.shutdown_timeout == 0:
            vllm_config.shutdown_timeout = settings.shutdown_seconds
        # vLLM hashes it into the name of its own compile cache.
        if isinstance(vllm_config.additional_config, dict):
            vllm_config.additional_config["sm70_settings"] = settings.key()
        if vllm_config.model_config is not None:
            announce(vllm_config)

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """FLASH_ATTN_V100 where it serves the layer. Else, unless the user named it, what vLLM chooses; why is logged.

        Raises `ValueError` when the user asked for FLASH_ATTN_V100 and it does not serve.
        """
        if selected_backend not in (None, AttentionBackendEnum.CUSTOM):
            return str(super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads))
        from sm70_engine.attention.backend import NAME, FlashAttnV100Backend

        reasons = FlashAttnV100Backend.validate_configuration(
            device_capability=cls.get_device_capability(), **attn_selector_config._asdict()
        )
        if not reasons:
            logger.info_once(f"Using {NAME} (registered as CUSTOM).")
            return f"{FlashAttnV100Backend.__module__}.{FlashAttnV100Backend.__qualname__}"
        if selected_backend is not None:
            raise ValueError(
                f"{NAME} must serve every layer when it is asked for; it refuses one: {', '.join(reasons)}. "
                "Leave `attentionBackend` unset to let such layers take another."
            )
        logger.warning_once(f"sm70: {NAME} refuses a layer, another backend serves it: {', '.join(reasons)}")
        return str(super().get_attn_backend_cls(None, attn_selector_config, num_heads))
