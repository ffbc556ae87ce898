"""Why a revision's pods do not serve: one reason and one next step for everything that can go wrong on the way.

Everything is taken from pod and node state, from the words of the node, and from the termination messages of
`sm70-serve`, `sm70-fetch` and the preflight; never from logs. Each reason has a page in `docs/runbooks/`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sm70_operator.api.conditions import ConditionStatus, ConditionType, Finding, Reason, with_remedy
from sm70_operator.observe.facts import ContainerFacts, NodeFacts, PodFacts
from sm70_operator.observe.snapshot import NodeWords
from sm70_operator.plan.devices import device_problem
from sm70_operator.plan.scheduling import explain_waiting, missing_volume
from sm70_profiles.profile import Hardware
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.report import DeviceFacts, printable
from sm70_profiles.resolver import ResolvedGpus
from sm70_profiles.termination import FindingSeverity, Termination, TerminationKind, parse_termination

CRASHES_BEFORE_BLAME = 2
"""One unexplained end may be an accident, from which the restarted server recovers."""

_MODEL_ENDS: dict[TerminationReason, Reason] = {
    TerminationReason.PATH_NOT_FOUND: Reason.PATH_NOT_FOUND,
    TerminationReason.PATH_UNREADABLE: Reason.PATH_UNREADABLE,
    TerminationReason.DRAFT_INCOMPATIBLE: Reason.DRAFT_INCOMPATIBLE,
    TerminationReason.CHECKSUM_MISMATCH: Reason.CHECKSUM_MISMATCH,
    TerminationReason.MODEL_INVALID: Reason.MODEL_INVALID,
    TerminationReason.DOWNLOAD_FAILED: Reason.DOWNLOAD_FAILED,
    TerminationReason.REPOSITORY_NOT_FOUND: Reason.REPOSITORY_UNAVAILABLE,
    TerminationReason.ACCESS_DENIED: Reason.REPOSITORY_UNAVAILABLE,
    TerminationReason.CACHE_UNWRITABLE: Reason.UNWRITABLE,
}
_ENGINE_ENDS: dict[TerminationReason, Reason] = {
    TerminationReason.REFUSED: Reason.REFUSED,
    TerminationReason.OUT_OF_MEMORY: Reason.OUT_OF_MEMORY,
    TerminationReason.GPU_OUT_OF_MEMORY: Reason.GPU_OUT_OF_MEMORY,
    TerminationReason.SHARED_MEMORY: Reason.SHARED_MEMORY_TOO_SMALL,
    TerminationReason.NO_KERNEL_IMAGE: Reason.NO_KERNEL_IMAGE,
    TerminationReason.DRIVER_TOO_OLD: Reason.DRIVER_TOO_OLD,
    TerminationReason.NCCL_FAILURE: Reason.NCCL_FAILURE,
    TerminationReason.ENGINE_UNSUPPORTED: Reason.ENGINE_UNSUPPORTED,
    TerminationReason.DISK_FULL: Reason.DISK_FULL,
}
_ELSEWHERE: dict[TerminationReason, tuple[ConditionType, Reason]] = {
    TerminationReason.ACCELERATION_REFUSED: (ConditionType.ACCELERATION_COMPLETE, Reason.ROUTE_DISABLED),
    TerminationReason.ENGINE_DIED: (ConditionType.ENGINE_STARTED, Reason.CRASH_LOOPING),
    TerminationReason.UNKNOWN: (ConditionType.ENGINE_STARTED, Reason.CRASH_LOOPING),
}
_PULL_PROBLEMS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
    | {"RegistryUnavailable", "SignatureValidationFailed"}
)
UNMOUNTED = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})
"""Reasons of a node's words about a volume."""
_CREATING = frozenset({"", "ContainerCreating", "PodInitializing"})
_SOURCE_PORT = re.compile(r":\d{4,5}->")
"""Differs at every try, and would make every try a change of the status."""
_BACK_OFF = re.compile(r'^Back-off pulling image "[^"]*": [A-Za-z]+: ')


@dataclass(frozen=True)
class Views:
    """What is known beside the pods themselves."""

    replicas: int
    gpus: ResolvedGpus | None
    nodes: Sequence[NodeFacts] | None
    holders: Sequence[PodFacts]
    words: Mapping[str, NodeWords]
    pods_refused: str
    """Why the Deployment cannot create pods; empty when it can."""
    hardware: Hardware | None = None
    """What the profile demands of the GPUs; None where it is not known."""
    devices: Mapping[str, DeviceFacts] = field(default_factory=dict)
    """What the running engines say of their GPUs, by pod uid."""
    progress: Mapping[str, str] = field(default_factory=dict)
    """How far downloads are, by pod uid."""
    conflict: str = ""
    """The service that pins the same GPU, in words; empty if none does."""


def judge_startup(pods: Sequence[PodFacts], views: Views) -> dict[ConditionType, Finding]:
    """Findings for `GPUsAllocated`, `ModelAvailable` and `EngineStarted` over all replicas."""
    missing = _missing(len(pods), views)
    return {
        ConditionType.GPUS_ALLOCATED: worst(pods, lambda pod: _gpus(pod, views), missing),
        ConditionType.MODEL_AVAILABLE: worst(pods, lambda pod: _model(pod, views), missing),
        ConditionType.ENGINE_STARTED: worst(pods, lambda pod: _engine(pod, views), _refused(views) or missing),
    }


def worst(pods: Iterable[PodFacts], judge: Callable[[PodFacts], Finding], other: Finding | None = None) -> Finding:
    """The finding that stands for all pods: a False before an Unknown before a True, then by the pod's name."""
    order = (ConditionStatus.FALSE, ConditionStatus.UNKNOWN, ConditionStatus.TRUE)
    found = [judge(pod) for pod in sorted(pods, key=lambda pod: pod.name)]
    found += [other] if other is not None else []
    return min(found, key=lambda finding: order.index(finding.status), default=Finding.unknown())


@dataclass(frozen=True)
class PreflightResult:
    """What a preflight says. `finding` is for the condition `type`; None when nothing is wrong."""

    passed: bool
    type: ConditionType | None = None
    finding: Finding | None = None
    warnings: tuple[str, ...] = ()


def judge_preflight(pods: Sequence[PodFacts]) -> PreflightResult | None:
    """The result of an ended preflight Job from its pods; None when none of them left a message.

    No message is no refusal: the Job may have lost its node or its time, and the start itself will tell.
    """
    for pod in sorted(pods, key=lambda pod: (pod.created, pod.name), reverse=True):
        for step in pod.steps:
            if (words := _last_words(step)) is not None:
                return _refused_by(words)
        words = _last_words(pod.container) if pod.container is not None else None
        if words is None:
            continue
        if words.kind is TerminationKind.PREFLIGHT and words.reason is TerminationReason.PASSED:
            warnings = [one for one in words.findings if one.severity is FindingSeverity.WARNING]
            return PreflightResult(passed=True, warnings=tuple(_told(one.message, one.remedy) for one in warnings))
        return _refused_by(words)
    return None


def absent_folder(words: NodeWords) -> bool:
    """Whether the node did not find a `hostPath`."""
    return words.reason == "FailedMount" and "hostPath type check failed" in words.message


def preflight_obstacle(pods: Sequence[PodFacts], words: Mapping[str, NodeWords]) -> str:
    """Why a preflight's pod can never start beside the server that serves; empty if nothing speaks against it.

    Modes of a user's claims are not watched, so a volume that cannot be mounted twice shows when it is tried.
    """
    for pod in pods:
        if not pod.scheduled and "ReadWriteOncePod" in pod.scheduling_message:
            return "A claim of the checkpoints is ReadWriteOncePod: it cannot be mounted beside the server that has it."
        if not pod.scheduled and (problem := missing_volume(pod)) is not None and "not bound" in problem:
            return "A claim of the checkpoints is not bound yet: the server's own pod has to be the first to mount it."
        told = words.get(pod.uid)
        if told is not None and "Multi-Attach" in told.message:
            return "A volume of the checkpoints is attached to another node and cannot be attached twice."
    return ""


def _refused_by(words: Termination) -> PreflightResult:
    kind, reason = condition_of(words.reason)
    errors = [one for one in words.findings if one.severity is FindingSeverity.ERROR]
    told = [_told(one.message, one.remedy) for one in errors[:8]] or [_explained(words, reason)]
    return PreflightResult(passed=False, type=kind, finding=Finding.false(reason, " ".join(told)))


def condition_of(reason: TerminationReason) -> tuple[ConditionType, Reason]:
    """The condition and the reason that an end is told as."""
    if reason in _MODEL_ENDS:
        return ConditionType.MODEL_AVAILABLE, _MODEL_ENDS[reason]
    if reason in _ENGINE_ENDS:
        return ConditionType.ENGINE_STARTED, _ENGINE_ENDS[reason]
    return _ELSEWHERE.get(reason, (ConditionType.ENGINE_STARTED, Reason.CRASH_LOOPING))


def _missing(there: int, views: Views) -> Finding | None:
    if there >= views.replicas:
        return None
    return Finding.unknown(message=f"{there} of {views.replicas} pods exist.")


def _refused(views: Views) -> Finding | None:
    if not views.pods_refused:
        return None
    return _false(Reason.PODS_REFUSED, f"The pods are not admitted: {printable(views.pods_refused, 700)}")


def _gpus(pod: PodFacts, views: Views) -> Finding:
    if not pod.scheduled:
        if views.conflict:
            return _false(Reason.GPU_CONFLICT, views.conflict)
        return explain_waiting(pod, views.gpus, views.nodes, views.holders)
    if views.gpus is not None and views.gpus.count == 0:
        return Finding.true(Reason.NOT_REQUIRED, "No GPU is asked for.")
    if (held := _memory_held(pod)) is not None:
        return held
    device = views.devices.get(pod.uid)
    if device is not None and views.gpus is not None:
        problem = device_problem(device, views.gpus, views.hardware)
        if problem is not None:
            return _false(problem[0], f"The server in `{pod.name}` on node `{pod.node}` reports {problem[1]}")
    also = f" {views.conflict}" if views.conflict else ""
    return Finding.true(Reason.ALLOCATED, f"Every replica holds its GPUs.{also}")


def _memory_held(pod: PodFacts) -> Finding | None:
    """The first ends for a GPU's memory: a driver gives it back some time after the earlier server's pod is gone."""
    container = pod.container
    if container is None or container.started or container.restarts >= CRASHES_BEFORE_BLAME:
        return None
    last = _last_words(container)
    if last is None or last.reason is not TerminationReason.GPU_OUT_OF_MEMORY:
        return None
    found = f"The server in `{pod.name}` on node `{pod.node}` did not find its GPUs' memory free, and tries again"
    return _false(Reason.MEMORY_NOT_RELEASED, found)


def _model(pod: PodFacts, views: Views) -> Finding:
    if (problem := missing_volume(pod)) is not None and not pod.scheduled:
        return _false(Reason.VOLUME_NOT_FOUND, problem)
    container = pod.container
    if container is not None and container.started:
        return Finding.true(Reason.PRESENT, "The engine has loaded the checkpoint.")
    if (unpulled := unpulled_checkpoint(pod)) is not None:
        return _false(Reason.CHECKPOINT_NOT_PULLED, unpulled)
    words = views.words.get(pod.uid)
    if words is not None and absent_folder(words):
        return _false(Reason.PATH_NOT_FOUND, f"On node `{pod.node}`: {words.message}")
    if (download := _download(pod, views.progress.get(pod.uid, ""))) is not None:
        return download
    if container is None:
        return Finding.unknown(message="The engine has not looked at the model yet.")
    last = _last_words(container)
    if last is not None and last.reason in _MODEL_ENDS:
        reason = _MODEL_ENDS[last.reason]
        return Finding.false(reason, _explained(last, reason))
    return Finding.unknown(message="The engine has not loaded the model yet.")


def unpulled_checkpoint(pod: PodFacts) -> str | None:
    """In words, that the image of a checkpoint cannot be pulled: a node tells it as if it were the container's own."""
    boxes = [*pod.steps, *([pod.container] if pod.container is not None else [])]
    for box in boxes:
        if box.waiting_reason not in _PULL_PROBLEMS:
            continue
        for volume, reference in pod.checkpoint_images.items():
            if re.search(f'["/]{re.escape(reference)}(:latest)?"', box.waiting_message):
                what = f"the image `{reference}` of the {volume}"
                return f"Node `{pod.node}` cannot pull {what}: {_pull_words(box)}"
    return None


def _pull_words(box: ContainerFacts) -> str:
    """The runtime's words, the same at every try."""
    return _SOURCE_PORT.sub("->", _BACK_OFF.sub("", box.waiting_message)) or box.waiting_reason


def _download(pod: PodFacts, progress: str) -> Finding | None:
    """How the download stands; None where none is needed, or all is there."""
    for step in pod.steps:
        what = step.name.removeprefix("fetch-")
        if step.exit is not None and step.exit.code == 0 and not step.running:
            continue
        last = _last_words(step)
        if step.running and (progress or last is None):
            tries = f", try {step.restarts + 1}" if step.restarts else ""
            far = f": {progress}" if progress else ""
            before = f" The try before ended: {_sentence(printable(last.message, 300).strip())}" if last else ""
            text = f"The {what} is being downloaded by `{step.name}` of `{pod.name}`{tries}{far}.{before}"
            return Finding.false(Reason.DOWNLOADING, text)
        if last is not None:
            # Also while it tries again and has not got any further than the try before.
            reason = _MODEL_ENDS.get(last.reason) or _ENGINE_ENDS.get(last.reason) or Reason.DOWNLOAD_FAILED
            return Finding.false(reason, f"The download of the {what}: {_explained(last, reason)}")
        if step.exit is not None and not step.running:
            killed = " (killed for its memory)" if step.exit.reason == "OOMKilled" else ""
            found = f"The download of the {what} by `{step.name}` of `{pod.name}` ended with exit code"
            return _false(Reason.DOWNLOAD_FAILED, f"{found} {step.exit.code}{killed}")
    return None


def _engine(pod: PodFacts, views: Views) -> Finding:
    container = pod.container
    if not pod.scheduled:
        return Finding.unknown(message="The pod has no node yet.")
    if container is not None and container.started:
        if container.ready and not pod.ready:
            # The kubelet changes both at once; only the node controller changes the pod's condition alone.
            found = f"Node `{pod.node}` of pod `{pod.name}` does not report any more."
            return Finding.unknown(Reason.NODE_NOT_READY, with_remedy(Reason.NODE_NOT_READY, found))
        return Finding.true(Reason.HEALTHY, "`GET /health` answers on every replica.")
    if container is None or (not container.running and container.exit is None):
        return _not_created(pod, container, views)
    if container.exit is not None:
        failure = _failure(pod, container)
        if failure is not None:
            return failure
    return Finding.false(
        Reason.LOADING, f"Pod `{pod.name}` runs; the server loads and does not answer `GET /health` yet."
    )


def _not_created(pod: PodFacts, container: ContainerFacts | None, views: Views) -> Finding:
    # While an init container cannot be made, its own words count: the engine's only say that it waits.
    step = next((one for one in pod.steps if one.waiting_reason and one.waiting_reason not in _CREATING), None)
    stuck = step if step is not None and step.waiting_reason != "CrashLoopBackOff" else container
    reason = stuck.waiting_reason if stuck is not None else ""
    message = stuck.waiting_message if stuck is not None else ""
    if unpulled_checkpoint(pod) is not None:
        return Finding.unknown(message="The server starts when its checkpoints are there; see `ModelAvailable`.")
    if stuck is not None and reason in _PULL_PROBLEMS:
        return _false(Reason.PULLING_IMAGE, f"Node `{pod.node}` cannot pull the image: {_pull_words(stuck)}")
    if reason not in _CREATING:
        return _false(
            Reason.CONTAINER_REFUSED, f"Node `{pod.node}` cannot create the container: {reason}: {message or reason}"
        )
    if any(one.running or one.exit is not None for one in pod.steps):
        return Finding.unknown(message="The server starts when its checkpoints are there; see `ModelAvailable`.")
    told = views.words.get(pod.uid)
    if told is not None and told.reason.startswith("Failed"):
        return _false(Reason.CONTAINER_REFUSED, f"Node `{pod.node}` says {told.reason}: {told.message}")
    if told is not None and told.reason == "Pulling":
        return Finding.false(Reason.PULLING_IMAGE, f"Node `{pod.node}` pulls the image.")
    return Finding.false(Reason.CONTAINER_CREATING, f"Node `{pod.node}` prepares the container of `{pod.name}`.")


def _failure(pod: PodFacts, container: ContainerFacts) -> Finding | None:
    """Why the server ended, if its end is to be told; None while a restarted server may yet recover."""
    end = container.exit
    if end is None:
        return None
    if end.reason == "OOMKilled":
        limit = f" of {pod.memory_limit}" if pod.memory_limit else ""
        return _false(
            Reason.OUT_OF_MEMORY,
            f"The server in `{pod.name}` was killed for its memory: it needs more than the limit{limit}.",
        )
    last = _last_words(container)
    if last is not None and last.reason in _ENGINE_ENDS:
        reason = _ENGINE_ENDS[last.reason]
        return Finding.false(reason, _explained(last, reason, pod.node if reason is Reason.DRIVER_TOO_OLD else ""))
    if last is not None and last.reason in _MODEL_ENDS:
        return Finding.false(
            Reason.CRASH_LOOPING, f"The server in `{pod.name}` ends with {last.reason}; see `ModelAvailable`."
        )
    again = container.restarts >= CRASHES_BEFORE_BLAME or container.waiting_reason == "CrashLoopBackOff"
    if container.running and not again:
        return None
    if not pod.deleting and _was_stopped(container):
        found = f"The server in `{pod.name}` was ended by the kubelet {container.restarts} times, and not by itself"
        return _false(Reason.PROBE_TIMEOUT, f"{found}: its startup or liveness probe was not answered in time.")
    what = f"exit code {end.code}" + (f" ({end.reason})" if end.reason not in ("", "Error", "Completed") else "")
    if end.code == 137:
        what += ": killed from outside, by the liveness probe or for the node's memory"
    told = printable(last.message if last is not None else end.message, 600).strip()
    return _false(
        Reason.CRASH_LOOPING, f"The server in `{pod.name}` ended with {what}" + (f": {told}" if told else ".")
    )


def _was_stopped(container: ContainerFacts) -> bool:
    """The server was asked to end, by its own last words. In a pod that stays nobody but the kubelet asks."""
    words = parse_termination(container.exit.message) if container.exit is not None else None
    return words is not None and words.kind is TerminationKind.SHUTDOWN


def _last_words(container: ContainerFacts) -> Termination | None:
    """The termination message, unless it tells of an ordered end."""
    if container.exit is None:
        return None
    words = parse_termination(container.exit.message)
    return None if words is None or words.kind is TerminationKind.SHUTDOWN else words


def _explained(words: Termination, reason: Reason, node: str = "") -> str:
    found, remedy = printable(words.message, 1500).strip(), printable(words.remedy, 500).strip()
    found = f"On node `{node}`: {found}" if node else found
    return _told(found, remedy) if remedy else with_remedy(reason, _sentence(found))


def _told(message: str, remedy: str) -> str:
    found = _sentence(printable(message, 1500).strip())
    return f"{found} {_sentence(printable(remedy, 500).strip())}" if remedy else found


def _false(reason: Reason, found: str) -> Finding:
    return Finding.false(reason, with_remedy(reason, _sentence(found)))


def _sentence(text: str) -> str:
    return text if text.endswith((".", "…")) else f"{text}."
