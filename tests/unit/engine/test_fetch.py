"""Downloads from a hub on the loopback, through the hubs' own libraries."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from sm70_engine.fetch.cli import main
from sm70_engine.fetch.errors import FetchError, of_disk
from sm70_engine.fetch.selection import RemoteFile, Selection, select
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.termination import TerminationKind, parse_termination
from unit.engine.loopback_hub import COMMIT, REPO, TOKEN, WEIGHTS, LoopbackHub, serving

WANTED = {"config.json", "model.safetensors", "sub/part.safetensors"}


class Run:
    """What a run of the program left."""

    def __init__(
        self, folder: Path, url: str, capsys: pytest.CaptureFixture[str], *more: str, **variables: str
    ) -> None:
        self.words = folder.parent / "termination-log"
        self.words.unlink(missing_ok=True)
        arguments = ["--hub", "huggingface", "--repo", REPO, "--revision", COMMIT, "--to", str(folder)]
        arguments += ["--endpoint", url, "--json", "--termination-log", str(self.words), *more]
        self.status = main(arguments, variables)
        captured = capsys.readouterr()
        self.out, self.err = captured.out, captured.err
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in captured.out.splitlines()]

    @property
    def reason(self) -> TerminationReason:
        words = parse_termination(self.words.read_text())
        assert words is not None
        assert words.kind is TerminationKind.FAILURE
        assert words.remedy
        assert self.lines[-1]["event"] == "failed"
        assert self.lines[-1]["reason"] == words.reason
        return words.reason


def files(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} - {
        ".sm70-fetch.json",
        ".sm70-fetch.lock",
    }


def test_what_is_wanted_comes_whole_and_a_marker_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub, folder = LoopbackHub(), tmp_path / "model"
    with serving(hub) as url:
        run = Run(folder, url, capsys)
    assert run.status == 0, run.err
    assert files(folder) == WANTED
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    total = sum(len(hub.files[path]) for path in WANTED)
    assert run.lines[0] == {"event": "progress", "bytes": 0, "totalBytes": total, "files": 0, "totalFiles": 3}
    assert run.lines[-1] == {"event": "done", "bytes": total, "totalBytes": total, "files": 3, "totalFiles": 3}
    marker = json.loads((folder / ".sm70-fetch.json").read_text())
    assert (marker["hub"], marker["repo"], marker["revision"]) == ("huggingface", REPO, COMMIT)
    assert marker["files"]["model.safetensors"] == {
        "bytes": len(WEIGHTS),
        "sha256": hashlib.sha256(WEIGHTS).hexdigest(),
    }
    assert hub.tokens == {None}
    assert not run.words.exists()

    # Complete: the hub may be down, and is not asked.
    run = Run(folder, "http://127.0.0.1:9", capsys)
    assert run.status == 0
    assert run.lines == [{"event": "done", "bytes": total, "totalBytes": total, "files": 3, "totalFiles": 3}]


def test_an_interrupted_download_is_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The library writes in parts of 10 MiB; what is in the part that breaks is lost.
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)
    hub, folder = LoopbackHub(cut_after=300_000), tmp_path / "model"
    with serving(hub) as url:
        first = Run(folder, url, capsys, "--workers", "1")
        assert first.status in (1, 3)
        assert not (folder / ".sm70-fetch.json").exists()
        partial = [file.stat().st_size for file in folder.rglob("*.partial") if file.stat().st_size]
        assert partial == [300_000 // (1 << 16) * (1 << 16)]
        hub.gated = False
        hub.sent.clear()
        second = Run(folder, url, capsys)
    assert second.status == 0, second.err
    assert ("model.safetensors", f"bytes={partial[0]}-") in hub.sent
    assert second.lines[0]["bytes"] == partial[0]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert files(folder) == WANTED


def test_a_damaged_file_is_fetched_again_and_the_others_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub, folder = LoopbackHub(), tmp_path / "model"
    with serving(hub) as url:
        assert Run(folder, url, capsys).status == 0
        (folder / "config.json").write_bytes(b"X" + hub.files["config.json"][1:])
        hub.sent.clear()
        assert Run(folder, url, capsys).status == 0  # The marker and the sizes are right: nothing is read.
        assert hub.sent == []
        assert Run(folder, url, capsys, "--verify").status == 0
    assert [path for path, _ in hub.sent] == ["config.json"]
    assert (folder / "config.json").read_bytes() == hub.files["config.json"]


@pytest.mark.parametrize("path", ["model.safetensors", "config.json"])
def test_wrong_bytes_never_stay(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    with serving(LoopbackHub(corrupt=path)) as url:
        run = Run(folder, url, capsys)
    assert run.status == 4
    assert run.reason is TerminationReason.CHECKSUM_MISMATCH
    assert not (folder / path).exists()
    assert not (folder / ".sm70-fetch.json").exists()


def test_the_users_digest_comes_before_the_hubs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right, wrong = hashlib.sha256(WEIGHTS).hexdigest(), "0" * 64
    with serving(LoopbackHub()) as url:
        assert Run(tmp_path / "a", url, capsys, "--sha256", f"model.safetensors={right}").status == 0
        run = Run(tmp_path / "b", url, capsys, "--sha256", f"model.safetensors={wrong}")
        absent = Run(tmp_path / "c", url, capsys, "--sha256", f"other.safetensors={right}")
        # Complete by its marker, and not what is demanded now.
        later = Run(tmp_path / "a", url, capsys, "--sha256", f"model.safetensors={wrong}")
    for one in (run, absent, later):
        assert (one.status, one.reason) == (4, TerminationReason.CHECKSUM_MISMATCH)


def test_a_gated_repository_opens_to_a_token_that_nobody_sees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub, folder = LoopbackHub(gated=True), tmp_path / "model"
    with serving(hub) as url:
        refused = Run(folder, url, capsys)
        assert (refused.status, refused.reason) == (3, TerminationReason.ACCESS_DENIED)
        opened = Run(folder, url, capsys, HF_TOKEN=TOKEN)
        assert opened.status == 0, opened.err
        file = tmp_path / "token"
        file.write_text(TOKEN + "\n")
        assert Run(tmp_path / "other", url, capsys, "--token-file", str(file)).status == 0
    assert hub.tokens == {None, f"Bearer {TOKEN}"}
    assert TOKEN not in opened.out + opened.err
    assert all(TOKEN not in text.read_text(errors="replace") for text in folder.rglob("*.json"))


def test_what_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(LoopbackHub()) as url:
        run = Run(tmp_path / "model", url, capsys, "--repo", "owner/other")
        nothing = Run(tmp_path / "model", url, capsys, "--include", "*.gguf")
    assert (run.status, run.reason) == (3, TerminationReason.REPOSITORY_NOT_FOUND)
    assert nothing.status == 3


def test_a_hub_that_is_down_can_be_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path / "model", "http://127.0.0.1:9", capsys)
    assert (run.status, run.reason) == (1, TerminationReason.DOWNLOAD_FAILED)


def test_two_models_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    with serving(LoopbackHub()) as url:
        assert Run(folder, url, capsys).status == 0
        run = Run(folder, url, capsys, "--revision", "f" * 40)
    assert (run.status, run.reason) == (5, TerminationReason.CACHE_UNWRITABLE)
    assert files(folder) == WANTED


def test_a_disk_that_is_too_small_is_found_before_the_download(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: usage)
    hub = LoopbackHub()
    with serving(hub) as url:
        run = Run(tmp_path / "model", url, capsys)
    assert (run.status, run.reason) == (5, TerminationReason.DISK_FULL)
    assert hub.sent == []


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    run = Run(tmp_path / "file", "http://127.0.0.1:9", capsys)
    assert (run.status, run.reason) == (5, TerminationReason.CACHE_UNWRITABLE)


@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.ENOSPC, TerminationReason.DISK_FULL), (errno.EROFS, TerminationReason.CACHE_UNWRITABLE)],
)
def test_the_disks_words_are_found_behind_a_librarys(number: int, reason: TerminationReason) -> None:
    outer = RuntimeError("download failed")
    outer.__cause__ = OSError(number, os.strerror(number), "/models/x")
    found = of_disk(outer)
    assert found is not None
    assert found.reason is reason


@pytest.mark.parametrize("path", ["../x.json", "/etc/x.json", "a/../../x.json", "a\\b.json"])
def test_paths_of_a_hub_stay_in_the_folder(path: str) -> None:
    with pytest.raises(FetchError, match="strange name"):
        select([RemoteFile(path, 1)], Selection(), {})


def test_code_is_not_taken_unless_it_is_asked_for() -> None:
    visible = {"modeling.py", "pytorch_model.bin", "config.json"}
    listed = [RemoteFile(path, 1) for path in (*visible, ".gitattributes", ".sm70-fetch.json", "a/.hidden/x.json")]
    assert set(select(listed, Selection(), {})) == {"config.json"}
    assert set(select(listed, Selection(include=("*",), exclude=()), {})) == visible


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--revision", "main"], "commit of 40"),
        (["--hub", "modelscope", "--revision", "master"], "not a branch"),
        (["--repo", "../x"], "OWNER/NAME"),
        (["--sha256", "model.safetensors=12"], "FILE=DIGEST"),
        (["--endpoint", "http://me:pass@hub"], "without a password"),
        (["--token", "s3cret"], "--token"),
        (["--token-file", "/nowhere/token"], "cannot be read"),
    ],
)
def test_usage(more: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--hub", "huggingface", "--repo", REPO, "--revision", COMMIT, "--to", str(tmp_path / "model"), *more]
    assert main(arguments, {}) == 64
    assert words in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_modelscope_through_its_own_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MODELSCOPE_HOME", str(tmp_path / "home"))
    hub, folder = LoopbackHub(), tmp_path / "model"
    with serving(hub) as url:
        run = Run(folder, url, capsys, "--hub", "modelscope", "--revision", "v1.0")
        assert run.status == 0, run.err
        assert files(folder) == WANTED
        absent = Run(tmp_path / "other", url, capsys, "--hub", "modelscope", "--repo", "owner/other")
        assert (absent.status, absent.reason) == (3, TerminationReason.REPOSITORY_NOT_FOUND)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_a_library_that_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "modelscope_hub", None)
    arguments = ["--hub", "modelscope", "--repo", REPO, "--revision", COMMIT, "--to", str(tmp_path / "model")]
    assert main(arguments, {}) == 64
    assert "pip install 'sm70[fetch]'" in capsys.readouterr().err
