"""Image archives: what is written can be read again, and bad ones are refused with advice."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from testcluster.errors import ClusterError
from testcluster.images import read_archive, write_binary_image, write_image


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    path = tmp_path / "layer.tar"
    with tarfile.open(path, "w") as tar:
        (tmp_path / "word").write_text("hello")
        tar.add(tmp_path / "word", "word")
    return path


def blobs(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as tar:
        members = {member.name: tar.extractfile(member) for member in tar}
        return {name: file.read() for name, file in members.items() if file is not None}


def test_every_blob_is_named_by_its_digest_and_reachable_from_the_index(tmp_path: Path, layer: Path) -> None:
    archive = tmp_path / "image.tar"
    write_image(archive, "test/app:1", [layer], {"Entrypoint": ["/word"], "User": "65532"})
    files = blobs(archive)
    for name, data in files.items():
        if name.startswith("blobs/"):
            assert name == f"blobs/sha256/{hashlib.sha256(data).hexdigest()}"

    def follow(descriptor: dict[str, str]) -> bytes:
        return files["blobs/" + descriptor["digest"].replace(":", "/")]

    (entry,) = json.loads(files["index.json"])["manifests"]
    manifest = json.loads(follow(entry))
    config = json.loads(follow(manifest["config"]))
    assert config["config"] == {"Entrypoint": ["/word"], "User": "65532"}
    assert [follow(one) for one in manifest["layers"]] == [layer.read_bytes()]
    assert config["rootfs"]["diff_ids"] == [one["digest"] for one in manifest["layers"]]


def test_an_archive_is_known_by_its_content_not_by_its_file(tmp_path: Path, layer: Path) -> None:
    first, again, other = (tmp_path / name for name in ("first.tar", "again.tar", "other.tar"))
    for path, user in ((first, "1"), (again, "1"), (other, "2")):
        write_image(path, "test/app:1", [layer], {"User": user})
    assert read_archive(first).digest == read_archive(again).digest != read_archive(other).digest
    assert read_archive(first).names == ("test/app:1",)
    assert read_archive(first).size == first.stat().st_size


def test_packed_layers_are_expected_to_take_more_disk(tmp_path: Path, layer: Path) -> None:
    archive, packed = tmp_path / "image.tar", tmp_path / "packed.tar"
    write_image(archive, "test/app:1", [layer], {})
    with tarfile.open(packed, "w") as tar:
        for name, data in blobs(archive).items():
            changed = data.replace(b"layer.v1.tar", b"layer.v1.tar+gzip")
            info = tarfile.TarInfo(name)
            info.size = len(changed)
            tar.addfile(info, io.BytesIO(changed))
    assert read_archive(archive).unpacking == 2 * archive.stat().st_size
    assert read_archive(packed).unpacking == 4 * packed.stat().st_size


def test_a_program_becomes_an_image_with_links(tmp_path: Path) -> None:
    program, archive = tmp_path / "tool", tmp_path / "tool.tar"
    program.write_bytes(b"\x7fELF")
    write_binary_image(archive, "test/tool:1", program, links=["sh"])
    layer = next(data for data in blobs(archive).values() if b"\x7fELF" in data)
    (tmp_path / "layer").write_bytes(layer)
    with tarfile.open(tmp_path / "layer") as tar:
        assert (tar.getmember("tool").mode, tar.getmember("bin/sh").linkname) == (0o755, "/tool")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layer", "tool", "tool.tar"]


def test_what_is_no_named_oci_archive_is_refused(tmp_path: Path, layer: Path) -> None:
    with pytest.raises(ClusterError, match=r"must be an OCI image archive.*cannot be read.*buildah push"):
        read_archive(tmp_path / "missing.tar")
    with pytest.raises(ClusterError, match=r"has no index\.json"):
        read_archive(layer)
    (tmp_path / "index.json").write_text('{"manifests": [{"digest": "sha256:0"}]}')
    nameless = tmp_path / "nameless.tar"
    with tarfile.open(nameless, "w") as tar:
        tar.add(tmp_path / "index.json", "./index.json")
    with pytest.raises(ClusterError, match="must name its image"):
        read_archive(nameless)
