"""What keeps pods from serving is told as one reason with one next step, from facts alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sm70_operator.api import names
from sm70_operator.api.conditions import MEANINGS, ConditionStatus, ConditionType, Finding, Reason
from sm70_operator.observe.facts import PodFacts, parse_pod
from sm70_operator.observe.snapshot import NodeWords
from sm70_operator.plan.devices import device_problem, pinning_conflicts
from sm70_operator.plan.explain import Views, condition_of, judge_preflight, judge_startup, preflight_obstacle
from sm70_profiles.facts import Interconnect
from sm70_profiles.profile import Hardware
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.report import DeviceFacts
from sm70_profiles.resolver import ResolvedGpus
from sm70_profiles.termination import (
    FindingSeverity,
    PreflightFinding,
    Termination,
    TerminationKind,
)
from unit.operator.builders import ended, placed, pod, serving

REVISION = "0123456789"
GPUS, MODEL, ENGINE = ConditionType.GPUS_ALLOCATED, ConditionType.MODEL_AVAILABLE, ConditionType.ENGINE_STARTED
FOUR = ResolvedGpus(
    count=4,
    products=("Tesla-V100-SXM2-16GB",),
    min_memory="16Gi",
    interconnect=Interconnect.NVLINK_MESH,
    resource_name="nvidia.com/gpu",
)
VIEWS = Views(replicas=1, gpus=FOUR, nodes=None, holders=(), words={}, pods_refused="")
V100 = DeviceFacts(
    name="Tesla V100-SXM2-16GB", compute_capability="7.0", count=4, memory_bytes=16_945_512_448, driver="570.124.06"
)
VOLTA = Hardware(count=4, compute_capability="7.0")


def words(
    reason: TerminationReason, message: str = "it happened", kind: TerminationKind = TerminationKind.FAILURE
) -> str:
    return Termination(kind=kind, reason=reason, message=message).encode().decode()


def told(raw: dict[str, Any], views: Views = VIEWS) -> dict[ConditionType, Finding]:
    return judge_startup([parse_pod(raw)], views)


@pytest.mark.parametrize(
    ("reason", "kind", "expected"),
    [
        (TerminationReason.OUT_OF_MEMORY, ENGINE, Reason.OUT_OF_MEMORY),
        (TerminationReason.GPU_OUT_OF_MEMORY, ENGINE, Reason.GPU_OUT_OF_MEMORY),
        (TerminationReason.SHARED_MEMORY, ENGINE, Reason.SHARED_MEMORY_TOO_SMALL),
        (TerminationReason.NO_KERNEL_IMAGE, ENGINE, Reason.NO_KERNEL_IMAGE),
        (TerminationReason.DRIVER_TOO_OLD, ENGINE, Reason.DRIVER_TOO_OLD),
        (TerminationReason.NCCL_FAILURE, ENGINE, Reason.NCCL_FAILURE),
        (TerminationReason.DISK_FULL, ENGINE, Reason.DISK_FULL),
        (TerminationReason.ENGINE_DIED, ENGINE, Reason.CRASH_LOOPING),
        (TerminationReason.PATH_NOT_FOUND, MODEL, Reason.PATH_NOT_FOUND),
        (TerminationReason.CHECKSUM_MISMATCH, MODEL, Reason.CHECKSUM_MISMATCH),
        (TerminationReason.MODEL_INVALID, MODEL, Reason.MODEL_INVALID),
    ],
)
def test_the_engines_last_words_become_a_reason_and_a_step(
    reason: TerminationReason, kind: ConditionType, expected: Reason
) -> None:
    found = told(placed(REVISION, ended(message=words(reason))))[kind]
    assert (found.status, found.reason) == (ConditionStatus.FALSE, expected)
    assert "it happened" in found.message
    assert MEANINGS[expected].remedy in found.message
    assert MEANINGS[expected].remedy


def test_every_end_has_a_condition_that_knows_its_reason() -> None:
    for reason in TerminationReason:
        kind, told_as = condition_of(reason)
        assert kind in MEANINGS[told_as].conditions, reason


def test_a_driver_is_told_with_its_node() -> None:
    found = told(placed(REVISION, ended(message=words(TerminationReason.DRIVER_TOO_OLD))))[ENGINE]
    assert "`node-1`" in found.message


def test_a_server_that_the_kubelet_ends_again_and_again() -> None:
    shutdown = words(TerminationReason.SHUTDOWN, "ended by SIGTERM", TerminationKind.SHUTDOWN)
    found = told(placed(REVISION, ended(0, "Completed", shutdown)))[ENGINE]
    assert found.reason is Reason.PROBE_TIMEOUT
    assert "`pod-1`" in found.message
    once = ended(0, "Completed", shutdown) | {"restartCount": 1, "state": {"running": {}}}
    assert told(placed(REVISION, once))[ENGINE].reason is Reason.LOADING, "one probe may be an accident"
    leaving = placed(REVISION, ended(0, "Completed", shutdown))
    leaving["metadata"]["deletionTimestamp"] = "2026-11-30T12:00:00Z"
    assert told(leaving)[ENGINE].reason is not Reason.PROBE_TIMEOUT


def test_a_node_that_is_lost_is_told_from_a_probe_that_fails() -> None:
    lost = serving(REVISION)
    for condition in lost["status"]["conditions"]:
        if condition["type"] == "Ready":
            condition["status"] = "False"
    found = told(lost)[ENGINE]
    assert (found.status, found.reason) == (ConditionStatus.UNKNOWN, Reason.NODE_NOT_READY)
    assert "`node-1`" in found.message
    lost["status"]["containerStatuses"][0]["ready"] = False
    assert told(lost)[ENGINE].reason is Reason.HEALTHY, "the probe fails, and the server answers"


# ------------------------------------------------------------------------------------------------------ downloads


def fetching(state: dict[str, Any], **more: Any) -> dict[str, Any]:
    raw = placed(REVISION, {"state": {"waiting": {"reason": "PodInitializing"}}})
    raw["status"]["initContainerStatuses"] = [{"name": "fetch-model", "restartCount": 0, "state": state, **more}]
    return raw


def test_a_download_is_told_while_it_runs() -> None:
    found = told(fetching({"running": {}}))
    assert (found[MODEL].status, found[MODEL].reason) == (ConditionStatus.FALSE, Reason.DOWNLOADING)
    assert "`fetch-model`" in found[MODEL].message
    far = told(fetching({"running": {}}), replace(VIEWS, progress={"uid-pod-1": "1.2 of 18.3 GB (6 %)"}))
    assert "1.2 of 18.3 GB (6 %)" in far[MODEL].message
    assert found[ENGINE].status is ConditionStatus.UNKNOWN


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (TerminationReason.REPOSITORY_NOT_FOUND, Reason.REPOSITORY_UNAVAILABLE),
        (TerminationReason.ACCESS_DENIED, Reason.REPOSITORY_UNAVAILABLE),
        (TerminationReason.CHECKSUM_MISMATCH, Reason.CHECKSUM_MISMATCH),
        (TerminationReason.DOWNLOAD_FAILED, Reason.DOWNLOAD_FAILED),
        (TerminationReason.DISK_FULL, Reason.DISK_FULL),
        (TerminationReason.CACHE_UNWRITABLE, Reason.UNWRITABLE),
    ],
)
def test_a_download_that_failed(reason: TerminationReason, expected: Reason) -> None:
    waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
    last = {"terminated": {"exitCode": 3, "reason": "Error", "message": words(reason)}}
    found = told(fetching(waiting, lastState=last))[MODEL]
    assert (found.status, found.reason) == (ConditionStatus.FALSE, expected)
    assert "download of the model" in found.message
    assert MEANINGS[expected].remedy in found.message


def test_another_try_is_no_failure_once_it_gets_on() -> None:
    """What never gets on (a gated repository) keeps its reason while it is tried again and again."""
    last = {"terminated": {"exitCode": 1, "reason": "Error", "message": words(TerminationReason.DOWNLOAD_FAILED)}}
    raw = fetching({"running": {}}, lastState=last)
    assert told(raw)[MODEL].reason is Reason.DOWNLOAD_FAILED
    found = told(raw, replace(VIEWS, progress={"uid-pod-1": "1.2 of 18.3 GB (6 %)"}))[MODEL]
    assert found.reason is Reason.DOWNLOADING
    assert "1.2 of 18.3 GB (6 %). The try before ended: " in found.message


def test_a_download_that_ended_without_words() -> None:
    last = {"terminated": {"exitCode": 64, "reason": "Error", "message": ""}}
    found = told(fetching({"waiting": {"reason": "CrashLoopBackOff"}}, lastState=last))[MODEL]
    assert found.reason is Reason.DOWNLOAD_FAILED
    assert "exit code 64" in found.message


def test_a_download_that_is_over_is_not_told() -> None:
    done = fetching({"terminated": {"exitCode": 0, "reason": "Completed", "message": ""}})
    assert told(done)[MODEL].status is ConditionStatus.UNKNOWN
    started = serving(REVISION)
    started["status"]["initContainerStatuses"] = done["status"]["initContainerStatuses"]
    assert told(started)[MODEL].reason is Reason.PRESENT


def test_a_download_whose_image_is_missing_is_an_image_problem() -> None:
    raw = fetching({"waiting": {"reason": "ErrImagePull", "message": "not found"}})
    found = told(raw)[ENGINE]
    assert found.reason is Reason.PULLING_IMAGE
    assert "not found" in found.message


@pytest.mark.parametrize(
    "message",
    [
        'failed to pull and unpack image "registry.test/checkpoint:1": connection refused',
        'failed to pull and unpack image "mirror.test/registry.test/checkpoint:1": connection refused',
        'Back-off pulling image "registry.test/checkpoint:1": ErrImagePull: connection refused',
    ],
)
def test_a_checkpoints_image_is_not_taken_for_the_engines(message: str) -> None:
    """The kubelet says of the container that waits what it says of the container's own image."""
    raw = placed(REVISION, {"state": {"waiting": {"reason": "ErrImagePull", "message": message}}})
    raw["spec"]["volumes"] = [{"name": "model", "image": {"reference": "registry.test/checkpoint:1"}}]
    found = told(raw)
    assert (found[MODEL].reason, found[ENGINE].reason) == (Reason.CHECKPOINT_NOT_PULLED, Reason.PENDING)
    assert "connection refused" in found[MODEL].message
    assert "image.reference" in found[MODEL].message
    raw["spec"]["volumes"] = [{"name": "model", "image": {"reference": "registry.test/other:1"}}]
    assert (told(raw)[MODEL].reason, told(raw)[ENGINE].reason) == (Reason.PENDING, Reason.PULLING_IMAGE)


# ------------------------------------------------------------------------------------------------------ preflight


def preflighted(reason: TerminationReason, *findings: PreflightFinding, name: str = "job-1") -> PodFacts:
    message = Termination(kind=TerminationKind.PREFLIGHT, reason=reason, message="summary", findings=findings)
    raw = placed(REVISION, {}, name)
    raw["status"]["containerStatuses"] = [
        {
            "name": names.JOB_CONTAINER,
            "state": {"terminated": {"exitCode": 2, "reason": "Error", "message": message.encode().decode()}},
        }
    ]
    return parse_pod(raw)


def finding(reason: TerminationReason, message: str, severity: FindingSeverity) -> PreflightFinding:
    return PreflightFinding(severity=severity, reason=reason, subject="model", message=message, remedy="Do this.")


def test_a_preflight_tells_all_errors_and_no_warning() -> None:
    error, warning = FindingSeverity.ERROR, FindingSeverity.WARNING
    result = judge_preflight(
        [
            preflighted(
                TerminationReason.DRAFT_INCOMPATIBLE,
                finding(TerminationReason.DRAFT_INCOMPATIBLE, "vocabulary 4, not 8", error),
                finding(TerminationReason.REFUSED, "--nonsense", error),
                finding(TerminationReason.DISK_FULL, "little room", warning),
            )
        ]
    )
    assert result is not None
    assert (result.passed, result.type) == (False, MODEL)
    assert result.finding is not None
    assert result.finding.reason is Reason.DRAFT_INCOMPATIBLE
    assert "vocabulary 4, not 8. Do this. --nonsense. Do this." in result.finding.message
    assert "little room" not in result.finding.message


def test_a_preflight_passes_with_its_warnings() -> None:
    little = finding(TerminationReason.DISK_FULL, "little room", FindingSeverity.WARNING)
    result = judge_preflight([preflighted(TerminationReason.PASSED, little)])
    assert result is not None
    assert (result.passed, result.finding, result.warnings) == (True, None, ("little room. Do this.",))


def test_a_preflight_whose_download_was_refused() -> None:
    last = {"terminated": {"exitCode": 3, "reason": "Error", "message": words(TerminationReason.ACCESS_DENIED)}}
    result = judge_preflight([parse_pod(fetching(last))])
    assert result is not None
    assert result.finding is not None
    assert result.finding.reason is Reason.REPOSITORY_UNAVAILABLE


def test_a_preflight_without_last_words_says_nothing() -> None:
    assert judge_preflight([]) is None
    assert judge_preflight([parse_pod(placed(REVISION, ended(137, "Error", "boom")))]) is None


@pytest.mark.parametrize(
    ("scheduler", "node", "words"),
    [
        ("node has pod using PersistentVolumeClaim with the same name and ReadWriteOncePod access mode", "", "beside"),
        ("pod has unbound immediate PersistentVolumeClaims", "", "first to mount"),
        ("", "Multi-Attach error for volume x: already used by pod(s) y", "attached"),
        ("0/3 nodes are available: 3 Insufficient cpu.", "", ""),
        ("", "", ""),
    ],
)
def test_a_preflight_that_can_never_start_is_left_out(scheduler: str, node: str, words: str) -> None:
    condition = {"type": "PodScheduled", "status": "False" if scheduler else "True", "message": scheduler}
    one = parse_pod(pod(REVISION, conditions=[condition]))
    told_by_node = {"uid-pod-1": NodeWords("FailedAttachVolume", node)} if node else {}
    found = preflight_obstacle([one], told_by_node)
    assert words in found
    assert bool(found) == bool(words)


# ------------------------------------------------------------------------------------------------------------ GPUs


def test_memory_that_is_not_given_back_yet_is_told_before_it_is_blamed() -> None:
    first = ended(message=words(TerminationReason.GPU_OUT_OF_MEMORY)) | {"restartCount": 1}
    found = told(placed(REVISION, first))[GPUS]
    assert (found.status, found.reason) == (ConditionStatus.FALSE, Reason.MEMORY_NOT_RELEASED)
    again = told(placed(REVISION, ended(message=words(TerminationReason.GPU_OUT_OF_MEMORY))))
    assert again[GPUS].reason is Reason.ALLOCATED
    assert again[ENGINE].reason is Reason.GPU_OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("device", "reason", "text"),
    [
        ({}, None, ""),
        ({"name": "Tesla V100-SXM2-32GB"}, Reason.GPU_MISMATCH, "`Tesla-V100-SXM2-16GB` is asked for"),
        ({"count": 2}, Reason.GPU_MISMATCH, "2 GPUs, where 4"),
        ({"compute_capability": "8.0"}, Reason.GPU_MISMATCH, "compute capability 8.0"),
        ({"memory_bytes": 8 << 30}, Reason.GPU_MISMATCH, "8192 MiB"),
        ({"nvlink": False}, Reason.TOPOLOGY_UNSUITABLE, "no NVLink"),
        ({"nvlink": None}, None, ""),
    ],
)
def test_the_gpus_of_a_running_server_are_compared(device: dict[str, Any], reason: Reason | None, text: str) -> None:
    raw = serving(REVISION)
    views = replace(VIEWS, hardware=VOLTA, devices={"uid-pod-1": V100.model_copy(update=device)})
    found = told(raw, views)[GPUS]
    assert found.reason is (reason or Reason.ALLOCATED)
    assert text in found.message


def test_a_server_without_gpus_is_no_mismatch() -> None:
    cpu = DeviceFacts(name="CPU", count=0)
    assert device_problem(cpu, FOUR, VOLTA) is None
    assert device_problem(V100, FOUR, Hardware(count=4, compute_capability="7.0", min_compute_capability="7.5")) == (
        Reason.GPU_MISMATCH,
        "compute capability 7.0, where the profile's kernels are for at least 7.5.",
    )


def claiming(message: str) -> dict[str, Any]:
    raw = pod(REVISION, conditions=[{"type": "PodScheduled", "status": "False", "message": message}])
    raw["spec"]["resourceClaims"] = [{"name": "gpus", "resourceClaimTemplateName": "t"}]
    return raw


def test_a_claim_that_cannot_be_satisfied_waits_and_names_the_holders() -> None:
    holder = serving("other", "held")
    holder["metadata"] |= {"uid": "other", "namespace": "research"}
    holder["metadata"]["labels"][names.SERVICE_LABEL] = "qwen"
    holder["spec"]["resourceClaims"] = [{"name": "gpus"}]
    views = replace(VIEWS, holders=(parse_pod(holder),))
    found = told(claiming("0/2 nodes are available: 2 cannot allocate all claims."), views)[GPUS]
    assert found.reason is Reason.WAITING_FOR_GPU
    assert "`research/qwen` on `node-1`" in found.message
    assert "`Tesla-V100-SXM2-16GB`" in found.message
    other = told(claiming("0/2 nodes are available: 2 Insufficient memory."), views)[GPUS]
    assert other.reason is Reason.UNSCHEDULABLE


def test_two_services_that_pin_one_gpu_are_named_to_both() -> None:
    conflicts = pinning_conflicts({"a/one": ["GPU-1", "GPU-2"], "b/two": ["GPU-2", "GPU-3"], "c/three": ["GPU-4"]})
    assert set(conflicts) == {"a/one", "b/two"}
    for text in conflicts.values():
        assert "`GPU-2`" in text
        assert "`a/one`" in text
        assert "`b/two`" in text
        assert "GPU-1" not in text
    found = told(claiming("0/1 nodes are available"), replace(VIEWS, conflict=conflicts["a/one"]))[GPUS]
    assert found.reason is Reason.GPU_CONFLICT
    assert pinning_conflicts({"a/one": ["GPU-1", "GPU-1"]}) == {}
