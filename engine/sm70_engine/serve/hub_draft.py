"""A draft that the profile takes from a hub: in the hub library's cache, and fetched into it before the server starts.

vLLM would fetch it while it loads, and then nobody has compared it with its pins. Where a checksum is known, the draft
is therefore there before vLLM is, in the cache where vLLM looks for it; where none is, nothing is fetched here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm70_engine.serve.failure import ServeError
from sm70_profiles.base import printable
from sm70_profiles.profile import UNKNOWN, HubRevision
from sm70_profiles.reasons import TerminationReason

PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
_ON = ("1", "true", "yes", "on")


@dataclass(frozen=True)
class HubDraft:
    """Where the draft lies, or why that is not known. `wanted`: checksums by file name."""

    folder: Path | None
    wanted: dict[str, str]
    reason: str = ""


def hub_draft(
    hub: HubRevision | None, wanted: Mapping[str, str], environment: Mapping[str, str], fetch: bool
) -> HubDraft:
    """The draft at its pinned revision. fetch: whether it may be downloaded when it is not there.

    Raises ServeError when a draft with a known checksum cannot be fetched.
    """
    found = dict(wanted)
    known = sorted(name for name, digest in wanted.items() if digest != UNKNOWN)
    if hub is None or UNKNOWN in (hub.repo, hub.revision):
        return HubDraft(None, found, "the profile pins no revision of a repository")
    if not known:
        return HubDraft(None, found, "the profile knows no checksum of its files")
    try:
        library = _library()
    except ImportError:
        return HubDraft(None, found, "huggingface_hub is not installed")
    folder = _there(library, hub, environment)
    if folder is not None and all((folder / name).is_file() for name in known):
        return HubDraft(folder, found)
    if not fetch or environment.get("HF_HUB_OFFLINE", "").lower() in _ON:
        return HubDraft(None, found, "it is not in the hub's cache yet")
    return HubDraft(_fetched(library, hub, environment), found)


def _library() -> Any:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import huggingface_hub

    return huggingface_hub


def _cache(environment: Mapping[str, str]) -> Path:
    """Where `huggingface_hub` keeps repositories, by the variables that it reads."""
    if place := environment.get("HF_HUB_CACHE"):
        return Path(place)
    if home := environment.get("HF_HOME"):
        return Path(home) / "hub"
    caches = environment.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path(environment.get("HOME", "/")) / ".cache") / "huggingface/hub"


def _asked(hub: HubRevision, environment: Mapping[str, str]) -> dict[str, Any]:
    return {
        "repo_id": hub.repo,
        "revision": hub.revision,
        "cache_dir": _cache(environment),
        "allow_patterns": list(PATTERNS),
        "token": environment.get("HF_TOKEN") or False,
        "endpoint": environment.get("HF_ENDPOINT"),
    }


def _there(library: Any, hub: HubRevision, environment: Mapping[str, str]) -> Path | None:
    try:
        return Path(library.snapshot_download(**_asked(hub, environment), local_files_only=True))
    except (OSError, ValueError):  # the library's errors for what it does not have
        return None


def _fetched(library: Any, hub: HubRevision, environment: Mapping[str, str]) -> Path:
    print(f"sm70-serve: fetching the draft {hub.repo} at {hub.revision[:12]}, to be compared with its pins", flush=True)
    try:
        return Path(library.snapshot_download(**_asked(hub, environment)))
    except Exception as error:  # of the network, the hub or the disk: vLLM would meet the same
        said = printable(" ".join(str(error).split()), 400)
        raise ServeError(
            TerminationReason.DOWNLOAD_FAILED,
            f"the draft {hub.repo} at {hub.revision[:12]} must be fetched to be compared with its pins: {said}",
            "Check network, proxy and token, give the draft as a folder, or skip the check with "
            "`--skip-check draft-sha256`.",
        ) from None
