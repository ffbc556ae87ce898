"""Strict start and the phases of a start, as the processes of a server see them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm70_engine.acceleration.startup import enter, read_startup
from sm70_engine.acceleration.strict import StrictStartError, refuse_unless_complete, remedy_of, strict
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.report import PathReport, PathState, StartupPhase
from sm70_profiles.spec import AllowedDisabledPath


def path(name: str, state: PathState, reason: str | None = None, expected: bool = True) -> PathReport:
    return PathReport(name=name, expected=expected, state=state, reason=reason, message=f"about {name}")


PATHS = (
    path("good", PathState.ENABLED),
    path("other", PathState.DISABLED, "kv_dtype", expected=False),
    path("slow", PathState.DISABLED, "budget<8000"),
    path("foreign", PathState.NOT_APPLICABLE, "not_applicable"),
)


def test_every_path_in_the_way_is_named_with_reason_and_remedy() -> None:
    with pytest.raises(StrictStartError) as caught:
        refuse_unless_complete(PATHS)
    refusal = caught.value.refusal
    assert refusal.reason is TerminationReason.ACCELERATION_REFUSED
    assert "slow is disabled: budget<8000 (about slow); foreign is not_applicable" in refusal.message
    assert "good" not in refusal.message
    assert "other" not in refusal.message
    assert "slow: set `maxNumBatchedTokens`" in refusal.remedy
    assert "foreign: use the engine" in refusal.remedy


def test_allowed_paths_are_not_in_the_way() -> None:
    allowed = [AllowedDisabledPath(path=name, because="a test") for name in ("slow", "foreign")]
    refuse_unless_complete(PATHS, allowed)
    with pytest.raises(StrictStartError):
        refuse_unless_complete(PATHS, allowed[:1])


@pytest.mark.parametrize(
    "reason",
    [
        "operator_missing:gdn",
        "contract_mismatch:head_dim",
        "num_speculative_tokens=5≠7",
        "method=None≠dflash",
        "page_size",
        "user_override",
    ],
)
def test_each_reason_has_its_own_remedy(reason: str) -> None:
    assert remedy_of(path("a", PathState.DISABLED, reason)) != remedy_of(path("a", PathState.DISABLED, "odd"))


@pytest.mark.parametrize("name", ["SM70_REQUIRE_PROFILE_ACCELERATION", "VLLM_SM70_REQUIRE_PROFILE_ACCELERATION"])
def test_both_names_of_the_variable_count(name: str) -> None:
    assert strict({name: "1"})
    assert not strict({name: "0"})
    assert not strict({})


def test_phases_go_forward_whichever_worker_speaks(tmp_path: Path) -> None:
    file = tmp_path / "startup"
    assert read_startup(file) is None
    for phase, moment in (
        (StartupPhase.STARTING, 100.0),
        (StartupPhase.LOADING_WEIGHTS, 110.5),
        (StartupPhase.COMPILING, 130.0),
        (StartupPhase.LOADING_WEIGHTS, 131.0),  # a slower worker
        (StartupPhase.SERVING, 200.0),
    ):
        enter(file, phase, moment)
    report = read_startup(file)
    assert report is not None
    assert (report.phase, report.since) == (StartupPhase.SERVING, "1970-01-01T00:03:20Z")
    assert report.seconds == {
        StartupPhase.STARTING: 10.5,
        StartupPhase.LOADING_WEIGHTS: 19.5,
        StartupPhase.COMPILING: 70.0,
    }
