"""An image is built again exactly when something that it is made from changed."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import pytest

from imagekit.recipes import RECIPES, SOURCES, TOOLS, Keys, Recipe
from toolbox import ROOT, ToolError, content_key

OPERATOR, CPU = RECIPES["operator"], RECIPES["engine-cpu"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A tree with a file for each thing that any image is made from."""
    for recipe in RECIPES.values():
        for path in (recipe.dockerfile, *recipe.inputs, *TOOLS, *SOURCES):
            target = tmp_path / path
            if (ROOT / path).is_dir():
                target.mkdir(parents=True, exist_ok=True)
                (target / "file").write_text(path)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(path)
    return tmp_path


def changed(recipe: Recipe, root: Path, path: str) -> set[str]:
    """The parts of an image that have another key after a file got another content."""
    before = asdict(Keys.of(recipe, root))
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("something else")
    after = asdict(Keys.of(recipe, root))
    return {part for part in before if before[part] != after[part]}


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("engine/sm70_engine/new.py", {"image"}),
        ("operator/file", {"image"}),
        ("pyproject.toml", {"image"}),
        ("image/engine-cpu/Dockerfile", {"lower", "image"}),
        ("requirements/cpu-lane.lock", {"lower", "image"}),
        ("image/vllm-metadata/file", {"lower", "image"}),
        ("image/base/file", {"tools", "lower", "image"}),
        ("requirements/uv.lock", {"tools", "lower", "image"}),
        ("requirements/operator.lock", set()),
        ("image/operator/Dockerfile", set()),
        ("docs/operations/images.md", set()),
        ("tests/test_something.py", set()),
        ("engine/sm70_engine/__pycache__/new.cpython-311.pyc", set()),
    ],
)
def test_a_change_reaches_the_parts_that_are_made_from_it_and_no_others(
    checkout: Path, path: str, parts: set[str]
) -> None:
    assert changed(CPU, checkout, path) == parts


def test_a_renamed_file_is_a_change(checkout: Path) -> None:
    before = Keys.of(CPU, checkout)
    (checkout / "engine/file").rename(checkout / "engine/other")
    assert Keys.of(CPU, checkout).image != before.image


def test_images_share_their_base_and_tools_only(checkout: Path) -> None:
    operator, engine = Keys.of(OPERATOR, checkout), Keys.of(CPU, checkout)
    assert (operator.base, operator.tools) == (engine.base, engine.tools)
    assert operator.lower != engine.lower
    assert operator.image != engine.image


def test_the_key_does_not_depend_on_where_the_checkout_lies(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "checkout"
    elsewhere.symlink_to(checkout)
    assert Keys.of(CPU, elsewhere) == Keys.of(CPU, checkout)


def test_parts_of_a_key_cannot_run_into_each_other() -> None:
    assert content_key([("a", b"bc")]) != content_key([("ab", b"c")])
    assert content_key([("a", b""), ("b", b"")]) != content_key([("a", b"b")])
    assert content_key([("a", b"1"), ("b", b"2")]) == content_key([("b", b"2"), ("a", b"1")])


def test_a_missing_input_is_named(checkout: Path) -> None:
    (checkout / "requirements/cpu-lane.lock").unlink()
    with pytest.raises(ToolError, match=r"requirements/cpu-lane\.lock"):
        Keys.of(CPU, checkout)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_everything_that_a_dockerfile_copies_is_in_its_key(recipe: Recipe) -> None:
    keyed = {*TOOLS, *SOURCES, *recipe.inputs}
    copied = set()
    for line in (ROOT / recipe.dockerfile).read_text().splitlines():
        if line.startswith("COPY ") and "--from=" not in line:
            copied |= {word.rstrip("/") for word in line.split()[1:-1]}
    assert copied == keyed
    assert Keys.of(recipe, ROOT)


def test_the_build_context_holds_what_the_dockerfiles_copy() -> None:
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in rules
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    copied = {path.split("/")[0] for recipe in RECIPES.values() for path in (*TOOLS, *SOURCES, *recipe.inputs)}
    assert copied == allowed
    assert "**/__pycache__" in rules
    assert not any(re.search(r"\s", rule) for rule in rules if not rule.startswith("#"))
