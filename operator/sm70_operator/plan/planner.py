"""The planner: one walk from a snapshot to a plan. Everything is derived anew each time; nothing is remembered."""

from __future__ import annotations

from datetime import datetime, timedelta

from sm70_operator.api.conditions import (
    ConditionStatus,
    ConditionType,
    Finding,
    Reason,
    with_remedy,
)
from sm70_operator.api.types import Revisions, Spec, Status
from sm70_operator.observe.facts import PodFacts
from sm70_operator.observe.snapshot import Snapshot, revision_of
from sm70_operator.plan.gates import judge_reports, merge_routes, reports_of
from sm70_operator.plan.intent import Rejected, Target, read_intent
from sm70_operator.plan.plan import Plan
from sm70_operator.plan.startup import Views, judge_startup
from sm70_operator.plan.status import World, build_status, read_status, transitions
from sm70_operator.plan.steps import Steps, next_steps, owner_of
from sm70_operator.plan.subject import Subject, subject_of
from sm70_operator.render.service import service_url
from sm70_operator.settings import Settings
from sm70_profiles.spec import Acceleration, AccelerationPolicy

WAITING_SECONDS = 15
"""How often a service that waits for a node is looked at again: other services' pods and nodes do not wake it."""
CREATING_SECONDS = 5
"""How often the node's words are read again while it prepares a container."""


def plan(snapshot: Snapshot, now: datetime, settings: Settings) -> Plan:
    """What to do now for one service, what to say, and when to look again."""
    if snapshot.resource.deleting:
        return Plan()  # the garbage collector does the rest; nothing may be made any more
    intent = read_intent(snapshot, settings)
    steps = next_steps(snapshot, intent)
    subject = subject_of(snapshot, intent, steps.wanted)
    pods = _pods_of(snapshot, subject)
    findings = _findings(snapshot, intent, steps, subject, pods, now)
    earlier = read_status(snapshot.resource)
    world = World(
        resource=snapshot.resource,
        revisions=Revisions(active=steps.active, target=intent.name if isinstance(intent, Target) else None),
        subject=subject.name if subject is not None else None,
        pods=pods,
        answers=snapshot.answers,
        url=service_url(owner_of(snapshot)) if snapshot.service is not None else None,
        effective=subject.effective() if subject is not None else None,
        profile=_profile_text(intent.spec),
        gpus=subject.gpus_text() if subject is not None else "",
        routes_seconds=settings.routes_seconds,
    )
    status = build_status(world, findings, earlier, now)
    return Plan(
        actions=() if snapshot.obstacle else steps.actions,
        status=status,
        events=(() if snapshot.obstacle else steps.events()) + transitions(earlier.conditions, status.conditions),
        wake_after_seconds=min(_wake(pods, intent, now, settings), _routes_due(world, status, now)),
    )


def _pods_of(snapshot: Snapshot, subject: Subject | None) -> tuple[PodFacts, ...]:
    if subject is None:
        return ()
    return tuple(pod for pod in snapshot.pods if pod.revision == subject.name and not pod.deleting and not pod.ended)


def _findings(
    snapshot: Snapshot,
    intent: Target | Rejected,
    steps: Steps,
    subject: Subject | None,
    pods: tuple[PodFacts, ...],
    now: datetime,
) -> dict[ConditionType, Finding]:
    findings = {
        ConditionType.ACCEPTED: _accepted(intent),
        ConditionType.QUALIFIED: Finding.unknown(Reason.NOT_REQUIRED, "No qualification is demanded."),
    }
    replicas = intent.spec.replicas if intent.spec is not None else max(len(pods), 1)
    if subject is not None and replicas:
        views = Views(
            replicas=replicas,
            gpus=subject.resolution.gpus if subject.resolution is not None else None,
            nodes=snapshot.nodes,
            holders=snapshot.holders,
            words=snapshot.node_words,
            pods_refused=_pods_refused(snapshot, subject.name),
        )
        findings |= judge_startup(pods, views)
        findings |= judge_reports(pods, snapshot.answers, subject.expectation, replicas)
    policy = subject.acceleration if subject is not None else Acceleration()
    ready = _ready(findings, intent, steps, policy, pods, replicas)
    obstacle = snapshot.obstacle or steps.foreign
    if obstacle and ready.status is not ConditionStatus.TRUE:
        ready = Finding.false(Reason.OBSTRUCTED, with_remedy(Reason.OBSTRUCTED, obstacle))
    findings[ConditionType.READY] = ready
    findings[ConditionType.PROGRESSING] = _progressing(snapshot, intent, steps, pods, replicas, ready, obstacle, now)
    return findings


def _accepted(intent: Target | Rejected) -> Finding:
    if isinstance(intent, Rejected):
        return intent.finding
    return Finding.true(Reason.RESOLVED, f"The spec resolves to revision {intent.name}.")


def _pods_refused(snapshot: Snapshot, revision: str) -> str:
    for child in snapshot.own(snapshot.deployments):
        if revision_of(child) == revision:
            for condition in (child.manifest.get("status") or {}).get("conditions") or ():
                if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
                    return str(condition.get("message") or "no reason given")
    return ""


def _ready(
    findings: dict[ConditionType, Finding],
    intent: Target | Rejected,
    steps: Steps,
    policy: Acceleration,
    pods: tuple[PodFacts, ...],
    replicas: int,
) -> Finding:
    accepted = findings[ConditionType.ACCEPTED]
    if steps.wanted is None or ConditionType.ENGINE_STARTED not in findings:
        if replicas == 0 and accepted.status is ConditionStatus.TRUE:
            return Finding.false(Reason.SCALED_TO_ZERO, with_remedy(Reason.SCALED_TO_ZERO, "No replica is wanted."))
        return accepted if accepted.status is not ConditionStatus.TRUE else Finding.unknown()
    serves = _serves(findings, intent, steps, policy, pods)
    if isinstance(intent, Rejected) and serves.status is not ConditionStatus.TRUE:
        also = f"Revision {steps.wanted} of an earlier spec does not serve either ({serves.reason})."
        return Finding.false(accepted.reason, f"{accepted.message} {also}")
    return serves


def _serves(
    findings: dict[ConditionType, Finding],
    intent: Target | Rejected,
    steps: Steps,
    policy: Acceleration,
    pods: tuple[PodFacts, ...],
) -> Finding:
    """Whether the wanted revision serves, and if not, the first reason why."""
    if steps.stopping and not pods:
        return Finding.false(Reason.DRAINING, _draining_text(steps))
    gates = [ConditionType.GPUS_ALLOCATED, ConditionType.MODEL_AVAILABLE, ConditionType.ENGINE_STARTED]
    if policy.policy is AccelerationPolicy.REQUIRE:
        gates.append(ConditionType.ACCELERATION_COMPLETE)
    failing = [findings[gate] for gate in gates if findings[gate].status is not ConditionStatus.TRUE]
    # A plain No says more than a Don't Know that stands before it only because it has to wait.
    for status in (ConditionStatus.FALSE, ConditionStatus.UNKNOWN):
        for finding in failing:
            if finding.status is status:
                return finding
    unready = [pod.name for pod in pods if not pod.ready]
    if unready:
        found = f"The readiness probe of `{unready[0]}` does not pass yet."
        return Finding.false(Reason.NOT_READY, with_remedy(Reason.NOT_READY, found))
    if isinstance(intent, Rejected):
        return Finding.true(
            Reason.SERVING_EARLIER_SPEC,
            f"Revision {steps.wanted} of an earlier spec serves; the present spec is not accepted"
            f" ({intent.finding.reason}).",
        )
    return Finding.true(Reason.SERVING, f"Revision {intent.name} serves.")


def _draining_text(steps: Steps) -> str:
    return f"Revision {', '.join(steps.stopping)} finishes its requests and stops; then revision {steps.wanted} starts."


def _progressing(
    snapshot: Snapshot,
    intent: Target | Rejected,
    steps: Steps,
    pods: tuple[PodFacts, ...],
    replicas: int,
    ready: Finding,
    obstacle: str,
    now: datetime,
) -> Finding:
    if obstacle:
        return Finding.false(Reason.OBSTRUCTED, with_remedy(Reason.OBSTRUCTED, obstacle))
    if steps.stopping:
        return Finding.true(Reason.DRAINING, _draining_text(steps))
    if steps.wanted is None:
        return Finding.false(Reason.SETTLED, "Nothing runs, and nothing is started before the spec is accepted.")
    if ready.status is ConditionStatus.TRUE or replicas == 0:
        return Finding.false(Reason.SETTLED, "The world is as the spec wants it.")
    deadline = intent.spec.rollout.progress_deadline_seconds if intent.spec is not None else None
    late = [pod for pod in pods if deadline is not None and _unready_for(pod, now) >= timedelta(seconds=deadline)]
    if late:
        found = f"`{late[0].name}` was not ready within {deadline} s."
        return Finding.false(Reason.DEADLINE_EXCEEDED, with_remedy(Reason.DEADLINE_EXCEEDED, found))
    if _was_complete(snapshot, steps.wanted):
        return Finding.true(Reason.RECOVERING, f"A replica of revision {steps.wanted} comes back.")
    return Finding.true(Reason.STARTING, f"Revision {steps.wanted} starts.")


def _unready_for(pod: PodFacts, now: datetime) -> timedelta:
    return timedelta(0) if pod.unready_since is None else now - pod.unready_since


def _was_complete(snapshot: Snapshot, revision: str) -> bool:
    """The Deployment had all its pods ready at least once, by its own controller's word."""
    for child in snapshot.own(snapshot.deployments):
        if revision_of(child) == revision:
            conditions = (child.manifest.get("status") or {}).get("conditions") or ()
            return any(one.get("reason") == "NewReplicaSetAvailable" for one in conditions)
    return False


def _wake(pods: tuple[PodFacts, ...], intent: Target | Rejected, now: datetime, settings: Settings) -> float:
    """Seconds until something may have changed that no event tells of."""
    candidates = [float(settings.resync_seconds)]
    if intent.spec is not None and intent.spec.profile_ref is not None:
        candidates.append(settings.profile_refresh_seconds)
    for pod in pods:
        if not pod.scheduled:
            candidates.append(WAITING_SECONDS)
        elif pod.container is None or not pod.container.running:
            candidates.append(CREATING_SECONDS)
        if intent.spec is not None and not pod.ready:
            left = timedelta(seconds=intent.spec.rollout.progress_deadline_seconds) - _unready_for(pod, now)
            if left > timedelta(0):
                candidates.append(left.total_seconds() + 1)
    return min(candidates)


def _routes_due(world: World, status: Status, now: datetime) -> float:
    """Seconds until counters that were held back may be written."""
    if status.routes is None or status.routes.items == merge_routes(reports_of(world.pods, world.answers)):
        return float("inf")
    due = status.routes.observed_time + timedelta(seconds=world.routes_seconds) - now
    return max(due.total_seconds(), 0.0)


def _profile_text(spec: Spec | None) -> str:
    if spec is None:
        return ""
    if spec.profile is not None:
        return spec.profile
    reference = spec.profile_ref
    return f"{reference.config_map.name}/{reference.config_map.key}"[:128] if reference is not None else ""
