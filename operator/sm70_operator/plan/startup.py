"""How far a revision's pods are: on a node, image there, model loaded, health answering; and if not, why not.

Everything is taken from pod state and from the termination message of `sm70-serve`, never from logs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sm70_operator.api.conditions import ConditionStatus, ConditionType, Finding, Reason, with_remedy
from sm70_operator.observe.facts import ContainerFacts, NodeFacts, PodFacts
from sm70_operator.observe.snapshot import NodeWords
from sm70_operator.plan.scheduling import explain_waiting, missing_volume
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.report import printable
from sm70_profiles.resolver import ResolvedGpus
from sm70_profiles.termination import Termination, TerminationKind, parse_termination

CRASHES_BEFORE_BLAME = 2
"""One unexplained end may be an accident, from which the restarted server recovers."""

_MODEL_ENDS: dict[str, Reason] = {
    TerminationReason.PATH_NOT_FOUND: Reason.PATH_NOT_FOUND,
    TerminationReason.PATH_UNREADABLE: Reason.PATH_UNREADABLE,
    TerminationReason.DRAFT_INCOMPATIBLE: Reason.DRAFT_INCOMPATIBLE,
    TerminationReason.CHECKSUM_MISMATCH: Reason.CHECKSUM_MISMATCH,
    TerminationReason.MODEL_INVALID: Reason.MODEL_INVALID,
}
_ENGINE_ENDS: dict[str, Reason] = {
    TerminationReason.REFUSED: Reason.REFUSED,
    TerminationReason.OUT_OF_MEMORY: Reason.OUT_OF_MEMORY,
    TerminationReason.SHARED_MEMORY: Reason.SHARED_MEMORY_TOO_SMALL,
    TerminationReason.ENGINE_UNSUPPORTED: Reason.ENGINE_UNSUPPORTED,
}
_PULL_PROBLEMS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
    | {"RegistryUnavailable", "SignatureValidationFailed"}
)
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
        return explain_waiting(pod, views.gpus, views.nodes, views.holders)
    if views.gpus is not None and views.gpus.count == 0:
        return Finding.true(Reason.NOT_REQUIRED, "No GPU is asked for.")
    return Finding.true(Reason.ALLOCATED, "Every replica holds its GPUs.")


def _model(pod: PodFacts, views: Views) -> Finding:
    if (problem := missing_volume(pod)) is not None and not pod.scheduled:
        return _false(Reason.VOLUME_NOT_FOUND, problem)
    container = pod.container
    if container is None:
        return Finding.unknown(message="The engine has not looked at the model yet.")
    if container.started:
        return Finding.true(Reason.PRESENT, "The engine has loaded the checkpoint.")
    words = views.words.get(pod.uid)
    if words is not None and words.reason == "FailedMount" and "hostPath type check failed" in words.message:
        return _false(Reason.PATH_NOT_FOUND, f"On node `{pod.node}`: {words.message}")
    last = _last_words(container)
    if last is not None and last.reason in _MODEL_ENDS:
        reason = _MODEL_ENDS[last.reason]
        return Finding.false(reason, _explained(last, reason))
    return Finding.unknown(message="The engine has not loaded the model yet.")


def _engine(pod: PodFacts, views: Views) -> Finding:
    container = pod.container
    if not pod.scheduled:
        return Finding.unknown(message="The pod has no node yet.")
    if container is not None and container.started:
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
    reason = container.waiting_reason if container is not None else ""
    message = container.waiting_message if container is not None else ""
    if reason in _PULL_PROBLEMS:
        words = _SOURCE_PORT.sub("->", _BACK_OFF.sub("", message)) or reason
        return _false(Reason.PULLING_IMAGE, f"Node `{pod.node}` cannot pull the image: {words}")
    if reason not in _CREATING:
        return _false(
            Reason.CONTAINER_REFUSED, f"Node `{pod.node}` cannot create the container: {reason}: {message or reason}"
        )
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
    last = _last_words(container)
    if end.reason == "OOMKilled":
        limit = f" of {pod.memory_limit}" if pod.memory_limit else ""
        return _false(
            Reason.OUT_OF_MEMORY,
            f"The server in `{pod.name}` was killed for its memory: it needs more than the limit{limit}.",
        )
    if last is not None and last.reason in _ENGINE_ENDS:
        reason = _ENGINE_ENDS[last.reason]
        return Finding.false(reason, _explained(last, reason))
    if last is not None and last.reason in _MODEL_ENDS:
        return Finding.false(
            Reason.CRASH_LOOPING, f"The server in `{pod.name}` ends with {last.reason}; see `ModelAvailable`."
        )
    again = container.restarts >= CRASHES_BEFORE_BLAME or container.waiting_reason == "CrashLoopBackOff"
    if container.running and not again:
        return None
    what = f"exit code {end.code}" + (f" ({end.reason})" if end.reason not in ("", "Error", "Completed") else "")
    if end.code == 137:
        what += ": killed from outside, by the liveness probe or for the node's memory"
    told = printable(last.message if last is not None else end.message, 600).strip()
    return _false(
        Reason.CRASH_LOOPING, f"The server in `{pod.name}` ended with {what}" + (f": {told}" if told else ".")
    )


def _last_words(container: ContainerFacts) -> Termination | None:
    """The termination message, unless it tells of an ordered end."""
    if container.exit is None:
        return None
    words = parse_termination(container.exit.message)
    return None if words is None or words.kind is TerminationKind.SHUTDOWN else words


def _explained(words: Termination, reason: Reason) -> str:
    found, remedy = printable(words.message, 1500).strip(), printable(words.remedy, 500).strip()
    return f"{_sentence(found)} {_sentence(remedy)}" if remedy else with_remedy(reason, _sentence(found))


def _false(reason: Reason, found: str) -> Finding:
    return Finding.false(reason, with_remedy(reason, _sentence(found)))


def _sentence(text: str) -> str:
    return text if text.endswith((".", "…")) else f"{text}."
