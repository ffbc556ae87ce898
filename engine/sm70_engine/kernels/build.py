"""Builds every family: an sm_70 cubin for the V100, compute_70 PTX for anything newer, and a manifest of both.

A family's output lies in `$SM70_CACHE/kernels/KEY`, where KEY depends on its source, the headers, the definitions and
the toolchain; what is there already is not built again. `export` packs each pair into one fat object; the loader reads
the folder of them and a wheel ships it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from . import fatbin, nvrtc, sass, toolchain
from .errors import KernelError
from .families import CALIBRATION, FAMILIES, Family

SCHEMA = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class KernelFacts:
    """What the machine code of one kernel is: resources per thread and block, instructions, its main loop's units."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_shared: int
    threads: int
    tensor_cores: bool
    instructions: int
    opcodes: dict[str, int]
    loop_instructions: int
    loop_cycles: dict[str, int]

    @property
    def spills(self) -> int:
        """Bytes of spilled registers stored and loaded."""
        return self.spill_stores + self.spill_loads


@dataclass(frozen=True)
class FamilyFacts:
    """A built family."""

    name: str
    contract: str
    source_hash: str
    kernels: dict[str, KernelFacts]


@dataclass(frozen=True)
class Variant:
    """A way to compile for timing on a newer GPU (sm70.cuh explains the switches). The plain one is what ships."""

    name: str = ""
    architecture: str = "compute_70"
    defines: tuple[str, ...] = ()

    @property
    def spread(self) -> int:
        """Bytes of memory per useful byte of weights and KV."""
        return 4 if "-DSTRETCH" in self.defines else 1


PLAIN = Variant()
TIMING = (
    Variant("s2", "compute_80", ("-DSTAND_IN=2",)),
    Variant("s2t", "compute_80", ("-DSTAND_IN=2", "-DSTRETCH")),
    Variant("s3t", "compute_80", ("-DSTAND_IN=3", "-DSTRETCH")),
)
# For compute-sanitizer's racecheck, which miscounts barriers where groups of warps meet unequally often.
RACECHECK = Variant("equal", "compute_70", ("-DMEET_EQUALLY",))


def source_hash(family: Family) -> str:
    """16 hexadecimal digits over everything that the family's code depends on, the toolchain aside."""
    digest = hashlib.sha256(" ".join(family.defines).encode())
    for path in family.files:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _key(family: Family, variant: Variant, tools: toolchain.Toolchain) -> str:
    parts = (SCHEMA, family.name, family.contract, source_hash(family), variant, tools.key)
    rules = b"".join((Path(__file__).parent / name).read_bytes() for name in ("sass.py", "nvrtc.py"))
    return hashlib.sha256(repr(parts).encode() + rules).hexdigest()[:16]


def folder(family: Family, variant: Variant, tools: toolchain.Toolchain) -> Path:
    """Where the family's output lies, built or not."""
    return toolchain.cache_root() / "kernels" / _key(family, variant, tools)


def _facts(family: Family, cubin: Path, log: str, tools: toolchain.Toolchain) -> FamilyFacts:
    usage, code = nvrtc.parse_usage(log), sass.disassemble(tools.tool("nvdisasm"), cubin)
    expected = {kernel.name for kernel in family.kernels}
    if set(usage) != expected or set(code) != expected:
        raise KernelError(
            f"{family.source} must define {sorted(expected)}; it defines {sorted(set(usage) | set(code))}"
        )
    kernels = {}
    for kernel in family.kernels:
        used, lines = usage[kernel.name], code[kernel.name]
        loop = sass.weigh_loop(lines, kernel.roles)
        kernels[kernel.name] = KernelFacts(
            registers=used.registers,
            stack=used.stack,
            spill_stores=used.spill_stores,
            spill_loads=used.spill_loads,
            static_shared=used.shared,
            threads=kernel.threads,
            tensor_cores=kernel.tensor_cores,
            instructions=sum(not line.label for line in lines),
            opcodes=dict(sorted(sass.opcodes(lines).items())),
            loop_instructions=loop.instructions,
            loop_cycles=loop.cycles,
        )
    return FamilyFacts(family.name, family.contract, source_hash(family), kernels)


def _build_one(family: Family, variant: Variant, tools: toolchain.Toolchain) -> Path:
    target = folder(family, variant, tools)
    if (target / MANIFEST).exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        options = (*family.defines, *variant.defines)
        ptx, _ = nvrtc.compile_source(tools.nvrtc, family.path, variant.architecture, options)
        (made / f"{family.name}.ptx").write_bytes(ptx)
        facts: object = {"name": family.name, "variant": variant.name}
        if variant == PLAIN:
            cubin, log = nvrtc.compile_source(tools.nvrtc, family.path, "sm_70", (*options, "--ptxas-options=-v"))
            (made / f"{family.name}.cubin").write_bytes(cubin)
            facts = asdict(_facts(family, made / f"{family.name}.cubin", log, tools))
        (made / MANIFEST).write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)
    return target


def build(
    families: Sequence[Family] = FAMILIES, variants: Iterable[Variant] = (PLAIN,), jobs: int | None = None
) -> dict[tuple[str, str], Path]:
    """Builds what is missing, several at a time; the folder of each (family, variant). Raises `KernelError`."""
    tools = toolchain.install()
    work = [(family, variant) for variant in variants for family in families]
    missing = [x for x in work if not (folder(*x, tools) / MANIFEST).exists()]
    if missing:
        # Processes: NVRTC holds a lock while it compiles. Spawned: the caller may have threads.
        workers = min(jobs or os.cpu_count() or 1, len(missing))
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            list(pool.map(_build_one, *zip(*((f, v, tools) for f, v in missing), strict=True)))
    return {(family.name, variant.name): folder(family, variant, tools) for family, variant in work}


def read_facts(path: Path) -> FamilyFacts:
    """The manifest of one built family."""
    data = json.loads((path / MANIFEST).read_text())
    kernels = {name: KernelFacts(**facts) for name, facts in data["kernels"].items()}
    return FamilyFacts(data["name"], data["contract"], data["source_hash"], kernels)


def export(target: Path, variants: Iterable[Variant] = (PLAIN,)) -> Path:
    """Builds everything into `target`: NAME.fatbin, one manifest, and NAME.VARIANT.ptx of timing builds."""
    built = build((*FAMILIES, CALIBRATION), variants)
    packer = toolchain.fatbin_library()
    target.mkdir(parents=True, exist_ok=True)
    families = {}
    for (name, variant), path in built.items():
        if variant:
            shutil.copyfile(path / f"{name}.ptx", target / f"{name}.{variant}.ptx")
        else:
            cubin, ptx = (path / f"{name}.cubin").read_bytes(), (path / f"{name}.ptx").read_bytes()
            (target / f"{name}.fatbin").write_bytes(fatbin.pack(packer, name, cubin, ptx))
            families[name] = json.loads((path / MANIFEST).read_text())
    packages = [line.split()[0] for line in toolchain.LOCK.read_text().split("\n") if "==" in line]
    manifest = {"schema": SCHEMA, "toolchain": packages, "families": families}
    (target / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    return target


def read_export(target: Path) -> dict[str, FamilyFacts]:
    """The manifests in a folder that `export` made. Raises `KernelError` unless it is one, and of these sources."""
    path = target / MANIFEST
    if not path.exists():
        raise KernelError(
            f"{target} must hold kernel objects ({MANIFEST}); build them with `sm70-kernels build --output`"
        )
    data = json.loads(path.read_text())
    if data.get("schema") != SCHEMA:
        raise KernelError(f"{path} has schema {data.get('schema')}; this code reads {SCHEMA}: build the objects again")
    facts = {
        name: FamilyFacts(name, x["contract"], x["source_hash"], {k: KernelFacts(**v) for k, v in x["kernels"].items()})
        for name, x in data["families"].items()
    }
    for family in FAMILIES:
        if family.name in facts and facts[family.name].source_hash != source_hash(family):
            raise KernelError(
                f"the objects of {family.name} in {target} were built from other sources than this package has; "
                "build them again with `sm70-kernels build --output`"
            )
    return facts
