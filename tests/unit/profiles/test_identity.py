"""Names made of content: what enters a hash, and what must not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sm70_profiles.base import quantity_bytes
from sm70_profiles.identity import (
    CompileCacheIdentity,
    QualificationIdentity,
    canonical_json,
    compact_json,
    digest,
    driver_branch,
    short,
    stable_arguments,
)
from sm70_profiles.resolver import Resolution
from sm70_profiles.settings import Overrides, Speculation

Serve = Callable[..., Resolution]


def test_canonical_json() -> None:
    assert canonical_json({"b": (1, 2), "a": {"z": None, "ä": True}}) == '{"a":{"z":null,"ä":true},"b":[1,2]}'
    assert canonical_json(Overrides(block_size=16)) == '{"blockSize":16}'
    assert canonical_json(frozenset({"b", "a"})) == '["a","b"]'
    assert compact_json({"method": "mtp", "a": 1}) == '{"method":"mtp","a":1}'


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_have_no_json(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"a": value})


def test_absent_members_do_not_change_a_hash() -> None:
    assert digest(Overrides()) == digest(Overrides(speculation=None)) == digest({})
    assert digest(Overrides(speculation=Speculation(tokens=7))) == digest({"speculation": {"tokens": 7}})
    assert short(Overrides(), 12) == digest(Overrides())[:12]
    # Known answer: another implementation must come to the same name.
    assert digest({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


def test_stable_arguments() -> None:
    argv = [
        "--host",
        "h",
        "--port=1",
        "--seed",
        "3",
        "--served-model-name",
        "x",
        "--enable-log-requests",
        "--log-level=X",
    ]
    assert stable_arguments(argv) == ("--seed", "3")


def test_resolution_hash(serve: Serve) -> None:
    base = serve().hash
    assert serve(served_name="other", port=9, host="h", drain_timeout_seconds=5, model_path="/x").hash == base
    assert serve(overrides={"maxNumSeqs": 2}).hash != base
    assert serve(extra_args=["--seed", "1"]).hash != base
    assert serve("qwen38_27b_nvfp4_target_only").hash != base


CACHE = {
    "engine_build": "0.1",
    "torch": "2.10",
    "cuda": "12.8",
    "driver_branch": "580",
    "gpu_product": "Tesla-V100-SXM2-16GB",
    "tensor_parallel_size": 4,
    "pipeline_parallel_size": 1,
    "model_shape": "a",
    "configuration": "b",
}


@pytest.mark.parametrize("member", CACHE)
def test_every_member_of_a_cache_key_counts(member: str) -> None:
    whole = CompileCacheIdentity.model_validate(CACHE)
    changed = whole.model_copy(update={member: 2 if isinstance(CACHE[member], int) else "other"})
    assert whole.key != changed.key
    assert whole.key is not None
    assert len(whole.key) == 64
    if member not in ("tensor_parallel_size", "pipeline_parallel_size", "configuration"):
        unknown = whole.model_copy(update={member: None})
        assert (unknown.key, unknown.missing) == (None, (member,))


def test_qualification_key() -> None:
    values = {
        "image_digest": "sha256:1",
        "model": "m",
        "profile_hash": "p",
        "resolution_hash": "r",
        "tensor_parallel_size": 4,
        "pipeline_parallel_size": 1,
        "gpu_product": "Tesla-V100-SXM2-16GB",
        "driver_branch": driver_branch("580.159.04"),
    }
    key = QualificationIdentity.model_validate(values).key
    assert QualificationIdentity.model_validate({**values, "driver_branch": driver_branch("580.1")}).key == key
    for member in values:
        other = QualificationIdentity.model_validate({**values, member: 2 if member.endswith("size") else "x"})
        assert other.key != key


def test_quantities() -> None:
    assert quantity_bytes("16Gi") == 16 << 30
    assert quantity_bytes("0") == 0
    for text in ("", "Gi", "1GB", "-1", "1.5Gi", "٣"):
        with pytest.raises(ValueError, match="quantity"):
            quantity_bytes(text)
