"""What a batch is for, from the scheduler's output."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sm70_engine.plugin.stages import stages_of
from sm70_profiles.routes import Stage

PREFILL, DECODE, VERIFY = Stage.PREFILL, Stage.DECODE, Stage.VERIFY


@pytest.mark.parametrize(
    ("new", "running", "drafted", "stages"),
    [
        ([], {}, {}, ()),
        (["a"], {}, {}, (PREFILL,)),
        ([], {"a": 0}, {}, (PREFILL,)),  # a long prompt in chunks
        ([], {"a": 1}, {}, (DECODE,)),
        (["b"], {"a": 1}, {}, (PREFILL, DECODE)),
        ([], {"a": 1}, {"a": [5, 6]}, (VERIFY,)),
        (["c"], {"a": 1, "b": 4}, {"a": [5]}, (PREFILL, DECODE, VERIFY)),
    ],
)
def test_stages(
    new: list[str], running: dict[str, int], drafted: dict[str, list[int]], stages: tuple[Stage, ...]
) -> None:
    batch = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(running), num_output_tokens=list(running.values())),
        scheduled_spec_decode_tokens=drafted,
    )
    assert stages_of(batch) == stages
