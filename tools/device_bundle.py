"""Packs what the device lane needs on a machine that has a GPU, torch and transformers, and no way to fetch anything.

    .venv/bin/python tools/device_bundle.py [--out build/device]      (make device-bundle)

The bundle holds vLLM built without its CUDA extensions (from source, as the image for V100 GPUs has it), the packages
that such a machine lacks (`requirements/device-lane.txt`, at the versions and hashes of the image's lock), and this
repository's wheel with the built kernels. It is for Python 3.12 on x86-64 Linux and must not exceed 50 MiB.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from lane import cpu_lane
from toolbox import ROOT, ToolError, build_wheel, clean_environment, content_key, files_under, run, step, uv

LIMIT = 50 << 20
PYTHON = "3.12"
PLATFORM = "x86_64-manylinux_2_34"
PACKED, OWN = "packages.tar.xz", "sm70.tar.xz"
PACKAGES = ("requirements/device-lane.txt", "requirements/sm70-lane.lock")
VLLM = ("requirements/sm70-vllm.lock", "requirements/sm70-build.lock")
# Never imported on the lane's paths, and large.
LEFT_OUT = ("pycountry/locales", "vllm/benchmarks", "anthropic/lib/bedrock", "**/tests", "**/__pycache__", "**/*.pyi")
REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)==\S+ \\\n(?:    --hash=\S+(?: \\)?\n)+", re.MULTILINE)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(names: str, lock: str) -> str:
    """The entries of a lock (text with hashes) for these names (one a line). Raises `ToolError` for an absent one."""
    entries = {_normal(match[1]): match[0] for match in REQUIREMENT.finditer(lock + "\n")}
    wanted = [_normal(line) for line in names.splitlines() if line and not line.startswith("#")]
    missing = [name for name in wanted if name not in entries]
    if missing:
        raise ToolError(f"requirements/sm70-lane.lock must pin {', '.join(missing)}, and does not")
    return "".join(entries[name] for name in wanted)


def _packages(site: Path, scratch: Path) -> None:
    names, lock = ((ROOT / path).read_text() for path in PACKAGES)
    (scratch / "requirements.lock").write_text(pinned(names, lock))
    with step("packages that the machine lacks"):
        uv(
            *("pip", "install", "-q", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--link-mode", "copy"),
            *("--python-version", PYTHON, "--python-platform", PLATFORM, "--target", site),
            *("-r", scratch / "requirements.lock"),
        )


def _vllm(site: Path, scratch: Path) -> None:
    """vLLM from source, without extensions; its build asks for a torch, and the CPU lane has one."""
    lane = cpu_lane()
    (packages,) = (lane.parents[3] / "..").resolve().glob("venv/lib/python3.*/site-packages")
    with step("vLLM from its source, without CUDA extensions"):
        uv("venv", "-q", "--no-project", "--python", Path(sys.executable).resolve(), scratch / "tools")
        (own,) = (scratch / "tools/lib").glob("python3.*/site-packages")
        (own / "lane.pth").write_text(f"{packages}\n")
        python = scratch / "tools/bin/python"
        uv("pip", "install", "-q", "--python", python, "--no-deps", "--require-hashes", "-r", ROOT / VLLM[1])
        uv_program = shutil.which("uv") or str(Path.home() / ".cache/sm70/uv/bin/uv")
        run(
            [
                *(uv_program, "pip", "install", "-q", "--python", python, "--target", site, "--no-deps"),
                *("--require-hashes", "--no-build-isolation", "--no-binary", "vllm", "--link-mode", "copy"),
                *("-r", ROOT / VLLM[0]),
            ],
            env=clean_environment({"VLLM_TARGET_DEVICE": "empty", "UV_NO_PROGRESS": "1"}),
        )


def base(cache: Path) -> Path:
    """The part of the bundle that an edit of this repository's code does not change; made once."""
    key = content_key([*files_under(ROOT, (*PACKAGES, *VLLM)), ("recipe", b"1"), ("python", PYTHON.encode())])
    target = cache / f"base-{key}"
    if (target / "ready").exists():
        return target / "site"
    shutil.rmtree(target, ignore_errors=True)
    site = target / "site"
    site.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        _packages(site, Path(scratch))
        _vllm(site, Path(scratch))
    for pattern in LEFT_OUT:
        for path in list(site.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    extensions = [path.name for path in (site / "vllm").rglob("*.so")]
    if extensions:
        raise ToolError(f"vLLM must be built without extensions, and has {', '.join(extensions)}")
    (target / "ready").touch()
    return site


def _own(site: Path, scratch: Path) -> None:
    """This repository's wheel, unpacked, with the kernels."""
    with step("this repository's wheel and its kernels"):
        with zipfile.ZipFile(build_wheel(ROOT, scratch)) as wheel:
            wheel.extractall(site)
        objects = site / "sm70_engine/kernels/objects"
        shutil.rmtree(objects, ignore_errors=True)
        environment = clean_environment({"PYTHONPATH": str(ROOT / "engine")})
        run([sys.executable, "-m", "sm70_engine.kernels.cli", "build", "--output", objects], cwd=ROOT, env=environment)


def _archive(folder: Path, target: Path) -> None:
    """An archive that depends on content alone: sorted, without times and owners."""
    options = ("--sort=name", "--mtime=@0", "--owner=0", "--group=0", "--numeric-owner")
    with step(f"packing {target.name}"), tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        unfinished = Path(scratch) / target.name
        run(["tar", *options, "-cJf", unfinished, "-C", folder, "."], env=clean_environment({"XZ_OPT": "-6 -T0"}))
        unfinished.rename(target)


def pack(out: Path) -> tuple[Path, Path]:
    """Makes the bundle and returns its two archives. Raises `ToolError` when they are too large together."""
    out.mkdir(parents=True, exist_ok=True)
    common = base(out)
    kept = common.parent / PACKED
    if not kept.exists():
        _archive(common, kept)
    packages, ours = out / PACKED, out / OWN
    shutil.copyfile(kept, packages)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        own = Path(folder) / "own"
        own.mkdir()
        _own(own, Path(folder))
        _archive(own, ours)
    size = packages.stat().st_size + ours.stat().st_size
    if size > LIMIT:
        raise ToolError(f"the bundle must not exceed {LIMIT >> 20} MiB; {out} has {size / 2**20:.1f}")
    return packages, ours


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build/device")
    try:
        archives = pack(parser.parse_args().out.absolute())
    except ToolError as error:
        print(f"device-bundle: {error}", file=sys.stderr)
        return 1
    for archive in archives:
        print(f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
