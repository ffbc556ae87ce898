"""What each image is made from, and the keys that follow from it.

An image has two parts. The lower one (Debian packages and the Python environment, gigabytes for an engine) depends on
its Dockerfile, its lock and the scripts of image/base; the upper one is this repository's wheel. An edit of the code
changes the upper key only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from toolbox import content_key, files_under

BASE_SUITE = "bookworm"
BASE_OPTIONS = (
    "--variant=apt",
    "--dpkgopt=path-exclude=/usr/share/man/*",
    "--dpkgopt=path-exclude=/usr/share/locale/*",
    # The mirror that this machine happens to use is no part of the base.
    '--customize-hook=rm -rf "$1"/etc/apt/sources.list "$1"/etc/apt/sources.list.d/*',
)
TOOLS = ("image/base", "requirements/uv.lock", "requirements/build.lock")
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "engine", "operator")


@dataclass(frozen=True)
class Recipe:
    """One image. Sizes are in gigabytes and serve the disk budget; docs/operations/images.md has the measured ones."""

    name: str
    inputs: tuple[str, ...]  # of the lower part, besides the Dockerfile and what every image shares
    building: float  # free space that building the lower part takes for a while
    kept: float  # of which this much stays, in buildah's storage and in archives
    exported: bool = True  # as archives for a cluster; otherwise built, checked, recorded and removed again
    check: str = ""  # a program that is run inside the finished image and prints JSON, which is recorded

    @property
    def dockerfile(self) -> str:
        return f"image/{self.name}/Dockerfile"


RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("operator", ("requirements/operator.lock",), building=1.0, kept=0.7),
        Recipe("engine-cpu", ("requirements/cpu-lane.lock", "image/vllm-metadata"), building=24.0, kept=12.5),
        Recipe(
            "engine-sm70",
            (
                *("requirements/sm70-lane.lock", "requirements/sm70-build.lock", "requirements/sm70-vllm.lock"),
                *("requirements/kernels.lock", "image/engine-sm70/kernels.sh"),
            ),
            building=36.0,
            kept=0.0,
            exported=False,
            check="image/engine-sm70/import_sweep.py",
        ),
    )
}


@dataclass(frozen=True)
class Keys:
    """The names that an image's parts have by their content."""

    base: str
    tools: str
    lower: str
    image: str

    @classmethod
    def of(cls, recipe: Recipe, root: Path) -> Keys:
        """The keys of the checkout at `root`."""
        base = content_key([("suite", BASE_SUITE.encode()), ("options", "\0".join(BASE_OPTIONS).encode())])
        tools = content_key([("base", base.encode()), *files_under(root, TOOLS)])
        lower = content_key([("tools", tools.encode()), *files_under(root, (recipe.dockerfile, *recipe.inputs))])
        image = content_key([("lower", lower.encode()), *files_under(root, SOURCES)])
        return cls(base, tools, lower, image)
