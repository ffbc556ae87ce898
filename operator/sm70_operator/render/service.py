"""The public Service. Its selector says which revision has the traffic; that is the persisted decision."""

from __future__ import annotations

from sm70_operator.api import names
from sm70_operator.render.objects import Manifest, Owner


def render_service(owner: Owner, revision: str) -> Manifest:
    """The Service that sends traffic to one revision's ready pods."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": owner.metadata(owner.name),
        "spec": {
            "type": "ClusterIP",
            "selector": names.selector(owner.name, revision),
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
