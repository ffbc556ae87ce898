"""The Jobs of a rollout: the preflight before anything is touched, and the judge of a candidate that runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sm70_operator.api import names
from sm70_operator.api.conditions import Reason
from sm70_operator.api.qualification import Evidence
from sm70_operator.observe.facts import PodFacts
from sm70_operator.observe.proof import JobFacts, last_words, pods_of
from sm70_operator.observe.snapshot import EngineAnswer, Snapshot
from sm70_operator.plan.evidence import EvidenceView, Standing, Wanted, judge_evidence, wanted_identity
from sm70_operator.plan.explain import (
    UNMOUNTED,
    absent_folder,
    judge_preflight,
    preflight_obstacle,
    unpulled_checkpoint,
)
from sm70_operator.plan.fleet import Fleet, owner_of
from sm70_operator.plan.intent import Target
from sm70_operator.plan.plan import Action, Apply, Conclude, Delete
from sm70_operator.plan.rollout import Check, CheckState, Decision
from sm70_operator.plan.scheduling import missing_volume
from sm70_operator.plan.trial import HOPELESS_SECONDS, PULL_PROBLEMS
from sm70_operator.render.preflight_job import ClaimFacts, preflight_look, render_preflight_job
from sm70_operator.render.qualification_job import (
    JudgeRun,
    read_verdict,
    render_qualification,
    render_qualification_job,
)
from sm70_operator.settings import Settings
from sm70_profiles.report import printable


@dataclass(frozen=True)
class Judgement:
    """What is known of the target before and after it starts."""

    evidence: EvidenceView
    wanted: Wanted | None
    preflight: Check


def judgement_of(
    snapshot: Snapshot, target: Target, fleet: Fleet, base: str | None, settings: Settings, now: datetime
) -> Judgement:
    """Evidence for the target's key, as far as it is known, and the outcome of its preflight."""
    image_id, device = "", None
    for pod in fleet[target.name].live:
        report = snapshot.answers.get(pod.uid, EngineAnswer()).report
        if report is not None and pod.container is not None:
            image_id, device = pod.container.image_id, report.device
            break
    wanted = wanted_identity(target.revision, target.resolution, image_id, device)
    evidence = judge_evidence(snapshot.evidence, wanted, target.spec.qualification, target.suite)
    return Judgement(evidence, wanted, _preflight(snapshot, target, fleet, base, settings, now))


def jobs(
    snapshot: Snapshot,
    target: Target,
    fleet: Fleet,
    decision: Decision,
    judgement: Judgement,
    settings: Settings,
    now: datetime,
) -> Iterator[Action]:
    """Jobs that are to run, verdicts of those that ended, and the end of preflights that nobody waits for any more."""
    owner = owner_of(snapshot)
    if decision.check and judgement.preflight.state is CheckState.MISSING:
        base = decision.traffic
        look = preflight_look(target.revision, _claims(snapshot), _node(fleet, base))
        manifest = render_preflight_job(owner, target.name, target.revision, look)
        yield Apply(manifest, f"Revision {target.name} is checked before anything is stopped for it.", known=False)
    yield from _verdicts(snapshot, now)
    if decision.judge:
        yield from _judge(snapshot, target, judgement, settings)
    for job in _own_jobs(snapshot, names.PREFLIGHT_COMPONENT):
        found = job.object
        if found.deleting:
            continue
        if fleet[job.revision].rejection is not None:
            yield Delete(found.name, found.uid, found.version, "Another try is checked anew.", "Job")
        elif not job.ended and job.revision != target.name:
            # It may wait for a volume for ever.
            yield Delete(found.name, found.uid, found.version, "Its revision is no longer asked for.", "Job")


def _own_jobs(snapshot: Snapshot, component: str) -> list[JobFacts]:
    uid = snapshot.resource.uid
    return [job for job in snapshot.jobs if job.component == component and job.object.owner == uid]


def _preflight(
    snapshot: Snapshot, target: Target, fleet: Fleet, base: str | None, settings: Settings, now: datetime
) -> Check:
    if not settings.preflight:
        return Check(because="Preflights are switched off.")
    record = fleet[target.name].record
    if record is not None and record.good_since is not None:
        return Check(because="It has served before.")
    look = preflight_look(target.revision, _claims(snapshot), _node(fleet, base))
    if look.skip:
        return Check(because=f"The preflight is left out. {look.skip}", alone=look.skip)
    job = next((one for one in _own_jobs(snapshot, names.PREFLIGHT_COMPONENT) if one.revision == target.name), None)
    if job is None or job.object.deleting:
        return Check(CheckState.MISSING)
    pods = pods_of(job, snapshot.job_pods)
    if not job.ended:
        if obstacle := preflight_obstacle(pods, snapshot.node_words):
            return Check(because=f"The preflight is left out. {obstacle}", alone=obstacle)
        stuck = _stuck(snapshot, job, now)
        if stuck:
            return Check(CheckState.FAILED, stuck)
        answers = [snapshot.answers.get(pod.uid, EngineAnswer()) for pod in pods if pod.downloading]
        far = next((f" It downloads: {answer.progress}." for answer in answers if answer.progress), "")
        again = "" if far else _tried_before(pods) or _waits(pods)
        return Check(CheckState.RUNNING, f"`{job.object.name}` runs.{far}{again}")
    result = judge_preflight(pods)
    if result is None:
        why = printable(job.message, 500) or "it left no report"
        return Check(CheckState.FAILED, f"The preflight `{job.object.name}` ended without a result: {why}")
    if result.finding is not None:
        return Check(CheckState.FAILED, printable(f"{result.finding.reason}: {result.finding.message}", 1000))
    warnings = f" It warns: {printable(' '.join(result.warnings), 500)}" if result.warnings else ""
    return Check(because=f"The preflight found nothing that would keep it from starting.{warnings}")


def _tried_before(pods: Sequence[PodFacts]) -> str:
    """Why the last download of a Job has ended that tries again, in words; empty where nothing is tried again."""
    result = judge_preflight([pod for pod in pods if pod.ended])
    if result is None or result.finding is None or result.finding.reason is not Reason.DOWNLOAD_FAILED:
        return ""
    return f" It tries again after {printable(f'{result.finding.reason}: {result.finding.message}', 500)}"


def _waits(pods: Sequence[PodFacts]) -> str:
    """That an image cannot be pulled, which may pass, in words; empty where nothing is known."""
    for pod in pods:
        unpulled, box = unpulled_checkpoint(pod), pod.container
        if unpulled is None and box is not None and box.waiting_reason in PULL_PROBLEMS:
            unpulled = f"Node `{pod.node}` cannot pull the image: {box.waiting_message or box.waiting_reason}"
        if unpulled is not None:
            return f" It waits. {printable(unpulled, 500)}"
    return ""


def _stuck(snapshot: Snapshot, job: JobFacts, now: datetime) -> str:
    """An image that cannot be pulled and a volume that cannot be mounted never end a Job by themselves."""
    for pod in pods_of(job, snapshot.job_pods):
        told = snapshot.node_words.get(pod.uid)
        if told is not None and absent_folder(told):
            return f"{Reason.PATH_NOT_FOUND}: On node `{pod.node}`: {told.message}"
        if now - pod.created < timedelta(seconds=HOPELESS_SECONDS):
            continue
        box = pod.container
        if (unpulled := unpulled_checkpoint(pod)) is not None:
            return f"{Reason.CHECKPOINT_NOT_PULLED}: {unpulled}"
        if box is not None and box.waiting_reason in PULL_PROBLEMS:
            return f"Node `{pod.node}` cannot pull the image: {box.waiting_message or box.waiting_reason}"
        if not pod.scheduled and (problem := missing_volume(pod)) is not None:
            return f"{Reason.VOLUME_NOT_FOUND}: {problem}"
        if told is not None and told.reason in UNMOUNTED:
            return f"{Reason.VOLUME_NOT_FOUND}: On node `{pod.node}`: {told.message}"
    return ""


def _verdicts(snapshot: Snapshot, now: datetime) -> Iterator[Action]:
    """Runs of this service that ended get their verdict, whoever is under judgement by now."""
    ended = {job.object.name: job for job in _own_jobs(snapshot, names.QUALIFICATION_COMPONENT) if job.ended}
    for run in snapshot.evidence:
        job = ended.get(run.name)
        if run.owner != snapshot.resource.uid or run.finished or run.deleting or job is None:
            continue
        if job.created is not None and run.created is not None and job.created < run.created:
            # What it said was of a run whose evidence was deleted, so that it is judged anew.
            yield Delete(job.object.name, job.object.uid, job.object.version, "It belongs to an earlier run.", "Job")
            continue
        status = read_verdict(last_words(job, snapshot.job_pods), run.spec, job.message if job.failed else "", now)
        body = status.model_dump(mode="json", by_alias=True, exclude_none=True)
        yield Conclude(run.name, run.uid, body, f"Run {run.name} ended: {status.verdict}.")


def _judge(snapshot: Snapshot, target: Target, judgement: Judgement, settings: Settings) -> Iterator[Action]:
    key = None if judgement.wanted is None else judgement.wanted.complete()
    if key is None or not settings.judge_image:
        return
    view, policy, owner = judgement.evidence, target.spec.qualification, owner_of(snapshot)
    running: Evidence | None = view.evidence if view.standing is Standing.RUNNING else None
    if running is not None and running.owner != snapshot.resource.uid:
        return  # another service judges the same; its verdict is ours too
    run = JudgeRun(
        revision=target.name,
        key=key,
        suite=target.suite.name,
        suite_digest=target.suite.digest,
        suite_config=target.suite.config,
        attempt=view.next_attempt if running is None else running.spec.attempt,
        image=settings.judge_image,
        served_name=target.revision.request.served_name,
        api_key=target.revision.api_key,
        image_pull_secrets=target.revision.image_pull_secrets,
        timeout_seconds=policy.timeout_seconds,
        thresholds=policy.thresholds,
    )
    because = f"Revision {target.name} is judged by suite `{target.suite.name}`, run {run.attempt}."
    if running is None:
        yield Apply(render_qualification(owner, run), because, known=False)
    if run.name(owner.name) not in {job.object.name for job in snapshot.jobs}:
        yield Apply(render_qualification_job(owner, run), because, known=False)


def _node(fleet: Fleet, base: str | None) -> str:
    return next((pod.node for pod in fleet[base].live if pod.node), "") if base is not None else ""


def _claims(snapshot: Snapshot) -> dict[str, ClaimFacts]:
    found = snapshot.claim
    if found is None:
        return {}
    modes = tuple((found.manifest.get("spec") or {}).get("accessModes") or ())
    bound = (found.manifest.get("status") or {}).get("phase") == "Bound"
    return {found.name: ClaimFacts(modes, bound)}
