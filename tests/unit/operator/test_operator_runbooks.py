"""Runbooks: a page for every reason, up to date, with commands and links that lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sm70_operator.api import runbooks
from sm70_operator.api.conditions import MEANINGS, Reason

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "docs" / "runbooks"
WRITE = "python -m sm70_operator.api.runbooks --write docs/runbooks"


def test_every_reason_has_a_page_and_none_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == {"README", *Reason}, f"run `{WRITE}`"
    assert runbooks.main(["--check", str(FOLDER)]) == 0, f"run `{WRITE}`"


@pytest.mark.parametrize("reason", [reason for reason in Reason if MEANINGS[reason].remedy])
def test_what_has_a_remedy_has_steps_and_says_what_the_operator_does(reason: Reason) -> None:
    page = runbooks.PAGES[reason]
    assert page.steps
    assert page.operator.endswith(".")
    text = (FOLDER / f"{reason}.md").read_text()
    assert MEANINGS[reason].text in text
    assert MEANINGS[reason].remedy in text
    assert re.search(r"^```sh\n(kubectl|sm70|nvidia-smi)", text, re.MULTILINE)
    assert text.count("```") % 2 == 0


def test_the_index_links_every_page() -> None:
    index = (FOLDER / "README.md").read_text()
    links = set(re.findall(r"\]\(([^)]+)\)", index))
    assert links == {f"{reason}.md" for reason in Reason}


def test_documents_that_a_page_names_exist() -> None:
    for path in FOLDER.glob("*.md"):
        for named in re.findall(r"docs/[\w./-]+", path.read_text()):
            assert (ROOT / named.rstrip(".")).exists() or named.startswith("docs/runbooks"), (path.name, named)


def test_a_stale_page_and_a_page_too_many_are_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runbooks.main(["--write", str(tmp_path)]) == 0
    assert runbooks.main(["--check", str(tmp_path)]) == 0
    (tmp_path / "Refused.md").write_text("old")
    (tmp_path / "Nothing.md").write_text("old")
    assert runbooks.main(["--check", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "Refused.md" in told
    assert "Nothing.md" in told
    assert runbooks.main(["--write", str(tmp_path)]) == 0
    assert not (tmp_path / "Nothing.md").exists()
