"""The rollout: which revisions are to run, which one gets the traffic, and why. Pure: from what the world shows.

Nothing is remembered from one look to the next but what the cluster holds: the public Service's selector (who has the
traffic), the annotations of ControllerRevisions (who proved good, who was rejected), and what runs. So a look that is
repeated, skipped or made by another process comes to the same decision.

    spec changes ── refused ────────────────────────────▶ the revision with the traffic keeps it
         │
     preflight ──── fails ──────────────────────────────▶ rejected, nothing was touched
         │
     evidence (when: Before and none) ──────────────────▶ judged beside the old one, or waited for
         │
     announced ──▶ Surge: started beside │ InPlace: drained, stopped, and only then started
         │
      started ───── fails ──────────┐
     accelerated ── does not ───────┤
     qualified ──── fails ──────────┼──▶ rejected: stopped, recorded; the last good revision returns
         │                          │
     promoted ──▶ bake ── fallback ─┘
         │
       good
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum

from sm70_operator.api.conditions import Reason
from sm70_operator.api.types import QualificationTime, RolloutStatus, RolloutStrategy
from sm70_operator.observe.revisions import Rejection
from sm70_operator.plan.evidence import EvidenceView, Standing
from sm70_operator.plan.fleet import Fleet, base_of, fallback_of
from sm70_operator.plan.intent import Rejected, Target
from sm70_operator.plan.strategy import Choice
from sm70_operator.plan.trial import Trial, TrialState
from sm70_profiles.qualification import Verdict

_NO_ROOM = frozenset({Reason.WAITING_FOR_GPU, Reason.UNSCHEDULABLE, Reason.GPU_CONFLICT})

FREE_SECONDS = 30.0
"""How often it is looked whether a set of GPUs has become free: other services' pods wake nobody else."""
_JUDGED = frozenset({Reason.GATE_FAILED, Reason.INCONCLUSIVE, Reason.RUN_ERROR})


class Step(StrEnum):
    """Where a service stands."""

    IDLE = "Idle"
    """Nothing runs, and nothing may."""
    SETTLED = "Settled"
    BAKING = "Baking"
    PAUSED = "Paused"
    PREFLIGHT = "Preflight"
    WAITING = "Waiting"
    """For evidence, or for GPUs without which the change would be an outage for nothing."""
    ANNOUNCING = "Announcing"
    DRAINING = "Draining"
    STARTING = "Starting"
    QUALIFYING = "Qualifying"
    HELD = "Held"
    PROMOTING = "Promoting"
    ROLLING_BACK = "RollingBack"
    ROLLED_BACK = "RolledBack"


class CheckState(StrEnum):
    """Of the preflight."""

    PASSED = "Passed"
    """Or not needed, or not possible: `because` says which."""
    MISSING = "Missing"
    RUNNING = "Running"
    FAILED = "Failed"


@dataclass(frozen=True)
class Check:
    state: CheckState = CheckState.PASSED
    because: str = ""
    alone: str = ""
    """Why the revision's pods cannot run beside those that serve; empty where nothing is known against it."""


@dataclass(frozen=True)
class Question:
    """Everything that decides, about the target and what stands beside it."""

    fleet: Fleet
    intent: Target | Rejected
    trial: Trial
    """Of the target."""
    returned: bool
    """The revision that would serve without the target is ready."""
    evidence: EvidenceView
    preflight: Check
    announced: RolloutStatus | None
    choice: Choice | None
    """None: nodes were not looked at yet."""
    promoted_at: datetime | None
    fallback_percent: int | None
    """Share of the target's dispatches on fallback routes lately; None: there was no traffic."""
    now: datetime
    last_start_seconds: int | None = None


@dataclass(frozen=True)
class Decision:
    """What is to be. Revisions that are not in `run` stop; one in it starts when nothing outside of it is left."""

    run: tuple[str, ...]
    traffic: str | None
    step: Step
    because: str = ""
    reason: Reason = Reason.PENDING
    """Of a step that waits or went back."""
    candidate: str | None = None
    """The revision under judgement, which the candidate Service reaches."""
    rollout: RolloutStatus | None = None
    reject: tuple[str, Rejection] | None = None
    proven: str | None = None
    """The revision whose bake time ended well, to be recorded."""
    judge: bool = False
    """The qualification of the candidate is to be run."""
    check: bool = False
    """The preflight of the target is to be run."""
    needs_nodes: bool = False
    wake_seconds: float | None = None


def decide(question: Question) -> Decision:
    """The present decision."""
    intent = question.intent
    if isinstance(intent, Rejected):
        return _keep(question.fleet)
    rejection = question.fleet[intent.name].rejection
    if rejection is not None and _holds(rejection, intent, question.evidence):
        return _return(question, intent, rejection)
    if intent.spec.replicas == 0:
        # Without a pod nothing can be proven, so nothing is promoted either.
        return Decision(run=(), traffic=question.fleet.active, step=Step.SETTLED)
    if question.fleet.active == intent.name:
        return _steady(question, intent)
    return _change(question, intent)


def _holds(rejection: Rejection, target: Target, evidence: EvidenceView) -> bool:
    """It is not tried again for this spec. A judge's No holds as long as its evidence: who deletes that asks anew."""
    if rejection.spec != target.attempt:
        return False
    return rejection.reason not in _JUDGED or evidence.standing in (Standing.FAILED, Standing.UNDECIDED)


def _keep(fleet: Fleet) -> Decision:
    base = base_of(fleet)
    if base is None:
        # What may run is not known, so what does run is left as it is; it gets no traffic.
        running = tuple(name for name, member in fleet.members.items() if member.asks)
        return Decision(run=running, traffic=fleet.active, step=Step.IDLE)
    return Decision(run=(base,), traffic=base, step=Step.SETTLED)


def _return(question: Question, target: Target, rejection: Rejection) -> Decision:
    fallback = fallback_of(question.fleet, target.name)
    why = f"Revision {target.name} was rejected: {rejection.message}"
    reason = Reason(rejection.reason) if rejection.reason in set(Reason) else Reason.PENDING
    if fallback is None:
        return Decision(run=(), traffic=None, step=Step.ROLLED_BACK, because=why, reason=reason)
    step = Step.ROLLED_BACK if question.returned else Step.ROLLING_BACK
    return Decision(run=(fallback,), traffic=fallback, step=step, because=why, reason=reason)


def _steady(question: Question, target: Target) -> Decision:
    """The target has the traffic: it is watched until its bake time ends."""
    fleet, name = question.fleet, target.name
    fallback, left = fallback_of(fleet, name), _bake_left(question, target)
    ready = question.trial.state is TrialState.READY
    judge = ready and question.evidence.standing in (Standing.MISSING, Standing.STALE, Standing.RUNNING)
    here = Decision(run=(name,), traffic=name, step=Step.SETTLED, candidate=name if judge else None, judge=judge)
    if _is_good(question, name):
        return here
    if fallback is not None:
        if (failure := _bad_bake(question, target)) is not None:
            return _reject(question, target, here, *failure)
        surged = fleet[fallback].asks and target.spec.rollout.strategy is not RolloutStrategy.IN_PLACE
        if surged and left > timedelta(0):
            here = replace(here, run=(fallback, name))  # as long as it may be needed, it is kept beside
    if left > timedelta(0):
        text = f"Revision {name} has the traffic and is watched until {question.now + left:%H:%M:%S} UTC."
        return replace(here, step=Step.BAKING, because=text, wake_seconds=left.total_seconds() + 1)
    return replace(here, proven=name if ready else None)


def _is_good(question: Question, name: str) -> bool:
    """Its bake time has ended well since it got the traffic."""
    record = question.fleet[name].record
    if record is None or record.good_since is None:
        return False
    return question.promoted_at is None or record.good_since >= question.promoted_at


def _bake_left(question: Question, target: Target) -> timedelta:
    if question.promoted_at is None:
        return timedelta(0)
    return question.promoted_at + timedelta(seconds=target.spec.rollout.bake_seconds) - question.now


def _bad_bake(question: Question, target: Target) -> tuple[Reason, str] | None:
    if question.trial.state is TrialState.FAILED:
        return question.trial.reason, question.trial.message
    limit, found = target.spec.rollout.max_fallback_percent, question.fallback_percent
    if found is not None and found > limit:
        return Reason.FALLBACK_OBSERVED, f"{found} percent of its dispatches took fallback routes, more than {limit}."
    if question.evidence.standing is Standing.FAILED:
        return Reason.GATE_FAILED, question.evidence.finding.message
    return None


def _change(question: Question, target: Target) -> Decision:
    """The target is another revision than the one with the traffic."""
    fleet, name = question.fleet, target.name
    base = base_of(fleet)
    if fleet[name].asks:
        return _judge(question, target, base)
    serving = base is not None and fleet[base].asks
    wait = Decision(run=() if base is None else (base,), traffic=base, step=Step.WAITING)
    if target.spec.rollout.paused and (serving or base is None):
        return replace(wait, step=Step.PAUSED, because=f"Revision {name} waits: `rollout.paused` is set.")
    if not serving:
        # Nothing is in its way any more, or never was.
        return replace(wait, run=(name,), step=Step.DRAINING if fleet.busy - {name} else Step.STARTING, candidate=name)
    return _begin(question, target, wait, base)


def _begin(question: Question, target: Target, wait: Decision, base: str | None) -> Decision:
    """Something serves, and is touched only when the change has good prospects."""
    name, check = target.name, question.preflight
    if check.state is CheckState.FAILED:
        return _reject(question, target, wait, Reason.PREFLIGHT_FAILED, check.because)
    if check.state is not CheckState.PASSED:
        text = f"Revision {name} is checked before anything is stopped for it. {check.because}".strip()
        return replace(wait, step=Step.PREFLIGHT, because=text, check=True)
    if question.evidence.standing is Standing.FAILED:
        return _reject(question, target, wait, Reason.GATE_FAILED, question.evidence.finding.message)
    if question.choice is None:
        return replace(wait, needs_nodes=True)
    choice = question.choice
    if choice.strategy is None:
        return replace(wait, because=choice.because, reason=Reason.WAITING_FOR_GPU, wake_seconds=FREE_SECONDS)
    qualification = target.spec.qualification
    unproven = question.evidence.standing not in (Standing.PROVEN, Standing.NOT_REQUIRED)
    if choice.strategy is RolloutStrategy.IN_PLACE and unproven and qualification.when is QualificationTime.BEFORE:
        text = (
            f"`qualification.when` is Before, there is no evidence for revision {name}, and it cannot be judged beside"
            f" the earlier one: {choice.because}"
        )
        return replace(wait, because=text, reason=Reason.EVIDENCE_MISSING, wake_seconds=FREE_SECONDS)
    rollout = RolloutStatus(revision=name, strategy=str(choice.strategy), because=choice.because[:1024])
    told = question.announced
    if told is None or (told.revision, told.strategy) != (rollout.revision, rollout.strategy):
        text = f"Revision {name} is next, {choice.strategy}: {choice.because}{_outage(question, choice)}"
        return replace(wait, step=Step.ANNOUNCING, because=text, rollout=rollout, wake_seconds=0.0)
    if choice.strategy is RolloutStrategy.SURGE and base is not None:
        return Decision((base, name), base, Step.STARTING, candidate=name, rollout=told)
    return Decision((name,), base, Step.DRAINING, candidate=name, rollout=told)


def _outage(question: Question, choice: Choice) -> str:
    """What an in-place change costs, as far as the last start tells."""
    seconds = question.last_start_seconds
    if choice.strategy is not RolloutStrategy.IN_PLACE or seconds is None:
        return ""
    return f" The last start took {seconds} s: expect as long without a server, and the draining and the judgement."


def _judge(question: Question, target: Target, base: str | None) -> Decision:
    """The target runs without traffic."""
    fleet, name = question.fleet, target.name
    told = question.announced
    rollout = told if told is not None and told.revision == name else None
    in_place = RolloutStrategy.IN_PLACE in (target.spec.rollout.strategy, rollout.strategy if rollout else "")
    beside = base is not None and fleet[base].asks and not in_place
    run = (base, name) if beside and base is not None else (name,)
    here = Decision(run=run, traffic=base, step=Step.STARTING, candidate=name, rollout=rollout)
    fallback, trial = fallback_of(fleet, name), question.trial
    if trial.state is TrialState.WAITING and trial.reason in _NO_ROOM and beside and base is not None:
        return _no_room(question, target, here, base)
    if trial.state is TrialState.FAILED and fallback is not None:
        return _reject(question, target, here, trial.reason, trial.message)
    if trial.state is not TrialState.READY:
        return replace(here, because=trial.message, reason=trial.reason)
    return _prove(question, target, here, beside)


def _no_room(question: Question, target: Target, here: Decision, base: str) -> Decision:
    """The set that was free is taken: the candidate makes way, and with Auto the change goes on in place."""
    text = f"the GPUs that were free are taken. {question.trial.message}"
    if target.spec.rollout.strategy is RolloutStrategy.SURGE:
        return replace(here, because=f"Revision {target.name} waits: {text}", reason=question.trial.reason)
    because = f"It goes on in place: {text}"[:1024]
    told = RolloutStatus(revision=target.name, strategy=str(RolloutStrategy.IN_PLACE), because=because)
    return Decision((base,), base, Step.ANNOUNCING, because=because, rollout=told, wake_seconds=0.0)


def _prove(question: Question, target: Target, here: Decision, beside: bool) -> Decision:
    name, view, policy = target.name, question.evidence, target.spec.qualification
    fallback = fallback_of(question.fleet, name)
    if view.admits(policy):
        return replace(here, traffic=name, step=Step.PROMOTING, because=f"Revision {name} gets the traffic.")
    if view.standing is Standing.FAILED:
        return _reject(question, target, here, Reason.GATE_FAILED, view.finding.message)
    if view.standing is Standing.UNDECIDED:
        reason = Reason.INCONCLUSIVE if view.last is Verdict.INCONCLUSIVE else Reason.RUN_ERROR
        if fallback is not None and not beside:
            return _reject(question, target, here, reason, view.finding.message)
        return replace(here, step=Step.HELD, because=view.finding.message, reason=reason)
    return replace(here, step=Step.QUALIFYING, because=view.finding.message, reason=Reason.RUNNING, judge=True)


def _reject(question: Question, target: Target, here: Decision, reason: Reason, message: str) -> Decision:
    """Only recorded now; what follows from it follows from the record, whoever reads it."""
    rejection = Rejection(str(reason), message[:1024], question.now, target.attempt)
    text = f"Revision {target.name} is rejected: {message}"
    return replace(
        here, reject=(target.name, rejection), step=Step.ROLLING_BACK, because=text, reason=reason, wake_seconds=0.0
    )
