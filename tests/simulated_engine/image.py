"""The image of the simulated engine: the operator's packages with this folder and what it needs of the product on top.

No container engine is asked: one small layer is written, and the image shares all others with the operator's image.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from testcluster.images import CONFIG, LAYER, MANIFEST
from toolbox import ROOT

REPOSITORY = "sm70.test/simulated-engine"
PLACE = "opt/simulated"
SOURCES = {
    "tests/simulated_engine": "simulated_engine",
    "engine/sm70_profiles": "sm70_profiles",
    "engine/sm70_engine": "sm70_engine",
}
"""Folders of the repository and the packages that they become."""
HUBS = (
    *("huggingface-hub", "filelock", "fsspec", "httpx2", "httpcore2", "packaging", "tqdm", "truststore"),
    *("modelscope-hub", "requests", "urllib3", "charset-normalizer", "cryptography", "cffi", "pycparser"),
)
"""For `sm70-fetch`, which is the real one: the hubs' libraries, and what they import and the operator's image lacks."""
PROGRAM = f"""#!/opt/sm70/bin/python
import sys
sys.path.insert(0, "/{PLACE}")
from simulated_engine.__main__ import main
main()
"""
FETCH = PROGRAM.replace("simulated_engine.__main__ import main", "sm70_engine.fetch.cli import main").replace(
    "\nmain()\n", "\nsys.exit(main())\n"
)


def write(lower: Path, folder: Path, root: Path = ROOT) -> tuple[str, Path]:
    """Writes the image above `lower` (the complete archive of the operator's packages) into a folder.

    Returns its reference, which its content decides, and its archive, which is to be loaded after `lower`.
    """
    files = {f"{PLACE}/{path}": data for path, data in _python_files(root, SOURCES)}
    files |= {f"{PLACE}/{path}": data for path, data in _installed(HUBS)}
    files[f"{PLACE}/bin/sm70-serve"] = PROGRAM.encode()
    files["opt/sm70/bin/sm70-fetch"] = FETCH.encode()
    return layered(lower, folder, REPOSITORY, files, {"Entrypoint": [f"/{PLACE}/bin/sm70-serve"]})


def files_only(reference: str, folder: Path, files: Mapping[str, bytes]) -> Path:
    """Writes an image that holds nothing but these files, as checkpoints are shipped; returns its archive."""
    layer = _layer(files)
    image = {
        "architecture": "amd64",
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
    }
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "layers": [{**_described(layer), "mediaType": LAYER}]}
    return _archive(reference, folder, image, manifest, [layer])


def operator_overlay(lower: Path, folder: Path, root: Path = ROOT) -> tuple[str, Path]:
    """The operator's sources as they are, laid over its packages: for work on it, as building the image is slow."""
    packages = {"operator/sm70_operator": "sm70_operator"} | {
        f"engine/{name}": name for name in ("sm70_profiles", "sm70_qualify")
    }
    files = {f"{PLACE}/{path}": data for path, data in _python_files(root, packages)}
    for program, module in (("sm70-operator", "sm70_operator.__main__"), ("sm70-qualify", "sm70_qualify.cli")):
        text = PROGRAM.replace("simulated_engine.__main__", module).replace("\nmain()\n", "\nsys.exit(main())\n")
        files[f"opt/sm70/bin/{program}"] = text.encode()
    config = {"Entrypoint": ["/opt/sm70/bin/sm70-operator"]}
    return layered(lower, folder, "sm70.test/operator-overlay", files, config)


def layered(
    lower: Path, folder: Path, repository: str, files: Mapping[str, bytes], config: Mapping[str, Any]
) -> tuple[str, Path]:
    """An image of the archive `lower` with these files on top and these members of its configuration changed."""
    with tarfile.open(lower) as tar:
        index = json.loads(_member(tar, "index.json"))
        manifest = json.loads(_member(tar, _path(index["manifests"][0]["digest"])))
        image = json.loads(_member(tar, _path(manifest["config"]["digest"])))
    layer = _layer(files)
    image["rootfs"]["diff_ids"] = [*image["rootfs"]["diff_ids"], _digest(layer)]
    image["config"] = {**image["config"], **config}
    image.pop("history", None)
    kind = manifest["layers"][0]["mediaType"]
    manifest["layers"] = [*manifest["layers"], {**_described(layer), "mediaType": kind}]
    manifest_blob, _ = _blobs(image, manifest)
    reference = f"{repository}:{_digest(manifest_blob)[7:23]}"
    return reference, _archive(reference, folder, image, manifest, [layer])


def _blobs(image: Mapping[str, Any], manifest: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """The manifest that names this configuration, and the configuration."""
    blob = json.dumps(image, sort_keys=True).encode()
    named = {**manifest, "config": {"mediaType": CONFIG, **manifest.get("config", {}), **_described(blob)}}
    return json.dumps(named, sort_keys=True).encode(), blob


def _archive(
    reference: str, folder: Path, image: Mapping[str, Any], manifest: Mapping[str, Any], layers: Sequence[bytes]
) -> Path:
    """Writes an archive with these layers; others of the manifest are to be there when it is loaded."""
    manifest_blob, image_blob = _blobs(image, manifest)
    names = {"io.containerd.image.name": reference, "org.opencontainers.image.ref.name": reference}
    entry = {"mediaType": manifest.get("mediaType", MANIFEST), **_described(manifest_blob), "annotations": names}
    target = folder / f"{reference.replace('/', '-').replace(':', '-')}.tar"
    blobs = {_path(_digest(data)): data for data in (*layers, image_blob, manifest_blob)}
    index = {"schemaVersion": 2, "manifests": [entry]}
    files = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "index.json": json.dumps(index).encode(), **blobs}
    target.write_bytes(_tar(files))
    return target


def _described(data: bytes) -> dict[str, Any]:
    """What a descriptor says of a blob besides its kind."""
    return {"digest": _digest(data), "size": len(data)}


def _installed(distributions: Sequence[str]) -> Iterable[tuple[str, bytes]]:
    """Files of distributions that are installed here, their metadata too; no programs."""
    for name in distributions:
        for path in sorted(metadata.files(name) or ()):
            if not {"__pycache__", ".."} & set(path.parts):
                yield str(path), path.read_binary()


def _python_files(root: Path, packages: Mapping[str, str]) -> Iterable[tuple[str, bytes]]:
    for source, package in packages.items():
        for path in sorted((root / source).rglob("*")):
            if path.is_file() and not {"__pycache__", "kernels"} & set(path.parts):
                yield f"{package}/{path.relative_to(root / source)}", path.read_bytes()


def _layer(files: Mapping[str, bytes]) -> bytes:
    return _tar(files, executable="/bin/")


def _tar(files: Mapping[str, bytes], executable: str = "\0") -> bytes:
    """An archive whose bytes follow from its content alone; folders are implied by their files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755 if executable in f"/{name}" else 0o644
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    assert file is not None
    return file.read()


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _path(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")
