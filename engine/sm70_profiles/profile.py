"""A profile: one recipe as a document. What to serve it on, with which settings, and which paths must be fast."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from sm70_profiles.base import Document, Figure, ProfileName, Quantity, Token
from sm70_profiles.facts import ComputeCapability, EngineFlavour, Interconnect, KvGroups, ModelFacts
from sm70_profiles.settings import Overrides

__all__ = [
    "UNKNOWN",
    "Checkpoint",
    "DraftRequirement",
    "Engine",
    "EngineFlavour",
    "Floors",
    "Hardware",
    "HubRevision",
    "Limits",
    "Measurement",
    "Profile",
    "Resources",
    "Tier",
    "Variant",
]

UNKNOWN = "unknown"
"""A value that no source gives. A check against it says `unverified`, never that it passed."""

Revision = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{40}|unknown)$")]
Checksum = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64}|unknown)$")]
FileName = Annotated[
    str,
    StringConstraints(
        min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$"
    ),
]
Repository = Annotated[
    str,
    StringConstraints(
        min_length=3, max_length=200, pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*|unknown)$"
    ),
]
Sentence = Annotated[str, StringConstraints(min_length=1, max_length=600)]


class Tier(StrEnum):
    """How much of the recipe has been proven."""

    PRODUCTION = "Production"
    NEWER = "Newer"
    RESEARCH = "Research"
    REFERENCE = "Reference"


class Engine(Document):
    flavour: EngineFlavour


class Hardware(Document):
    """The GPUs of one replica. `computeCapability` is that of the kernels: None where no GPU kernel runs."""

    count: int = Field(ge=0, le=64)
    products: tuple[Token, ...] = Field(default=(), max_length=16)
    min_memory: Quantity | None = None
    interconnect: Interconnect = Interconnect.ANY
    compute_capability: ComputeCapability | None = None
    min_compute_capability: ComputeCapability | None = Field(
        default=None, description="The least that serves at all; without it exactly `computeCapability` is demanded."
    )


class HubRevision(Document):
    """One repository of a model hub at one commit. Commit ids of different hubs are unrelated."""

    repo: Repository
    revision: Revision = UNKNOWN


class Checkpoint(Document):
    """A pinned checkpoint. What no source gives is `unknown`; `sm70-profiles pin` fills checksums from files."""

    hugging_face: HubRevision | None = None
    model_scope: HubRevision | None = None
    sha256: dict[FileName, Checksum] = Field(default_factory=dict, max_length=64)
    download_bytes: int | None = Field(default=None, ge=0, le=1 << 44, description="About how much is downloaded.")


class DraftRequirement(Document):
    """What the recipe demands of a draft model, and which one it was made with."""

    required: bool = False
    architectures: tuple[Token, ...] = Field(default=(), max_length=8)
    checkpoint: Checkpoint | None = None
    shape: ModelFacts | None = Field(default=None, description="The draft that the recipe is qualified with.")
    tokens: int | None = Field(default=None, ge=1, le=31, description="Draft tokens of the qualified verifier.")


class Resources(Document):
    """What the pod's container asks of the node besides GPUs."""

    cpu_request: Annotated[str, StringConstraints(pattern=r"^[0-9]{1,4}m?$")] = "4"
    memory_request: Quantity = "16Gi"
    memory_limit: Quantity = "64Gi"
    shared_memory: Quantity = "8Gi"


class Variant(Document):
    """Settings that replace the recipe's when more draft tokens than the threshold are verified."""

    draft_tokens_above: int = Field(ge=0, le=31)
    settings: Overrides


class Limits(Document):
    """Bounds that were measured rather than derived; None was not measured."""

    max_model_len: int | None = Field(default=None, ge=1, le=4_194_304, description="Longest context seen to fit.")
    max_num_seqs: int | None = Field(default=None, ge=1, le=4096, description="Most sequences seen to survive.")
    max_num_batched_tokens: int | None = Field(default=None, ge=1, le=1_048_576)
    max_capture_size: int | None = Field(default=None, ge=1, le=4096)
    draft_bytes: int | None = Field(default=None, ge=0, le=1 << 40, description="Largest draft sized for.")
    draft_tokens_above: int | None = Field(
        default=None, ge=0, le=31, description="`maxModelLen` holds only for more draft tokens than this."
    )


class Floors(Document):
    """The slowest at which a server of the recipe counts as healthy, one request at a time; None: the suite's own."""

    prefill_rate: Figure | None = Field(default=None, description="Prompt tokens per second until the first token.")
    decode_rate: Figure | None = Field(default=None, description="Tokens per second after the first.")
    first_token: Figure | None = Field(default=None, description="Milliseconds until the first token, at most.")


class Measurement(Document):
    """One published or own figure with the contract under which it holds."""

    what: Sentence
    value: Sentence
    contract: Sentence
    source: Sentence


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
    model_shape: ModelFacts | None = Field(default=None, description="The model that the recipe is qualified with.")
    model_checkpoint: Checkpoint | None = None
    served_name: Token | None = None
    draft: DraftRequirement = DraftRequirement()
    settings: Overrides
    variants: tuple[Variant, ...] = Field(default=(), max_length=4)
    limits: Limits = Limits()
    kv_groups: KvGroups | None = Field(
        default=None, description="How the engine of the recipe's figures groups layers; default: the serving engine's."
    )
    resources: Resources = Resources()
    expected_acceleration: tuple[Token, ...] = Field(default=(), max_length=64)
    floors: Floors | None = Field(default=None, description="What a qualification run holds the server to.")
    gates: tuple[Sentence, ...] = Field(default=(), max_length=32, description="What must be shown before production.")
    unknown: tuple[Sentence, ...] = Field(default=(), max_length=32, description="What no source says.")
    measured: tuple[Measurement, ...] = Field(default=(), max_length=32)
    sources: tuple[Sentence, ...] = Field(default=(), max_length=16)

    @model_validator(mode="after")
    def _expects_each_path_once(self) -> Self:
        twice = sorted({name for name in self.expected_acceleration if self.expected_acceleration.count(name) > 1})
        if twice:
            raise ValueError(f"`expectedAcceleration` must name each path once, found `{'`, `'.join(twice)}` again")
        return self
