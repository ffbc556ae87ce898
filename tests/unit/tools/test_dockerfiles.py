"""What every Dockerfile must keep: pods run restricted, and nothing of a build machine gets into an image."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from toolbox import ROOT

DOCKERFILES = sorted(ROOT.glob("image/*/Dockerfile"))
SHIPPED = [path for path in DOCKERFILES if path.parent.name != "base"]
SCRIPTS = sorted(ROOT.glob("image/base/*.sh"))
HOST = re.compile(r"[a-z]+://|\b[\w-]+\.(com|org|io|net|dev)\b(?!\.)", re.IGNORECASE)


def instructions(path: Path) -> list[tuple[str, str]]:
    """Keyword and rest of each instruction, continued lines joined, comments left out."""
    text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split()[0], " ".join(line.split()[1:])) for line in lines if line.strip()]


def stage(path: Path, name: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    inside = False
    for keyword, rest in instructions(path):
        if keyword == "FROM":
            inside = rest.endswith(f" AS {name}")
        if inside:
            found.append((keyword, rest))
    return found


def test_the_images_are_found() -> None:
    assert {path.parent.name for path in SHIPPED} == {"operator", "engine-cpu", "engine-sm70"}


@pytest.mark.parametrize("path", [*DOCKERFILES, *SCRIPTS], ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_address_of_a_package_source(path: Path) -> None:
    assert not [line for line in path.read_text().splitlines() if HOST.search(line)]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.parent.name)
class TestShipped:
    def test_runs_as_the_numeric_user_that_pods_demand(self, path: Path) -> None:
        assert [rest for keyword, rest in instructions(path) if keyword == "USER"] == ["65532:65532"]

    def test_fetches_nothing_by_add(self, path: Path) -> None:
        assert not [rest for keyword, rest in instructions(path) if keyword == "ADD"]

    def test_starts_one_program_without_a_shell(self, path: Path) -> None:
        (entrypoint,) = [rest for keyword, rest in instructions(path) if keyword == "ENTRYPOINT"]
        words = json.loads(entrypoint)
        assert len(words) == 1
        assert words[0].startswith("/opt/sm70/bin/sm70-")
        assert not [rest for keyword, rest in instructions(path) if keyword == "CMD"]

    def test_writes_below_tmp_only(self, path: Path) -> None:
        settings = " ".join(rest for keyword, rest in stage(path, "lower") if keyword == "ENV")
        folders = dict(re.findall(r"(\w*(?:HOME|DIR))=(\S+)", settings))
        assert folders["HOME"] == "/tmp"
        assert all(folder == "/tmp" or folder.startswith("/tmp/") for folder in folders.values())

    def test_starts_from_nothing_with_a_public_base_for_its_build_stages(self, path: Path) -> None:
        sources = [rest.split()[0] for keyword, rest in instructions(path) if keyword == "FROM"]
        assert ("ARG", "BASE=debian:12-slim") in instructions(path)
        assert sources[0] == "${BASE}"
        assert "scratch" in sources
        assert sources[-1] == "lower"

    def test_the_code_is_the_only_thing_above_the_lower_part(self, path: Path) -> None:
        last = instructions(path)
        start = max(index for index, (keyword, _) in enumerate(last) if keyword == "FROM")
        above = [entry for entry in last[start:] if entry[0] in ("COPY", "RUN")]
        kernels = [("COPY", "--from=kernels /out/ /")] if stage(path, "kernels") else []
        assert above == [("COPY", "--from=wheel /out/ /"), *kernels]

    def test_the_engine_for_gpus_ships_its_kernels(self, path: Path) -> None:
        assert bool(stage(path, "kernels")) == (path.parent.name == "engine-sm70")

    def test_says_what_it_is(self, path: Path) -> None:
        labels = " ".join(rest for keyword, rest in instructions(path) if keyword == "LABEL")
        for name in ("title", "description", "licenses", "version", "revision"):
            assert f"org.opencontainers.image.{name}=" in labels

    def test_shares_the_stages_that_every_image_has(self, path: Path) -> None:
        for name in ("tools", "wheel"):
            assert stage(path, name) == stage(SHIPPED[0], name)


def test_both_engines_can_compile_and_run_lscpu() -> None:
    for path in SHIPPED:
        if path.parent.name != "operator":
            packages = {word for _, rest in stage(path, "rootfs") for word in rest.split()}
            assert {"g++", "libpython3.11-dev", "openssl", "dash", "util-linux", "libnuma1"} <= packages
