"""Reads and writes OCI image archives without a container engine."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testcluster.errors import ClusterError

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
NAMES = ("io.containerd.image.name", "org.opencontainers.image.ref.name")  # the first that is there counts
COMPRESSED = ("gzip", "zstd")
MAX_INDEX = 1 << 20  # bytes


@dataclass(frozen=True)
class Archive:
    """An OCI archive and what its index says: which content it has, under which names it will be known."""

    path: Path
    digest: str
    names: tuple[str, ...]
    size: int  # bytes
    compressed: bool = False

    @property
    def unpacking(self) -> int:
        """The bytes of disk that it takes while it is unpacked: the packed layers, and a guess of what is in them."""
        return self.size * (4 if self.compressed else 2)


def read_archive(path: Path) -> Archive:
    """Reads an archive's index and manifests, not its layers. Raises ClusterError if it has none."""
    advice = "write it with `buildah push IMAGE oci-archive:FILE:NAME` or `docker buildx build --output type=oci`"
    try:
        with tarfile.open(path) as tar:
            members = {member.name.removeprefix("./"): member for member in tar}
            data = _read(tar, members, "index.json")
            manifests = json.loads(data)["manifests"] if data is not None else []
            compressed = any(
                layer["mediaType"].endswith(COMPRESSED)
                for manifest in manifests
                for layer in json.loads(_read(tar, members, _blob(manifest)) or b"{}").get("layers", [])
            )
    except (OSError, tarfile.TarError, ValueError, LookupError) as error:
        raise ClusterError(f"{path} must be an OCI image archive, but cannot be read: {error}; {advice}") from None
    if data is None:
        raise ClusterError(f"{path} must be an OCI image archive, but has no index.json; {advice}")
    names = set()
    for manifest in manifests:
        annotations = manifest.get("annotations", {})
        names.update([annotations[key] for key in NAMES if key in annotations][:1])
    if not names:
        raise ClusterError(f"{path} must name its image in index.json, but does not; {advice}")
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    return Archive(path, digest, tuple(sorted(names)), path.stat().st_size, compressed)


def _read(tar: tarfile.TarFile, members: Mapping[str, tarfile.TarInfo], name: str) -> bytes | None:
    """A small file of the archive; None if it is not there, or not small."""
    member = members.get(name)
    file = tar.extractfile(member) if member is not None and member.size <= MAX_INDEX else None
    return file.read() if file is not None else None


def _blob(descriptor: Mapping[str, Any]) -> str:
    return "blobs/" + str(descriptor["digest"]).replace(":", "/")


def write_image(archive: Path, name: str, layers: Sequence[Path], config: Mapping[str, Any]) -> None:
    """Writes an image of uncompressed layer tars; `config` is its `config` (Entrypoint, User, Env, …)."""
    with tarfile.open(archive, "w") as out:

        def add(path: str, data: bytes) -> None:
            info = tarfile.TarInfo(path)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))

        def blob(kind: str, value: Mapping[str, Any]) -> dict[str, Any]:
            data = json.dumps(value, sort_keys=True).encode()
            digest = hashlib.sha256(data).hexdigest()
            add(f"blobs/sha256/{digest}", data)
            return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}

        descriptors = []
        for layer in layers:
            with layer.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                file.seek(0)
                info = tarfile.TarInfo(f"blobs/sha256/{digest}")
                info.size = layer.stat().st_size
                out.addfile(info, file)
            descriptors.append({"mediaType": LAYER, "digest": f"sha256:{digest}", "size": info.size})
        rootfs = {"type": "layers", "diff_ids": [descriptor["digest"] for descriptor in descriptors]}
        image = blob(CONFIG, {"architecture": "amd64", "os": "linux", "config": dict(config), "rootfs": rootfs})
        manifest = blob(MANIFEST, {"schemaVersion": 2, "mediaType": MANIFEST, "config": image, "layers": descriptors})
        manifest["annotations"] = dict.fromkeys(NAMES, name)
        add("oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        add("index.json", json.dumps({"schemaVersion": 2, "manifests": [manifest]}).encode())


def write_binary_image(archive: Path, name: str, binary: Path, links: Sequence[str] = ()) -> None:
    """Writes an image that holds one static program, and links to it by these names in /bin."""
    layer = archive.with_suffix(".layer")
    with tarfile.open(layer, "w") as tar, binary.open("rb") as file:
        info = tarfile.TarInfo(binary.name)
        info.size, info.mode = binary.stat().st_size, 0o755
        tar.addfile(info, file)
        for link in links:
            entry = tarfile.TarInfo(f"bin/{link}")
            entry.type, entry.linkname = tarfile.SYMTYPE, f"/{binary.name}"
            tar.addfile(entry)
    write_image(archive, name, [layer], {"Entrypoint": [f"/{binary.name}"], "User": "65532:65532"})
    layer.unlink()
