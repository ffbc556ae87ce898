"""`--mixed-prefill-step-latency-ms`: vLLM's schedulers with a bound on steps that mix prompts and running answers."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from sm70_engine.acceleration.pace import Pace, step_budget
from sm70_engine.session import current_session


class _Paced:
    """To be put before one of vLLM's schedulers."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        bound = current_session().settings.mixed_prefill_step_latency_milliseconds or 0
        self._pace = Pace(bound / 1000)
        self._running_steps: deque[tuple[int, float, int, bool]] = deque(maxlen=8)
        self._last_update = 0.0

    def schedule(self, *arguments: Any, **options: Any) -> Any:
        scheduler: Any = self
        decoding = {
            request.request_id
            for request in scheduler.running
            if request.num_computed_tokens >= request.num_prompt_tokens
        }
        full = scheduler.max_num_scheduled_tokens
        if decoding:
            tokens = len(decoding) * (1 + scheduler.num_spec_tokens)
            block = scheduler.cache_config.block_size
            scheduler.max_num_scheduled_tokens = step_budget(full, tokens, self._pace.chunk(), block)
        try:
            output = super().schedule(*arguments, **options)  # type: ignore[misc]
        finally:
            scheduler.max_num_scheduled_tokens = full
        scheduled = output.num_scheduled_tokens
        prompt = sum(count for request, count in scheduled.items() if request not in decoding)
        self._running_steps.append((id(output), time.monotonic(), prompt, any(name in decoding for name in scheduled)))
        return output

    def update_from_output(self, scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
        now = time.monotonic()
        for step in list(self._running_steps):
            identity, began, prompt, decodes = step
            if identity == id(scheduler_output):
                self._running_steps.remove(step)
                # With two steps in flight the second begins to run when the first is over.
                self._pace.observe(now - max(began, self._last_update), prompt, decodes)
        self._last_update = now
        return super().update_from_output(scheduler_output, *arguments, **options)  # type: ignore[misc]


class PacedScheduler(_Paced, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, paced."""


class PacedAsyncScheduler(_Paced, AsyncScheduler):  # type: ignore[misc]
    """vLLM's asynchronous scheduler, paced."""
