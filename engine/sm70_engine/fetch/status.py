"""Tells how far a download is to whoever asks on `SM70_STATUS_PORT`, in the form of a start of `sm70-serve`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime

from sm70_engine.fetch.fetching import Progress, Tell
from sm70_engine.serve.status import telling
from sm70_profiles.report import StartupPhase, StartupReport


@contextmanager
def told_to_askers(environment: Mapping[str, str], tell: Tell) -> Iterator[Tell]:
    """The same `tell`, which besides keeps the newest progress for those who ask. Raises ServeError for a bad port."""
    since = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    newest: list[Progress] = []

    def keep(progress: Progress) -> None:
        newest[:] = [progress]
        tell(progress)

    def report() -> StartupReport:
        progress = newest[0] if newest else None
        return StartupReport(
            phase=StartupPhase.DOWNLOADING,
            since=since,
            done_bytes=None if progress is None else progress.bytes,
            total_bytes=None if progress is None else progress.total_bytes,
        )

    with telling(environment, report):
        yield keep
