"""OCI images as archives that a cluster can load, written so that what did not change is not written again.

An image is handed over as two archives: a complete one of its lower part, and one that holds only what the image adds.
The second alone is not complete; whoever loads it must have loaded the first one before, and containerd then takes the
layers that it has already. So an edit of the code costs a megabyte instead of gigabytes, here and in the cluster.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolbox import ToolError

TAG = "image"


@dataclass(frozen=True)
class Blob:
    """A file of an image, by the digest of its content; the size is in bytes."""

    digest: str
    size: int

    @property
    def path(self) -> str:
        return "blobs/" + self.digest.replace(":", "/")


@dataclass(frozen=True)
class Manifest:
    """What an image consists of."""

    blob: Blob
    media_type: str
    config: Blob
    layers: tuple[Blob, ...]

    @property
    def size(self) -> int:
        """Bytes of the layers; they are not compressed."""
        return sum(layer.size for layer in self.layers)


def parse_manifest(data: bytes) -> Manifest:
    """Raises `ToolError` when a layer is compressed: the sizes and the sharing of layers here rely on plain ones."""
    value = json.loads(data)
    if packed := [entry["mediaType"] for entry in value["layers"] if not entry["mediaType"].endswith(".tar")]:
        raise ToolError(f"layers must be plain tar files, and one is {packed[0]}")
    blob = Blob(f"sha256:{hashlib.sha256(data).hexdigest()}", len(data))
    layers = tuple(_blob(entry) for entry in value["layers"])
    return Manifest(blob, value["mediaType"], _blob(value["config"]), layers)


def _blob(descriptor: dict[str, Any]) -> Blob:
    return Blob(descriptor["digest"], descriptor["size"])


def read_layout(layout: Path) -> Manifest:
    """The only image of an OCI layout folder."""
    (entry,) = json.loads((layout / "index.json").read_text())["manifests"]
    return parse_manifest((layout / _blob(entry).path).read_bytes())


def pretend(layout: Path, layers: Sequence[Blob]) -> None:
    """Puts files of the right size and no content in the place of layers, so that skopeo does not copy them again."""
    for layer in layers:
        path = layout / layer.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(layer.size)


def write_archive(target: Path, layout: Path, reference: str, without: Collection[Blob] = ()) -> None:
    """Writes the image of a layout folder as an OCI archive that names it `reference`, leaving out some layers."""
    manifest = read_layout(layout)
    names = {"io.containerd.image.name": reference, "org.opencontainers.image.ref.name": reference}
    entry = {
        "mediaType": manifest.media_type,
        "digest": manifest.blob.digest,
        "size": manifest.blob.size,
        "annotations": names,
    }
    partial = target.with_suffix(".partial")
    with tarfile.open(partial, "w") as tar:

        def add(path: str, size: int) -> tarfile.TarInfo:
            info = tarfile.TarInfo(path)
            info.size, info.mode = size, 0o644
            return info

        for path, value in (
            ("oci-layout", {"imageLayoutVersion": "1.0.0"}),
            ("index.json", {"schemaVersion": 2, "manifests": [entry]}),
        ):
            data = json.dumps(value).encode()
            tar.addfile(add(path, len(data)), io.BytesIO(data))
        for blob in dict.fromkeys((manifest.blob, manifest.config, *manifest.layers)):
            if blob not in without:
                with (layout / blob.path).open("rb") as file:
                    tar.addfile(add(blob.path, blob.size), file)
    partial.replace(target)


def join(target: Path, archives: Sequence[Path]) -> None:
    """Makes one complete archive out of an image's archives; the last one's index is the result's."""
    seen = set()
    partial = target.with_suffix(".partial")
    with tarfile.open(partial, "w") as out:
        for archive in reversed(archives):
            with tarfile.open(archive) as tar:
                for member in tar:
                    if member.name not in seen:
                        seen.add(member.name)
                        out.addfile(member, tar.extractfile(member))
    partial.replace(target)


def traces(layer: Path) -> list[str]:
    """Files in a layer at places where only a build machine's settings or leftovers can be."""
    places = ("mnt/", "srv/", "root/", "tmp/", "build/", "source/", "etc/apt/", "etc/pip.conf", "etc/uv/")
    with tarfile.open(layer) as tar:
        return [name for member in tar if (name := member.name.removeprefix("./")).startswith(places)]


def forget(folder: Path) -> None:
    """Removes a layout folder."""
    shutil.rmtree(folder, ignore_errors=True)
