"""What the conditions say of the service as a whole: Accepted, Qualified, Progressing and Ready.

`Ready` speaks of the revision with the public traffic, all other conditions of the one under judgement while there is
one, and of the one with the traffic otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from sm70_operator.api.conditions import ConditionStatus, ConditionType, Finding, Reason, with_remedy
from sm70_operator.observe.facts import PodFacts
from sm70_operator.plan.evidence import EvidenceView, Standing
from sm70_operator.plan.fleet import Fleet
from sm70_operator.plan.intent import Rejected, Target
from sm70_operator.plan.rollout import Decision, Step
from sm70_operator.plan.steps import Steps
from sm70_operator.plan.subject import Subject
from sm70_operator.plan.trial import Trial, TrialState
from sm70_profiles.spec import Acceleration, AccelerationPolicy

_STARTS = (ConditionType.GPUS_ALLOCATED, ConditionType.MODEL_AVAILABLE, ConditionType.ENGINE_STARTED)
_MOVING: dict[Step, Reason] = {
    Step.PREFLIGHT: Reason.PREFLIGHT,
    Step.ANNOUNCING: Reason.ANNOUNCED,
    Step.QUALIFYING: Reason.QUALIFYING,
    Step.PROMOTING: Reason.PROMOTING,
    Step.BAKING: Reason.BAKING,
    Step.ROLLING_BACK: Reason.ROLLING_BACK,
}


@dataclass(frozen=True)
class Revised:
    """One revision as the conditions see it."""

    subject: Subject | None
    pods: tuple[PodFacts, ...]
    findings: dict[ConditionType, Finding]

    @property
    def acceleration(self) -> Acceleration:
        return self.subject.acceleration if self.subject is not None else Acceleration()


@dataclass(frozen=True)
class Outcome:
    """Everything that the summary is made of."""

    intent: Target | Rejected
    fleet: Fleet
    decision: Decision
    steps: Steps
    about: Revised
    """The revision under judgement, or else the one with the traffic."""
    serving: Revised
    """The one with the traffic."""
    trial: Trial
    evidence: EvidenceView | None
    obstacle: str
    replicas: int
    judge_missing: bool
    """A judge is needed, and the operator has no image of one."""

    @property
    def target(self) -> str | None:
        return self.intent.name if isinstance(self.intent, Target) else None


def summarize(outcome: Outcome) -> dict[ConditionType, Finding]:
    """All findings."""
    findings = {ConditionType.ACCEPTED: _accepted(outcome.intent), **outcome.about.findings}
    findings[ConditionType.QUALIFIED] = _qualified(outcome)
    ready = _ready(outcome, findings)
    if outcome.obstacle and ready.status is not ConditionStatus.TRUE:
        ready = Finding.false(Reason.OBSTRUCTED, with_remedy(Reason.OBSTRUCTED, outcome.obstacle))
    findings[ConditionType.READY] = ready
    findings[ConditionType.PROGRESSING] = _progressing(outcome, ready)
    return findings


def _accepted(intent: Target | Rejected) -> Finding:
    if isinstance(intent, Rejected):
        return intent.finding
    if intent.spec.rollout.rollback_to is not None:
        return Finding.true(Reason.RESOLVED, f"`rollout.rollbackTo` names the stored revision {intent.name}.")
    return Finding.true(Reason.RESOLVED, f"The spec resolves to revision {intent.name}.")


def _qualified(outcome: Outcome) -> Finding:
    view = outcome.evidence
    if view is None:
        return Finding.unknown(Reason.NOT_REQUIRED, "No qualification is demanded.")
    if outcome.judge_missing and view.standing in (Standing.MISSING, Standing.STALE):
        found = "The operator was given no image with `sm70-qualify` (`SM70_OPERATOR_JUDGE_IMAGE`)."
        return Finding.false(Reason.RUN_ERROR, found)
    return view.finding


def _ready(outcome: Outcome, findings: dict[ConditionType, Finding]) -> Finding:
    accepted, decision = findings[ConditionType.ACCEPTED], outcome.decision
    is_accepted = accepted.status is ConditionStatus.TRUE
    if outcome.replicas == 0 and is_accepted:
        return Finding.false(Reason.SCALED_TO_ZERO, with_remedy(Reason.SCALED_TO_ZERO, "No replica is wanted."))
    if decision.traffic is None or not outcome.serving.findings:
        return _nobody_serves(outcome, accepted)
    failing = _failing(outcome.serving)
    if failing is None:
        return _serving(outcome)
    if not is_accepted:
        also = f"Revision {decision.traffic} of an earlier spec does not serve either ({failing.reason})."
        return Finding.false(accepted.reason, f"{accepted.message} {also}")
    if decision.step is Step.DRAINING or (outcome.steps.stopping and not outcome.about.pods):
        return Finding.false(Reason.DRAINING, _draining(outcome))
    return failing if outcome.target == decision.traffic else (_candidate(outcome) or failing)


def _nobody_serves(outcome: Outcome, accepted: Finding) -> Finding:
    if accepted.status is not ConditionStatus.TRUE:
        return accepted
    decision = outcome.decision
    if decision.step is Step.ROLLED_BACK:
        return Finding.false(decision.reason, decision.because)
    if outcome.steps.stopping and not outcome.about.pods:
        return Finding.false(Reason.DRAINING, _draining(outcome))
    if decision.step is Step.PAUSED:
        # Before the candidate's own findings: of one that may not start, all are unknown.
        return Finding.false(Reason.PAUSED, with_remedy(Reason.PAUSED, decision.because))
    return _candidate(outcome) or Finding.unknown()


def _candidate(outcome: Outcome) -> Finding | None:
    """Why the revision under judgement does not have the traffic yet."""
    failing = _failing(outcome.about) if outcome.about.findings else None
    if failing is not None:
        return failing
    decision = outcome.decision
    if decision.step in (Step.QUALIFYING, Step.HELD):
        finding = _qualified(outcome)
        return Finding.false(finding.reason, finding.message)
    if decision.step is Step.PROMOTING:
        return Finding.false(Reason.PROMOTING, decision.because)
    if decision.step is Step.PAUSED:
        return Finding.false(Reason.PAUSED, with_remedy(Reason.PAUSED, decision.because))
    return None


def _failing(revised: Revised) -> Finding | None:
    """The first reason why a revision does not serve; a plain No before a Don't Know that only has to wait."""
    gates = [*_STARTS]
    if revised.acceleration.policy is AccelerationPolicy.REQUIRE:
        gates.append(ConditionType.ACCELERATION_COMPLETE)
    found = [revised.findings.get(gate, Finding.unknown()) for gate in gates]
    failing = [finding for finding in found if finding.status is not ConditionStatus.TRUE]
    for status in (ConditionStatus.FALSE, ConditionStatus.UNKNOWN):
        for finding in failing:
            if finding.status is status:
                return finding
    unready = [pod.name for pod in revised.pods if not pod.ready]
    if unready:
        text = f"The readiness probe of `{unready[0]}` does not pass yet."
        return Finding.false(Reason.NOT_READY, with_remedy(Reason.NOT_READY, text))
    return None


def _serving(outcome: Outcome) -> Finding:
    decision, intent = outcome.decision, outcome.intent
    if isinstance(intent, Rejected):
        return Finding.true(
            Reason.SERVING_EARLIER_SPEC,
            f"Revision {decision.traffic} of an earlier spec serves; the present spec is not accepted"
            f" ({intent.finding.reason}).",
        )
    if decision.traffic != intent.name:
        text = f"Revision {decision.traffic} of an earlier spec serves. {decision.because}".strip()
        return Finding.true(Reason.SERVING_EARLIER_SPEC, text)
    view = outcome.evidence
    unproven = (Standing.MISSING, Standing.RUNNING, Standing.FAILED)
    if view is not None and view.standing in unproven and decision.step is not Step.PROMOTING:
        finding = _qualified(outcome)
        return Finding.false(finding.reason, finding.message)
    return Finding.true(Reason.SERVING, f"Revision {intent.name} serves.")


def _draining(outcome: Outcome) -> str:
    """What stops, and what comes then."""
    going = ", ".join(outcome.steps.stopping) or str(outcome.decision.traffic)
    run = outcome.decision.run
    then = f"then revision {run[-1]} starts" if run else "nothing starts then"
    ends = [pod for name in outcome.steps.stopping for pod in outcome.fleet[name].pods if pod.deleting and pod.node]
    where = f" `{ends[0].name}` on node `{ends[0].node}` ends." if ends else ""
    return f"Revision {going} finishes its requests and stops; {then}.{where}"


def _progressing(outcome: Outcome, ready: Finding) -> Finding:
    decision, steps = outcome.decision, outcome.steps
    if outcome.obstacle:
        return Finding.false(Reason.OBSTRUCTED, with_remedy(Reason.OBSTRUCTED, outcome.obstacle))
    if decision.step in _MOVING:
        return Finding.true(_MOVING[decision.step], decision.because)
    if decision.step is Step.PAUSED:
        return Finding.false(Reason.PAUSED, with_remedy(Reason.PAUSED, decision.because))
    if decision.step is Step.ROLLED_BACK:
        return Finding.false(Reason.ROLLED_BACK, with_remedy(Reason.ROLLED_BACK, decision.because))
    if decision.step is Step.HELD:
        return Finding.false(Reason.HELD, with_remedy(Reason.HELD, decision.because))
    if decision.step is Step.WAITING:
        return Finding.false(decision.reason, decision.because)
    if steps.stopping or decision.step is Step.DRAINING:
        return Finding.true(Reason.DRAINING, _draining(outcome))
    if outcome.about.subject is None or not decision.run:
        return _at_rest(outcome)
    if decision.step is Step.SETTLED and (ready.status is ConditionStatus.TRUE or outcome.replicas == 0):
        return Finding.false(Reason.SETTLED, "The world is as the spec wants it.")
    if outcome.trial.state is TrialState.FAILED and outcome.trial.reason is Reason.DEADLINE_EXCEEDED:
        text = with_remedy(Reason.DEADLINE_EXCEEDED, outcome.trial.message)
        return Finding.false(Reason.DEADLINE_EXCEEDED, text)
    name = outcome.decision.candidate or decision.traffic
    if _was_complete(outcome.fleet, name):
        return Finding.true(Reason.RECOVERING, f"A replica of revision {name} comes back.")
    return Finding.true(Reason.STARTING, f"Revision {name} starts.")


def _at_rest(outcome: Outcome) -> Finding:
    if isinstance(outcome.intent, Rejected):
        return Finding.false(Reason.SETTLED, "Nothing runs, and nothing is started before the spec is accepted.")
    return Finding.false(Reason.SETTLED, "The world is as the spec wants it.")


def _was_complete(fleet: Fleet, revision: str | None) -> bool:
    """The Deployment had all its pods ready at least once, by its own controller's word."""
    child = fleet[revision].deployment if revision is not None else None
    if child is None:
        return False
    conditions = (child.manifest.get("status") or {}).get("conditions") or ()
    return any(one.get("reason") == "NewReplicaSetAvailable" for one in conditions)
