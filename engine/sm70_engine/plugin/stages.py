"""What a batch of the scheduler is for: prefill, decode or the verification of drafted tokens."""

from __future__ import annotations

from typing import Any

from sm70_profiles.routes import Stage


def stages_of(scheduler_output: Any) -> tuple[Stage, ...]:
    """The stages of a batch (vLLM's `SchedulerOutput`), in the order of the catalogue.

    A request with drafted tokens is verified; one that has produced no token yet is in prefill, all others decode.
    """
    drafted = scheduler_output.scheduled_spec_decode_tokens
    stages = {Stage.PREFILL for request in scheduler_output.scheduled_new_reqs if request.req_id not in drafted}
    running = scheduler_output.scheduled_cached_reqs
    for request_id, produced in zip(running.req_ids, running.num_output_tokens, strict=True):
        if request_id in drafted:
            stages.add(Stage.VERIFY)
        else:
            stages.add(Stage.DECODE if produced else Stage.PREFILL)
    return tuple(stage for stage in Stage if stage in stages)
