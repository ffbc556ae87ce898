"""What all manifests have in common: metadata with labels and the owner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sm70_operator.api import names

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Owner:
    """The custom resource that the objects belong to; they go when it goes."""

    namespace: str
    name: str
    uid: str

    def reference(self) -> Manifest:
        return {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }

    def metadata(self, name: str, extra: Mapping[str, str] | None = None) -> Manifest:
        """Metadata of an object of this service, with further labels."""
        return {
            "name": name,
            "namespace": self.namespace,
            "labels": {**names.labels(self.name), **(extra or {})},
            "ownerReferences": [self.reference()],
        }
