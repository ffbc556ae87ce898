"""The pages that are generated from the device lane's results: up to date, complete, and honest about what is open."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sm70_engine.kernels import cli, plots, results, round_model, routes_doc, toolchain
from sm70_engine.kernels.errors import KernelError
from sm70_engine.kernels.families import FAMILIES
from sm70_engine.kernels.round_model import Kind
from sm70_profiles.routes import ROUTES

DEVICE = toolchain.REPOSITORY / cli.DEVICE_RESULTS


@pytest.mark.parametrize("name", cli.DOCUMENTS)
def test_the_page_is_up_to_date(name: str) -> None:
    page = toolchain.REPOSITORY / f"docs/engine/{name}.md"
    assert page.read_text() == cli.document(name), f"run `sm70-kernels {name} --write`"


def test_every_route_has_a_row_and_every_kernel_of_a_row_exists() -> None:
    page = routes_doc.document(results.read(DEVICE))
    for name in ROUTES:
        assert f"| `{name}` |" in page
    names = [kernel.name for family in FAMILIES for kernel in family.kernels]
    for route, served in routes_doc.SERVED.items():
        assert route in ROUTES
        for prefix in served.kernels:
            assert any(name.startswith(prefix) for name in names), f"{route}: no kernel begins with {prefix}"


def test_the_round_is_the_sum_of_its_lines_and_grows_with_the_context() -> None:
    found = results.read(DEVICE)
    sums = [round_model.total(round_model.lines(found, context)) for context in round_model.CONTEXTS]
    assert sums == sorted(sums)
    for context in round_model.CONTEXTS:
        lines = round_model.lines(found, context)
        parts = [round_model.total(lines, (kind,)) for kind in Kind]
        assert sum(low for low, _ in parts) == pytest.approx(round_model.total(lines)[0])
        assert all(line.low <= line.high for line in lines)
        # What no kernel of ours computes is never passed off as timed.
        assert not any(
            "no kernel" in line.source or "assumed" in line.source for line in lines if line.kind is not Kind.OPEN
        )


def test_a_context_between_two_cases_lies_between_their_times() -> None:
    found = results.read(DEVICE)
    attention = {
        context: next(line for line in round_model.lines(found, context) if line.name.startswith("verify"))
        for context in round_model.CONTEXTS
    }
    assert attention[32768].kind is Kind.PROXY
    assert attention[65536].kind is Kind.MODELLED
    assert attention[32768].low < attention[65536].low < attention[131072].low < attention[262144].low


def test_later_results_count_and_kernels_that_are_gone_do_not(tmp_path: Path) -> None:
    def row(us: float) -> dict[str, object]:
        return {"family": "f", "case": "c", "kernel": "k", "v100_microseconds": us}

    for name, us, ratio in (("a", 5.0, 2.0), ("b", 3.0, 0.5)):
        runs = [{"variant": variant, "rows": [row(us + i)]} for i, variant in enumerate(results.STAND_INS)]
        (tmp_path / f"{name}_bench.json").write_text(json.dumps({"runs": runs}))
        checks = [{"name": "kv_write_f16 one", "ratio": ratio}, {"name": "gone_kernel x", "ratio": 0.1}]
        (tmp_path / f"{name}_checks.json").write_text(json.dumps({"checks": checks}))
    found = results.read(tmp_path)
    assert found.times[("f", "c")].text == "3.0 / 4.0"
    assert found.checks == {"kv_write_f16": results.Checked(1, 1)}


def test_a_measurement_on_a_v100_replaces_every_prediction(tmp_path: Path) -> None:
    row = {"family": "f", "case": "c", "kernel": "k", "v100_microseconds": 9.0}
    run = {"variant": "", "measured_v100": True, "rows": [row]}
    (tmp_path / "a_v100_bench.json").write_text(json.dumps({"runs": [run]}))
    predicted = [{"variant": variant, "rows": [{**row, "v100_microseconds": 5.0}]} for variant in results.STAND_INS]
    (tmp_path / "b_h200_bench.json").write_text(json.dumps({"runs": predicted}))
    found = results.read(tmp_path).times[("f", "c")]
    assert (found.low, found.high, found.text, found.source) == (9.0, 9.0, "9.0 measured", "a_v100_bench.json")


def test_a_run_is_drawn_or_says_what_it_needs(tmp_path: Path) -> None:
    document = {
        "about": {"device": "a card", "date": "2026-12-01T00:00:00+00:00"},
        "runs": [
            {"rows": [{"family": "attention_decode_e4m3", "case": "c", "share": 0.5, "kind": "prediction"}]},
            {"rows": [], "prefill": [{"kernel": "prefill_f16_d256", "case": "c", "v100_tflops": 9.0, "kind": "m"}]},
        ],
        "peers": [{"peer": "torch", "family": "nvfp4_linear", "case": "c", "microseconds": 3.0}],
    }
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        with pytest.raises(KernelError, match="pip install matplotlib"):
            plots.write(document, tmp_path)
    else:
        names = [path.name for path in plots.write(document, tmp_path)]
        assert names == ["decode.svg", "prefill.svg", "peers_linears.svg"]
        assert "e4m3 c" in (tmp_path / "decode.svg").read_text()


def test_a_later_run_replaces_the_same_figure_only() -> None:
    def run(case: str, share: float) -> dict[str, object]:
        return {"about": {}, "runs": [{"rows": [{"kind": "p", "family": "f", "case": case, "share": share}]}]}

    merged = plots.merge([run("a", 0.1), run("b", 0.2), run("a", 0.3)])
    assert [(row["case"], row["share"]) for row in merged["runs"][0]["rows"]] == [("a", 0.3), ("b", 0.2)]
