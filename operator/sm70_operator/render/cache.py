"""The claim of the compile cache. It outlives pods and revisions and goes with the service."""

from __future__ import annotations

from sm70_operator.api import names
from sm70_operator.api.types import AccessMode, Spec
from sm70_operator.render.objects import Manifest, Owner

DEFAULT_SIZE = "20Gi"


def render_cache_claim(owner: Owner, spec: Spec) -> Manifest | None:
    """The PersistentVolumeClaim, or None where the spec names a claim or folder of its own, or wants no cache."""
    cache = spec.compile_cache
    if cache is None or cache.existing_claim is not None or cache.host_path is not None:
        return None
    shared = AccessMode.READ_WRITE_MANY if spec.replicas > 1 else AccessMode.READ_WRITE_ONCE
    body: Manifest = {
        "accessModes": [str(mode) for mode in cache.access_modes or (shared,)],
        "resources": {"requests": {"storage": cache.size or DEFAULT_SIZE}},
    }
    if cache.storage_class_name is not None:
        body["storageClassName"] = cache.storage_class_name
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": owner.metadata(names.compile_cache_name(owner.name), {names.COMPONENT_LABEL: "compile-cache"}),
        "spec": body,
    }
