"""Carries out a plan's actions. Each is safe to repeat, and each is refused if it is not ours to do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from sm70_operator.act.client import ApiError, ApiServer, Raw
from sm70_operator.api import names
from sm70_operator.observe.facts import controller_uid, parse_pod
from sm70_operator.observe.snapshot import Resource
from sm70_operator.plan.plan import Action, Apply, Conclude, Delete, Record, Scale

logger = logging.getLogger(__name__)


class ObstacleError(Exception):
    """The action cannot be done as things stand; the message is for the status."""


class NotYetError(Exception):
    """A fresh look shows that the snapshot was too old for this action; look again soon."""


class NotLeaderError(Exception):
    """Somebody else may act now; this process must not."""


@dataclass(frozen=True)
class Written:
    """An object that was written. `version`: its resourceVersion now; empty where it is gone or was not told."""

    kind: str
    name: str
    version: str


class Executor:
    """`may_act` is asked before every request that changes something."""

    def __init__(self, api: ApiServer, may_act: Callable[[], bool]) -> None:
        self._api = api
        self._may_act = may_act

    async def run(self, action: Action, resource: Resource) -> Written:
        """Does one thing and says what. Raises ObstacleError, NotYetError, NotLeaderError, ApiError (may pass)."""
        if isinstance(action, Apply | Scale) and action.runs:
            await self._nothing_else_runs(resource, {action.runs, *action.beside})
        if isinstance(action, Apply) and not action.known:
            await self._name_is_free(action.manifest, resource)
        if not self._may_act():
            raise NotLeaderError("the lease is not held any more")
        try:
            written = await self._send(await self._pinned(action, resource), resource.key.namespace)
        except ApiError as error:
            raise self._judged(error, action) from error
        logger.info("%s: %s", resource.key, action.because)
        return written

    async def _send(self, action: Action, namespace: str) -> Written:
        kind, name = subject(action)
        found: Raw = {}
        match action:
            case Apply(manifest=manifest, version=version):
                if version:
                    manifest = {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": version}}
                found = await self._api.apply(kind, namespace, name, manifest, names.FIELD_MANAGER)
            case Scale(uid=uid, version=version, replicas=replicas):
                body = {"metadata": {"uid": uid, "resourceVersion": version}, "spec": {"replicas": replicas}}
                found = await self._api.merge(kind, namespace, name, body, names.FIELD_MANAGER)
            case Record(uid=uid, version=version, annotations=annotations):
                metadata = {"uid": uid, "resourceVersion": version, "annotations": dict(annotations)}
                found = await self._api.merge(kind, namespace, name, {"metadata": metadata}, names.FIELD_MANAGER)
            case Conclude(uid=uid, status=status):
                body = {
                    "apiVersion": names.API_VERSION,
                    "kind": kind,
                    "metadata": {"name": name, "namespace": namespace, "uid": uid},
                    "status": status,
                }
                found = await self._api.apply(kind, namespace, name, body, names.STATUS_FIELD_MANAGER, "status")
            case Delete(uid=uid, version=version) if uid:
                await self._api.delete(kind, namespace, name, uid, version)
        return Written(kind, name, str((found.get("metadata") or {}).get("resourceVersion", "")))

    async def _pinned(self, action: Action, resource: Resource) -> Action:
        """A deletion of what was not seen, as one of what is there now; unchanged if that is nothing of ours."""
        if not isinstance(action, Delete) or action.uid:
            return action
        found = await self._api.get(action.kind, resource.key.namespace, action.name)
        metadata = {} if found is None else found["metadata"]
        if controller_uid(metadata) != resource.uid:
            return action
        return replace(action, uid=metadata["uid"], version=metadata["resourceVersion"])

    def _judged(self, error: ApiError, action: Action) -> Exception:
        gone = error.code == 404 and not isinstance(action, Apply)
        replaced = error.code == 409
        if gone or replaced:
            return NotYetError(str(error))
        if error.refused:
            return ObstacleError(f"The API server refuses: {error}")
        return error

    async def _name_is_free(self, manifest: Raw, resource: Resource) -> None:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        found = await self._api.get(kind, resource.key.namespace, name)
        metadata = found.get("metadata", {}) if found is not None else {}
        if found is None or controller_uid(metadata) == resource.uid:
            return
        labels = metadata.get("labels") or {}
        if controller_uid(metadata) and labels.get(names.SERVICE_LABEL) == resource.key.name:
            raise NotYetError(f"{kind} {name} of an earlier service is still there")
        raise ObstacleError(
            f"A {kind} `{name}` exists in namespace `{resource.key.namespace}` and does not belong to this service."
        )

    async def _nothing_else_runs(self, resource: Resource, admitted: set[str]) -> None:
        """No more sets of GPUs than are admitted, asked of the API server itself: a cache may lag behind our edits."""
        selector = f"{names.SERVICE_LABEL}={resource.key.name}"
        namespace = resource.key.namespace
        for deployment in await self._api.list("Deployment", namespace, labelSelector=selector):
            labels = deployment["metadata"].get("labels") or {}
            if labels.get(names.REVISION_LABEL) not in admitted and deployment["spec"].get("replicas"):
                raise NotYetError(f"{deployment['metadata']['name']} still runs")
        for raw in await self._api.list("Pod", namespace, labelSelector=selector):
            pod = parse_pod(raw)
            if pod.component == names.ENGINE_COMPONENT and pod.revision not in admitted and not pod.ended:
                raise NotYetError(f"pod {pod.name} still ends")


def subject(action: Action) -> tuple[str, str]:
    """Kind and name of the object that an action is about."""
    match action:
        case Apply(manifest=manifest):
            return str(manifest["kind"]), str(manifest["metadata"]["name"])
        case Scale(name=name):
            return "Deployment", name
        case Record(name=name):
            return "ControllerRevision", name
        case Conclude(name=name):
            return names.QUALIFICATION_KIND, name
        case Delete(kind=kind, name=name):
            return kind, name
