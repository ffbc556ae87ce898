"""The public Service. Its selector says which revision has the traffic; that is the persisted decision."""

from __future__ import annotations

from sm70_operator.api import names
from sm70_operator.render.objects import Manifest, Owner


def render_service(owner: Owner, revision: str | None, promoted_at: str = "") -> Manifest:
    """The Service that sends traffic to one revision's ready pods; None: to nobody's."""
    metadata = owner.metadata(owner.name)
    if promoted_at:
        metadata["annotations"] = {names.PROMOTED_ANNOTATION: promoted_at}
    return _service(metadata, names.selector(owner.name, revision or names.NO_REVISION))


def render_candidate_service(owner: Owner, revision: str) -> Manifest:
    """The Service of the revision under judgement. It also reaches pods that are not ready yet."""
    metadata = owner.metadata(names.candidate_name(owner.name), {names.COMPONENT_LABEL: names.CANDIDATE_COMPONENT})
    manifest = _service(metadata, names.selector(owner.name, revision))
    manifest["spec"]["publishNotReadyAddresses"] = True
    return manifest


def _service(metadata: Manifest, selector: dict[str, str]) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "type": "ClusterIP",
            "selector": selector,
            "ports": [
                {
                    "name": names.PORT_NAME,
                    "port": names.HTTP_PORT,
                    "targetPort": names.PORT_NAME,
                    "protocol": "TCP",
                    "appProtocol": "http",
                }
            ],
        },
    }


def service_url(owner: Owner) -> str:
    """Where clients inside the cluster find the server."""
    return f"http://{owner.name}.{owner.namespace}.svc:{names.HTTP_PORT}"


def candidate_url(owner: Owner) -> str:
    """Where the judge finds the revision under judgement."""
    return f"http://{names.candidate_name(owner.name)}.{owner.namespace}.svc:{names.HTTP_PORT}"
