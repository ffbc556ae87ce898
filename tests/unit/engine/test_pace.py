"""The pace of steps that mix prompts and running answers."""

from __future__ import annotations

import pytest

from sm70_engine.acceleration.pace import FIRST_CHUNK, LEAST_CHUNK, Pace, step_budget


def test_the_chunk_follows_what_was_measured() -> None:
    pace = Pace(0.1)
    assert pace.chunk() == FIRST_CHUNK
    pace.observe(0.02, 0, decodes=True)
    pace.observe(0.02 + 0.2, 1000, decodes=True)  # 0.2 ms a prompt token
    assert pace.chunk() == 400
    pace.observe(5.0, 4096, decodes=False)  # a prompt alone hurts nobody
    assert pace.chunk() == 400
    for _ in range(40):
        pace.observe(0.02 + 0.8, 1000, decodes=True)  # the machine got slower
    assert 95 <= pace.chunk() <= 105


def test_a_prompt_always_advances() -> None:
    pace = Pace(0.001)
    pace.observe(0.5, 0, decodes=True)
    pace.observe(0.9, 100, decodes=True)
    assert pace.chunk() == LEAST_CHUNK


@pytest.mark.parametrize(
    ("full", "decodes", "chunk", "block", "budget"),
    [
        (4096, 4, 256, 16, 260),  # a small page
        (4096, 4, 8000, 16, 4096),  # never above the configured budget
        (4096, 4, 256, 2048, 260),  # below one block: advances inside of it
        (4096, 4, 2046, 2048, 2047),  # never between chunk and block, where nothing would be scheduled
        (4096, 4, 3000, 2048, 3004),
        (64, 64, 16, 16, 64),  # decodes fill the step: vLLM's own budget stands
    ],
)
def test_the_budget_of_a_mixed_step(full: int, decodes: int, chunk: int, block: int, budget: int) -> None:
    assert step_budget(full, decodes, chunk, block) == budget
