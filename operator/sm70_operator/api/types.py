"""Spec and status of an Sm70InferenceService. The CRD is generated from these types; the planner computes with them.

Whatever the resolver reads too (sources, overrides, GPUs, acceleration) is defined in `sm70_profiles.spec`.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

from sm70_operator.api.conditions import Condition
from sm70_operator.api.pod import EnvVar, KeyReference, LocalReference, PodSettings
from sm70_profiles.base import AbsolutePath, Document, Figure, Name, ProfileName, Quantity
from sm70_profiles.qualification import GateName
from sm70_profiles.report import UuidSource
from sm70_profiles.routes import Stage
from sm70_profiles.spec import Acceleration, DraftSource, GpuRequest, ModelSource, Overrides

Image = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@+-]*$")]
Argument = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class ListType(StrEnum):
    """How server-side apply merges a list."""

    MAP = "map"
    SET = "set"


def list_map(*keys: str) -> dict[str, Any]:
    """Schema extensions of a list whose items are told apart by these fields."""
    return {"x-kubernetes-list-type": ListType.MAP.value, "x-kubernetes-list-map-keys": list(keys)}


class ProfileReference(Document):
    """A profile document of the user's own. A change of its content is a new revision."""

    config_map: KeyReference


class AccessMode(StrEnum):
    READ_WRITE_ONCE = "ReadWriteOnce"
    READ_WRITE_ONCE_POD = "ReadWriteOncePod"
    READ_WRITE_MANY = "ReadWriteMany"


class CompileCache(Document):
    """Where compiled kernels and graphs are kept between starts.

    Either an existing claim, or a folder of the node, or (neither given) a claim `NAME-compile-cache` that the operator
    makes and that is deleted with the service. Without `compileCache` every start compiles anew.
    """

    storage_class_name: Name | None = Field(default=None, description="Default: the cluster's default class.")
    size: Quantity | None = Field(default=None, description="Default: 20Gi. It can be raised later, never lowered.")
    access_modes: tuple[AccessMode, ...] = Field(
        default=(), max_length=3, description="Default: ReadWriteOnce, or ReadWriteMany with several replicas."
    )
    existing_claim: Name | None = None
    host_path: AbsolutePath | None = None


class Auth(Document):
    """Who may ask. Exactly one of the two must be set."""

    api_key_secret_ref: KeyReference | None = Field(
        default=None, description="The server demands this key as a bearer token. The operator never reads it."
    )
    allow_anonymous: bool | None = Field(default=None, description="Serve whoever reaches the port.")


class ImagePullPolicy(StrEnum):
    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class Engine(Document):
    """The server's image. Omitted: the operator's own image for the profile's flavour."""

    image: Image | None = None
    image_pull_secrets: tuple[LocalReference, ...] = Field(default=(), max_length=8, json_schema_extra=list_map("name"))
    image_pull_policy: ImagePullPolicy | None = Field(
        default=None, description="Default: Always for a tag `latest` or none, else IfNotPresent."
    )


class RolloutStrategy(StrEnum):
    AUTO = "Auto"
    """`Surge` where a matching set of GPUs is free at that moment, else `InPlace`."""
    IN_PLACE = "InPlace"
    """The earlier revision stops, then the new one starts on the same GPUs."""
    SURGE = "Surge"
    """The new one starts beside the earlier one, on a second set."""


RevisionName = Annotated[str, StringConstraints(min_length=1, max_length=16, pattern=r"^[0-9a-f]+$")]


class Rollout(Document):
    """How a change is carried out, and how one that proves bad is undone.

    The public Service keeps its revision until the new one is started, accelerated and qualified. A new one that fails
    is stopped and recorded in `status.revisions.rejected`; the last good one returns, and the same revision is not
    tried again before the spec changes.
    """

    strategy: RolloutStrategy = RolloutStrategy.AUTO
    paused: bool = Field(
        default=False,
        description="No change begins. One whose earlier revision has already stopped is carried on: to hold it would"
        " only prolong the outage.",
    )
    drain_timeout_seconds: int = Field(
        default=120, ge=0, le=3600, description="How long a stopping server finishes requests."
    )
    progress_deadline_seconds: int = Field(
        default=1800,
        ge=60,
        le=86_400,
        description="How long a start may stand still; it begins anew with every phase that is reached. Afterwards the"
        " last good revision returns; without one, the start is reported and still tried.",
    )
    bake_seconds: int = Field(
        default=600, ge=0, le=86_400, description="How long a promoted revision is watched before it counts as good."
    )
    max_fallback_percent: int = Field(
        default=5,
        ge=0,
        le=100,
        description="Share of dispatches on fallback routes above which a revision returns within its bake time.",
    )
    revision_history_limit: int = Field(
        default=5, ge=1, le=50, description="Stopped revisions that are kept, beside the last good one."
    )
    rollback_to: RevisionName | None = Field(
        default=None, description="A stored revision that is served in place of what the spec resolves to."
    )


class QualificationTime(StrEnum):
    BEFORE = "Before"
    """Evidence must exist before a serving revision is stopped. A first one, which stops none, is judged in place."""
    DURING = "During"
    """A candidate is judged after it has started and before it gets traffic."""
    NEVER = "Never"


class OnInconclusive(StrEnum):
    HOLD = "Hold"
    PROMOTE = "Promote"


class SuiteSource(Document):
    """A suite document of the user's own. Evidence holds for its very content."""

    config_map: KeyReference


class Qualification(Document):
    """What a revision has to show before it gets traffic, beside its acceleration."""

    suite: ProfileName = Field(default="smoke", description="A built-in suite.")
    suite_ref: SuiteSource | None = Field(
        default=None, description="In place of `suite`: a suite of your own, which the judge reads from the ConfigMap."
    )
    thresholds: dict[GateName, Figure] = Field(
        default_factory=dict,
        max_length=32,
        description="Other floors of the suite's performance gates, as decimal figures: `{decode-rate: '60'}`. Evidence"
        " for other floors is other evidence.",
    )
    when: QualificationTime = Field(
        default=QualificationTime.DURING,
        description="During: the started candidate is judged while it has no public traffic. Before: also nothing that"
        " serves is stopped for a candidate without evidence. Never: no evidence is asked for.",
    )
    on_inconclusive: OnInconclusive = Field(
        default=OnInconclusive.HOLD,
        description="What samples that do not decide lead to, after the repeats. Hold: in place the last good revision"
        " returns; a candidate that stands in nobody's way is held. Promote: it gets the traffic.",
    )
    repeats: int = Field(default=2, ge=0, le=10, description="Further runs after one that did not decide.")
    timeout_seconds: int = Field(default=3600, ge=60, le=86_400, description="Of one run.")


class Spec(Document):
    """What to serve, on what, and how."""

    profile: ProfileName | None = Field(default=None, description="A built-in profile.")
    profile_ref: ProfileReference | None = None
    model: ModelSource
    draft: DraftSource | None = None
    overrides: Overrides = Overrides()
    extra_args: tuple[Argument, ...] = Field(
        default=(), max_length=64, description="Further options of `vllm serve`; none that a typed field owns."
    )
    env: tuple[EnvVar, ...] = Field(default=(), max_length=64, json_schema_extra=list_map("name"))
    replicas: int = Field(default=1, ge=0, le=64)
    gpus: GpuRequest = GpuRequest()
    compile_cache: CompileCache | None = None
    acceleration: Acceleration = Acceleration()
    auth: Auth
    engine: Engine = Engine()
    pod: PodSettings = PodSettings()
    qualification: Qualification = Field(
        default=Qualification(when=QualificationTime.NEVER), description="Omitted: no evidence is asked for."
    )
    rollout: Rollout = Rollout()


class StatusPart(Document):
    """Unlike the spec, a status of another version is read as far as it is understood."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True, protected_namespaces=()
    )


Word = Annotated[str, StringConstraints(max_length=128)]
Text = Annotated[str, StringConstraints(max_length=1024)]
Revision = Annotated[str, StringConstraints(max_length=16)]


class RejectedRevision(StatusPart):
    """A revision that failed, and why. It is not tried again before the spec changes."""

    revision: Revision
    reason: Word
    message: Text = ""
    time: datetime


class Revisions(StatusPart):
    """`active` is what the public Service selects, `target` what the present spec asks for.

    `lastGood` is the newest one whose bake time ended well: a failing change returns to it.
    """

    active: Revision | None = None
    target: Revision | None = None
    last_good: Revision | None = None
    rejected: tuple[RejectedRevision, ...] = Field(
        default=(), max_length=16, json_schema_extra=list_map("revision"), description="The newest first."
    )


class RolloutStatus(StatusPart):
    """The change under way: told before anything is done for it."""

    revision: Revision
    strategy: Word = Field(description="`InPlace` or `Surge`.")
    because: Text = ""


class PathState(StrEnum):
    ENABLED = "Enabled"
    DISABLED = "Disabled"
    NOT_APPLICABLE = "NotApplicable"
    UNKNOWN = "Unknown"


class PathStatus(StatusPart):
    """One acceleration path; over several pods the worst state."""

    name: Word
    expected: bool
    state: PathState
    reason: Word | None = None
    message: Text = ""


class AccelerationStatus(StatusPart):
    """What the serving pods report of themselves."""

    summary: Word = Field(description="Enabled over expected paths, `11/11`.")
    schema_version: int = Field(ge=0, le=2**31 - 1)
    observed_time: datetime = Field(description="When this content was first seen.")
    paths: tuple[PathStatus, ...] = Field(default=(), max_length=64, json_schema_extra=list_map("name"))


class RouteStatus(StatusPart):
    """Dispatches of one route since the servers started, summed over pods. Graph replays are not counted."""

    route: Word
    stage: Stage
    dispatches: int = Field(ge=0, le=2**53)
    fallback: bool = False


class RouteWindow(StatusPart):
    """The newest stretch of time in which anything was dispatched; a restarted server begins a new one."""

    seconds: int = Field(ge=0, le=2**31 - 1)
    dispatches: int = Field(ge=0, le=2**53)
    fallback_percent: int = Field(ge=0, le=100, description="Share of these dispatches on fallback routes, rounded up.")
    resets: int = Field(default=0, ge=0, le=2**31 - 1, description="Counters that were seen to begin anew.")


class LastShutdown(StatusPart):
    """The last ordered end of a server of the service, by its own last words."""

    revision: Revision
    pod: Annotated[str, StringConstraints(max_length=253)]
    time: datetime
    message: Text = ""
    items: tuple[RouteStatus, ...] = Field(default=(), max_length=32, json_schema_extra=list_map("route", "stage"))


class RoutesStatus(StatusPart):
    """What was really executed. Written at most once a minute, at once when a route or a fallback is new."""

    revision: Revision
    observed_time: datetime
    window: RouteWindow | None = None
    last_shutdown: LastShutdown | None = None
    items: tuple[RouteStatus, ...] = Field(default=(), max_length=128, json_schema_extra=list_map("route", "stage"))


class Effective(StatusPart):
    """The resolver's answer for the target revision. Values of variables are not shown."""

    profile: Word
    profile_hash: Word
    image: Text
    args: tuple[Annotated[str, StringConstraints(max_length=4096)], ...] = Field(default=(), max_length=512)
    env: tuple[Word, ...] = Field(
        default=(), max_length=128, description="Names of the variables that the pod is given."
    )
    warnings: tuple[Text, ...] = Field(default=(), max_length=32)


class Placement(StatusPart):
    """Where a pod runs, and on which GPUs by its own word."""

    pod: Annotated[str, StringConstraints(max_length=253)]
    node: Annotated[str, StringConstraints(max_length=253)]
    gpu_uuids: tuple[Word, ...] = Field(default=(), max_length=64, alias="gpuUUIDs")
    source: UuidSource = Field(default=UuidSource.NONE, description="How the engine knows the uuids.")


class CacheState(StrEnum):
    COLD = "Cold"
    WARMING = "Warming"
    WARM = "Warm"
    UNWRITABLE = "Unwritable"


class CompileCacheStatus(StatusPart):
    """The compile cache by the engines' word; with several pods, the one that found the least."""

    key: Word | None = None
    state: CacheState
    files_added_at_last_start: int | None = Field(default=None, ge=0, le=2**53)


class QualificationStatus(StatusPart):
    """The evidence for the revision under judgement, or else for the active one."""

    name: Annotated[str, StringConstraints(max_length=253)] | None = None
    verdict: Word
    key: Word | None = None


class Capacity(StatusPart):
    """How much one replica holds, by the engine's word."""

    kv_tokens: int | None = Field(default=None, ge=0, le=2**53)
    block_size: int | None = Field(default=None, ge=0, le=2**31 - 1)
    residents_at_max_len: int | None = Field(default=None, ge=0, le=2**31 - 1)


class StartupPhase(StrEnum):
    SCHEDULING = "Scheduling"
    PULLING = "Pulling"
    DOWNLOADING = "Downloading"
    LOADING_WEIGHTS = "LoadingWeights"
    COMPILING = "Compiling"
    CAPTURING_GRAPHS = "CapturingGraphs"
    WARMING = "Warming"
    SERVING = "Serving"


class Startup(StatusPart):
    """How far the slowest replica of the revision that starts is. A phase that was reached stays reached."""

    revision: Revision
    phase: StartupPhase
    since: datetime
    estimate_seconds: int | None = Field(
        default=None, ge=0, le=2**31 - 1, description="How long the service's last complete start took."
    )
    downloaded_bytes: int | None = Field(
        default=None, ge=0, le=2**53, description="The most that was there of a download of this start."
    )
    downloaded_at: datetime | None = Field(default=None, description="When it last became more.")


class Display(StatusPart):
    """Texts for the columns of `kubectl get`; nothing decides by them."""

    profile: Word = ""
    gpus: Text = ""
    nodes: Text = ""
    cache: Word = ""


class Status(StatusPart):
    """What is. It can be deleted at any time and comes back."""

    observed_generation: int = Field(default=0, ge=0, le=2**53)
    replicas: int = Field(default=0, ge=0, le=2**31 - 1, description="Pods of the target revision.")
    ready_replicas: int = Field(default=0, ge=0, le=2**31 - 1)
    selector: Text = Field(default="", description="Label selector of the pods, for `kubectl scale` and autoscalers.")
    url: Text | None = None
    revisions: Revisions = Revisions()
    rollout: RolloutStatus | None = None
    startup: Startup | None = None
    qualification: QualificationStatus | None = None
    compile_cache: CompileCacheStatus | None = None
    capacity: Capacity | None = None
    acceleration: AccelerationStatus | None = None
    routes: RoutesStatus | None = None
    effective: Effective | None = None
    placement: tuple[Placement, ...] = Field(default=(), max_length=64, json_schema_extra=list_map("pod"))
    display: Display = Display()
    conditions: tuple[Condition, ...] = Field(default=(), max_length=32, json_schema_extra=list_map("type"))
