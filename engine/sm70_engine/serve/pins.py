"""Compares checkpoints with the checksums that the profile or the request pins, before anything is loaded.

Only files with a known checksum are read. A pin that is `unknown` is said to be `unverified`, never to have passed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path

from sm70_engine.serve.failure import ServeError
from sm70_engine.serve.hub_draft import HubDraft
from sm70_profiles.base import printable
from sm70_profiles.checkpoints import Verdict, overall, verify
from sm70_profiles.profile import UNKNOWN, Checkpoint
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.report import CheckpointReport
from sm70_profiles.resolver import ServeRequest

READERS = 4
SKIPPED = "skipped"


class SkippableCheck(StrEnum):
    """Checks that a user may skip, by name."""

    MODEL = "model-sha256"
    DRAFT = "draft-sha256"


def draft_sums(request: ServeRequest) -> dict[str, str]:
    """Checksums of the draft's files by name: the request's win over the profile's."""
    return {**_sums(request.profile.draft.checkpoint), **(request.draft_sha256 or {})}


def pins(
    request: ServeRequest, hub: HubDraft | None = None
) -> dict[str, tuple[Path | None, SkippableCheck, dict[str, str]]]:
    """Folder (None: not known), check and wanted checksums by file name, for `model` and `draft`.

    hub: the draft where it comes from a hub.
    """
    found: dict[str, tuple[Path | None, SkippableCheck, dict[str, str]]] = {
        "model": (Path(request.model_path), SkippableCheck.MODEL, _sums(request.profile.model_checkpoint))
    }
    if request.draft_path is not None:
        found["draft"] = (Path(request.draft_path), SkippableCheck.DRAFT, draft_sums(request))
    elif hub is not None:
        found["draft"] = (hub.folder, SkippableCheck.DRAFT, hub.wanted)
    return found


def check_pins(
    request: ServeRequest, skip: Collection[str] = (), hub: HubDraft | None = None
) -> tuple[tuple[CheckpointReport, ...], list[tuple[str, ServeError]]]:
    """What the report says of each checkpoint, and every mismatch with `model` or `draft`. hub: as for `pins`."""
    reports, errors = [], []
    for what, (folder, check, wanted) in pins(request, hub).items():
        if check in skip:
            reports.append(CheckpointReport(what=what, verdict=SKIPPED, reason=f"left out by `--skip-check {check}`"))
            continue
        if folder is None:
            reason = hub.reason if hub is not None else ""
            reports.append(CheckpointReport(what=what, verdict=Verdict.UNVERIFIED, reason=reason))
            continue
        verdicts = _verdicts(folder, wanted)
        wrong = [
            f"{name} {verdict}" for name, verdict in verdicts.items() if verdict in (Verdict.FAILED, Verdict.MISSING)
        ]
        if wrong:
            errors.append((what, _mismatch(what, check, wrong)))
        verdict = overall(verdicts)
        reason = _unverified(verdicts) if verdict is Verdict.UNVERIFIED else ""
        reports.append(CheckpointReport(what=what, verdict=verdict, files=_bounded(verdicts), reason=reason))
    return tuple(reports), errors


def _sums(checkpoint: Checkpoint | None) -> dict[str, str]:
    return dict(checkpoint.sha256) if checkpoint is not None else {}


def _verdicts(folder: Path, wanted: Mapping[str, str]) -> dict[str, Verdict]:
    there = [name for name in wanted if (folder / name).is_file()]
    known = [name for name in there if wanted[name] != UNKNOWN]
    with ThreadPoolExecutor(READERS) as pool:
        sums = dict(zip(known, pool.map(lambda name: _sha256(folder / name), known), strict=True))
    found = {name: sums.get(name, UNKNOWN) for name in there}
    # A file whose pin is unknown may have another name in this copy: that is for nobody to judge.
    pinned = {name: pin for name, pin in wanted.items() if pin != UNKNOWN or name in there}
    return verify(Checkpoint(sha256=pinned), found)


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return "unreadable"


def _unverified(verdicts: Mapping[str, Verdict]) -> str:
    open_ones = sorted(name for name, verdict in verdicts.items() if verdict is Verdict.UNVERIFIED)
    return f"no checksum is known for {printable(', '.join(open_ones), 300) or 'any of its files'}"


def _bounded(verdicts: Mapping[str, Verdict]) -> dict[str, str]:
    return {printable(name, 128): str(verdict) for name, verdict in list(verdicts.items())[:64]}


def _mismatch(what: str, check: SkippableCheck, wrong: list[str]) -> ServeError:
    return ServeError(
        TerminationReason.CHECKSUM_MISMATCH,
        f"the {what}'s files must have the pinned SHA-256; found {printable(', '.join(wrong), 600)}",
        f"Copy the {what} again, correct the pin, or skip the check with `--skip-check {check}`.",
    )
