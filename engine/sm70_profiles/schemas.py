"""JSON Schemas of what an engine and the judge say, for readers that are not written in Python; shipped in the wheel.

    python -m sm70_profiles.schemas --write      makes the files anew
    python -m sm70_profiles.schemas NAME         prints one

Readers must ignore members that they do not know: a newer engine may add some.
"""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from sm70_profiles.qualification import QualificationReport, Suite
from sm70_profiles.report import AccelerationReport, StartupReport
from sm70_profiles.termination import Termination

MODELS: dict[str, type[BaseModel]] = {
    "acceleration-report": AccelerationReport,
    "startup": StartupReport,
    "termination": Termination,
    "qualification-report": QualificationReport,
    "qualification-suite": Suite,
}
_FOLDER = "data/schemas"


def schema(name: str) -> dict[str, Any]:
    """The shipped schema. Raises KeyError for a name that is not in `MODELS`."""
    if name not in MODELS:
        raise KeyError(name)
    document: dict[str, Any] = json.loads((folder() / f"{name}.schema.json").read_text("utf-8"))
    return document


def generate(name: str) -> str:
    """The schema as the types say it now."""
    model = MODELS[name]
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **model.model_json_schema(by_alias=True, mode="serialization"),
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def stale(folder: Path) -> list[str]:
    """Names whose file in the folder is not what `generate` makes."""
    return [name for name in MODELS if _text(folder / f"{name}.schema.json") != generate(name)]


def write(folder: Path) -> None:
    """Writes every schema."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        (folder / f"{name}.schema.json").write_text(generate(name), "utf-8")


def folder() -> Path:
    """Where the schemas lie in this installation."""
    return Path(str(files(__package__).joinpath(_FOLDER)))


def _text(path: Path) -> str | None:
    return path.read_text("utf-8") if path.exists() else None


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    if arguments == ["--write"]:
        write(folder())
        return 0
    if len(arguments) == 1 and arguments[0] in MODELS:
        print(generate(arguments[0]), end="")
        return 0
    print(f"usage: python -m sm70_profiles.schemas --write | {' | '.join(MODELS)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
