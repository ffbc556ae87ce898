"""Ends a strict start from within a process of the server, and leaves the reason for `sm70-serve`."""

from __future__ import annotations

from collections.abc import Iterable

from sm70_engine.acceleration.strict import StrictStartError, refuse_unless_complete
from sm70_engine.session import Session, SessionFolder
from sm70_profiles.report import PathReport


def enforce(session: Session, folder: SessionFolder, paths: Iterable[PathReport]) -> None:
    """Raises StrictStartError when the start is strict and an expected path is not enabled."""
    if not session.strict:
        return
    try:
        refuse_unless_complete(paths, session.request.acceleration.allow_disabled)
    except StrictStartError as error:
        folder.refuse(error.refusal)
        raise
