"""The catalogue of routes: what a dispatch is counted as. A fallback is a route of its own, never silence."""

from __future__ import annotations

from enum import StrEnum

from sm70_profiles.base import Document


class Stage(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"
    DRAFT = "draft"


class Route(Document):
    """One way to execute an operation."""

    name: str
    path: str | None
    """The acceleration path that this route executes; None for a fallback."""
    stages: tuple[Stage, ...]
    description: str

    @property
    def fallback(self) -> bool:
        return self.path is None


_TARGET = (Stage.PREFILL, Stage.DECODE, Stage.VERIFY)
_ALL = tuple(Stage)
_CATALOGUE = (
    Route(
        name="nvfp4_linear_reference",
        path="reference_nvfp4_linear",
        stages=_TARGET,
        description="NVFP4 weights, unpacked and multiplied by the plain reference on the CPU.",
    ),
    Route(
        name="attention_reference",
        path="reference_attention",
        stages=_ALL,
        description="Paged attention of the CPU lane over the KV cache in the compute dtype.",
    ),
    Route(
        name="attention_e4m3_reference",
        path="reference_attention_e4m3",
        stages=_ALL,
        description="Paged attention of the CPU lane over an E4M3 KV cache.",
    ),
    Route(
        name="attention_e5m2_reference",
        path=None,
        stages=_ALL,
        description="Paged attention of the CPU lane over an E5M2 KV cache: served, but not the recipe's path.",
    ),
    Route(
        name="gdn_reference",
        path="reference_gdn",
        stages=_TARGET,
        description="Gated delta net of the CPU lane.",
    ),
)
ROUTES = {route.name: route for route in _CATALOGUE}
