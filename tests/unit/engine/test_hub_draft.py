"""A draft from a hub is compared with its pins before the server starts, or the report says why it was not."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from sm70_engine.serve.failure import ServeError
from sm70_engine.serve.hub_draft import HubDraft, hub_draft
from sm70_engine.serve.pins import check_pins
from sm70_profiles.catalog import load_profile
from sm70_profiles.profile import HubRevision
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.resolver import ServeRequest
from unit.engine.loopback_hub import COMMIT, REPO, WEIGHTS, LoopbackHub, serving

PINNED = HubRevision(repo=REPO, revision=COMMIT)
SUMS = {"model.safetensors": hashlib.sha256(WEIGHTS).hexdigest(), "config.json": "unknown"}


@pytest.fixture
def hub() -> Iterator[tuple[LoopbackHub, str]]:
    found = LoopbackHub()
    with serving(found) as url:
        yield found, url


def request(tmp_path: Path) -> ServeRequest:
    return ServeRequest(
        profile=load_profile("tiny_hybrid_reference_dflash"), model_path=str(tmp_path), served_name="tiny"
    )


def verdict(tmp_path: Path, draft: HubDraft, skip: tuple[str, ...] = ()) -> tuple[str, str]:
    (report,) = (one for one in check_pins(request(tmp_path), skip, draft)[0] if one.what == "draft")
    return report.verdict, report.reason


def test_it_is_fetched_once_and_compared(tmp_path: Path, hub: tuple[LoopbackHub, str]) -> None:
    variables = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub[1]}
    before = hub_draft(PINNED, SUMS, variables, fetch=False)
    assert verdict(tmp_path, before) == ("unverified", "it is not in the hub's cache yet")
    draft = hub_draft(PINNED, SUMS, variables, fetch=True)
    assert draft.folder is not None
    assert draft.folder.is_relative_to(tmp_path / "home/hub")
    # Code and prose of the repository stay there.
    assert {path.name for path in draft.folder.iterdir()} == {"config.json", "model.safetensors", "sub"}
    asked = hub[0].asked
    assert hub_draft(PINNED, SUMS, variables, fetch=True) == draft
    assert hub[0].asked == asked
    # The configuration's checksum is not known, so the whole is not verified; the weights are.
    (report,) = (one for one in check_pins(request(tmp_path), (), draft)[0] if one.what == "draft")
    assert report.files == {"config.json": "unverified", "model.safetensors": "passed"}
    assert (report.verdict, report.reason) == ("unverified", "no checksum is known for config.json")
    whole = HubDraft(draft.folder, {"model.safetensors": SUMS["model.safetensors"]})
    assert verdict(tmp_path, whole) == ("passed", "")


def test_another_file_than_the_pinned_one_ends_the_start(tmp_path: Path, hub: tuple[LoopbackHub, str]) -> None:
    variables = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_ENDPOINT": hub[1]}
    draft = hub_draft(PINNED, {"model.safetensors": "0" * 64}, variables, fetch=True)
    ((what, error),) = check_pins(request(tmp_path), (), draft)[1]
    assert (what, error.reason) == ("draft", TerminationReason.CHECKSUM_MISMATCH)
    assert "model.safetensors failed" in error.message
    assert verdict(tmp_path, draft, ("draft-sha256",)) == ("skipped", "left out by `--skip-check draft-sha256`")


def test_a_draft_that_cannot_be_fetched_ends_the_start(tmp_path: Path, hub: tuple[LoopbackHub, str]) -> None:
    hub[0].gated = True
    variables = {"XDG_CACHE_HOME": str(tmp_path), "HF_ENDPOINT": hub[1]}
    with pytest.raises(ServeError, match="must be fetched") as refused:
        hub_draft(PINNED, SUMS, variables, fetch=True)
    assert refused.value.reason is TerminationReason.DOWNLOAD_FAILED
    offline = hub_draft(PINNED, SUMS, {**variables, "HF_HUB_OFFLINE": "1"}, fetch=True)
    assert verdict(tmp_path, offline) == ("unverified", "it is not in the hub's cache yet")


@pytest.mark.parametrize(
    ("pinned", "sums", "reason"),
    [
        (None, SUMS, "the profile pins no revision of a repository"),
        (HubRevision(repo=REPO), SUMS, "the profile pins no revision of a repository"),
        (PINNED, {"config.json": "unknown"}, "the profile knows no checksum of its files"),
        (PINNED, {}, "the profile knows no checksum of its files"),
    ],
)
def test_what_cannot_be_compared_is_unverified_and_not_fetched(
    tmp_path: Path, hub: tuple[LoopbackHub, str], pinned: HubRevision | None, sums: dict[str, str], reason: str
) -> None:
    draft = hub_draft(pinned, sums, {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub[1]}, fetch=True)
    assert verdict(tmp_path, draft) == ("unverified", reason)
    assert hub[0].asked == 0
