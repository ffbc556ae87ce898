"""The offline view of an `Sm70InferenceService`: as much of its spec as the resolver reads.

The operator owns the whole resource. Here the parts that it shares with the resolver are read with the same types, so
that a file is refused offline in the words that the cluster would use; parts that only the operator reads are passed
over by name, and a field that nobody knows is an error.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, StringConstraints, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from sm70_profiles.base import Document, ProfileName
from sm70_profiles.documents import describe
from sm70_profiles.profile import Profile
from sm70_profiles.reasons import Refusal, RefusalCode
from sm70_profiles.resolver import Argument, ServeRequest
from sm70_profiles.settings import Overrides
from sm70_profiles.spec import Acceleration, DraftSource, GpuRequest, ModelSource

API_VERSION = "inference.sm70.io/v1alpha1"
KIND = "Sm70InferenceService"
TARGET_MOUNT = "/models/target"
DRAFT_MOUNT = "/models/draft"
OPERATORS_OWN = frozenset(
    {"replicas", "compileCache", "qualification", "rollout", "auth", "engine", "pod", "network", "startup"}
)
"""Parts of the spec that the resolver does not read."""


class Variable(Document):
    """One variable; a reference's value is not known offline."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True, protected_namespaces=()
    )

    name: Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    value: Annotated[str, StringConstraints(max_length=4096)] | None = None


class ProfileReference(Document):
    """A profile document of the user's own, in a ConfigMap."""

    config_map: dict[str, str] = Field(max_length=2)


class ServiceSpec(Document):
    """What the resolver reads of a spec."""

    profile: ProfileName | None = None
    profile_ref: ProfileReference | None = None
    model: ModelSource
    draft: DraftSource | None = None
    overrides: Overrides = Overrides()
    extra_args: tuple[Argument, ...] = Field(default=(), max_length=64)
    env: tuple[Variable, ...] = Field(default=(), max_length=64)
    gpus: GpuRequest = GpuRequest()
    acceleration: Acceleration = Acceleration()

    @model_validator(mode="before")
    @classmethod
    def _without_the_operators_parts(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: part for key, part in value.items() if key not in OPERATORS_OWN}

    @model_validator(mode="after")
    def _one_profile(self) -> Self:
        if (self.profile is None) == (self.profile_ref is None):
            raise ValueError("exactly one of `profile` and `profileRef` must be set")
        return self


class ResourceError(ValueError):
    """The document is not a service. `refusals` say why, in the resolver's form."""

    def __init__(self, refusals: tuple[Refusal, ...]) -> None:
        super().__init__("; ".join(map(str, refusals)))
        self.refusals = refusals


def read_resource(document: dict[str, Any]) -> tuple[str, ServiceSpec]:
    """Name and spec of a service. Raises ResourceError."""
    found = f"{document.get('apiVersion')} {document.get('kind')}"
    if found != f"{API_VERSION} {KIND}":
        raise _invalid("kind", f"must be {API_VERSION} {KIND}", found[:120])
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or not name:
        raise _invalid("metadata.name", "must be given", "none")
    try:
        return name, ServiceSpec.model_validate(document.get("spec") or {})
    except ValidationError as error:
        raise _invalid("spec", "must fit the schema", describe(error)) from None


def serve_request(name: str, spec: ServiceSpec, profile: Profile) -> ServeRequest:
    """The request that a pod of this service would get. Mounts stand for the sources."""
    return ServeRequest(
        profile=profile,
        model_path=TARGET_MOUNT,
        draft_path=None if spec.draft is None else DRAFT_MOUNT,
        draft_sha256=(spec.draft.sha256 or None) if spec.draft else None,
        served_name=spec.model.served_name or name,
        overrides=spec.overrides,
        extra_args=spec.extra_args,
        environment={one.name: one.value for one in spec.env if one.value is not None} or None,
        gpus=spec.gpus,
        acceleration=spec.acceleration,
    )


def resource(
    name: str,
    *,
    profile: str,
    model: str | None,
    draft: str | None,
    served_name: str,
    settings: Overrides,
    extra_args: tuple[str, ...],
    environment: dict[str, str],
    gpus: int,
) -> dict[str, Any]:
    """A service as a document: what is absent stays the profile's. The key is a Secret's, which the user makes."""
    overrides = settings.model_dump(mode="json", by_alias=True, exclude_none=True)
    spec: dict[str, Any] = {
        "profile": profile,
        "model": {**_source(model, "model"), "servedName": served_name},
        "draft": _source(draft, "draft") if draft else None,
        "overrides": overrides or None,
        "extraArgs": list(extra_args) or None,
        "env": [{"name": key, "value": value} for key, value in sorted(environment.items())] or None,
        "gpus": {"count": gpus},
        "auth": {"apiKeySecretRef": {"name": f"{name}-api-key", "key": "api-key"}},
    }
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name},
        "spec": {key: value for key, value in spec.items() if value is not None},
    }


def _source(path: str | None, what: str) -> dict[str, Any]:
    if path is not None and path.startswith("/"):
        return {"hostPath": {"path": path}}
    folder = (path or what).strip("./") or what
    return {"persistentVolumeClaim": {"claimName": "models", "path": folder}}


def _invalid(field: str, must: str, found: str) -> ResourceError:
    return ResourceError(
        (
            Refusal(
                code=RefusalCode.RESOURCE_INVALID,
                field=field,
                must=must,
                found=found,
                remedy="Correct the resource.",
            ),
        )
    )
