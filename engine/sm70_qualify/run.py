"""A run of a suite: which gates concern the server, what they are held to, and a report in the end, come what may."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version

import httpx

from sm70_profiles.catalog import load_profile, profile_names
from sm70_profiles.profile import Profile
from sm70_profiles.qualification import (
    AnyCheck,
    Gate,
    Metric,
    Performance,
    PrefixHit,
    QualificationReport,
    RightAnswers,
    Skipped,
    Suite,
    ToolUse,
    Verdict,
    combined,
)
from sm70_profiles.report import AccelerationReport, ReportError
from sm70_qualify.asking import Asker
from sm70_qualify.client import ASKING_ERRORS, Endpoint, EndpointError
from sm70_qualify.gates import Circumstances, judge

PROFILE_NAME = re.compile("[a-z0-9]([a-z0-9_-]*[a-z0-9])?")


class Interrupted(BaseException):
    """The run was asked to stop."""


@dataclass(frozen=True)
class Subject:
    """What is known of the server before it is judged."""

    profile: Profile | None = None
    """Given by the user, else the built-in one that the server's own report names."""
    report: AccelerationReport | None = None
    max_model_len: int | None = None

    @property
    def profile_name(self) -> str | None:
        if self.profile is not None:
            return self.profile.name
        if self.report is None or len(self.report.profile.name) > 63:
            return None
        return self.report.profile.name if PROFILE_NAME.fullmatch(self.report.profile.name) else None

    @property
    def profile_hash(self) -> str | None:
        found = self.report.profile.hash if self.report is not None else ""
        return found if re.fullmatch("[0-9a-f]{1,64}", found) else None

    def switched_off(self, *options: str) -> str | None:
        """The option by which the server says that something is off."""
        if self.report is None:
            return None
        return next((option for option in options if option in self.report.effective.argv), None)


@dataclass(frozen=True)
class Watcher:
    """What is told while a run goes on."""

    begins: Callable[[AnyCheck, int, int], None] = lambda _check, _number, _of: None
    judged: Callable[[Gate], None] = lambda _gate: None


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def tool_version() -> str:
    try:
        return version("sm70")
    except PackageNotFoundError:
        return "0"


def await_endpoint(endpoint: Endpoint, seconds: float) -> None:
    """Waits until the endpoint answers at all, or the time is up, which the next question will tell."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            endpoint.models()
            return
        except EndpointError as error:
            if error.status not in (502, 503, 504):
                return
        except httpx.HTTPError:
            pass
        time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))


def survey(endpoint: Endpoint, profile: Profile | None) -> Subject:
    """Asks what the server says of itself. A server of another make says nothing, which is no error.

    Raises one of ASKING_ERRORS when the endpoint cannot be asked for its models, or does not serve the one wanted.
    """
    served = endpoint.models()
    if endpoint.model not in served:
        raise EndpointError(f"the endpoint must serve `{endpoint.model}`; it serves {', '.join(served) or 'nothing'}")
    try:
        report: AccelerationReport | None = endpoint.acceleration()
    except (*ASKING_ERRORS, ReportError):
        report = None
    if profile is None and report is not None and report.profile.name in profile_names():
        profile = load_profile(report.profile.name)
    return Subject(profile=profile, report=report, max_model_len=served[endpoint.model])


def irrelevant(check: AnyCheck, subject: Subject) -> str | None:
    """Why a gate is not asked of this server; None when it is."""
    name = subject.profile_name
    if check.profiles and (name is None or not any(fnmatchcase(name, pattern) for pattern in check.profiles)):
        return f"asked of the profiles {', '.join(check.profiles)} only; this is {name or 'unknown'}"
    if isinstance(check, PrefixHit) and (option := subject.switched_off("--no-enable-prefix-caching")):
        return f"the server runs with {option}"
    tools = isinstance(check, ToolUse) or (isinstance(check, RightAnswers) and any(q.tool for q in check.questions))
    if tools and subject.report is not None and "--enable-auto-tool-choice" not in subject.report.effective.argv:
        return "the server runs without --enable-auto-tool-choice"
    return None


def floors(suite: Suite, profile: Profile | None, given: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Thresholds of performance gates that are not the suite's own, and whose they are, by gate."""
    found: dict[str, str] = {}
    source: dict[str, str] = {}
    for check in suite.gates:
        if not isinstance(check, Performance):
            continue
        if (of_profile := _of_profile(profile, check.metric)) is not None:
            found[check.name], source[check.name] = of_profile, "the profile"
        if check.name in given:
            found[check.name], source[check.name] = given[check.name], "the command line"
    return found, source


def _of_profile(profile: Profile | None, metric: Metric) -> str | None:
    if profile is None or profile.floors is None:
        return None
    match metric:
        case Metric.PREFILL_RATE:
            return profile.floors.prefill_rate
        case Metric.DECODE_RATE:
            return profile.floors.decode_rate
        case Metric.FIRST_TOKEN:
            return profile.floors.first_token


def run(
    suite: Suite,
    asker: Asker,
    subject: Subject,
    *,
    thresholds: Mapping[str, str] | None = None,
    watcher: Watcher = Watcher(),
) -> tuple[QualificationReport, bool]:
    """Judges a server by a suite: the report, and whether the run was interrupted, which makes what is left errors."""
    started = now()
    found, source = floors(suite, subject.profile, thresholds or {})
    about = Circumstances(asker, floors=found, floor_source=source, max_model_len=subject.max_model_len)
    asked: list[AnyCheck] = []
    skipped: list[Skipped] = []
    for check in suite.gates:
        if because := irrelevant(check, subject):
            skipped.append(Skipped(name=check.name, because=because))
        else:
            asked.append(check)
    gates: list[Gate] = []
    interrupted = False
    try:
        for number, check in enumerate(asked, start=1):
            watcher.begins(check, number, len(asked))
            gate = judge(check, about)
            gates.append(gate)
            watcher.judged(gate)
    except (Interrupted, KeyboardInterrupt):
        interrupted = True
        gates.extend(
            Gate(name=check.name, verdict=Verdict.ERROR, message="the run was stopped before")
            for check in asked[len(gates) :]
        )
    return _report(suite, subject, asker, started, tuple(gates), tuple(skipped)), interrupted


def _report(
    suite: Suite,
    subject: Subject,
    asker: Asker,
    started: str,
    gates: tuple[Gate, ...],
    skipped: tuple[Skipped, ...],
) -> QualificationReport:
    verdict = combined(gate.verdict for gate in gates)
    decisive = next((gate for gate in gates if gate.verdict is verdict and verdict is not Verdict.PASSED), None)
    message = f"{decisive.name}: {decisive.message or decisive.verdict}" if decisive else ""
    return QualificationReport(
        schema_version=1,
        suite=suite.reference,
        tool_version=tool_version(),
        started_at=started,
        finished_at=now(),
        verdict=verdict,
        message=message if gates else "no gate of the suite concerns this server",
        profile=subject.profile_name,
        profile_hash=subject.profile_hash,
        gates=gates,
        skipped=skipped,
        raw_digest=asker.raw_digest,
    )


def unreachable(suite: Suite, message: str, started: str, profile: str | None, raw_digest: str) -> QualificationReport:
    """The report of a run whose server could not even be asked for its models."""
    return QualificationReport(
        schema_version=1,
        suite=suite.reference,
        tool_version=tool_version(),
        started_at=started,
        finished_at=now(),
        verdict=Verdict.ERROR,
        message=message,
        profile=profile,
        raw_digest=raw_digest,
    )
