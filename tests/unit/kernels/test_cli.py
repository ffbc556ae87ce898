"""The command line's faces that need neither a toolchain nor a GPU, and the report's rules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sm70_engine.kernels import build, cli, families, nvcc, peers, report, v100
from sm70_engine.kernels.build import KernelFacts
from sm70_engine.kernels.errors import KernelError


def facts(registers: int, threads: int) -> KernelFacts:
    return KernelFacts(registers, 0, 0, 0, 0, threads, True, 100, {"HMMA.884": 4}, 50, {"tensor": 8, "lsu": 16})


def test_list_names_every_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out
    for family in families.FAMILIES:
        assert family.contract in out
        assert all(kernel.name in out for kernel in family.kernels)


@pytest.mark.parametrize("command", ["check --on device", "check --all", "bench", "bench --all --submit-file x.json"])
def test_a_machine_without_objects_is_told_what_to_do(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command.split(), "--objects", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "no CUDA driver" in error or "sm70-kernels build --output" in error


@pytest.mark.parametrize(
    ("change", "text"),
    [({}, ""), ({"schema": 99}, "has schema 99"), ({"hash": "0" * 16}, "built from other sources")],
)
def test_only_objects_of_the_same_sources_are_loaded(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    family = families.family("kv_cache")
    entry = {"contract": "", "source_hash": change.get("hash", build.source_hash(family)), "kernels": {}}
    manifest = {"schema": change.get("schema", build.SCHEMA), "families": {family.name: entry}}
    (tmp_path / build.MANIFEST).write_text(json.dumps(manifest))
    if text:
        with pytest.raises(KernelError, match=text):
            build.read_export(tmp_path)
    else:
        assert set(build.read_export(tmp_path)) == {"kv_cache"}


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "ctas"),
    [(64, 512, 0, 2), (32, 1024, 0, 2), (128, 256, 0, 2), (255, 256, 0, 1), (16, 128, 49152, 2), (16, 32, 0, 32)],
)
def test_occupancy_of_a_v100(registers: int, threads: int, shared: int, ctas: int) -> None:
    assert v100.ctas_per_sm(registers, threads, shared) == ctas


def test_the_model_names_what_binds() -> None:
    # 7.35 bytes per cycle and SM: 1,152 bytes give each sub-partition 627 cycles.
    light, heavy = facts(64, 512), KernelFacts(64, 0, 0, 0, 0, 512, True, 9, {}, 50, {"tensor": 700, "lsu": 16})
    assert v100.loop_budget(light, 1152).binds == "memory"
    assert v100.loop_budget(heavy, 1152).binds == "tensor"
    assert v100.loop_budget(heavy, 1152).units["tensor"] == pytest.approx(700 / 627, rel=0.01)


def test_bytes_of_a_main_loop_are_known_for_every_streaming_kernel() -> None:
    for family in families.FAMILIES:
        for kernel in family.kernels:
            streams = kernel.tensor_cores and not kernel.name.startswith("prefill_")  # which computes: prefill_model.py
            assert (v100.loop_bytes(kernel.name) > 0) == streams, kernel.name


def test_what_a_token_and_a_unit_of_weights_cost() -> None:
    loop = replace(facts(64, 384), loop_instructions=3200)  # the verifier: 16 tokens a pass and sub-partition
    assert v100.cost("verify_e4m3_d256_r6", loop) == v100.Cost(512, 200.0)
    assert v100.cost("linear_4_2_1_8", loop) == v100.Cost(1152, 1600.0)  # two column tiles a pass
    assert v100.cost("prefill_e4m3_d256", loop) is None


def test_only_the_generated_part_of_a_document_changes() -> None:
    document = f"intro\n{report.BEGIN}\nold\n{report.END}\nrest\n"
    changed = report.embed(document, "new")
    assert changed.startswith("intro\n")
    assert changed.endswith("\nrest\n")
    assert "new" in changed
    assert "old" not in changed
    assert report.embed(changed, "new") == changed
    with pytest.raises(KernelError, match="must hold the lines"):
        report.embed("no marks", "new")


def test_nvcc_is_asked_for_both_targets_of_every_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake, log = tmp_path / "nvcc", tmp_path / "log"
    fake.write_text(f'#!/bin/sh\necho "$@" >>{log}\n')
    fake.chmod(0o755)
    assert nvcc.main([str(tmp_path / "out"), str(fake)]) == 0
    asked = log.read_text().splitlines()
    assert len(asked) == 2 * len(families.FAMILIES)
    assert sum("-arch=sm_70 -cubin" in line for line in asked) == len(families.FAMILIES)
    assert "-DFORMAT=E4M3" in next(line for line in asked if "attention_decode_e4m3.ptx" in line)
    fake.write_text("#!/bin/sh\necho no such architecture\nexit 1\n")
    assert nvcc.main([str(tmp_path / "out"), str(fake)]) == 2
    assert "no such architecture" in capsys.readouterr().err


def test_peers_are_set_against_ours_and_what_is_missing_is_named() -> None:
    rows = [
        peers.PeerRow(peers.OURS, "f", "a case", 10.0, 9.0, 11.0, 1_000_000),
        peers.PeerRow("torch SDPA, dense FP16", "f", "a case", 25.0, 24.0, 26.0, 2_000_000, 1.5e-3),
    ]
    absent = [
        {"peer": "FlashInfer", "case": "", "reason": "not installed here"},
        {"peer": "torch", "case": "a case", "reason": "refused"},
    ]
    table = peers.markdown(peers.Comparison(rows, absent))
    assert "| f | a case | torch SDPA, dense FP16 | 25.00 (24.00, 26.00) | 80 | 2.50 | 1.5e-03 |" in table
    assert "FlashInfer: not installed here" in table
    assert "torch in a case: refused" in table


def test_a_predictions_set_up_is_set_against_a_v100() -> None:
    """By the calibration of one NVIDIA H200 with the stand-in s3, 2026-12-01."""
    calibration = {
        "useful_read_gbs": 1195.654, "gigahertz": 1.98, "mma_cycles_independent": 9.306, "mma_cycles_dependent": 10.442,
    }  # fmt: skip
    found = {name: round(value, 3) for name, value in v100.proxy_error(calibration).items()}
    assert found == {"memory": 0.027, "matrix": 0.108, "latency": 0.2}


def test_the_models_fingerprint_follows_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    before = v100.fingerprint()
    monkeypatch.setattr(v100, "MEMORY_GBS", 1000.0)
    assert v100.fingerprint() != before
