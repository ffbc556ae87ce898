"""The parts of a service's spec that the resolver reads: sources, overrides and the GPU request.

The operator builds the CRD's schema from these same types, so admission, pod and laptop cannot disagree about a field.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from sm70_profiles.base import AbsolutePath, Document, Name, Quantity, RelativePath, Token
from sm70_profiles.facts import Interconnect
from sm70_profiles.settings import (
    Dtype,
    KvCacheDtype,
    Overrides,
    Speculation,
    SpeculationMethod,
    Tools,
)

__all__ = [
    "SHA256",
    "SOURCE_MEMBERS",
    "Acceleration",
    "AccelerationPolicy",
    "AllowedDisabledPath",
    "CheckpointSource",
    "DraftSource",
    "Dtype",
    "GpuAllocation",
    "GpuRequest",
    "HostPathSource",
    "HubSource",
    "HuggingFaceSource",
    "ImageSource",
    "Interconnect",
    "KvCacheDtype",
    "ModelScopeSource",
    "ModelSource",
    "Overrides",
    "PersistentVolumeClaimSource",
    "SecretKey",
    "Speculation",
    "SpeculationMethod",
    "Tools",
]

SHA256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class PersistentVolumeClaimSource(Document):
    """A folder of a PersistentVolumeClaim in the service's namespace."""

    claim_name: Name
    path: RelativePath | None = Field(default=None, description="Folder inside the volume; default: its root.")


class HostPathSource(Document):
    """A folder of the node's own disk; the node must have it before the pod starts."""

    path: AbsolutePath


class ImageSource(Document):
    """The files of an OCI image, mounted as an image volume."""

    reference: Annotated[
        str, StringConstraints(min_length=1, max_length=512, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@+-]*$")
    ]
    path: RelativePath | None = None


class SecretKey(Document):
    """One key of a Secret in the service's namespace. Only the container that needs it sees its value."""

    name: Name
    key: Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=r"^[-._A-Za-z0-9]+$")]


class HubSource(Document):
    """A repository of a model hub at one revision, downloaded once into a claim before the server starts."""

    repo: Annotated[
        str,
        StringConstraints(
            min_length=3, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$"
        ),
    ]
    claim_name: Name = Field(description="The PersistentVolumeClaim that keeps the download; it must be writable.")
    path: RelativePath | None = Field(
        default=None, description="Folder inside the claim; default: made of repository and revision."
    )
    token_secret_ref: SecretKey | None = Field(
        default=None, description="Access token for a gated repository. The operator never reads it."
    )

    @property
    def pin(self) -> str:
        """The revision."""
        raise NotImplementedError

    @property
    def folder(self) -> str:
        """The folder inside the claim: another revision never lands in the folder of this one."""
        return self.path or f"{self.repo.replace('/', '--')}-{self.pin[:40]}"


class HuggingFaceSource(HubSource):
    """A repository of the Hugging Face hub."""

    revision: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")] = Field(
        description="A full commit id: a branch is another model tomorrow."
    )

    @property
    def pin(self) -> str:
        return self.revision


class ModelScopeSource(HubSource):
    """A repository of the ModelScope hub."""

    revision: Annotated[
        str, StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    ] = Field(description="A commit id or a tag.")

    @property
    def pin(self) -> str:
        return self.revision


class CheckpointSource(Document):
    """Where a checkpoint is. Exactly one of the members must be set."""

    persistent_volume_claim: PersistentVolumeClaimSource | None = None
    host_path: HostPathSource | None = None
    image: ImageSource | None = None
    hugging_face: HuggingFaceSource | None = None
    model_scope: ModelScopeSource | None = None

    @property
    def hub(self) -> HubSource | None:
        """The repository that is downloaded, if it is one."""
        return self.hugging_face or self.model_scope

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in SOURCE_MEMBERS if getattr(self, name) is not None]
        if len(given) != 1:
            members = ", ".join(f"`{CheckpointSource.model_fields[name].alias}`" for name in SOURCE_MEMBERS)
            raise ValueError(f"exactly one of {members} must be set, found {len(given)}")
        return self


SOURCE_MEMBERS = ("persistent_volume_claim", "host_path", "image", "hugging_face", "model_scope")


class ModelSource(CheckpointSource):
    """The target model."""

    served_name: Token | None = Field(default=None, description="Name in the OpenAI API; default: the service's name.")


class DraftSource(CheckpointSource):
    """The draft model of speculative decoding. Omitted: the profile's pinned checkpoint."""

    sha256: dict[Annotated[str, StringConstraints(max_length=128)], SHA256] = Field(
        default_factory=dict, max_length=64, description="Expected SHA-256 by file name."
    )


class GpuAllocation(StrEnum):
    DEVICE_PLUGIN = "DevicePlugin"
    DRA = "DRA"


GpuUuid = Annotated[str, StringConstraints(min_length=5, max_length=64, pattern=r"^GPU-[0-9A-Za-z-]+$")]


class GpuRequest(Document):
    """The GPUs of one replica. What is omitted comes from the profile."""

    count: int | None = Field(default=None, ge=0, le=64, description="Must equal TP x PP of the resolved settings.")
    products: tuple[Token, ...] | None = Field(default=None, min_length=1, max_length=16)
    min_memory: Quantity | None = None
    interconnect: Interconnect | None = None
    resource_name: Annotated[str, StringConstraints(max_length=253, pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$")] = (
        "nvidia.com/gpu"
    )
    allocation: GpuAllocation = Field(
        default=GpuAllocation.DEVICE_PLUGIN,
        description="DevicePlugin: by count, on nodes with the wanted labels. DRA: by a ResourceClaimTemplate whose"
        " selectors name product, compute capability, memory and `uuids`; the cluster needs a DRA driver.",
    )
    uuids: tuple[GpuUuid, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="The only GPUs that may be taken, `gpus.count` of them for each replica. Needs `allocation: DRA`.",
    )
    device_class_name: Name | None = Field(default=None, description="Of DRA. Default: `gpu.nvidia.com`.")

    @model_validator(mode="after")
    def _only_claims_can_pin(self) -> Self:
        if self.allocation is not GpuAllocation.DRA:
            given = [name for name in ("uuids", "device_class_name") if getattr(self, name) is not None]
            if given:
                fields = ", ".join(f"`{type(self).model_fields[name].alias}`" for name in given)
                raise ValueError(f"{fields} need `allocation: DRA`: a device plugin hands out GPUs by number only")
        return self


class AccelerationPolicy(StrEnum):
    REQUIRE = "Require"
    REPORT = "Report"


class AllowedDisabledPath(Document):
    """An expected path that may be disabled, and the user's reason."""

    path: Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[a-z0-9_]+$")]
    because: Annotated[str, StringConstraints(min_length=1, max_length=256)]


class Acceleration(Document):
    """What the readiness of a pod demands. `Require`: every expected path enabled, save the allowed ones."""

    policy: AccelerationPolicy = AccelerationPolicy.REQUIRE
    allow_disabled: tuple[AllowedDisabledPath, ...] = Field(default=(), max_length=32)
