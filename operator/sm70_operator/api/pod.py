"""The parts of a pod that a user may set: the few corev1 types that the service's spec passes through, bounded.

They are typed rather than passed blindly, so that a misspelt field is refused by the API server and not lost in a pod.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from sm70_profiles.base import Document, Name, Quantity

LabelKey = Annotated[
    str,
    StringConstraints(
        min_length=1,
        max_length=317,
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
    ),
]
LabelValue = Annotated[str, StringConstraints(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")]
DataKey = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=r"^[-._A-Za-z0-9]+$")]
"""A key of a Secret's or a ConfigMap's data."""
EnvName = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
ResourceName = Annotated[
    str, StringConstraints(min_length=1, max_length=253, pattern=r"^([a-z0-9][-a-z0-9.]*/)?[A-Za-z0-9][-A-Za-z0-9_.]*$")
]
QUANTITY_TEXT = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"
ResourceQuantity = (
    Annotated[str, StringConstraints(min_length=1, max_length=32, pattern=QUANTITY_TEXT)]
    | Annotated[int, Field(ge=0, le=2**53)]
)
"""An amount of a resource as Kubernetes writes it: `2`, `500m`, `16Gi`."""


class KeyReference(Document):
    """One key of a Secret or ConfigMap in the service's namespace."""

    name: Name
    key: DataKey


class FieldReference(Document):
    """A field of the pod itself, for example `metadata.name`."""

    field_path: Annotated[
        str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z][A-Za-z0-9.\[\]'/_-]*$")
    ]


class EnvVarSource(Document):
    """Where a variable's value comes from. Exactly one of the members must be set."""

    config_map_key_ref: KeyReference | None = None
    secret_key_ref: KeyReference | None = None
    field_ref: FieldReference | None = None


class EnvVar(Document):
    """One variable of the engine's environment. The operator never reads the value of a reference."""

    name: EnvName
    value: Annotated[str, StringConstraints(max_length=4096)] | None = None
    value_from: EnvVarSource | None = None


class LocalReference(Document):
    """An object of the service's namespace."""

    name: Name


class TolerationOperator(StrEnum):
    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(Document):
    """A taint that the pods accept; an absent `key` with `operator: Exists` accepts all."""

    key: LabelKey | None = None
    operator: TolerationOperator | None = None
    value: LabelValue | None = None
    effect: TaintEffect | None = None
    toleration_seconds: int | None = Field(default=None, ge=0, le=2**31 - 1)


class NodeOperator(StrEnum):
    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"
    GT = "Gt"
    LT = "Lt"


class LabelOperator(StrEnum):
    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class NodeSelectorRequirement(Document):
    key: LabelKey
    operator: NodeOperator
    values: tuple[LabelValue, ...] = Field(default=(), max_length=32)


class NodeSelectorTerm(Document):
    """All of the requirements must hold."""

    match_expressions: tuple[NodeSelectorRequirement, ...] = Field(default=(), max_length=16)
    match_fields: tuple[NodeSelectorRequirement, ...] = Field(default=(), max_length=16)


class NodeSelector(Document):
    """One of the terms must hold. The service's own demands on the GPU are added to every term."""

    node_selector_terms: tuple[NodeSelectorTerm, ...] = Field(min_length=1, max_length=16)


class PreferredNode(Document):
    weight: int = Field(ge=1, le=100)
    preference: NodeSelectorTerm


class NodeAffinity(Document):
    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    preferred_during_scheduling_ignored_during_execution: tuple[PreferredNode, ...] = Field(default=(), max_length=16)


class LabelRequirement(Document):
    key: LabelKey
    operator: LabelOperator
    values: tuple[LabelValue, ...] = Field(default=(), max_length=32)


class LabelSelector(Document):
    match_labels: dict[LabelKey, LabelValue] = Field(default_factory=dict, max_length=16)
    match_expressions: tuple[LabelRequirement, ...] = Field(default=(), max_length=16)


class PodTerm(Document):
    """Pods that the selector finds, counted within one value of the node label `topologyKey`."""

    topology_key: LabelKey
    label_selector: LabelSelector | None = None
    namespaces: tuple[Name, ...] = Field(default=(), max_length=16)
    namespace_selector: LabelSelector | None = None


class PreferredPods(Document):
    weight: int = Field(ge=1, le=100)
    pod_affinity_term: PodTerm


class PodAffinity(Document):
    required_during_scheduling_ignored_during_execution: tuple[PodTerm, ...] = Field(default=(), max_length=8)
    preferred_during_scheduling_ignored_during_execution: tuple[PreferredPods, ...] = Field(default=(), max_length=8)


class Affinity(Document):
    """Scheduling wishes beyond `nodeSelector`."""

    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None


class ResourceRequirements(Document):
    """Override of the profile's requests and limits, by resource name. GPUs belong to `gpus`, not here."""

    requests: dict[ResourceName, ResourceQuantity] = Field(default_factory=dict, max_length=16)
    limits: dict[ResourceName, ResourceQuantity] = Field(default_factory=dict, max_length=16)


class PodSettings(Document):
    """What the pods need besides the engine. Any change is a new revision: the pods are replaced."""

    node_selector: dict[LabelKey, LabelValue] = Field(default_factory=dict, max_length=32)
    tolerations: tuple[Toleration, ...] = Field(default=(), max_length=32)
    affinity: Affinity | None = None
    priority_class_name: Name | None = None
    runtime_class_name: Name | None = None
    resources: ResourceRequirements | None = None
    shared_memory: Quantity | None = Field(
        default=None, description="Size of /dev/shm, in memory and counted in the limit; default: the profile's."
    )
    service_account_name: Name | None = Field(default=None, description="Its token is not mounted.")
    labels: dict[LabelKey, LabelValue] = Field(default_factory=dict, max_length=32)
    annotations: dict[LabelKey, Annotated[str, StringConstraints(max_length=4096)]] = Field(
        default_factory=dict, max_length=32
    )
