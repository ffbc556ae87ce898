"""The CPU lane is made again when its packages change, and not when this repository's code does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import lane
from lane import Interpreter
from toolbox import ROOT

PYTHON = Interpreter(Path("/usr/bin/python3.11"), "3.11.2")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for path in (*lane.INPUTS, "pyproject.toml"):
        source, target = ROOT / path, tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copyfile(source, target)
    return tmp_path


def edit(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("something else")


@pytest.mark.parametrize("path", ["requirements/cpu-lane.lock", "image/vllm-metadata/pyproject.toml"])
def test_other_packages_make_another_lane(checkout: Path, path: str) -> None:
    before = lane.lane_key(checkout, PYTHON)
    edit(checkout / path)
    assert lane.lane_key(checkout, PYTHON) != before


@pytest.mark.parametrize("path", ["pyproject.toml", "engine/sm70_engine/cli.py", "requirements/operator.lock"])
def test_an_edit_of_the_code_keeps_the_lane(checkout: Path, path: str) -> None:
    before = lane.lane_key(checkout, PYTHON)
    edit(checkout / path)
    assert lane.lane_key(checkout, PYTHON) == before


def test_each_python_has_its_own_lane(checkout: Path) -> None:
    others = [Interpreter(PYTHON.executable, "3.11.7"), Interpreter(Path("/opt/python/bin/python3.11"), PYTHON.version)]
    keys = {lane.lane_key(checkout, python) for python in (PYTHON, *others)}
    assert len(keys) == 3


def test_old_lanes_go_and_one_that_is_being_filled_stays(tmp_path: Path) -> None:
    names = ["cpu-a", "cpu-b", "cpu-c"]
    for age, name in enumerate(names):
        (tmp_path / name / "venv").mkdir(parents=True)
        (tmp_path / name / "ready").touch()
        os.utime(tmp_path / name / "ready", (1000 - age, 1000 - age))
    (tmp_path / "cpu-filling" / "venv").mkdir(parents=True)
    lane._forget_old(tmp_path, keep=tmp_path / "cpu-a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cpu-a", "cpu-b", "cpu-filling"]


def test_environments_of_checkouts_that_are_gone_are_removed(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for name, root in (("one", here), ("two", tmp_path / "gone")):
        (tmp_path / "checkouts" / name).mkdir(parents=True)
        (tmp_path / "checkouts" / name / "stamp").write_text(f"digest\n{root}\n")
    lane._forget_gone_checkouts(tmp_path / "checkouts")
    assert [path.name for path in (tmp_path / "checkouts").iterdir()] == ["one"]
