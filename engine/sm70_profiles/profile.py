"""A profile: one recipe as a document. What to serve it on, with which settings, and which paths must be fast."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from sm70_profiles.base import Document, ProfileName, Quantity, Token
from sm70_profiles.spec import Interconnect, Overrides


class Tier(StrEnum):
    """How much of the recipe has been proven."""

    PRODUCTION = "Production"
    NEWER = "Newer"
    RESEARCH = "Research"
    REFERENCE = "Reference"


class EngineFlavour(StrEnum):
    """Which build of the engine serves the profile."""

    SM70 = "sm70"
    CPU = "cpu"


class Engine(Document):
    flavour: EngineFlavour


class Hardware(Document):
    """The GPUs of one replica. `computeCapability` is that of the kernels: None where no GPU kernel runs."""

    count: int = Field(ge=0, le=64)
    products: tuple[Token, ...] = Field(default=(), max_length=16)
    min_memory: Quantity | None = None
    interconnect: Interconnect = Interconnect.ANY
    compute_capability: Annotated[str, StringConstraints(pattern=r"^[0-9]+\.[0-9]$")] | None = None


class DraftRequirement(Document):
    """What the recipe demands of a draft model."""

    required: bool = False
    architectures: tuple[Token, ...] = Field(default=(), max_length=8)


class Resources(Document):
    """What the pod's container asks of the node besides GPUs."""

    cpu_request: Annotated[str, StringConstraints(pattern=r"^[0-9]{1,4}m?$")] = "4"
    memory_request: Quantity = "16Gi"
    memory_limit: Quantity = "64Gi"
    shared_memory: Quantity = "8Gi"


class Profile(Document):
    """The whole document; `schemaVersion` names the format."""

    schema_version: Literal[1]
    name: ProfileName
    title: Annotated[str, StringConstraints(max_length=200)]
    tier: Tier
    description: Annotated[str, StringConstraints(max_length=4000)] = ""
    engine: Engine
    hardware: Hardware
    model_architectures: tuple[Token, ...] = Field(default=(), max_length=16)
    draft: DraftRequirement = DraftRequirement()
    settings: Overrides
    resources: Resources = Resources()
    expected_acceleration: tuple[Token, ...] = Field(default=(), max_length=64)
