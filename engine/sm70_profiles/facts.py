"""What is known of the world when a request is resolved: the checkpoints, the GPUs, the engine, the host.

Every member may be unknown (None), and an unknown fact never refuses anything: it leaves a judgement open.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from sm70_profiles.base import Document, Token

Text = Annotated[str, StringConstraints(max_length=256)]
Dimension = Annotated[int, Field(ge=0, le=1 << 40)]
ComputeCapability = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,2}\.[0-9]$")]


class EngineFlavour(StrEnum):
    """Which build of the engine serves."""

    SM70 = "sm70"
    CPU = "cpu"
    VLLM = "vllm"
    SINGLE_GPU = "single_gpu"


class Interconnect(StrEnum):
    """How the GPUs of a replica reach each other."""

    NVLINK_MESH = "NVLinkMesh"
    NVLINK = "NVLink"
    ANY = "Any"


class KvGroups(StrEnum):
    """How an engine groups layers of several kinds into one pool of equal pages."""

    SMALLEST = "smallest"
    """By the kind with the fewest layers; other kinds are padded up to whole groups (stock vLLM)."""
    COMMON_DIVISOR = "common_divisor"
    """By the smallest size that divides the target's kinds evenly and holds the draft's layers."""


class ModelFacts(Document):
    """What a checkpoint's config.json says; None is unknown. Sizes are of the whole model, before any split."""

    architectures: tuple[Text, ...] = Field(default=(), max_length=16)
    quantization: Text | None = None
    vocabulary: Dimension | None = None
    hidden_size: Dimension | None = None
    layers: Dimension | None = None
    intermediate_size: Dimension | None = None
    attention_heads: Dimension | None = None
    kv_heads: Dimension | None = None
    head_dim: Dimension | None = None
    full_attention_layers: Dimension | None = None
    linear_attention_layers: Dimension | None = None
    linear_key_heads: Dimension | None = None
    linear_value_heads: Dimension | None = None
    linear_key_dim: Dimension | None = None
    linear_value_dim: Dimension | None = None
    conv_kernel: Dimension | None = None
    sliding_window: Dimension | None = None
    experts: Dimension | None = None
    experts_per_token: Dimension | None = None
    max_position: Dimension | None = None
    block_size: Dimension | None = Field(default=None, description="Of a block draft: tokens it verifies in one pass.")
    selector_top_k: Dimension | None = None
    capture_layers: Dimension | None = Field(
        default=None, description="Hidden states of the target that a draft reads."
    )
    weight_bytes: Dimension | None = Field(default=None, description="Of all weight files together.")


class GpuFacts(Document):
    """The GPUs that a replica gets."""

    product: Token | None = None
    count: int | None = Field(default=None, ge=0, le=1024)
    memory_mib: int | None = Field(default=None, ge=1, le=1 << 24, description="Of one GPU, as the driver reports it.")
    compute_capability: ComputeCapability | None = None
    interconnect: Interconnect | None = None
    driver: Token | None = None


class EngineFacts(Document):
    """The engine that will really serve. `flavour` None: the profile's. `features` None: not asked."""

    flavour: EngineFlavour | None = None
    features: frozenset[Token] | None = Field(default=None, max_length=64)
    build: Text | None = None
    torch: Text | None = None
    cuda: Text | None = None


class HostFacts(Document):
    """The machine or container in which the engine starts."""

    wsl: bool | None = None
    container: bool | None = None
    shared_memory_bytes: Dimension | None = None


class Facts(Document):
    """Everything together. `gpu_products` are the products that the nodes at hand have."""

    model: ModelFacts | None = None
    draft: ModelFacts | None = None
    gpu_products: tuple[str, ...] | None = None
    gpu: GpuFacts | None = None
    engine: EngineFacts | None = None
    host: HostFacts | None = None


def complete(found: ModelFacts | None, recipe: ModelFacts | None) -> ModelFacts | None:
    """What is known of a checkpoint, completed by the recipe's where nothing known contradicts it."""
    if found is None or recipe is None:
        return found or recipe
    known = {name: value for name in ModelFacts.model_fields if (value := getattr(found, name)) not in (None, ())}
    told = ("hidden_size", "layers", "vocabulary", "attention_heads", "kv_heads", "head_dim", "intermediate_size")
    if any(name in known and getattr(recipe, name) not in (None, known[name]) for name in told):
        return found
    return recipe.model_copy(update=known)
