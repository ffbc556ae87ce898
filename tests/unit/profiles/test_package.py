"""What the package is: pure at its core, documented from its data."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from sm70_profiles import docsgen
from sm70_profiles.catalog import profile_names
from sm70_profiles.engines import Feature, engine_table
from sm70_profiles.facts import EngineFlavour
from sm70_profiles.reasons import NoticeCode, PathReason, RefusalCode, TerminationReason, Vocabulary

REPOSITORY = Path(__file__).parents[3]
PACKAGE = Path(str(files("sm70_profiles")))
EDGE = {"documents.py", "catalog.py", "docsgen.py", "importenv.py", "resource.py"}
"""Modules that may read documents, and with them import a YAML reader."""


def loaded_by(*modules: str) -> set[str]:
    """Top-level packages in a fresh process after these imports."""
    code = (
        f"import sys, json, {', '.join(modules)}; print(json.dumps(sorted(m.partition('.')[0] for m in sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return set(json.loads(out))


def test_the_core_needs_pydantic_and_the_standard_library_only() -> None:
    allowed = {
        "pydantic",
        "pydantic_core",
        "annotated_types",
        "typing_extensions",
        "typing_inspection",
        "sm70_profiles",
    }
    loaded = loaded_by("sm70_profiles.resolver", "sm70_profiles.rules", "sm70_profiles.memory", "sm70_profiles.typed")
    foreign = loaded - loaded_by("pydantic", "tomllib") - allowed - set(sys.stdlib_module_names)
    assert {name for name in foreign if not name.startswith("_")} == set()


def test_nothing_heavy_at_the_edge_either() -> None:
    loaded = loaded_by("sm70_profiles.cli", "sm70_profiles.docsgen")
    assert not loaded & {
        "kubernetes",
        "kubernetes_asyncio",
        "kopf",
        "torch",
        "vllm",
        "httpx",
        "aiohttp",
        "transformers",
    }


def test_yaml_and_rich_stay_at_the_edge() -> None:
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        tops = {name.partition(".")[0] for name in names}
        if path.name not in EDGE and path.parent.name != "cli":
            assert not tops & {"yaml", "rich"}, path


@pytest.mark.parametrize("kind", [RefusalCode, PathReason, NoticeCode, TerminationReason])
def test_every_word_has_one_meaning(kind: type[Vocabulary]) -> None:
    meanings = [word.meaning for word in kind]
    assert all(meaning.endswith((".", "`.")) for meaning in meanings)
    assert len(set(meanings)) == len(meanings)


def test_reference_pages_are_up_to_date() -> None:
    assert docsgen.stale_pages(REPOSITORY / "docs" / "reference") == []


def test_stale_pages_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert docsgen.main(["--write", str(tmp_path)]) == 0
    assert docsgen.main(["--check", str(tmp_path)]) == 0
    (tmp_path / "reasons.md").write_text("old", "utf-8")
    (tmp_path / "profiles" / "gone.md").write_text("old", "utf-8")
    (tmp_path / "profiles" / f"{profile_names()[0]}.md").unlink()
    assert docsgen.main(["--check", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("not up to date") == 3
    assert docsgen.main(["--write", str(tmp_path)]) == 0
    assert docsgen.main(["--check", str(tmp_path)]) == 0


@pytest.mark.parametrize("flavour", EngineFlavour)
def test_engine_tables(flavour: EngineFlavour) -> None:
    table = engine_table(flavour)
    assert table.flavour is flavour
    assert {"--model", "--kv-cache-dtype", "--speculative-config"} <= table.options
    assert not table.features & table.degrades
    assert set(table.spellings.values()) <= table.options


def test_only_the_launchers_engine_has_its_patches() -> None:
    patched = {
        Feature.LOOKUP,
        Feature.KVARN,
        Feature.PTH_FLASH_ATTENTION,
        Feature.FA2_FP8,
        Feature.EMBEDDING_IN_HOST_MEMORY,
    }
    for flavour in EngineFlavour:
        assert bool(engine_table(flavour).features & patched) == (flavour is EngineFlavour.SINGLE_GPU)


def test_module_entry_point() -> None:
    out = subprocess.run(
        [sys.executable, "-m", "sm70_profiles", "list", "--json"], capture_output=True, text=True, check=True
    )
    assert [row["name"] for row in json.loads(out.stdout)] == list(profile_names())
