"""The CPU lane's platform: vLLM's own CPU platform with our worker, our attention backend and a graceful shutdown."""

from __future__ import annotations

import os
from typing import Any

from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from sm70_engine.acceleration.capabilities import capabilities
from sm70_engine.acceleration.report import build_report, readable
from sm70_engine.plugin.effective import effective_settings
from sm70_engine.session import current_session, session_folder
from sm70_profiles.report import PathState

logger = init_logger("vllm.sm70")

LEAST_SHUTDOWN_SECONDS = 5
"""vLLM kills its workers at once when the timeout is 0; they need a moment to say goodbye."""


class CpuReferencePlatform(CpuPlatform):  # type: ignore[misc]
    """Stays CPU in every respect for vLLM (`is_cpu()` holds); only the choices below are ours."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """vLLM calls it when the configuration is complete, before any worker starts."""
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = "sm70_engine.plugin.worker.CpuReferenceWorker"
        super().check_and_update_config(vllm_config)
        if vllm_config.shutdown_timeout == 0:
            vllm_config.shutdown_timeout = LEAST_SHUTDOWN_SECONDS
        if vllm_config.model_config is not None:
            _announce(vllm_config)

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """Our backend, except for what it does not do (MLA, sparse), where vLLM decides."""
        if attn_selector_config.use_mla or attn_selector_config.use_sparse:
            return str(super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads))
        return str(AttentionBackendEnum.CUSTOM.get_path())


def _announce(vllm_config: Any) -> None:
    """Logs the report, once a server: for people, and as JSON for programs."""
    folder = session_folder()
    if folder is None or not folder.announce_once():
        return
    session = current_session()
    settings = effective_settings(session.settings, vllm_config)
    report = build_report(session, settings, capabilities(session, os.environ), (), os.environ)
    for line in readable(report).splitlines():
        logger.info(line)
    for path in report.paths:
        if path.expected and path.state is not PathState.ENABLED:
            logger.warning("sm70: expected path %s is %s: %s (%s)", path.name, path.state, path.reason, path.message)
    logger.info("sm70 acceleration report: %s", report.model_dump_json(by_alias=True))
