"""The two hubs, each through its own library, which is imported only here and only when it is asked for.

The libraries resume (a partial file is gone on with by a range request) and retry; what they put on the disk is checked
by us afterwards, against what the hub lists and the user demands.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from sm70_engine.fetch.errors import FetchError, UsageError, of_disk
from sm70_engine.fetch.selection import RemoteFile
from sm70_profiles.reasons import TerminationReason

PARTIAL = ".sm70-fetch"
COMMIT = re.compile("[0-9a-f]{40}")
BRANCHES = frozenset({"main", "master", "dev", "develop", "latest", "head"})


class HubName(StrEnum):
    HUGGING_FACE = "huggingface"
    MODEL_SCOPE = "modelscope"


class Hub(Protocol):
    """One repository at one revision."""

    def files(self) -> Sequence[RemoteFile]:
        """What the revision holds. Raises FetchError."""

    def download(self, file: RemoteFile, folder: Path) -> None:
        """Puts a file under the folder, going on with a partial one. Raises FetchError."""

    def partial_bytes(self, folder: Path) -> int:
        """Bytes of partial files under the folder."""

    def clean(self, folder: Path) -> None:
        """Removes what the library leaves beside the files."""


def require_pinned(hub: HubName, revision: str) -> None:
    """Raises UsageError for a revision that is another model tomorrow."""
    if hub is HubName.HUGGING_FACE and COMMIT.fullmatch(revision) is None:
        raise UsageError(f"`--revision` must be a commit of 40 hexadecimal digits, found `{revision[:80]}`")
    if revision.lower() in BRANCHES or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", revision) is None:
        raise UsageError(f"`--revision` must be a commit or a tag, not a branch; found `{revision[:80]}`")


def open_hub(name: HubName, repo: str, revision: str, *, token: str | None, endpoint: str | None) -> Hub:
    """The repository. Raises UsageError where its library is not installed."""
    opened = HuggingFace if name is HubName.HUGGING_FACE else ModelScope
    try:
        return opened(repo, revision, token=token, endpoint=endpoint)
    except ImportError as error:
        raise UsageError(f"`--hub {name}` needs {error.name}: pip install 'sm70[fetch]'") from None


class HuggingFace:
    """Through `huggingface_hub`."""

    def __init__(self, repo: str, revision: str, *, token: str | None, endpoint: str | None) -> None:
        # Before the import: it reads them once. No token of the user's home is sent without being asked for.
        for variable in ("HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_IMPLICIT_TOKEN", "HF_HUB_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(variable, "1")
        import huggingface_hub
        import huggingface_hub.errors  # the package itself loads it only when it is asked for something

        self._library = huggingface_hub
        self._repo, self._revision = repo, revision
        self._token: str | bool = token or False
        self._endpoint = endpoint

    def files(self) -> Sequence[RemoteFile]:
        try:
            api = self._library.HfApi(endpoint=self._endpoint, token=self._token)
            info = api.model_info(self._repo, revision=self._revision, files_metadata=True)
        except Exception as error:
            raise self._explained(error) from error
        if info.sha != self._revision:
            raise FetchError(TerminationReason.DOWNLOAD_FAILED, "the hub answered with another revision than asked for")
        return [self._file(one) for one in info.siblings or ()]

    def _file(self, listed: Any) -> RemoteFile:
        lfs = getattr(listed, "lfs", None)
        digest = getattr(lfs, "sha256", None)
        size = listed.size if listed.size is not None else -1
        return RemoteFile(str(listed.rfilename), int(size), _hex(digest, 64), None if lfs else _hex(listed.blob_id, 40))

    def download(self, file: RemoteFile, folder: Path) -> None:
        # Not `hf_hub_download`: since 2.x it throws a partial file away when it ends, and a shard has gigabytes.
        try:
            partial = self._partial(folder, file)
            partial.parent.mkdir(exist_ok=True)
            with partial.open("ab") as target:
                if target.tell() > file.size:
                    target.truncate(0)
                if target.tell() < file.size:
                    self._get(file, target)
            (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
            partial.replace(folder / file.path)
        except Exception as error:
            raise self._explained(error) from error

    def _get(self, file: RemoteFile, target: BinaryIO) -> None:
        """The rest of a file, by the library's client, which retries and gives the token to the hub's host only."""
        from huggingface_hub.file_download import http_get

        library = self._library
        url = library.hf_hub_url(self._repo, file.path, revision=self._revision, endpoint=self._endpoint)
        headers = library.utils.build_hf_headers(token=self._token)
        http_get(url, target, resume_size=target.tell(), headers=headers, expected_size=file.size)

    def _partial(self, folder: Path, file: RemoteFile) -> Path:
        """Named by content, so that only the same file of any revision is gone on with."""
        content = file.sha256 or file.git_blob or self._revision
        return folder / PARTIAL / f"{hashlib.sha256(f'{file.path}:{content}'.encode()).hexdigest()[:32]}.partial"

    def partial_bytes(self, folder: Path) -> int:
        return _sizes(folder / PARTIAL, "*.partial")

    def clean(self, folder: Path) -> None:
        shutil.rmtree(folder / PARTIAL, ignore_errors=True)

    def _explained(self, error: Exception) -> FetchError:
        if (disk := of_disk(error)) is not None:
            return disk
        errors = self._library.errors
        where = f"{self._repo} at {self._revision[:12]}"
        if isinstance(error, errors.GatedRepoError | errors.DisabledRepoError):
            return FetchError(TerminationReason.ACCESS_DENIED, f"{where} is gated")
        # The network failed: an EntryNotFoundError by inheritance only.
        offline = isinstance(error, errors.LocalEntryNotFoundError)
        absent = errors.RepositoryNotFoundError | errors.RevisionNotFoundError | errors.EntryNotFoundError
        if isinstance(error, absent) and not offline:
            return FetchError(TerminationReason.REPOSITORY_NOT_FOUND, f"{where}: {_said(error)}")
        if _status(error) in (401, 403):
            return FetchError(TerminationReason.ACCESS_DENIED, f"{where}: {_said(error)}")
        return FetchError(TerminationReason.DOWNLOAD_FAILED, f"{where}: {_said(error)}")


class ModelScope:
    """Through `modelscope_hub`."""

    def __init__(self, repo: str, revision: str, *, token: str | None, endpoint: str | None) -> None:
        import modelscope_hub

        self._library = modelscope_hub
        self._repo, self._revision = repo, revision
        self._token, self._endpoint = token, endpoint
        self._partial: list[str] = []
        self._api: Any = None

    def _client(self) -> Any:
        if self._api is None:
            self._api = self._library.HubApi(endpoint=self._endpoint, token=self._token)
        return self._api

    def files(self) -> Sequence[RemoteFile]:
        try:
            listed = self._client().list_repo_files(self._repo, "model", revision=self._revision)
        except Exception as error:
            raise self._explained(error) from error
        return [RemoteFile(str(one.path), int(one.size), _hex(one.sha256, 64)) for one in listed if not one.is_dir]

    def download(self, file: RemoteFile, folder: Path) -> None:
        self._partial.append(file.path)
        try:
            self._client().download_file(
                self._repo,
                "model",
                file.path,
                revision=self._revision,
                local_dir=folder,
                expected_sha256=file.sha256,
                file_size=file.size,
            )
        except Exception as error:
            raise self._explained(error) from error

    def partial_bytes(self, folder: Path) -> int:
        return sum(_sizes((folder / path).parent, f"{Path(path).name}.*") for path in list(self._partial))

    def clean(self, folder: Path) -> None:
        for path in self._partial:
            for suffix in (".incomplete", ".parallel_tmp"):
                (folder / (path + suffix)).unlink(missing_ok=True)

    def _explained(self, error: Exception) -> FetchError:
        if (disk := of_disk(error)) is not None:
            return disk
        library = self._library
        where = f"{self._repo} at {self._revision[:12]}"
        if isinstance(error, library.AuthenticationError | library.PermissionDeniedError):
            return FetchError(TerminationReason.ACCESS_DENIED, f"{where}: {_said(error)}")
        if isinstance(error, library.NotExistError):
            return FetchError(TerminationReason.REPOSITORY_NOT_FOUND, f"{where}: {_said(error)}")
        if isinstance(error, library.FileIntegrityError):
            return FetchError(TerminationReason.CHECKSUM_MISMATCH, f"{where}: {_said(error)}")
        return FetchError(TerminationReason.DOWNLOAD_FAILED, f"{where}: {_said(error)}")


def _said(error: Exception) -> str:
    """What a library says, without addresses: a signed one is a secret."""
    text = re.sub(r"https?://\S+", "…", f"{type(error).__name__}: {error}")
    return " ".join(text.split())[:300]


def _status(error: Exception) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _hex(value: Any, digits: int) -> str | None:
    return value if isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", value) else None


def _sizes(folder: Path, pattern: str) -> int:
    total = 0
    try:
        for file in folder.glob(pattern):
            total += file.stat().st_size
    except OSError:  # A part was finished and renamed in between.
        return total
    return total
