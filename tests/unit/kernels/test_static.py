"""What the sm_70 machine code must hold: no spills, tensor cores where promised, resources that a V100 has."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sm70_engine.kernels import build, cli, families, fatbin, nvrtc, report, sass, toolchain
from sm70_engine.kernels.build import FamilyFacts

LISTING = """
	.section	.text.kernel,"ax",@progbits
.L_x_0:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/              @!P0 LDG.E.128.SYS R4, [R2] ;
        /*0020*/                   HMMA.884.F32.F32.STEP0 R8, R4, R6, R8 ;
        /*0030*/                   FFMA R8, R4, R6, R8 ;
        /*0040*/               @P0 BRA `(.L_x_1) ;
        /*0050*/                   EXIT ;
"""


def test_the_main_loop_is_found_and_weighed() -> None:
    code = sass.parse(LISTING)["kernel"]
    assert sass.opcodes(code)["HMMA.884"] == 1
    loop = sass.weigh_loop(code)
    assert loop.instructions == 4
    assert loop.cycles == {"control": 1, "fma": 2, "lsu": 16, "tensor": 2}


def test_loops_of_several_roles_are_weighed_together() -> None:
    product = "HMMA.884.F32.F32.STEP0 R8, R4, R6, R8"
    first = [".L_x_1:", "/*0010*/ LDG.E.SYS R4, [R2] ;", f"/*0020*/ {product} ;", "/*0030*/ BRA `(.L_x_1) ;"]
    second = [x.replace("L_x_1", "L_x_2") for x in (*first[:2], first[2], *first[2:])]
    text = "\n".join(['\t.section\t.text.kernel,"ax",@progbits', *first, *second, "/*0040*/ EXIT ;"])
    code = sass.parse(text)["kernel"]
    assert [len(body) for body in sass.loops(code)] == [4, 3]
    loop = sass.weigh_loop(code, (1, 2))
    assert loop.instructions == 4 + 2 * 3
    assert loop.cycles["tensor"] == 2 * (2 + 2 * 1)


def test_the_compilers_report_is_read() -> None:
    log = (
        "ptxas info    : Compiling entry function 'f' for 'sm_70'\nptxas info    : Function properties for f\n"
        "    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 512 bytes smem, 400 bytes cmem[0]\n"
    )
    assert nvrtc.parse_usage(log) == {"f": nvrtc.Usage(40, 16, 8, 4, 512)}


@pytest.fixture(scope="module")
def facts() -> dict[str, FamilyFacts]:
    return {name: build.read_facts(path) for (name, _), path in build.build().items()}


@pytest.mark.parametrize("family", families.FAMILIES, ids=lambda family: family.name)
def test_machine_code_keeps_its_promises(family: families.Family, facts: dict[str, FamilyFacts]) -> None:
    assert set(facts[family.name].kernels) == {kernel.name for kernel in family.kernels}
    for name, kernel in facts[family.name].kernels.items():
        assert kernel.spills == 0, f"{name} spills {kernel.spills} bytes"
        assert kernel.stack == 0, f"{name} has a stack of {kernel.stack} bytes"
        assert not {"LDL", "STL"} & set(kernel.opcodes), f"{name} uses local memory"
        assert (kernel.opcodes.get("HMMA.884", 0) > 0) == kernel.tensor_cores, name
        assert kernel.registers * kernel.threads <= 65536, f"{name} does not fit a multiprocessor"


def test_the_documents_table_is_up_to_date(facts: dict[str, FamilyFacts]) -> None:
    document = (toolchain.REPOSITORY / cli.DOCUMENT).read_text()
    assert report.embed(document, report.table(facts.values())) == document, "run `sm70-kernels report --write`"


def test_a_second_build_changes_nothing(facts: dict[str, FamilyFacts]) -> None:
    before = {key: (path / build.MANIFEST).stat().st_mtime_ns for key, path in build.build().items()}
    assert before == {key: (path / build.MANIFEST).stat().st_mtime_ns for key, path in build.build().items()}
    assert facts


def test_a_fat_object_holds_the_machine_code_and_the_ptx(facts: dict[str, FamilyFacts], tmp_path: Path) -> None:
    tools, library = toolchain.install(), toolchain.fatbin_library()
    folder = build.folder(families.family("kv_cache"), build.PLAIN, tools)
    cubin, ptx = ((folder / f"kv_cache.{kind}").read_bytes() for kind in ("cubin", "ptx"))
    packed = fatbin.pack(library, "kv_cache", cubin, ptx)
    assert packed == fatbin.pack(library, "kv_cache", cubin, ptx)
    fat = tmp_path / "kv_cache.fatbin"
    fat.write_bytes(packed)
    subprocess.run([tools.tool("cuobjdump"), "-xelf", "all", "-xptx", "all", fat], cwd=tmp_path, check=True)
    assert (tmp_path / "kv_cache.sm_70.cubin").read_bytes() == cubin
    entries = [line for line in (tmp_path / "kv_cache.sm_70.ptx").read_text().splitlines() if ".entry" in line]
    assert entries == [line for line in ptx.decode().splitlines() if ".entry" in line]
    assert len(entries) == len(families.family("kv_cache").kernels)
    assert facts["kv_cache"]
