"""Logs the acceleration report when the configuration is complete, once a server: for people, and as JSON."""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.logger import init_logger

from sm70_engine.acceleration.capabilities import capabilities
from sm70_engine.acceleration.enforce import enforce
from sm70_engine.acceleration.report import build_report, readable
from sm70_engine.plugin.effective import effective_settings
from sm70_engine.session import current_session, session_folder
from sm70_profiles.report import PathState

logger = init_logger("vllm.sm70")


def announce(vllm_config: Any) -> None:
    """Each expected path that is not enabled is a warning with its reason. Raises StrictStartError."""
    folder = session_folder()
    if folder is None or not folder.announce_once():
        return
    session = current_session()
    settings = effective_settings(session.settings, vllm_config)
    report = build_report(
        session, settings, capabilities(session, os.environ), (), os.environ, cuda=torch.version.cuda, folder=folder
    )
    for line in readable(report).splitlines():
        logger.info(line)
    for path in report.paths:
        if path.expected and path.state is not PathState.ENABLED:
            logger.warning("sm70: expected path %s is %s: %s (%s)", path.name, path.state, path.reason, path.message)
    logger.info("sm70 acceleration report: %s", report.model_dump_json(by_alias=True))
    enforce(session, folder, report.paths)
