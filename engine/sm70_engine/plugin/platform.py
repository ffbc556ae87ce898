"""The CPU lane's platform: vLLM's own CPU platform with our worker, our attention backend and a graceful shutdown."""

from __future__ import annotations

import os
from typing import Any

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from sm70_engine.plugin.announce import announce
from sm70_engine.plugin.pacing_option import add_option, choose_scheduler
from sm70_engine.plugin.settings import read_settings


class CpuReferencePlatform(CpuPlatform):  # type: ignore[misc]
    """Stays CPU in every respect for vLLM (`is_cpu()` holds); only the choices below are ours."""

    sm70_platform = True

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        super().pre_register_and_update(parser)
        add_option(parser)

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """vLLM calls it when the configuration is complete, before any worker starts."""
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = "sm70_engine.plugin.worker.CpuReferenceWorker"
        super().check_and_update_config(vllm_config)
        choose_scheduler(vllm_config)
        if vllm_config.shutdown_timeout == 0:
            vllm_config.shutdown_timeout = read_settings(os.environ).shutdown_seconds
        if vllm_config.model_config is not None:
            announce(vllm_config)

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """Our backend, except for what it does not do (MLA, sparse), where vLLM decides."""
        if attn_selector_config.use_mla or attn_selector_config.use_sparse:
            return str(super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads))
        return str(AttentionBackendEnum.CUSTOM.get_path())
