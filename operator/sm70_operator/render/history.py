"""The ControllerRevision of a resolved change: what its pods are rendered from, for as long as it may be needed."""

from __future__ import annotations

from sm70_operator.api import names
from sm70_operator.render.objects import Manifest, Owner
from sm70_operator.render.revision import Revision


def render_controller_revision(owner: Owner, name: str, revision: Revision, number: int, source: str) -> Manifest:
    """`number` counts up over the revisions of a service; `source` names the spec that it was resolved from."""
    metadata = owner.metadata(names.controller_revision_name(owner.name, name), names.selector(owner.name, name))
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {**metadata, "annotations": {names.SOURCE_ANNOTATION: source}},
        "revision": number,
        "data": revision.model_dump(mode="json", by_alias=True, exclude_none=True),
    }
