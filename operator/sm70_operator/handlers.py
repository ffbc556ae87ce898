"""kopf registrations: what is watched, how it is cached, and which service an event wakes. A table of contents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import kopf

from sm70_operator.api import names
from sm70_operator.api.qualification import parse_evidence
from sm70_operator.observe.facts import PodFacts, parse_node, parse_object, parse_pod
from sm70_operator.observe.proof import parse_job
from sm70_operator.observe.revisions import parse_revision
from sm70_operator.observe.snapshot import Key, Resource, StoredResource
from sm70_operator.observe.store import Store
from sm70_operator.settings import Settings

CHILDREN: Mapping[str, tuple[str, str, str]] = {
    "deployments": ("apps", "v1", "deployments"),
    "pods": ("", "v1", "pods"),
    "services": ("", "v1", "services"),
    "claims": ("", "v1", "persistentvolumeclaims"),
    "revisions": ("apps", "v1", "controllerrevisions"),
    "jobs": ("batch", "v1", "jobs"),
    "evidence": (names.GROUP, names.VERSION, names.QUALIFICATION_PLURAL),
}
PLURALS = frozenset({names.PLURAL, "nodes", *(child[-1] for child in CHILDREN.values())})
OURS = (names.GROUP, names.VERSION, names.PLURAL)
NODES = ("", "v1", "nodes")


def registry(
    settings: Settings,
    woken: Callable[[Store, Key], None],
    ended: Callable[[Key, PodFacts], None] = lambda key, pod: None,
) -> kopf.OperatorRegistry:
    """Everything that kopf has to do for us. `woken` is called for every event, after the first lists are complete;
    `ended` is told of a pod that is gone, whose last words stand nowhere else.
    """
    made = kopf.OperatorRegistry()

    @kopf.index(*OURS, id="resources", registry=made)
    def resources(body: kopf.Body, **_: Any) -> dict[Key, StoredResource]:
        resource = StoredResource.of(Resource.parse(dict(body)))
        _relieve(body)
        return {resource.key: resource}

    for index, parse in (
        ("deployments", parse_object),
        ("pods", parse_pod),
        ("services", parse_object),
        ("claims", parse_object),
        ("revisions", parse_revision),
        ("jobs", parse_job),
    ):
        kopf.index(*CHILDREN[index], id=index, registry=made)(_indexer(parse))
        kopf.on.event(*CHILDREN[index], id=f"{index}-event", registry=made)(_child_event(settings, woken))
    kopf.on.event(*CHILDREN["pods"], id="pods-gone", registry=made)(_pod_gone(ended))

    @kopf.index(*CHILDREN["evidence"], id="evidence", registry=made)
    def evidence(body: kopf.Body, namespace: str | None, **_: Any) -> dict[str, Any]:
        found = parse_evidence(dict(body))
        _relieve(body)
        return {} if found is None else {namespace or "": found}

    kopf.on.event(*CHILDREN["evidence"], id="evidence-event", registry=made)(_child_event(settings, woken))

    if settings.observe_nodes:

        @kopf.index(*NODES, id="nodes", registry=made)
        def nodes(body: kopf.Body, name: str, **_: Any) -> dict[str, Any]:
            node = parse_node(dict(body))
            _relieve(body)
            return {name: node}

    @kopf.on.event(*OURS, id="service-event", registry=made)
    async def event(name: str, namespace: str | None, **kwargs: Any) -> None:
        woken(_store(settings, kwargs), Key(namespace or "", name))

    return made


def _indexer(parse: Callable[[Mapping[str, Any]], Any]) -> Callable[..., dict[Key, Any]]:
    def index(body: kopf.Body, labels: Mapping[str, str], namespace: str, **_: Any) -> dict[Key, Any]:
        service = labels.get(names.SERVICE_LABEL)
        found = {Key(namespace, service): parse(dict(body))} if service else {}
        _relieve(body)
        return found

    return index


def _relieve(body: kopf.Body) -> None:
    """Empties the parts of an object that are facts by now.

    kopf keeps the last body of every object until its worker ends, and copies and compares it in between; while the
    first lists come in, that is every object of the cluster at once. A DELETED event is not indexed, and stays whole.
    """
    for part in ("spec", "status", "data"):
        if isinstance(held := body.get(part), dict):
            held.clear()
    metadata = body.get("metadata")
    if isinstance(metadata, dict):
        metadata.pop("managedFields", None)


def _child_event(settings: Settings, woken: Callable[[Store, Key], None]) -> Callable[..., Any]:
    async def event(labels: Mapping[str, str], namespace: str, **kwargs: Any) -> None:
        service = labels.get(names.SERVICE_LABEL)
        if service:
            woken(_store(settings, kwargs), Key(namespace, service))

    return event


def _pod_gone(ended: Callable[[Key, PodFacts], None]) -> Callable[..., Any]:
    async def event(body: kopf.Body, labels: Mapping[str, str], namespace: str, **kwargs: Any) -> None:
        service = labels.get(names.SERVICE_LABEL)
        if kwargs.get("type") == "DELETED" and service:
            ended(Key(namespace, service), parse_pod(dict(body)))

    return event


def _store(settings: Settings, indices: Mapping[str, Any]) -> Store:
    return Store(
        resources=indices["resources"],
        deployments=indices["deployments"],
        pods=indices["pods"],
        services=indices["services"],
        claims=indices["claims"],
        nodes=indices["nodes"] if settings.observe_nodes else None,
        revisions=indices["revisions"],
        jobs=indices["jobs"],
        evidence=indices["evidence"],
    )
