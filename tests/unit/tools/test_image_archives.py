"""Archives of images: what a cluster is given, and that it is complete without being written twice."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
from pathlib import Path

import pytest

import images
from imagekit import oci
from imagekit.recipes import RECIPES, Keys
from toolbox import ROOT, ToolError

LAYER = "application/vnd.oci.image.layer.v1.tar"


def layer(**files: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name.replace("__", "/"))
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


def write_layout(folder: Path, *layers: bytes, media_type: str = LAYER) -> Path:
    """An OCI layout folder with one image."""

    def blob(data: bytes) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        path = folder / "blobs/sha256" / digest
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data)}

    config = blob(json.dumps({"layers": len(layers)}).encode())
    entries = [{"mediaType": media_type, **blob(data)} for data in layers]
    manifest = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": config}
    index = {"manifests": [blob(json.dumps({**manifest, "layers": entries}).encode())]}
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def contents(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as tar:
        return {member.name: file.read() for member in tar if (file := tar.extractfile(member))}


PACKAGES, CODE = layer(usr__lib__big="packages" * 1000), layer(opt__code="code")


@pytest.fixture
def archives(tmp_path: Path) -> tuple[Path, Path]:
    """The two archives of an image: its packages, and what it adds to them."""
    below, above = tmp_path / "below.tar", tmp_path / "above.tar"
    lower = write_layout(tmp_path / "lower", PACKAGES)
    oci.write_archive(below, lower, "sm70.test/app-lower:1")
    upper = write_layout(tmp_path / "upper", PACKAGES, CODE)
    oci.write_archive(above, upper, "sm70.test/app:2", oci.read_layout(lower).layers)
    return below, above


def test_the_second_archive_holds_only_what_the_image_adds(archives: tuple[Path, Path]) -> None:
    below, above = map(contents, archives)
    assert PACKAGES in below.values()
    assert PACKAGES not in above.values()
    assert CODE in above.values()


def test_an_archive_names_its_image(archives: tuple[Path, Path]) -> None:
    for archive, name in zip(archives, ("sm70.test/app-lower:1", "sm70.test/app:2"), strict=True):
        (manifest,) = json.loads(contents(archive)["index.json"])["manifests"]
        assert manifest["annotations"]["io.containerd.image.name"] == name


def test_joined_archives_are_a_complete_image(archives: tuple[Path, Path], tmp_path: Path) -> None:
    whole = tmp_path / "whole.tar"
    oci.join(whole, archives)
    found = contents(whole)
    (entry,) = json.loads(found["index.json"])["manifests"]
    assert entry["annotations"]["org.opencontainers.image.ref.name"] == "sm70.test/app:2"
    manifest = json.loads(found[f"blobs/{entry['digest'].replace(':', '/')}"])
    for descriptor in (manifest["config"], *manifest["layers"]):
        data = found[f"blobs/{descriptor['digest'].replace(':', '/')}"]
        assert f"sha256:{hashlib.sha256(data).hexdigest()}" == descriptor["digest"]
        assert len(data) == descriptor["size"]


def test_compressed_layers_are_refused(tmp_path: Path) -> None:
    layout = write_layout(tmp_path, b"packed", media_type=f"{LAYER}+gzip")
    with pytest.raises(ToolError, match="plain tar"):
        oci.read_layout(layout)


def test_the_size_of_an_image_is_that_of_its_layers(tmp_path: Path) -> None:
    assert oci.read_layout(write_layout(tmp_path, PACKAGES, CODE)).size == len(PACKAGES) + len(CODE)


@pytest.mark.parametrize("name", ["mnt/environment", "./etc/apt/sources.list", "root/.cache/x", "tmp/before"])
def test_what_the_build_left_in_a_layer_is_found(tmp_path: Path, name: str) -> None:
    path = tmp_path / "layer.tar"
    path.write_bytes(layer(**{name.replace("/", "__"): "", "opt__sm70": ""}))
    assert oci.traces(path) == [name.removeprefix("./")]


class FakeStorage:
    """Stands in for buildah's storage: names of images, and what was removed."""

    def __init__(self, *tags: str) -> None:
        self.kept = list(tags)
        self.removed: list[str] = []

    def tidy(self) -> None:
        pass

    def tags(self) -> list[str]:
        return self.kept

    def remove(self, names: list[str]) -> None:
        self.removed += names


def record(folder: Path, key: str, lower: str, age: int) -> images.ImageInfo:
    archives = tuple(folder / f"operator-{part}.tar" for part in (f"lower-{lower}", key))
    for archive in archives:
        archive.touch()
    info = images.ImageInfo(
        "operator",
        key,
        f"sm70.test/operator:{key}",
        "sha256:0",
        7,
        (3, 4),
        archives,
        f"sm70.test/operator-lower:{lower}",
    )
    path = folder / f"operator-{key}.json"
    info.write(path)
    os.utime(path, (10_000 - age, 10_000 - age))
    return info


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SM70_CACHE", str(tmp_path))
    (tmp_path / "images").mkdir()
    return images.folder()


def test_an_image_that_is_there_needs_no_program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = record(folder, Keys.of(RECIPES["operator"], ROOT).image, "a", age=0)
    monkeypatch.setenv("PATH", "")
    assert images.image_archives(["operator"]) == {"operator": info}


def test_an_image_whose_archive_is_gone_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(folder, Keys.of(RECIPES["operator"], ROOT).image, "a", age=0).archives[0].unlink()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ToolError, match="apt-get install buildah mmdebstrap skopeo"):
        images.image_archives(["operator"])


def test_an_unknown_image_is_refused_by_name() -> None:
    with pytest.raises(ToolError, match="operator, engine-cpu, engine-sm70, and no engine"):
        images.image_archives(["engine"])


def test_the_newest_versions_on_the_same_packages_are_kept(folder: Path) -> None:
    for age, (key, lower) in enumerate([("k1", "new"), ("k2", "new"), ("k3", "new")]):
        record(folder, key, lower, age)
    old = record(folder, "k4", "old", age=-1)
    old_record = folder / "operator-k4.json"
    old_record.touch()  # the newest of all has other packages: then only it is of use
    storage = FakeStorage("sm70.test/operator:k1", "sm70.test/operator:k4", old.lower, "sm70.test/operator-lower:new")
    images.Builder(ROOT, storage).prune()  # type: ignore[arg-type]
    assert sorted(path.name for path in folder.glob("operator*")) == [
        "operator-k4.json", "operator-k4.tar", "operator-lower-old.tar",
    ]  # fmt: skip
    assert storage.removed == ["sm70.test/operator:k1", "sm70.test/operator-lower:new"]


def test_two_versions_are_kept(folder: Path) -> None:
    for age, key in enumerate(["k1", "k2", "k3"]):
        record(folder, key, "same", age)
    images.Builder(ROOT, FakeStorage()).prune()  # type: ignore[arg-type]
    assert sorted(path.stem for path in folder.glob("operator-k*.json")) == ["operator-k1", "operator-k2"]
    assert (folder / "operator-lower-same.tar").exists()
    assert not (folder / "operator-k3.tar").exists()


def test_too_little_disk_is_said_before_anything_is_built(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = RECIPES["engine-cpu"]
    keys = {recipe.name: Keys.of(recipe, ROOT)}
    usage = type("Usage", (), {"free": 5_000_000_000})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ToolError, match="GB must be free"):
        images.Builder(ROOT, FakeStorage()).check_disk([recipe], keys)  # type: ignore[arg-type]
    assert "engine-cpu 12.5 GB" in capsys.readouterr().err
    # With its packages there, only the code is to be built, and 5 GB are plenty.
    lower = f"sm70.test/engine-cpu-lower:{keys['engine-cpu'].lower}"
    images.Builder(ROOT, FakeStorage(lower)).check_disk([recipe], keys)  # type: ignore[arg-type]
    assert "only this repository's code" in capsys.readouterr().err


def test_a_record_survives_being_written_and_read(folder: Path) -> None:
    info = record(folder, "k1", "a", age=0)
    assert images.ImageInfo.read(folder / "operator-k1.json") == info
    assert info.reference in images.table([info])
    (folder / "operator-k1.json").write_text("{}")
    with pytest.raises(ToolError, match="remove it"):
        images.ImageInfo.read(folder / "operator-k1.json")
