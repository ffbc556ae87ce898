"""Checkpoints of a model hub: the init containers that download them into a claim before the server starts.

`sm70-fetch` is resumable and leaves a marker, so a pod whose download is complete asks nothing of the network. The
token reaches this container only, by reference.
"""

from __future__ import annotations

from sm70_operator.api import names
from sm70_operator.render.objects import Manifest
from sm70_operator.render.revision import Revision, checkpoint_path
from sm70_profiles.spec import CheckpointSource, DraftSource, HubSource

PROGRAM = "sm70-fetch"
TOKEN_VARIABLES = {"huggingface": "HF_TOKEN", "modelscope": "MODELSCOPE_API_TOKEN"}
PASSED_VARIABLES = frozenset(
    {"HF_ENDPOINT", "MODELSCOPE_ENDPOINT"}
    | {name for word in ("http_proxy", "https_proxy", "no_proxy") for name in (word, word.upper())}
)
"""Of the user's `env`, what a download needs too: mirrors and proxies."""
RESOURCES: Manifest = {"requests": {"cpu": "250m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}}


def downloads(revision: Revision) -> tuple[tuple[str, CheckpointSource, HubSource, str], ...]:
    """What has to be downloaded: `model` or `draft`, its source, its repository and its mount."""
    sources: tuple[tuple[str, CheckpointSource | None, str], ...] = (
        ("model", revision.model, names.MODEL_MOUNT),
        ("draft", revision.draft, names.DRAFT_MOUNT),
    )
    return tuple(
        (what, source, source.hub, mount) for what, source, mount in sources if source is not None and source.hub
    )


def fetch_steps(revision: Revision, mounts: list[Manifest]) -> list[Manifest]:
    """The init containers, the model's first. `mounts`: the engine's, of which each step gets its own, writable."""
    steps = []
    for what, source, hub, mount in downloads(revision):
        volume = next(one for one in mounts if one["mountPath"] == mount)
        temporary = next(one for one in mounts if one["mountPath"] == "/tmp")  # noqa: S108
        step: Manifest = {
            "name": names.fetch_container(what),
            "image": revision.image,
            "command": [PROGRAM],
            "args": _arguments(source, hub, mount),
            "env": _environment(revision, source, hub),
            "terminationMessagePolicy": "File",
            "resources": RESOURCES,
            "securityContext": restricted(),
            "volumeMounts": [{"name": volume["name"], "mountPath": mount}, dict(temporary)],
        }
        if revision.image_pull_policy is not None:
            step["imagePullPolicy"] = str(revision.image_pull_policy)
        steps.append(step)
    return steps


def restricted() -> Manifest:
    """The security context of every container that we make."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
    }


def _hub_name(source: CheckpointSource) -> str:
    return "huggingface" if source.hugging_face is not None else "modelscope"


def _arguments(source: CheckpointSource, hub: HubSource, mount: str) -> list[str]:
    words = ["--hub", _hub_name(source), "--repo", hub.repo, "--revision", hub.pin]
    words += ["--to", checkpoint_path(source, mount), "--json", "--termination-log", names.TERMINATION_LOG]
    if isinstance(source, DraftSource):
        for file, digest in sorted(source.sha256.items()):
            words += ["--sha256", f"{file}={digest}"]
    return words


def _environment(revision: Revision, source: CheckpointSource, hub: HubSource) -> list[Manifest]:
    variables: list[Manifest] = [
        {"name": names.HOME_VARIABLE, "value": "/tmp"},  # noqa: S108
        {"name": names.STATUS_PORT_VARIABLE, "value": str(names.STATUS_PORT)},
    ]
    variables += [
        {"name": one.name, "value": one.value}
        for one in revision.user_env
        if one.name in PASSED_VARIABLES and one.value is not None
    ]
    if hub.token_secret_ref is not None:
        reference = {"name": hub.token_secret_ref.name, "key": hub.token_secret_ref.key}
        variables.append({"name": TOKEN_VARIABLES[_hub_name(source)], "valueFrom": {"secretKeyRef": reference}})
    return variables
