"""Builds the container images, each part once per content, and writes them as archives for a cluster.

    .venv/bin/python tools/images.py build operator engine-cpu [--json]
    .venv/bin/python tools/images.py save engine-cpu FILE.tar       one complete OCI archive, for other tools
    .venv/bin/python tools/images.py remove engine-cpu

Everything lies in `$SM70_CACHE/images`: what is known of an image in NAME.json, its archives beside it, buildah's
layers in storage/. The Dockerfiles are ordinary ones; this tool adds keys, disk checks and cheap updates.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from imagekit import oci
from imagekit.buildah import Storage, check_programs
from imagekit.recipes import RECIPES, Keys, Recipe
from toolbox import ROOT, ToolError, cache_root, exclusive, say, step

ImageError = ToolError
REGISTRY = "sm70.test"  # the top-level domain .test is never real: nothing tries to pull these
KEPT = 2  # versions of each image, as long as they share their packages


@dataclass(frozen=True)
class ImageInfo:
    """A built image. `archives` are to be loaded in this order; the first alone is complete. `size` is in bytes."""

    name: str
    key: str
    reference: str
    digest: str
    size: int
    layers: tuple[int, ...]
    archives: tuple[Path, ...]
    lower: str = ""

    def write(self, path: Path) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=1, default=str) + "\n"
        partial = path.with_suffix(".partial")
        partial.write_text(text)
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> ImageInfo:
        """Raises `ToolError` for a file that this version of the tool did not write."""
        try:
            found = json.loads(path.read_text())
            found["archives"] = tuple(Path(archive) for archive in found["archives"])
            found["layers"] = tuple(found["layers"])
            return cls(**found)
        except (ValueError, KeyError, TypeError) as error:
            raise ToolError(f"{path} must describe an image, and does not ({error}); remove it") from None


def folder() -> Path:
    """Where images lie."""
    return cache_root() / "images"


def image_archives(names: Iterable[str], root: Path = ROOT) -> dict[str, ImageInfo]:
    """The images of the checkout at `root`, built where they are not there yet. Raises `ImageError`."""
    names = list(names)
    if unknown := [name for name in names if name not in RECIPES]:
        raise ToolError(f"there are the images {', '.join(RECIPES)}, and no {', '.join(unknown)}")
    keys = {name: Keys.of(RECIPES[name], root) for name in names}
    if all(_built(name, keys[name]) for name in names):
        return {name: _info(name, keys[name]) for name in names}
    check_programs()
    folder().mkdir(parents=True, exist_ok=True)
    with exclusive(folder() / "lock"):
        builder = Builder(root, Storage(folder()))
        builder.check_disk([RECIPES[name] for name in names if not _built(name, keys[name])], keys)
        try:
            for name in names:
                if not _built(name, keys[name]):
                    builder.build(RECIPES[name], keys[name])
                _info(name, keys[name]).write(folder() / f"{name}.json")
        finally:
            # A build that failed leaves gigabytes behind, on a disk that may be full for that very reason.
            builder.storage.tidy()
            builder.prune()
    return {name: _info(name, keys[name]) for name in names}


def check_record(name: str) -> Path:
    """Where the result of an image's check lies."""
    return folder() / f"{name}.check"


def _record(name: str, key: str) -> Path:
    return folder() / f"{name}-{key}.json"


def _info(name: str, keys: Keys) -> ImageInfo:
    return ImageInfo.read(_record(name, keys.image))


def _built(name: str, keys: Keys) -> bool:
    record = _record(name, keys.image)
    return record.exists() and all(archive.exists() for archive in ImageInfo.read(record).archives)


@dataclass(frozen=True)
class Builder:
    """Builds from the checkout at `root`; the caller holds the lock."""

    root: Path
    storage: Storage

    def check_disk(self, recipes: Sequence[Recipe], keys: dict[str, Keys]) -> None:
        """Prints what will be written; raises `ToolError` when the disk has not that much."""
        self.storage.tidy()
        tags = self.storage.tags()
        new = [recipe for recipe in recipes if _lower(recipe, keys[recipe.name]) not in tags]
        # One after the other: what they keep adds up, what they need for a while does not.
        need = 1.0 + sum(recipe.kept for recipe in new)
        need += max((recipe.building - recipe.kept for recipe in new), default=0.0)
        free = shutil.disk_usage(folder()).free / 1e9
        sizes = [(recipe.name, recipe.kept or recipe.building) for recipe in new]
        parts = [f"{name} {size:g} GB" for name, size in sizes] or ["only this repository's code"]
        say(f"images: to build {', '.join(parts)}; takes up to {need:.0f} GB, {free:.0f} GB are free in {folder()}")
        if free < need:
            raise ToolError(f"{need:.0f} GB must be free in {folder()}, and {free:.0f} GB are: make room there")

    def build(self, recipe: Recipe, keys: Keys) -> None:
        """Builds both parts of an image and writes its archives and its record."""
        log = folder() / f"{recipe.name}.log"
        log.unlink(missing_ok=True)
        base, tools = f"localhost/base:{keys.base}", f"localhost/tools:{keys.tools}"
        lower, reference = _lower(recipe, keys), f"{REGISTRY}/{recipe.name}:{keys.image}"
        tags = self.storage.tags()
        if base not in tags:
            with step("base: Debian 12 by mmdebstrap"):
                self.storage.make_base(base, self.root / "image/base/Dockerfile")
        if tools not in tags:
            with step("tools: Python and uv for the build stages"):
                self.storage.build(tools, self.root, recipe.dockerfile, base=base, log=log, target="tools")
        # The stage `tools` must be a ready image: buildah 1.28 mounts a stage that it took from its cache without the
        # result of that stage's last step.
        ready = {"tools": tools}
        if lower not in tags:
            with step(f"{recipe.name}: packages (the part that an edit of the code leaves alone)"):
                self.storage.build(
                    lower, self.root, recipe.dockerfile, base=base, log=log, target="lower", contexts=ready,
                    share_downloads=recipe.exported,
                )  # fmt: skip
        with step(f"{recipe.name}: this repository's wheel"):
            contexts = {**ready, "lower": lower}
            self.storage.build(reference, self.root, recipe.dockerfile, base=base, log=log, contexts=contexts)
        archives = self._export(recipe, keys, lower, reference) if recipe.exported else ()
        if recipe.check:
            with step(f"{recipe.name}: {recipe.check}, in the image"):
                mounts = {self.root / recipe.check: "/mnt/check.py"}
                found = self.storage.run_in(reference, ["/opt/sm70/bin/python", "/mnt/check.py"], mounts)
            check_record(recipe.name).write_text(found)
        manifest = self.storage.manifest(reference)
        sizes = tuple(layer.size for layer in manifest.layers)
        info = ImageInfo(
            recipe.name, keys.image, reference, manifest.blob.digest, manifest.size, sizes, archives, lower
        )
        info.write(_record(recipe.name, keys.image))

    def _export(self, recipe: Recipe, keys: Keys, lower: str, reference: str) -> tuple[Path, Path]:
        below = folder() / f"{recipe.name}-lower-{keys.lower}.tar"
        above = folder() / f"{recipe.name}-{keys.image}.tar"
        known = self.storage.manifest(lower).layers
        if not below.exists():
            with step(f"{recipe.name}: archive of the packages"):
                self._write(lower, below, ())
        with step(f"{recipe.name}: archive of the rest"):
            self._write(reference, above, known)
        return below, above

    def _write(self, image: str, target: Path, known: Sequence[oci.Blob]) -> None:
        with tempfile.TemporaryDirectory(dir=folder()) as place:
            layout = Path(place)
            oci.pretend(layout, known)
            self.storage.export(image, layout)
            layers = oci.read_layout(layout).layers
            if layers[: len(known)] != tuple(known):
                raise ToolError(f"{image} must begin with the layers of its lower part, and does not")
            for layer in layers[len(known) :]:
                if found := oci.traces(layout / layer.path):
                    raise ToolError(f"a layer of {image} must hold nothing of the build, and holds {found[0]}")
            oci.write_archive(target, layout, image, known)

    def prune(self) -> None:
        """Keeps the newest versions of each image, with what they stand on, and removes the rest."""
        kept: list[ImageInfo] = []
        for name in RECIPES:
            records = [path for path in folder().glob(f"{name}-*.json") if path.stem.count("-") == name.count("-") + 1]
            records.sort(key=lambda path: path.stat().st_mtime, reverse=True)
            for place, record in enumerate(records):
                info = ImageInfo.read(record)
                if place < KEPT and info.lower == ImageInfo.read(records[0]).lower:
                    kept.append(info)
                else:
                    record.unlink()
        needed = {archive for info in kept for archive in info.archives}
        for archive in folder().glob("*.tar"):
            if archive not in needed:
                archive.unlink()
        names = {image for info in kept if info.archives for image in (info.reference, info.lower)}
        for recipe in RECIPES.values():
            keys = Keys.of(recipe, self.root)
            names |= {f"localhost/base:{keys.base}", f"localhost/tools:{keys.tools}"}
            if recipe.exported:  # also when there is no image on it yet, because building that failed
                names.add(_lower(recipe, keys))
        self.storage.remove([tag for tag in self.storage.tags() if tag not in names])


def _lower(recipe: Recipe, keys: Keys) -> str:
    return f"{REGISTRY}/{recipe.name}-lower:{keys.lower}"


def save(name: str, target: Path) -> None:
    """Writes an image as one complete OCI archive."""
    info = image_archives([name])[name]
    if not info.archives:
        raise ToolError(
            f"{name} is not kept as an archive: build it with Docker or buildah from image/{name}/Dockerfile"
        )
    with step(f"writing {target}"):
        oci.join(target, info.archives)


def remove(names: Sequence[str]) -> None:
    """Forgets images: records, archives, layers."""
    with exclusive(folder() / "lock"):
        for name in names:
            for path in [*folder().glob(f"{name}-*.json"), folder() / f"{name}.json"]:
                path.unlink(missing_ok=True)
        builder = Builder(ROOT, Storage(folder()))
        builder.storage.tidy()
        builder.prune()


def table(infos: Iterable[ImageInfo]) -> str:
    """Name, size, digest and reference of images, for a terminal."""
    rows = [("IMAGE", "SIZE", "DIGEST", "REFERENCE")]
    for info in infos:
        size = f"{info.size / 1e6:.0f} MB" if info.size < 1e9 else f"{info.size / 1e9:.2f} GB"
        rows.append((info.name, size, info.digest, info.reference))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def main() -> int:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Builds the container images.")
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="build images that are not there yet, and print what they are")
    building.add_argument("names", nargs="+", metavar="NAME", help=", ".join(RECIPES))
    building.add_argument("--json", action="store_true", help="print JSON instead of a table")
    saving = commands.add_parser("save", help="write one complete OCI archive")
    saving.add_argument("name", metavar="NAME")
    saving.add_argument("file", type=Path, metavar="FILE")
    removing = commands.add_parser("remove", help="forget images")
    removing.add_argument("names", nargs="+", metavar="NAME", choices=list(RECIPES))
    options = parser.parse_args()
    try:
        if options.command == "build":
            infos = image_archives(options.names)
            found = {name: dataclasses.asdict(info) for name, info in infos.items()}
            print(json.dumps(found, indent=1, default=str) if options.json else table(infos.values()))
        elif options.command == "save":
            save(options.name, options.file)
        else:
            remove(options.names)
    except ToolError as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
