"""Conditions and their reasons: every word that the status may use, with its meaning and the user's next step.

The reference documentation is generated from these tables, and nothing else in the operator spells a reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from sm70_profiles.base import Document


class ConditionType(StrEnum):
    ACCEPTED = "Accepted"
    GPUS_ALLOCATED = "GPUsAllocated"
    MODEL_AVAILABLE = "ModelAvailable"
    CACHE_WARM = "CacheWarm"
    ENGINE_STARTED = "EngineStarted"
    ACCELERATION_COMPLETE = "AccelerationComplete"
    QUALIFIED = "Qualified"
    ROUTES_HEALTHY = "RoutesHealthy"
    PROGRESSING = "Progressing"
    READY = "Ready"


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Reason(StrEnum):
    PENDING = "Pending"
    RESOLVED = "Resolved"
    REFUSED = "Refused"
    PROFILE_NOT_FOUND = "ProfileNotFound"
    PROFILE_INVALID = "ProfileInvalid"
    SCHEMA_UNSUPPORTED = "SchemaUnsupported"
    ALLOCATED = "Allocated"
    NOT_REQUIRED = "NotRequired"
    WAITING_FOR_GPU = "WaitingForGPU"
    GPU_MISMATCH = "GPUMismatch"
    TOPOLOGY_UNSUITABLE = "TopologyUnsuitable"
    UNSCHEDULABLE = "Unschedulable"
    PRESENT = "Present"
    PATH_NOT_FOUND = "PathNotFound"
    PATH_UNREADABLE = "PathUnreadable"
    VOLUME_NOT_FOUND = "VolumeNotFound"
    CHECKPOINT_NOT_PULLED = "CheckpointNotPulled"
    MODEL_INVALID = "ModelInvalid"
    CHECKSUM_MISMATCH = "ChecksumMismatch"
    DRAFT_INCOMPATIBLE = "DraftIncompatible"
    HIT = "Hit"
    COLD = "Cold"
    NOT_APPLICABLE = "NotApplicable"
    HEALTHY = "Healthy"
    PODS_REFUSED = "PodsRefused"
    CONTAINER_CREATING = "ContainerCreating"
    PULLING_IMAGE = "PullingImage"
    CONTAINER_REFUSED = "ContainerRefused"
    LOADING = "Loading"
    OUT_OF_MEMORY = "OutOfMemory"
    SHARED_MEMORY_TOO_SMALL = "SharedMemoryTooSmall"
    ENGINE_UNSUPPORTED = "EngineUnsupported"
    CRASH_LOOPING = "CrashLooping"
    ALL_ENABLED = "AllEnabled"
    ROUTE_DISABLED = "RouteDisabled"
    REPORT_UNAVAILABLE = "ReportUnavailable"
    REPORT_MISMATCH = "ReportMismatch"
    ACCELERATED = "Accelerated"
    FALLBACK_OBSERVED = "FallbackObserved"
    NO_TRAFFIC = "NoTraffic"
    COUNTERS_RESET = "CountersReset"
    SETTLED = "Settled"
    STARTING = "Starting"
    DRAINING = "Draining"
    RECOVERING = "Recovering"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    PREFLIGHT = "Preflight"
    PREFLIGHT_FAILED = "PreflightFailed"
    ANNOUNCED = "Announced"
    QUALIFYING = "Qualifying"
    HELD = "Held"
    PROMOTING = "Promoting"
    BAKING = "Baking"
    ROLLING_BACK = "RollingBack"
    ROLLED_BACK = "RolledBack"
    PAUSED = "Paused"
    OBSTRUCTED = "Obstructed"
    SERVING = "Serving"
    SERVING_EARLIER_SPEC = "ServingEarlierSpec"
    SCALED_TO_ZERO = "ScaledToZero"
    NOT_READY = "NotReady"
    GPU_CONFLICT = "GPUConflict"
    MEMORY_NOT_RELEASED = "MemoryNotReleased"
    DOWNLOADING = "Downloading"
    DOWNLOAD_FAILED = "DownloadFailed"
    REPOSITORY_UNAVAILABLE = "RepositoryUnavailable"
    DISK_FULL = "DiskFull"
    UNWRITABLE = "Unwritable"
    GPU_OUT_OF_MEMORY = "GPUOutOfMemory"
    NO_KERNEL_IMAGE = "NoKernelImage"
    DRIVER_TOO_OLD = "DriverTooOld"
    NCCL_FAILURE = "NCCLFailure"
    PROBE_TIMEOUT = "ProbeTimeout"
    NODE_NOT_READY = "NodeNotReady"
    PASSED = "Passed"
    EVIDENCE_MISSING = "EvidenceMissing"
    RUNNING = "Running"
    GATE_FAILED = "GateFailed"
    INCONCLUSIVE = "Inconclusive"
    RUN_ERROR = "RunError"
    STALE = "Stale"


TRUE_MEANS: dict[ConditionType, str] = {
    ConditionType.ACCEPTED: "the spec resolves: the profile is found and nothing is refused",
    ConditionType.GPUS_ALLOCATED: "every replica has its place on a node and holds the GPUs it asks for",
    ConditionType.MODEL_AVAILABLE: "model and draft are present and fit the profile",
    ConditionType.CACHE_WARM: "the compile cache for the engine's key existed and was hit at the last start",
    ConditionType.ENGINE_STARTED: "every replica's health endpoint answers",
    ConditionType.ACCELERATION_COMPLETE: "every path that the profile expects is enabled on every serving pod,"
    " save those that `acceleration.allowDisabled` names",
    ConditionType.QUALIFIED: "evidence for exactly this configuration passed",
    ConditionType.ROUTES_HEALTHY: "the counters show accelerated routes taken and no fallback",
    ConditionType.PROGRESSING: "the operator is working towards the spec",
    ConditionType.READY: "the active revision serves, and its acceleration satisfies the policy",
}


@dataclass(frozen=True)
class Meaning:
    """What a reason says and what the user does about it. `remedy` is empty where nothing is to be done."""

    conditions: tuple[ConditionType, ...]
    text: str
    remedy: str = ""


_ACCEPTED, _GPUS, _MODEL, _CACHE, _ENGINE = (
    (ConditionType.ACCEPTED,),
    (ConditionType.GPUS_ALLOCATED,),
    (ConditionType.MODEL_AVAILABLE,),
    (ConditionType.CACHE_WARM,),
    (ConditionType.ENGINE_STARTED,),
)
_QUALIFIED = (ConditionType.QUALIFIED,)
_ACCELERATION, _ROUTES, _PROGRESS, _READY = (
    (ConditionType.ACCELERATION_COMPLETE,),
    (ConditionType.ROUTES_HEALTHY,),
    (ConditionType.PROGRESSING,),
    (ConditionType.READY,),
)

MEANINGS: dict[Reason, Meaning] = {
    Reason.PENDING: Meaning(tuple(ConditionType), "Not known yet: an earlier step has to end first."),
    Reason.RESOLVED: Meaning(_ACCEPTED, "The spec resolves; `status.effective` says to what."),
    Reason.REFUSED: Meaning(
        (ConditionType.ACCEPTED, ConditionType.ENGINE_STARTED),
        "The spec cannot be served as it stands; the message holds every refusal. A running revision keeps serving.",
        "Mend each field that the message names; nothing is started before all of them are right.",
    ),
    Reason.PROFILE_NOT_FOUND: Meaning(
        _ACCEPTED,
        "`profile` names no built-in profile, or the ConfigMap or key of `profileRef` does not exist.",
        "Use one of the names in the message, or create the ConfigMap.",
    ),
    Reason.PROFILE_INVALID: Meaning(
        _ACCEPTED, "The document of `profileRef` is not a profile.", "Mend what the message lists in the ConfigMap."
    ),
    Reason.SCHEMA_UNSUPPORTED: Meaning(
        _ACCEPTED,
        "The stored object holds something that this operator does not know; it was written for another version.",
        "Upgrade the operator, or remove the fields that the message names.",
    ),
    Reason.ALLOCATED: Meaning(_GPUS, "Every replica is on a node and holds its GPUs."),
    Reason.NOT_REQUIRED: Meaning(
        (ConditionType.GPUS_ALLOCATED, ConditionType.QUALIFIED),
        "Not asked for: `gpus.count` is 0, or no qualification is demanded. `Ready` does not wait for it.",
    ),
    Reason.WAITING_FOR_GPU: Meaning(
        _GPUS,
        "Matching nodes exist, but not enough of one node's GPUs are free. The message names the holders it knows.",
        "Free GPUs by scaling down or deleting a holder; the pod starts by itself then.",
    ),
    Reason.GPU_MISMATCH: Meaning(
        _GPUS,
        "No node has GPUs of the wanted product.",
        "Set `gpus.products` to one that the message lists, or add a node with the wanted product.",
    ),
    Reason.TOPOLOGY_UNSUITABLE: Meaning(
        _GPUS,
        "No single node has as many GPUs as one replica needs; waiting cannot help.",
        "Lower `gpus.count` together with the parallel sizes, or add a larger node.",
    ),
    Reason.UNSCHEDULABLE: Meaning(
        _GPUS,
        "The scheduler finds no node for another reason than GPUs; the message has its words.",
        "Compare requests, `pod.nodeSelector`, `pod.affinity` and `pod.tolerations` with the nodes.",
    ),
    Reason.PRESENT: Meaning(_MODEL, "The engine has loaded the checkpoint."),
    Reason.PATH_NOT_FOUND: Meaning(
        _MODEL,
        "The folder does not exist in the volume.",
        "Correct the `path` of the source, or put the checkpoint there; the pod is tried again by itself.",
    ),
    Reason.PATH_UNREADABLE: Meaning(
        _MODEL, "The files exist but uid 65532 cannot read them.", "Make them readable for others (`chmod -R o+rX`)."
    ),
    Reason.VOLUME_NOT_FOUND: Meaning(
        _MODEL,
        "A PersistentVolumeClaim that the spec names does not exist in the namespace, or is not bound.",
        "Create the claim, or correct `claimName`.",
    ),
    Reason.CHECKPOINT_NOT_PULLED: Meaning(
        _MODEL,
        "The node cannot pull the OCI image that holds the checkpoint; the message has the runtime's words.",
        "Check the source's `image.reference`, and `engine.imagePullSecrets`, which is for this image too.",
    ),
    Reason.MODEL_INVALID: Meaning(
        _MODEL, "The files are not a checkpoint that the profile can serve.", "Use the model that the profile is for."
    ),
    Reason.CHECKSUM_MISMATCH: Meaning(
        _MODEL, "A file's SHA-256 is not the expected one.", "Copy the file again, or correct `draft.sha256`."
    ),
    Reason.DRAFT_INCOMPATIBLE: Meaning(
        _MODEL, "The draft was not made for this target model.", "Use the matching draft, or turn speculation off."
    ),
    Reason.HIT: Meaning(_CACHE, "Everything that the start needed was in the cache."),
    Reason.COLD: Meaning(_CACHE, "The start had to compile; the next one with the same key finds the result."),
    Reason.NOT_APPLICABLE: Meaning(
        (ConditionType.CACHE_WARM, ConditionType.ACCELERATION_COMPLETE),
        "The engine compiles nothing, or an expected path cannot exist on this engine.",
        "For acceleration: use a profile that is made for this engine.",
    ),
    Reason.HEALTHY: Meaning(_ENGINE, "`GET /health` answers on every replica."),
    Reason.PODS_REFUSED: Meaning(
        _ENGINE,
        "The API server does not admit the pods: a quota, a pod security level or an admission policy.",
        "Change what the message names; the pods are tried again by themselves.",
    ),
    Reason.CONTAINER_CREATING: Meaning(_ENGINE, "The node prepares the container: volumes, network, devices."),
    Reason.PULLING_IMAGE: Meaning(
        _ENGINE,
        "The node pulls the engine's image, or tries to: the message has the runtime's words when it cannot.",
        "Check `engine.image` and `engine.imagePullSecrets`.",
    ),
    Reason.CONTAINER_REFUSED: Meaning(
        _ENGINE,
        "The node cannot create the container, for example because a Secret or a mounted folder does not exist.",
        "Create what the message names.",
    ),
    Reason.LOADING: Meaning(_ENGINE, "The server runs and loads weights, compiles or captures graphs."),
    Reason.OUT_OF_MEMORY: Meaning(
        _ENGINE,
        "The server needed more host memory than the pod's limit.",
        "Raise `pod.resources.limits.memory`, or lower `pod.sharedMemory`, which counts in it.",
    ),
    Reason.SHARED_MEMORY_TOO_SMALL: Meaning(
        _ENGINE, "The shared memory is too small for the parallel ranks.", "Raise `pod.sharedMemory`."
    ),
    Reason.ENGINE_UNSUPPORTED: Meaning(
        _ENGINE,
        "The image's engine cannot serve this profile.",
        "Use the image that belongs to this version of the operator.",
    ),
    Reason.CRASH_LOOPING: Meaning(
        _ENGINE,
        "The server ends again and again; the message has its last words.",
        "Read `kubectl logs --previous` of the pod that the message names.",
    ),
    Reason.ALL_ENABLED: Meaning(_ACCELERATION, "Every expected path is enabled, or its absence is allowed."),
    Reason.ROUTE_DISABLED: Meaning(
        _ACCELERATION,
        "An expected path is disabled; the message has path and reason.",
        "Remove the override that disables it, or allow it in `acceleration.allowDisabled`.",
    ),
    Reason.REPORT_UNAVAILABLE: Meaning(
        _ACCELERATION,
        "The engine's report cannot be had: no answer, or not a report.",
        "Check that the operator's network may reach the pods on port 8000.",
    ),
    Reason.REPORT_MISMATCH: Meaning(
        _ACCELERATION,
        "The engine reports another profile or image than the operator gave it.",
        "Delete the pod; if it persists, the image belongs to another version.",
    ),
    Reason.ACCELERATED: Meaning(_ROUTES, "Accelerated routes were taken and no fallback was."),
    Reason.FALLBACK_OBSERVED: Meaning(
        _ROUTES,
        "Some work ran on a fallback route since the server started. It does not withdraw `Ready`.",
        "Compare `status.routes` with the profile's requirements.",
    ),
    Reason.NO_TRAFFIC: Meaning(_ROUTES, "Nothing was dispatched since the server started, so nothing is proven."),
    Reason.COUNTERS_RESET: Meaning(
        _ROUTES,
        "A server was restarted, what its counters held is lost, and nothing was dispatched since.",
        "Look for the restart's cause in `status.routes.lastShutdown` and in the pod's last state; the next requests"
        " decide.",
    ),
    Reason.SETTLED: Meaning(_PROGRESS, "The world is as the spec wants it, or nothing can be done about it."),
    Reason.STARTING: Meaning(_PROGRESS, "The wanted revision starts."),
    Reason.DRAINING: Meaning(_PROGRESS, "The earlier revision finishes its requests and stops."),
    Reason.RECOVERING: Meaning(_PROGRESS, "A replica of the active revision was lost and comes back."),
    Reason.DEADLINE_EXCEEDED: Meaning(
        _PROGRESS,
        "The revision was not ready within `rollout.progressDeadlineSeconds`. It is still tried.",
        "Read the condition that is not True.",
    ),
    Reason.PREFLIGHT: Meaning(
        _PROGRESS, "A Job without GPUs looks at the new revision while the earlier one goes on serving."
    ),
    Reason.PREFLIGHT_FAILED: Meaning(
        (ConditionType.PROGRESSING, ConditionType.READY),
        "The preflight found that the new revision would not start. Nothing was stopped for it.",
        "Mend what the message names; the next spec is checked again.",
    ),
    Reason.ANNOUNCED: Meaning(_PROGRESS, "The change begins; the message says how and why so."),
    Reason.QUALIFYING: Meaning(_PROGRESS, "The new revision serves without public traffic and is judged."),
    Reason.HELD: Meaning(
        _PROGRESS,
        "The judgement of the new revision did not decide, and it stands in nobody's way.",
        "Read the condition `Qualified`.",
    ),
    Reason.PROMOTING: Meaning(_PROGRESS, "The new revision gets the public traffic."),
    Reason.BAKING: Meaning(_PROGRESS, "The new revision has the traffic and is watched for `rollout.bakeSeconds`."),
    Reason.ROLLING_BACK: Meaning(_PROGRESS, "The new revision was rejected and the last good one returns."),
    Reason.ROLLED_BACK: Meaning(
        _PROGRESS,
        "The revision of the present spec was rejected and is not tried again; the last good one is to serve.",
        "Change the spec; `status.revisions.rejected` says what was wrong.",
    ),
    Reason.PAUSED: Meaning(_PROGRESS, "`rollout.paused` is set, and a change waits.", "Set `rollout.paused` to false."),
    Reason.OBSTRUCTED: Meaning(
        (ConditionType.PROGRESSING, ConditionType.READY),
        "The API server refuses what the operator wants to do, or an object of the needed name belongs to another.",
        "Change what the message names; the operator tries again by itself.",
    ),
    Reason.SERVING: Meaning(_READY, "The revision of the present spec serves."),
    Reason.SERVING_EARLIER_SPEC: Meaning(
        _READY,
        "The present spec is refused, and the revision of an earlier one keeps serving.",
        "Read the condition `Accepted`.",
    ),
    Reason.SCALED_TO_ZERO: Meaning(_READY, "`replicas` is 0.", "Raise `replicas`."),
    Reason.NOT_READY: Meaning(
        _READY, "A pod does not pass its readiness probe.", "Read the pod's events, or wait for a long prefill to end."
    ),
    Reason.GPU_CONFLICT: Meaning(
        _GPUS,
        "Another service's `gpus.uuids` name the same GPU; the message names both services and the GPU.",
        "Take the GPU out of one of the two lists, or scale one of the services to 0.",
    ),
    Reason.MEMORY_NOT_RELEASED: Meaning(
        _GPUS,
        "A server that was stopped may still hold the memory of its GPUs; the next one starts when it is given back.",
        "Wait; if it stays, look for the process that holds it (`nvidia-smi` on the node) and end it.",
    ),
    Reason.DOWNLOADING: Meaning(
        _MODEL, "The checkpoint is being downloaded into its claim; an interrupted download is gone on with."
    ),
    Reason.DOWNLOAD_FAILED: Meaning(
        (ConditionType.MODEL_AVAILABLE,),
        "The network or the hub ended a download. What has come is kept, and the pod tries again by itself.",
        "Check that the node reaches the hub, or name a mirror (`HF_ENDPOINT`, `MODELSCOPE_ENDPOINT`) in `env`.",
    ),
    Reason.REPOSITORY_UNAVAILABLE: Meaning(
        _MODEL,
        "The hub has no such repository or revision, or it is gated and the token does not open it. To a stranger a hub"
        " does not say which.",
        "Check `repo` and `revision`; for a gated one accept its terms and name a Secret in `tokenSecretRef`.",
    ),
    Reason.DISK_FULL: Meaning(
        (ConditionType.MODEL_AVAILABLE, ConditionType.ENGINE_STARTED),
        "A volume has less room than what has to be written to it.",
        "Enlarge the claim that the message names, or remove what is not needed.",
    ),
    Reason.UNWRITABLE: Meaning(
        (ConditionType.CACHE_WARM, ConditionType.MODEL_AVAILABLE),
        "A volume cannot be written to: full, read-only, or of another user. A compile cache that cannot be written"
        " costs time at every start and nothing else.",
        "Make the volume writable for group 65532 (`fsGroup`), or enlarge it.",
    ),
    Reason.GPU_OUT_OF_MEMORY: Meaning(
        _ENGINE,
        "The engine needed more memory of a GPU than was free.",
        "Lower `overrides.maxModelLen`, `overrides.maxNumSeqs` or `overrides.gpuMemoryUtilizationPercent`; if the GPU"
        " was not empty, end what else is on it.",
    ),
    Reason.NO_KERNEL_IMAGE: Meaning(
        _ENGINE,
        "The image's engine has no code for the architecture of this GPU.",
        "Use the engine image that is built for the GPU, or choose nodes with the profile's GPU in `gpus.products`.",
    ),
    Reason.DRIVER_TOO_OLD: Meaning(
        _ENGINE,
        "The node's NVIDIA driver is older than the CUDA of the image needs.",
        "Update the driver of the node that the message names, or use an image for an older CUDA.",
    ),
    Reason.NCCL_FAILURE: Meaning(
        _ENGINE,
        "The parallel ranks could not talk to each other.",
        "Check the node's GPUs (`nvidia-smi topo -m`, `dmesg` for Xid lines) and raise `pod.sharedMemory`.",
    ),
    Reason.PROBE_TIMEOUT: Meaning(
        _ENGINE,
        "The kubelet ended a server that did not answer its probe in time.",
        "Look at the load of the node and at the events of the pod that the message names.",
    ),
    Reason.NODE_NOT_READY: Meaning(
        _ENGINE,
        "The node of a pod does not report any more, so nothing is known of its server.",
        "Look at the node; if it is off for good, delete it (`kubectl delete node`), and the pod is replaced.",
    ),
    Reason.PASSED: Meaning(_QUALIFIED, "An `Sm70Qualification` for exactly this configuration passed."),
    Reason.EVIDENCE_MISSING: Meaning(
        _QUALIFIED, "The suite was not run for this revision yet; it is, as soon as the revision serves."
    ),
    Reason.RUNNING: Meaning(_QUALIFIED, "The judge's Job runs; the message names the `Sm70Qualification`."),
    Reason.GATE_FAILED: Meaning(
        _QUALIFIED,
        "A gate of the suite was measured and is not good enough. The same configuration is not judged again while its"
        " `Sm70Qualification` exists.",
        "Change what the gate measures, or delete the `Sm70Qualification` to have it judged again.",
    ),
    Reason.INCONCLUSIVE: Meaning(
        _QUALIFIED,
        "The samples did not decide the gates, nor in the `qualification.repeats` further runs.",
        "Delete the `Sm70Qualification` objects that the message names to judge again when the machine is quieter, or"
        " set `qualification.onInconclusive: Promote`.",
    ),
    Reason.RUN_ERROR: Meaning(
        _QUALIFIED,
        "The judge could not measure: its Job did not end with a report, or the candidate could not be asked.",
        "Read the Job's pod that has the name of the `Sm70Qualification`; delete the object to have it run again.",
    ),
    Reason.STALE: Meaning(
        _QUALIFIED,
        "The evidence was taken on another GPU product or driver branch than the server now runs on.",
        "The suite is run again by itself; until then the revision keeps what traffic it has.",
    ),
}


class Condition(Document):
    """One observation, in the form of metav1.Condition."""

    type: ConditionType
    status: ConditionStatus
    reason: Reason
    message: Annotated[str, StringConstraints(max_length=4096)] = ""
    observed_generation: int = Field(ge=0, le=2**53)
    last_transition_time: datetime


@dataclass(frozen=True)
class Finding:
    """What the planner concludes for one condition; the time is added when it enters the status."""

    status: ConditionStatus
    reason: Reason
    message: str

    @classmethod
    def true(cls, reason: Reason, message: str = "") -> Finding:
        return cls(ConditionStatus.TRUE, reason, message)

    @classmethod
    def false(cls, reason: Reason, message: str = "") -> Finding:
        return cls(ConditionStatus.FALSE, reason, message)

    @classmethod
    def unknown(cls, reason: Reason = Reason.PENDING, message: str = "") -> Finding:
        return cls(ConditionStatus.UNKNOWN, reason, message)


def with_remedy(reason: Reason, found: str) -> str:
    """What was found, and the next step that belongs to the reason."""
    return " ".join(part for part in (found, MEANINGS[reason].remedy) if part)


def conditions(
    findings: dict[ConditionType, Finding], earlier: Iterable[Condition], generation: int, now: datetime
) -> tuple[Condition, ...]:
    """All conditions in their order. `lastTransitionTime` moves only when a status flips."""
    before = {condition.type: condition for condition in earlier}
    result = []
    for kind in ConditionType:
        finding = findings.get(kind, Finding.unknown())
        same = before.get(kind)
        flipped = same is None or same.status is not finding.status
        result.append(
            Condition(
                type=kind,
                status=finding.status,
                reason=finding.reason,
                message=finding.message[:4096],
                observed_generation=generation,
                last_transition_time=now if same is None or flipped else same.last_transition_time,
            )
        )
    return tuple(result)
