"""Names that others rely on: the resource, labels, objects, paths in the pod. Each is spelt here and nowhere else."""

from __future__ import annotations

GROUP = "inference.sm70.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "Sm70InferenceService"
PLURAL = "sm70inferenceservices"
SINGULAR = "sm70inferenceservice"
SHORT_NAME = "sm70"
CATEGORY = "sm70"
QUALIFICATION_KIND = "Sm70Qualification"
QUALIFICATION_PLURAL = "sm70qualifications"
QUALIFICATION_SINGULAR = "sm70qualification"
QUALIFICATION_SHORT_NAME = "sm70q"
MAX_NAME_LENGTH = 40
"""Leaves room for `-HASH` and the suffixes of ReplicaSet and pod within a label's 63 characters."""

FIELD_MANAGER = "sm70-operator"
STATUS_FIELD_MANAGER = "sm70-operator-status"

SERVICE_LABEL = f"{GROUP}/service"
REVISION_LABEL = f"{GROUP}/revision"
PART_LABEL = "app.kubernetes.io/part-of"
NAME_LABEL = "app.kubernetes.io/name"
INSTANCE_LABEL = "app.kubernetes.io/instance"
COMPONENT_LABEL = "app.kubernetes.io/component"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
FOR_REVISION_LABEL = f"{GROUP}/for-revision"
"""On Jobs and their pods: the revision they judge. `REVISION_LABEL` there would make them endpoints of a Service."""
JOB_UID_LABEL = "batch.kubernetes.io/controller-uid"
"""Set by the Job controller on a Job's pods."""
RESERVED_LABEL_PREFIXES = (f"{GROUP}/", "app.kubernetes.io/")

ENGINE_COMPONENT = "engine"
CANDIDATE_COMPONENT = "candidate"
PREFLIGHT_COMPONENT = "preflight"
QUALIFICATION_COMPONENT = "qualification"
"""Values of `COMPONENT_LABEL`, by which pods of engines and of Jobs are told apart."""

PROMOTED_ANNOTATION = f"{GROUP}/promoted-at"
"""On the public Service: since when its selector has this value."""
SOURCE_ANNOTATION = f"{GROUP}/source"
"""On a ControllerRevision: the hash of the part of the spec that it was resolved from."""
GOOD_ANNOTATION = f"{GROUP}/good-since"
REJECTED_ANNOTATION = f"{GROUP}/rejected"
"""On a ControllerRevision: since when it is proven, or JSON that says why it is not tried again."""

TERMINATION_LOG = "/dev/termination-log"
"""Where Kubernetes looks for a container's last words."""
JOB_CONTAINER = "job"
"""The one container of a preflight or qualification Job."""

NO_REVISION = "none"
"""The revision that a public Service selects while nothing is promoted; no hash can be spelt like this."""

GPU_PRODUCT_LABEL = "nvidia.com/gpu.product"
GPU_MEMORY_LABEL = "nvidia.com/gpu.memory"
"""Set by GPU feature discovery: the product's name, and the memory of one GPU in MiB."""

CONTAINER = "engine"
HTTP_PORT = 8000
STATUS_PORT = 8001
"""Where `sm70-serve` tells the phase of its start, while the server does not listen yet."""
PORT_NAME = "http"
MODEL_MOUNT = "/models/target"
DRAFT_MOUNT = "/models/draft"
CACHE_MOUNT = "/cache"

SERVE_REQUEST_VARIABLE = "SM70_SERVE_REQUEST"
ENGINE_IMAGE_VARIABLE = "SM70_ENGINE_IMAGE"
API_KEY_VARIABLE = "VLLM_API_KEY"
CACHE_HOME_VARIABLE = "XDG_CACHE_HOME"
HOME_VARIABLE = "HOME"
STATUS_PORT_VARIABLE = "SM70_STATUS_PORT"
OWN_VARIABLES = (
    STATUS_PORT_VARIABLE,
    SERVE_REQUEST_VARIABLE,
    ENGINE_IMAGE_VARIABLE,
    API_KEY_VARIABLE,
    CACHE_HOME_VARIABLE,
    HOME_VARIABLE,
)

REPORT_PATH = "/sm70/acceleration"
READY_PATH = "/sm70/ready"
STARTUP_PATH = "/sm70/startup"
HEALTH_PATH = "/health"


def deployment_name(service: str, revision: str) -> str:
    """The Deployment of one revision."""
    return f"{service}-{revision}"


def controller_revision_name(service: str, revision: str) -> str:
    """The ControllerRevision that holds one revision."""
    return f"{service}-{revision}"


def candidate_name(service: str) -> str:
    """The Service that reaches the revision under judgement and nothing else."""
    return f"{service}-candidate"


def preflight_name(service: str, revision: str) -> str:
    """The Job that looks at a revision without a GPU."""
    return f"{service}-p{revision}"


def claim_template_name(service: str, revision: str) -> str:
    """The ResourceClaimTemplate of one revision."""
    return f"{service}-gpus-{revision}"


def fetch_container(what: str) -> str:
    """The init container that downloads the `model` or the `draft`."""
    return f"fetch-{what}"


def compile_cache_name(service: str) -> str:
    """The PersistentVolumeClaim that the operator makes for the compile cache."""
    return f"{service}-compile-cache"


def selector(service: str, revision: str) -> dict[str, str]:
    """The labels that select a revision's pods, and nothing more: a user's value must never be part of a selector."""
    return {SERVICE_LABEL: service, REVISION_LABEL: revision}


def labels(service: str) -> dict[str, str]:
    """The labels of every object that belongs to a service."""
    return {
        NAME_LABEL: "sm70-engine",
        INSTANCE_LABEL: service,
        MANAGED_BY_LABEL: FIELD_MANAGER,
        PART_LABEL: "sm70",
        SERVICE_LABEL: service,
    }
