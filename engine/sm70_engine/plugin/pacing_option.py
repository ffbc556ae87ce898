"""Admits the option of the paced schedulers and chooses them; imports none of vLLM."""

from __future__ import annotations

from typing import Any

from sm70_engine.session import current_session

OPTION = "--mixed-prefill-step-latency-ms"


def add_option(parser: Any) -> None:
    """Makes `vllm serve` accept the option; its value is the session's, which the schedulers read."""
    if parser is not None:
        parser.add_argument(
            OPTION, type=int, default=0, help="Bound on a step that mixes prefill and decode; 0 sets none."
        )


def choose_scheduler(vllm_config: Any) -> None:
    """Takes a paced scheduler where a bound is set; one that the user named stays."""
    scheduler = vllm_config.scheduler_config
    bound = current_session().settings.mixed_prefill_step_latency_milliseconds
    if bound and scheduler.scheduler_cls is None:
        name = "PacedAsyncScheduler" if scheduler.async_scheduling else "PacedScheduler"
        scheduler.scheduler_cls = f"sm70_engine.plugin.pacing.{name}"
