"""One look at one service: snapshot, plan, actions, status, events. It waits and asks, and decides nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from pydantic import ValidationError

from sm70_operator.act.apply import Executor, NotYetError, ObstacleError, subject
from sm70_operator.act.client import ApiError, ApiServer
from sm70_operator.act.events import EventRecorder
from sm70_operator.act.status_writer import StatusWriter
from sm70_operator.api import names
from sm70_operator.api.pod import KeyReference
from sm70_operator.api.types import QualificationTime
from sm70_operator.observe.facts import PodFacts, parse_pod
from sm70_operator.observe.proof import last_words
from sm70_operator.observe.snapshot import Key, NodeWords, Resource, Snapshot, UserDocument, pinned_uuids
from sm70_operator.observe.store import Store
from sm70_operator.plan.plan import Plan
from sm70_operator.plan.planner import plan
from sm70_operator.runtime.expectations import Expectations
from sm70_operator.runtime.metrics import Metrics
from sm70_operator.runtime.poller import Poller
from sm70_operator.settings import Settings
from sm70_profiles.documents import MAX_DOCUMENT_BYTES, describe
from sm70_profiles.report import printable

logger = logging.getLogger(__name__)
SOON_SECONDS = 1.0
WORDS_AFTER_SECONDS = 5
WORDS_KEPT_SECONDS = 10.0


class RetryError(Exception):
    """The look has ended as far as it could; again after a back-off."""


@dataclass(frozen=True)
class _Kept:
    """Something read from the API server, and when."""

    at: float
    document: UserDocument | None = None
    words: NodeWords | None = None


class Reconciler:
    """`store` gives the present cache, or None while the watches are not complete."""

    def __init__(
        self,
        *,
        api: ApiServer,
        executor: Executor,
        status_writer: StatusWriter,
        events: EventRecorder,
        poller: Poller,
        store: Callable[[], Store | None],
        settings: Settings,
        metrics: Metrics,
        may_act: Callable[[], bool],
        ended: Callable[[Key], PodFacts | None] = lambda key: None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._api = api
        self._executor = executor
        self._status_writer = status_writer
        self._events = events
        self._poller = poller
        self._store = store
        self._settings = settings
        self._metrics = metrics
        self._may_act = may_act
        self._ended = ended
        self._clock = clock
        self._expectations = Expectations(clock)
        self._documents: dict[Key, dict[KeyReference, _Kept]] = {}
        self._words: dict[str, _Kept] = {}

    async def reconcile(self, key: Key) -> float | None:
        """Returns the seconds until the next look; None: only when something happens. Raises RetryError, ApiError."""
        store = self._store()
        if store is None or not self._may_act():
            return SOON_SECONDS
        resource = store.resource(key)
        if resource is None:
            self._forget(key)
            return None
        wait = self._expectations.waits(key, store)
        if wait is not None and not resource.deleting:
            self._metrics.reconciles.labels("waiting").inc()
            return wait  # the event that shows it wakes the service before
        resource = self._status_writer.current(resource)
        pods = store.pods_of(key)
        downloads = tuple(pod for pod in store.job_pods_of(key) if pod.downloading)
        if not self._poller.follow(key, (*pods, *downloads)) and not resource.deleting:
            # Without the engines' word the status would tell less than it did before this process started.
            self._metrics.reconciles.labels("waiting").inc()
            return None
        snapshot = await self._snapshot(store, resource, pods)
        now = self._clock().replace(microsecond=0)
        planned = plan(snapshot, now, self._settings)
        if planned.needs_nodes:
            # Only a change that begins has to know what is free: all nodes and pods are gone through for it.
            snapshot = replace(snapshot, nodes=store.all_nodes(), holders=store.gpu_holders())
            planned = plan(snapshot, now, self._settings)
        try:
            early = await self._act(planned, resource, store)
        except ObstacleError as obstacle:
            blocked = plan(replace(snapshot, obstacle=str(obstacle)), now, self._settings)
            await self._tell(blocked, resource, now)
            self._metrics.reconciles.labels("obstacle").inc()
            raise RetryError(str(obstacle)) from obstacle
        if not (early and planned.promotes):
            await self._tell(planned, resource, now)
        self._metrics.reconciles.labels("success").inc()
        return SOON_SECONDS if early or not self._may_act() else planned.wake_after_seconds

    async def _act(self, planned: Plan, resource: Resource, store: Store) -> bool:
        """Carries out the actions in order; True if one has to wait for the cache to catch up."""
        for action in planned.actions:
            before = store.version_of(subject(action)[0], resource.key, subject(action)[1])
            try:
                written = await self._executor.run(action, resource)
            except NotYetError as error:
                logger.info("%s: not yet: %s", resource.key, error)
                return True
            self._expectations.note(resource.key, store, written, before)
            self._metrics.actions.labels(type(action).__name__.lower()).inc()
        return False

    async def _tell(self, planned: Plan, resource: Resource, now: datetime) -> None:
        """Status first, then events: an event tells of something that the status says."""
        if planned.status is None or not self._may_act():
            return
        if not await self._status_writer.write(resource, planned.status):
            return
        self._metrics.status_writes.inc()
        for event in planned.events:
            await self._events.post(resource, event, now)

    def _forget(self, key: Key) -> None:
        self._poller.forget(key)
        self._status_writer.forget(key)
        self._expectations.forget(key)
        self._documents.pop(key, None)

    async def _snapshot(self, store: Store, resource: Resource, pods: tuple[PodFacts, ...]) -> Snapshot:
        key = resource.key
        waiting = any(not pod.scheduled for pod in pods)
        job_pods = await self._job_pods(store, key)
        return Snapshot(
            resource=resource,
            deployments=store.deployments_of(key),
            pods=pods,
            gone=self._ended(key),
            service=store.service_of(key),
            candidate=store.candidate_of(key),
            claim=store.claim_of(key),
            revisions=store.revisions_of(key),
            jobs=store.jobs_of(key),
            job_pods=job_pods,
            evidence=store.evidence_of(key),
            nodes_hidden=store.nodes is None,
            profile=await self._document(resource, resource.spec.get("profileRef")),
            suite=await self._document(resource, _suite_source(resource)),
            nodes=store.all_nodes() if waiting else None,
            holders=store.gpu_holders() if waiting else (),
            # All services are gone through, for the few that pin GPUs.
            pinned=store.pinned() if pinned_uuids(resource) else {},
            answers=self._poller.answers(key),
            node_words=await self._node_words((*pods, *job_pods)),
        )

    async def _job_pods(self, store: Store, key: Key) -> tuple[PodFacts, ...]:
        """The pods of the service's Jobs. Jobs and pods are watched apart: a Job may be seen to have ended before its
        pod is, and a judge that is not heard yet must not count as one that said nothing. Then the API server is asked.
        """
        pods = store.job_pods_of(key)
        if all(not job.ended or last_words(job, pods) for job in store.jobs_of(key)):
            return pods
        selector = f"{names.SERVICE_LABEL}={key.name}"
        found = map(parse_pod, await self._api.list("Pod", key.namespace, labelSelector=selector))
        return tuple(pod for pod in found if pod.component != names.ENGINE_COMPONENT)

    async def _document(self, resource: Resource, source: object) -> UserDocument | None:
        """The document that `source` names, read again now and then: a user's ConfigMap is not watched."""
        raw = source.get("configMap") if isinstance(source, dict) else None
        if not raw:
            return None
        try:
            reference = KeyReference.model_validate(raw)
        except ValidationError as error:
            return UserDocument(missing=f"Its reference cannot be read: {describe(error)}")
        now, fresh = time.monotonic(), self._settings.profile_refresh_seconds
        held = {one: kept for one, kept in self._documents.get(resource.key, {}).items() if now - kept.at < fresh}
        if reference not in held:
            document = await self._read_document(resource.key.namespace, reference)
            held[reference] = _Kept(now, document=document)
        self._documents[resource.key] = held
        return held[reference].document

    async def _read_document(self, namespace: str, reference: KeyReference) -> UserDocument:
        found = await self._api.get("ConfigMap", namespace, reference.name)
        if found is None:
            return UserDocument(missing=f"There is no ConfigMap `{reference.name}` in namespace `{namespace}`")
        text = (found.get("data") or {}).get(reference.key)
        if text is None:
            return UserDocument(missing=f"The ConfigMap `{reference.name}` has no key `{reference.key}`")
        return UserDocument(text=text[: MAX_DOCUMENT_BYTES + 1])

    async def _node_words(self, pods: tuple[PodFacts, ...]) -> dict[str, NodeWords]:
        """The newest event of each pod whose container is not made after a while."""
        found = {}
        present = {pod.uid for pod in pods}
        now, wall = time.monotonic(), self._clock()
        for pod in pods:
            if not pod.preparing or pod.deleting or (wall - pod.created).total_seconds() < WORDS_AFTER_SECONDS:
                continue
            kept = self._words.get(pod.uid)
            if kept is None or now - kept.at >= WORDS_KEPT_SECONDS:
                kept = self._words[pod.uid] = _Kept(now, words=await self._read_words(pod))
            if kept.words is not None:
                found[pod.uid] = kept.words
        for uid in [uid for uid, kept in self._words.items() if now - kept.at > 60 and uid not in present]:
            del self._words[uid]
        return found

    async def _read_words(self, pod: PodFacts) -> NodeWords | None:
        try:
            events = await self._api.list("Event", pod.namespace, fieldSelector=f"involvedObject.uid={pod.uid}")
        except ApiError as error:
            logger.warning("the events of pod %s/%s cannot be read: %s", pod.namespace, pod.name, error)
            return None
        if not events:
            return None
        last = max(events, key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")
        return NodeWords(printable(last.get("reason") or "", 64), printable(last.get("message") or "", 500))


def _suite_source(resource: Resource) -> object:
    """What `qualification.suiteRef` names, where a qualification is asked for."""
    asked = resource.spec.get("qualification")
    return asked.get("suiteRef") if isinstance(asked, dict) and asked.get("when") != QualificationTime.NEVER else None
