"""The planner: one walk from a snapshot to a plan. Everything is derived anew each time; nothing is remembered."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from sm70_operator.api import names
from sm70_operator.api.conditions import Finding
from sm70_operator.api.types import RolloutStrategy, Spec, Startup, Status
from sm70_operator.observe.facts import PodFacts, parse_time
from sm70_operator.observe.snapshot import Snapshot
from sm70_operator.plan.devices import pinning_conflicts
from sm70_operator.plan.evidence import EvidenceView, Standing
from sm70_operator.plan.explain import Views, judge_startup
from sm70_operator.plan.fleet import Fleet, base_of, fallback_of, fleet_of, owner_of
from sm70_operator.plan.gates import fallback_percent, judge_reports, merge_routes, reports_of
from sm70_operator.plan.intent import Rejected, Target, read_intent
from sm70_operator.plan.judging import Judgement, jobs, judgement_of
from sm70_operator.plan.plan import Event, EventType, Plan
from sm70_operator.plan.rollout import Check, Decision, Question, decide
from sm70_operator.plan.status import World, build_status, read_status, revisions_of, transitions
from sm70_operator.plan.steps import carry_out
from sm70_operator.plan.strategy import Choice, Supply, choose
from sm70_operator.plan.subject import subject_of
from sm70_operator.plan.summary import Outcome, Revised, summarize
from sm70_operator.plan.trial import Trial, TrialState, judge_trial, stalled, startup_of
from sm70_operator.render.service import service_url
from sm70_operator.settings import Settings
from sm70_profiles.spec import GpuAllocation

WAITING_SECONDS = 15
"""How often a service that waits for a node is looked at again: other services' pods and nodes do not wake it."""
CREATING_SECONDS = 5
"""How often the node's words are read again while it prepares a container."""


def plan(snapshot: Snapshot, now: datetime, settings: Settings) -> Plan:
    """What to do now for one service, what to say, and when to look again."""
    if snapshot.resource.deleting:
        return Plan()  # the garbage collector does the rest; nothing may be made any more
    intent = read_intent(snapshot, settings)
    earlier, fleet = read_status(snapshot.resource), fleet_of(snapshot)
    replicas = _replicas(intent, fleet)
    target = _look(snapshot, fleet, intent, intent.name if isinstance(intent, Target) else None, replicas)
    startup = _startup(snapshot, intent, fleet, earlier, now)
    trial = _trial(intent, target, startup, replicas, now)
    judgement = _judgement(snapshot, intent, fleet, settings, now)
    decision = decide(_question(snapshot, intent, fleet, trial, judgement, earlier, target, replicas, now))
    if decision.needs_nodes and not snapshot.obstacle:
        return Plan(needs_nodes=True, wake_after_seconds=0.0)
    steps = carry_out(snapshot, intent, fleet, decision, now)
    if isinstance(intent, Target) and judgement is not None and not steps.foreign and not fleet.earlier:
        extra = tuple(jobs(snapshot, intent, fleet, decision, judgement, settings, now))
        steps = replace(steps, actions=(*steps.actions, *extra))
    name = _subject_name(intent, decision)
    looks = {intent.name: target} if isinstance(intent, Target) else {}
    about, serving = (
        looks[one] if one in looks else _look(snapshot, fleet, intent, one, replicas)
        for one in (name, decision.traffic)
    )
    outcome = Outcome(
        intent=intent,
        fleet=fleet,
        decision=decision,
        steps=steps,
        about=about,
        serving=serving,
        trial=trial,
        evidence=judgement.evidence if judgement is not None else None,
        obstacle=snapshot.obstacle or steps.foreign,
        replicas=replicas,
        judge_missing=decision.judge and not settings.judge_image,
    )
    if name is not None and (startup is None or startup.revision != name):
        startup = startup_of(name, about.pods, snapshot.answers, earlier.startup, now)
    world = _world(snapshot, outcome, name, startup, settings)
    status = build_status(world, summarize(outcome), earlier, now)
    blocked = bool(snapshot.obstacle)
    return Plan(
        actions=() if blocked else steps.actions,
        status=status,
        events=(
            *(() if blocked else (*_announced(decision, earlier), *steps.events())),
            *transitions(earlier.conditions, status.conditions),
        ),
        wake_after_seconds=min(
            _wake(about.pods, intent, startup, now, settings),
            _jobs_wake(snapshot),
            _routes_due(world, status, now),
            decision.wake_seconds if decision.wake_seconds is not None else float("inf"),
        ),
    )


def _announced(decision: Decision, earlier: Status) -> tuple[Event, ...]:
    if decision.rollout is None or decision.rollout == earlier.rollout:
        return ()
    return (Event(EventType.NORMAL, "RolloutBegins", "BeginRollout", decision.because),)


def _subject_name(intent: Target | Rejected, decision: Decision) -> str | None:
    """The revision that the conditions speak of."""
    if decision.candidate is not None or decision.traffic is not None:
        return decision.candidate or decision.traffic
    return intent.name if isinstance(intent, Target) else None


def _world(
    snapshot: Snapshot, outcome: Outcome, name: str | None, startup: Startup | None, settings: Settings
) -> World:
    subject, decision = outcome.about.subject, outcome.decision
    return World(
        resource=snapshot.resource,
        revisions=revisions_of(outcome.fleet, decision.traffic, outcome.target),
        rollout=decision.rollout,
        startup=startup if name is not None else None,
        evidence=outcome.evidence,
        subject=name if subject is not None else None,
        pods=outcome.about.pods,
        all_pods=(*snapshot.pods, *([snapshot.gone] if snapshot.gone is not None else [])),
        answers=snapshot.answers,
        url=service_url(owner_of(snapshot)) if snapshot.service is not None else None,
        effective=subject.effective() if subject is not None else None,
        profile=_profile_text(outcome.intent.spec),
        gpus=subject.gpus_text() if subject is not None else "",
        routes_seconds=settings.routes_seconds,
    )


def _replicas(intent: Target | Rejected, fleet: Fleet) -> int:
    if intent.spec is not None:
        return intent.spec.replicas
    return max(len(fleet[fleet.active].live) if fleet.active is not None else 0, 1)


def _look(snapshot: Snapshot, fleet: Fleet, intent: Target | Rejected, name: str | None, replicas: int) -> Revised:
    subject = None if name is None else subject_of(snapshot, intent, fleet[name])
    if subject is None or name is None:
        return Revised(None, (), {})
    pods = fleet[name].live
    if not replicas:
        return Revised(subject, pods, {})
    views = Views(
        replicas=replicas,
        gpus=subject.resolution.gpus if subject.resolution is not None else None,
        nodes=snapshot.nodes,
        holders=snapshot.holders,
        words=snapshot.node_words,
        pods_refused=_pods_refused(fleet, name),
        hardware=subject.hardware,
        progress={uid: answer.progress for uid, answer in snapshot.answers.items() if answer.progress},
        devices={uid: answer.report.device for uid, answer in snapshot.answers.items() if answer.report is not None},
        conflict=pinning_conflicts(snapshot.pinned).get(str(snapshot.resource.key), ""),
    )
    findings = judge_startup(pods, views) | judge_reports(pods, snapshot.answers, subject.expectation, replicas)
    return Revised(subject, pods, findings)


def _pods_refused(fleet: Fleet, name: str) -> str:
    child = fleet[name].deployment
    for condition in ((child.manifest.get("status") or {}).get("conditions") or ()) if child is not None else ():
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            return str(condition.get("message") or "no reason given")
    return ""


def _startup(
    snapshot: Snapshot, intent: Target | Rejected, fleet: Fleet, earlier: Status, now: datetime
) -> Startup | None:
    name = intent.name if isinstance(intent, Target) else fleet.active
    if name is None:
        return None
    return startup_of(name, fleet[name].live, snapshot.answers, earlier.startup, now)


def _trial(intent: Target | Rejected, look: Revised, startup: Startup | None, replicas: int, now: datetime) -> Trial:
    if isinstance(intent, Rejected) or look.subject is None:
        return Trial(TrialState.STARTING)
    still = stalled(startup, look.pods, intent.spec.rollout.progress_deadline_seconds, now)
    return judge_trial(look.findings, look.pods, replicas, look.subject.acceleration, still, now)


def _judgement(
    snapshot: Snapshot, intent: Target | Rejected, fleet: Fleet, settings: Settings, now: datetime
) -> Judgement | None:
    if isinstance(intent, Rejected):
        return None
    return judgement_of(snapshot, intent, fleet, base_of(fleet), settings, now)


def _question(
    snapshot: Snapshot,
    intent: Target | Rejected,
    fleet: Fleet,
    trial: Trial,
    judgement: Judgement | None,
    earlier: Status,
    look: Revised,
    replicas: int,
    now: datetime,
) -> Question:
    back = fallback_of(fleet, intent.name) if isinstance(intent, Target) else None
    waiting = fleet[back].live if back is not None else ()
    metadata = snapshot.service.manifest.get("metadata", {}) if snapshot.service is not None else {}
    not_required = EvidenceView(Standing.NOT_REQUIRED, Finding.unknown())
    return Question(
        fleet=fleet,
        intent=intent,
        trial=trial,
        returned=bool(waiting) and len(waiting) >= replicas and all(pod.ready for pod in waiting),
        evidence=judgement.evidence if judgement is not None else not_required,
        preflight=judgement.preflight if judgement is not None else Check(),
        announced=earlier.rollout,
        choice=_choice(snapshot, intent, earlier, judgement.preflight.alone if judgement is not None else ""),
        promoted_at=parse_time((metadata.get("annotations") or {}).get(names.PROMOTED_ANNOTATION)),
        fallback_percent=fallback_percent(look.pods, snapshot.answers),
        now=now,
        last_start_seconds=earlier.startup.estimate_seconds if earlier.startup is not None else None,
    )


def _choice(snapshot: Snapshot, intent: Target | Rejected, earlier: Status, alone: str) -> Choice | None:
    if isinstance(intent, Rejected):
        return None
    revision, wanted = intent.revision, intent.spec.rollout.strategy
    counted = revision.gpus.count > 0 and revision.request.gpus.allocation is GpuAllocation.DEVICE_PLUGIN
    if wanted is not RolloutStrategy.IN_PLACE and counted and snapshot.nodes is None and not snapshot.nodes_hidden:
        return None
    supply = Supply(snapshot.nodes, snapshot.holders, snapshot.claim, alone)
    return choose(wanted, intent.name, revision, intent.spec.replicas, supply, earlier.rollout)


def _wake(
    pods: tuple[PodFacts, ...], intent: Target | Rejected, startup: Startup | None, now: datetime, settings: Settings
) -> float:
    """Seconds until something may have changed that no event tells of."""
    candidates = [float(settings.resync_seconds)]
    if intent.spec is not None and intent.spec.profile_ref is not None:
        candidates.append(settings.profile_refresh_seconds)
    deadline = timedelta(seconds=intent.spec.rollout.progress_deadline_seconds) if intent.spec is not None else None
    for pod in pods:
        if not pod.scheduled:
            candidates.append(WAITING_SECONDS)
        elif pod.container is None or not pod.container.running:
            candidates.append(CREATING_SECONDS)
        if deadline is not None and not pod.ready:
            since = [
                one for one in (pod.unready_since, startup.since if startup is not None else None) if one is not None
            ]
            left = deadline - (now - max(since, default=now))
            if left > timedelta(0):
                candidates.append(left.total_seconds() + 1)
    return min(candidates)


def _jobs_wake(snapshot: Snapshot) -> float:
    """A node's words about a Job's pod are events, which are not watched; a claim may stay absent for ever."""
    pods = (pod for pod in snapshot.job_pods if not pod.ended and not pod.deleting)
    return CREATING_SECONDS if any(pod.preparing or not pod.scheduled for pod in pods) else float("inf")


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
