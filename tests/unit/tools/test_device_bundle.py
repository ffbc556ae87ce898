"""What the device lane's bundle takes from the lock, and the rule by which its tokens are judged."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from device_bundle import PACKAGES, pinned
from toolbox import ROOT, ToolError

LOCK = """\
first-one==1.0 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
second==2.0 ; python_version > '3' \\
    --hash=sha256:cc
Third_one==3.0 \\
    --hash=sha256:dd
"""


def test_names_are_taken_with_their_version_and_hashes() -> None:
    taken = pinned("# a comment\nthird.one\n\nFirst_One\n", LOCK)
    assert taken.splitlines()[0].startswith("Third_one==3.0")
    assert "--hash=sha256:bb" in taken
    assert "second" not in taken


def test_a_name_that_the_lock_lacks_is_refused() -> None:
    with pytest.raises(ToolError, match="absent-one"):
        pinned("absent_one\nfirst-one\n", LOCK)


def test_the_image_and_the_lane_have_the_same_versions() -> None:
    names, lock = ((ROOT / path).read_text() for path in PACKAGES)
    assert pinned(names, lock).count("--hash=sha256:") > len(names.splitlines())


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The rule, without torch and transformers, which judge on the device only."""
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(AutoModelForCausalLM=None, Tensor=None))
    from device import reference

    return reference.verdict


def _found(tokens: int, *others: dict[str, float]) -> dict[str, Any]:
    return {"tokens": tokens, "equal": tokens - len(others), "others": list(others)}


@pytest.mark.parametrize(
    ("found", "e4m3", "passed"),
    [
        (_found(100), False, True),
        (_found(0), False, False),
        (_found(100, {"gap": 0.009}), False, True),
        (_found(100, {"gap": 0.011}), False, False),
        (_found(100, {"gap": 0.12}), True, True),
        (_found(100, {"gap": 0.14}), True, False),
        (_found(100, *[{"gap": 0.001}] * 2), False, True),
        (_found(100, *[{"gap": 0.001}] * 3), False, False),
    ],
)
def test_only_near_ties_and_few_of_them_are_admitted(
    verdict: Any, found: dict[str, Any], e4m3: bool, passed: bool
) -> None:
    assert verdict(found, e4m3)["passed"] is passed
