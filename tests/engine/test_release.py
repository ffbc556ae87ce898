"""Real servers of the release recipe in small: its override rows, its compile cache, and a strict start.

Each start compiles or loads compiled code, so all of it is left to `make test-full`; the gate judges the same rows by
vLLM's completed configuration (test_lane.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.conftest import Starter
from engine.judge import faults
from engine.server import Server, type_in
from engine.test_lane import OVERRIDES
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.report import CacheState, CompileCacheReport, PathState
from sm70_profiles.routes import Stage
from sm70_profiles.termination import TerminationKind

pytestmark = [pytest.mark.engine, pytest.mark.full]
PROFILE = "tiny_hybrid_reference_release"


@pytest.fixture
def volume(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A volume for the compile cache, and a folder for compiled code that is not this machine's."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "tmp").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "volume"))
    monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
    yield folder / "volume"
    assert not any((folder / "tmp").glob("sm70-cache-*/*-0"))  # each server took its folder along


def drafting(models: Path) -> dict[str, Any]:
    return {"draftPath": str(models / "draft")}


@pytest.mark.parametrize("case", OVERRIDES)
def test_an_override_disables_exactly_its_paths(
    starter: Starter, models: Path, volume: Path, answers: dict[str, dict[str, Any]], case: str
) -> None:
    overrides, disabled, reason = OVERRIDES[case]
    drafts = overrides.get("speculation") != {"method": "None"}
    server = starter(PROFILE, "tiny", overrides=overrides, **(drafting(models) if drafts else {}))
    report = server.report()
    off = {path.name: path.reason for path in report.paths if path.expected and path.state is not PathState.ENABLED}
    assert off == dict.fromkeys(disabled, reason)
    assert (report.summary.enabled, report.summary.total) == (8 - len(disabled), 8)
    settled = [(row.field, row.requested, row.view) for row in report.settled]
    assert settled == ([("block_size", "16", "worker 0")] if case == "pages of 16" else [])
    ready = server.http.get("/sm70/ready")
    assert ready.status_code == 503
    assert ready.json()["path"] in disabled
    # It serves all the same, and what it says is right.
    for one in answers.values():
        assert faults(server.chat(one["request"]), one["expected"]) == []
    assert server.stop() == 0


def served(
    starter: Starter, models: Path, answers: dict[str, dict[str, Any]]
) -> tuple[CompileCacheReport, list[Any], Server]:
    """One life of a server: what its cache did, what it answered, and itself."""
    server = starter(PROFILE, "tiny", **drafting(models))
    assert server.http.get("/sm70/ready").status_code == 200
    cache = server.report().compile_cache
    assert cache is not None
    said = [server.chat(one["request"])["choices"][0]["message"] for one in answers.values()]
    for message in said:
        for call in message.get("tool_calls") or ():
            call["id"] = ""
    assert server.dispatches()["gdn_reference", Stage.VERIFY] > 0
    assert server.stop() == 0
    return cache, said, server


def test_compiled_code_is_found_again_and_answers_the_same(
    starter: Starter, models: Path, volume: Path, answers: dict[str, dict[str, Any]]
) -> None:
    first, said, _ = served(starter, models, answers)
    assert first.state is CacheState.COLD
    assert first.files_added_at_last_start
    second, again, _ = served(starter, models, answers)
    assert (second.state, second.files_added_at_last_start) == (CacheState.WARM, 0)
    assert second.key == first.key
    assert again == said


def test_a_damaged_file_on_the_volume_costs_a_cold_start_and_is_replaced(
    starter: Starter, models: Path, volume: Path, answers: dict[str, dict[str, Any]]
) -> None:
    _, said, _ = served(starter, models, answers)
    library = next(volume.glob("sm70-compile/*/*/files/inductor/**/*.so"))
    whole = library.read_bytes()
    library.write_bytes(b"damaged")
    cache, again, server = served(starter, models, answers)
    assert cache.state is CacheState.COLD
    assert cache.files_added_at_last_start
    assert "warning: compile cache: a cold start: the entry is damaged" in server.log
    assert again == said
    (replaced,) = volume.glob(f"sm70-compile/*/*/files/**/{library.name}")
    assert len(replaced.read_bytes()) == len(whole)


def test_a_volume_that_cannot_be_written_is_said_and_nothing_worse(
    starter: Starter, models: Path, volume: Path, answers: dict[str, dict[str, Any]]
) -> None:
    volume.mkdir()
    (volume / "sm70-compile").write_text("a file is in the way")
    cache, said, server = served(starter, models, answers)
    assert cache.state is CacheState.UNWRITABLE
    assert "cannot be written" in cache.message
    assert cache.message in server.log
    assert said[0]["content"]


def test_a_strict_start_that_only_the_processes_can_judge_ends_before_it_serves(
    lane: Path, models: Path, tmp_path: Path
) -> None:
    # The prediction knows nothing of operators: without ours, the completed configuration is where it shows.
    hidden = tmp_path / "site/sitecustomize.py"
    hidden.parent.mkdir()
    hidden.write_text(
        "import sm70_engine.acceleration.capabilities as capabilities\n"
        "known = capabilities.provide\n"
        "capabilities.provide = lambda name: None if name == 'gdn' else known(name)\n"
    )
    variables = {"SM70_REQUIRE_PROFILE_ACCELERATION": "1", "PYTHONPATH": str(hidden.parent)}
    server = type_in(lane, tmp_path, models / "tiny", "tiny_hybrid_reference", **variables)
    assert server.process.wait(timeout=240) == 2
    words = server.last_words()
    assert (words.kind, words.reason) == (TerminationKind.FAILURE, TerminationReason.ACCELERATION_REFUSED)
    assert "reference_gdn is disabled: operator_missing:gdn" in words.message
    assert "Loading" not in server.log.partition("StrictStartError")[0]
