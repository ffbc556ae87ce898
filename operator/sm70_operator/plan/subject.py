"""The subject of the status: the revision whose pods the conditions speak of, and what was promised to them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from sm70_operator.api import names
from sm70_operator.api.types import Effective
from sm70_operator.observe.facts import ObjectFacts
from sm70_operator.observe.snapshot import Snapshot
from sm70_operator.plan.fleet import Member, owner_of
from sm70_operator.plan.gates import Expectation
from sm70_operator.plan.intent import Rejected, Target
from sm70_operator.render.deployment import render_deployment
from sm70_operator.render.objects import Manifest
from sm70_operator.render.revision import Revision
from sm70_profiles.profile import Hardware
from sm70_profiles.report import printable
from sm70_profiles.resolver import Resolution, ServeRequest, resolve
from sm70_profiles.spec import Acceleration

MAX_WARNINGS = 32


@dataclass(frozen=True)
class Subject:
    """A revision and its resolution; the latter is None where an older Deployment cannot be understood any more."""

    name: str
    image: str
    variables: tuple[str, ...]
    acceleration: Acceleration
    resolution: Resolution | None
    hardware: Hardware | None = None
    """What the profile demands of the GPUs."""

    @property
    def expectation(self) -> Expectation:
        return Expectation(
            profile_hash=self.resolution.profile_hash if self.resolution is not None else None,
            image=self.image or None,
            acceleration=self.acceleration,
        )

    def effective(self) -> Effective | None:
        """What `status.effective` shows."""
        resolution = self.resolution
        if resolution is None:
            return None
        return Effective(
            profile=resolution.profile,
            profile_hash=resolution.profile_hash,
            image=self.image,
            args=resolution.argv,
            env=self.variables,
            warnings=tuple(printable(str(warning), 1024) for warning in resolution.warnings[:MAX_WARNINGS]),
        )

    def gpus_text(self) -> str:
        """The GPUs of one replica, for people."""
        gpus = self.resolution.gpus if self.resolution is not None else None
        if gpus is None or gpus.count == 0:
            return "0" if gpus is not None else ""
        return f"{gpus.count} x {' | '.join(gpus.products)}" if gpus.products else str(gpus.count)


def subject_of(snapshot: Snapshot, intent: Target | Rejected, member: Member) -> Subject | None:
    """What is known of a revision: by the spec, by its record, or else by its Deployment."""
    if isinstance(intent, Target) and intent.name == member.name:
        return _of_document(snapshot, member.name, intent.revision, intent.resolution)
    if member.record is not None and member.record.document is not None and member.record.resolution is not None:
        return _of_document(snapshot, member.name, member.record.document, member.record.resolution)
    return None if member.deployment is None else _of_deployment(member.deployment, member.name)


def _of_document(snapshot: Snapshot, name: str, document: Revision, resolution: Resolution) -> Subject:
    manifest = render_deployment(owner_of(snapshot), name, document, 0)
    return Subject(
        name=name,
        image=document.image,
        variables=tuple(_environment(manifest)),
        acceleration=document.request.acceleration,
        resolution=resolution,
        hardware=document.request.profile.hardware,
    )


def _of_deployment(deployment: ObjectFacts, name: str) -> Subject:
    environment = _environment(deployment.manifest)
    request = None
    # One that another version of the operator made and this one cannot read is judged by its pods' own reports.
    with suppress(ValidationError):
        request = ServeRequest.model_validate_json(environment.get(names.SERVE_REQUEST_VARIABLE, ""))
    return Subject(
        name=name,
        image=environment.get(names.ENGINE_IMAGE_VARIABLE, ""),
        variables=tuple(environment),
        acceleration=Acceleration() if request is None else request.acceleration,
        resolution=None if request is None else resolve(request),
        hardware=None if request is None else request.profile.hardware,
    )


def _environment(manifest: Manifest | Mapping[str, Any]) -> dict[str, str]:
    """The engine container's variables; those with a reference have no value here."""
    containers = manifest.get("spec", {}).get("template", {}).get("spec", {}).get("containers") or ()
    engine: Mapping[str, Any] = next((one for one in containers if one.get("name") == names.CONTAINER), {})
    return {variable["name"]: variable.get("value") or "" for variable in engine.get("env") or ()}
