"""Whether a revision that was started proves itself: it starts, keeps moving, and runs its fast paths.

Failing is told from waiting: what a candidate cannot mend by trying again fails at once, what may pass fails when
nothing moves for the progress deadline, and what is not its fault (GPUs that somebody else holds) never does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from sm70_operator.api.conditions import ConditionStatus, ConditionType, Finding, Reason
from sm70_operator.api.types import Startup, StartupPhase
from sm70_operator.observe.facts import PodFacts
from sm70_operator.observe.snapshot import EngineAnswer
from sm70_profiles.spec import Acceleration, AccelerationPolicy

HOPELESS_SECONDS = 120
"""How long a node may fail to make a container before that counts: a registry or a volume may come back."""
RESTARTS_BEFORE_FAILURE = 2
"""A first end may have been an accident, or memory that its predecessor had not given back yet."""
PULL_PROBLEMS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
)

_AT_ONCE = frozenset(
    {
        Reason.REFUSED,
        Reason.ENGINE_UNSUPPORTED,
        Reason.SHARED_MEMORY_TOO_SMALL,
        Reason.PATH_NOT_FOUND,
        Reason.PATH_UNREADABLE,
        Reason.MODEL_INVALID,
        Reason.CHECKSUM_MISMATCH,
        Reason.DRAFT_INCOMPATIBLE,
        Reason.REPOSITORY_UNAVAILABLE,
        Reason.NO_KERNEL_IMAGE,
        Reason.DRIVER_TOO_OLD,
        Reason.GPU_MISMATCH,
        Reason.TOPOLOGY_UNSUITABLE,
        Reason.ROUTE_DISABLED,
        Reason.REPORT_MISMATCH,
    }
)
_AFTER_RESTARTS = frozenset(
    {Reason.OUT_OF_MEMORY, Reason.GPU_OUT_OF_MEMORY, Reason.NCCL_FAILURE, Reason.CRASH_LOOPING, Reason.PROBE_TIMEOUT}
    | {Reason.DISK_FULL, Reason.UNWRITABLE}
)
_AFTER_A_WHILE = frozenset(
    {Reason.CONTAINER_REFUSED, Reason.PODS_REFUSED, Reason.VOLUME_NOT_FOUND, Reason.CHECKPOINT_NOT_PULLED}
)
_NOT_ITS_FAULT = frozenset({Reason.WAITING_FOR_GPU, Reason.UNSCHEDULABLE, Reason.GPU_CONFLICT, Reason.DOWNLOADING})
_STARTS = (ConditionType.GPUS_ALLOCATED, ConditionType.MODEL_AVAILABLE, ConditionType.ENGINE_STARTED)
_ORDER = tuple(StartupPhase)


class TrialState(StrEnum):
    WAITING = "Waiting"
    """For a node with free GPUs: nothing of it runs."""
    STARTING = "Starting"
    FAILED = "Failed"
    READY = "Ready"
    """Every replica serves, and its acceleration satisfies the policy."""


@dataclass(frozen=True)
class Trial:
    state: TrialState
    reason: Reason = Reason.PENDING
    message: str = ""


def judge_trial(
    findings: Mapping[ConditionType, Finding],
    pods: Sequence[PodFacts],
    replicas: int,
    acceleration: Acceleration,
    stalled: str,
    now: datetime,
) -> Trial:
    """`findings` are those of the revision's own pods; `stalled` says for how long nothing moves, or nothing."""
    gates = [*_STARTS]
    if acceleration.policy is AccelerationPolicy.REQUIRE:
        gates.append(ConditionType.ACCELERATION_COMPLETE)
    found = [findings.get(gate, Finding.unknown()) for gate in gates]
    for finding in found:
        if finding.status is ConditionStatus.FALSE and _fails(finding.reason, pods, now):
            return Trial(TrialState.FAILED, finding.reason, finding.message)
    first = next((one for one in found if one.status is not ConditionStatus.TRUE), None)
    if first is None and len(pods) >= replicas and all(pod.ready for pod in pods):
        return Trial(TrialState.READY)
    first = first or Finding.false(Reason.NOT_READY, "A pod does not pass its readiness probe yet.")
    if first.reason in _NOT_ITS_FAULT:
        return Trial(TrialState.WAITING, first.reason, first.message)
    if stalled:
        return Trial(TrialState.FAILED, Reason.DEADLINE_EXCEEDED, f"{stalled} {first.message}".strip())
    return Trial(TrialState.STARTING, first.reason, first.message)


def _fails(reason: Reason, pods: Sequence[PodFacts], now: datetime) -> bool:
    if reason in _AT_ONCE or (reason is Reason.NOT_APPLICABLE):
        return True
    if reason in _AFTER_RESTARTS:
        return any(_restarts(pod) >= RESTARTS_BEFORE_FAILURE for pod in pods)
    old = [pod for pod in pods if now - pod.created >= timedelta(seconds=HOPELESS_SECONDS)]
    if reason is Reason.PULLING_IMAGE:
        return any(pod.container is not None and pod.container.waiting_reason in PULL_PROBLEMS for pod in old)
    return reason in _AFTER_A_WHILE and bool(old)


def _restarts(pod: PodFacts) -> int:
    """Of the server, or of the download before it."""
    boxes = [*pod.steps, *([pod.container] if pod.container is not None else [])]
    return max((box.restarts for box in boxes), default=0)


def startup_of(
    revision: str,
    pods: Sequence[PodFacts],
    answers: Mapping[str, EngineAnswer],
    earlier: Startup | None,
    now: datetime,
) -> Startup | None:
    """How far the slowest pod has come. A phase that was reached stays reached when a server starts anew: only what is
    new is progress.
    """
    if not pods:
        return None
    phase = min((_phase(pod, answers.get(pod.uid)) for pod in pods), key=_ORDER.index)
    estimate = _took(pods, answers) or (earlier.estimate_seconds if earlier is not None else None)
    known = earlier if earlier is not None and earlier.revision == revision else None
    since = known.since if known is not None else max(pod.unready_since or pod.created for pod in pods)
    if known is not None and known.phase is not phase:
        restarted = known.phase is not StartupPhase.SERVING and _ORDER.index(phase) < _ORDER.index(known.phase)
        phase, since = (known.phase, since) if restarted else (phase, now)
    startup = Startup(revision=revision, phase=phase, since=since, estimate_seconds=estimate)
    return _with_download(startup, pods, answers, known, now) if phase is StartupPhase.DOWNLOADING else startup


def _with_download(
    startup: Startup,
    pods: Sequence[PodFacts],
    answers: Mapping[str, EngineAnswer],
    known: Startup | None,
    now: datetime,
) -> Startup:
    """With the bytes of the replica that has the fewest. Less than before is no progress: a part that broke is lost."""
    told = [answers[pod.uid].done_bytes for pod in pods if pod.downloading and pod.uid in answers]
    done = min((one for one in told if one is not None), default=None)
    most = known.downloaded_bytes if known is not None else None
    if done is None or (most is not None and done <= most):
        done, at = most, known.downloaded_at if known is not None else None
    else:
        at = now
    return startup.model_copy(update={"downloaded_bytes": done, "downloaded_at": at})


def _took(pods: Sequence[PodFacts], answers: Mapping[str, EngineAnswer]) -> int | None:
    """How long the slowest server's start took, by its own word."""
    reports = [answers[pod.uid].report for pod in pods if pod.uid in answers]
    starts = [one.startup for one in reports if one is not None and one.startup is not None]
    return max((round(sum(one.seconds.values())) for one in starts), default=None)


def stalled(startup: Startup | None, pods: Sequence[PodFacts], deadline_seconds: int, now: datetime) -> str:
    """In words, that nothing has moved for the deadline; empty while something may still be expected."""
    if startup is None:
        return ""
    moved = max(startup.since, startup.downloaded_at or startup.since)
    if startup.phase is StartupPhase.SERVING:
        moved = max([moved, *(pod.unready_since for pod in pods if pod.unready_since is not None)])
    if now - moved < timedelta(seconds=deadline_seconds):
        return ""
    what = f"phase {startup.phase} was reached"
    if startup.downloaded_at is not None and startup.phase is StartupPhase.DOWNLOADING:
        what = "the download last went on"
    return f"Nothing has moved for {deadline_seconds} s since {what}."


def _phase(pod: PodFacts, answer: EngineAnswer | None) -> StartupPhase:
    container = pod.container
    if container is not None and container.started:
        return StartupPhase.SERVING
    if not pod.scheduled:
        return StartupPhase.SCHEDULING
    if pod.downloading:
        return StartupPhase.DOWNLOADING
    if container is None or (not container.running and container.exit is None):
        fetches = any(step.running or step.exit is not None for step in pod.steps)
        return StartupPhase.DOWNLOADING if fetches else StartupPhase.PULLING
    told = answer.phase if answer is not None else ""
    return StartupPhase(told) if told in _ORDER else StartupPhase.LOADING_WEIGHTS
