"""The CRD: generated, up to date, structural, bounded; and the types that it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from pydantic import BaseModel, Field

from sm70_operator.api import crd, reference
from sm70_operator.api.hashing import revision_name
from sm70_operator.api.schema import SchemaError, structural_schema
from sm70_operator.api.types import Spec, Status
from sm70_profiles.resolver import OWNED_FLAGS
from sm70_profiles.spec import SOURCE_MEMBERS, CheckpointSource

ROOT = Path(__file__).resolve().parents[3]
SCHEMA: dict[str, Any] = crd.definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
EVIDENCE: dict[str, Any] = crd.qualification_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
FORBIDDEN = {"$ref", "oneOf", "anyOf", "allOf", "uniqueItems", "propertyNames", "patternProperties", "const", "title"}


def nodes(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from nodes(field, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), Mapping):
        yield from nodes(schema["additionalProperties"], f"{path}{{}}")


@pytest.mark.parametrize("folder", ["crds", "charts/sm70-operator/crds"])
def test_what_is_committed_is_what_is_generated(folder: str) -> None:
    assert crd.main(["--check", str(ROOT / folder)]) == 0, "run `make crds`"


def test_a_stale_file_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert crd.main(["--write", str(tmp_path)]) == 0
    for name in crd.render_all():
        assert crd.main(["--write", str(tmp_path)]) == 0
        (tmp_path / name).write_text("old")
        assert crd.main(["--check", str(tmp_path)]) == 1
        assert name in capsys.readouterr().err


def test_the_reference_is_up_to_date(tmp_path: Path) -> None:
    page = ROOT / "docs" / "reference" / "crd.md"
    assert reference.main(["--check", str(page)]) == 0, f"run `python -m sm70_operator.api.reference --write {page}`"
    assert reference.main(["--check", str(tmp_path / "absent.md")]) == 1


@pytest.mark.parametrize("definition", [SCHEMA, EVIDENCE], ids=["service", "evidence"])
@pytest.mark.parametrize("part", ["spec", "status"])
def test_the_schema_is_structural_and_everything_has_a_bound(part: str, definition: dict[str, Any]) -> None:
    for path, schema in nodes(definition["properties"][part], part):
        assert not FORBIDDEN & schema.keys(), path
        kind = schema.get("type")
        assert kind != "number", f"{path}: no floats"
        if kind == "array":
            assert "maxItems" in schema, path
            assert schema["x-kubernetes-list-type"] in ("atomic", "map", "set"), path
        elif kind == "string" and schema.get("format") != "date-time":
            assert "maxLength" in schema or "enum" in schema, path
        elif kind == "integer":
            assert {"minimum", "maximum", "format"} <= schema.keys(), path
        elif kind == "object" and "properties" not in schema:
            assert "maxProperties" in schema, path
        elif kind is None:
            assert schema["x-kubernetes-int-or-string"] is True, path


def test_list_maps_have_their_keys_as_required_fields() -> None:
    for path, schema in [*nodes(SCHEMA), *nodes(EVIDENCE)]:
        for key in schema.get("x-kubernetes-list-map-keys", ()):
            assert key in schema["items"]["required"], path


def test_the_status_admits_words_that_it_does_not_know_yet() -> None:
    """An operator that is newer than the CRD must be able to write its status."""
    for kind in (SCHEMA, EVIDENCE):
        assert not [path for path, schema in nodes(kind["properties"]["status"]) if "enum" in schema]


def test_every_flag_that_a_field_owns_is_refused_in_extra_args() -> None:
    items = SCHEMA["properties"]["spec"]["properties"]["extraArgs"]["items"]
    (rule,) = items["x-kubernetes-validations"]
    for flag, owner in OWNED_FLAGS.items():
        assert f"'{flag}'" in rule["rule"]
        assert owner in rule["messageExpression"]


def test_every_source_is_in_the_one_of_rule() -> None:
    spec = SCHEMA["properties"]["spec"]["properties"]
    for part in ("model", "draft"):
        message = spec[part]["x-kubernetes-validations"][0]["message"]
        for member in SOURCE_MEMBERS:
            assert f"`{CheckpointSource.model_fields[member].alias}`" in message


def test_subresources_names_and_columns() -> None:
    definition = yaml.safe_load((ROOT / "crds" / crd.FILE_NAME).read_text())["spec"]
    version = definition["versions"][0]
    assert version["subresources"]["status"] == {}
    assert version["subresources"]["scale"]["labelSelectorPath"] == ".status.selector"
    assert (definition["names"]["shortNames"], definition["names"]["categories"]) == (["sm70"], ["sm70"])
    narrow = [column["name"] for column in version["additionalPrinterColumns"] if not column.get("priority")]
    assert narrow == ["READY", "REASON", "ACCEL", "QUALIFIED", "PROFILE", "ACTIVE", "TARGET", "AGE"]


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (float, "number"),
        (list[str], "maxItems"),
        (dict[str, str], "maxProperties"),
        (int, "minimum"),
        (bool | str, "union"),
        (Any, "no place"),
    ],
)
def test_the_generator_refuses_what_a_crd_cannot_hold(annotation: Any, words: str) -> None:
    model: type[BaseModel] = type("Model", (BaseModel,), {"__annotations__": {"field": annotation}})
    with pytest.raises(SchemaError, match=words) as caught:
        structural_schema(model, {})
    assert "Model.field" in str(caught.value)


def test_an_optional_bounded_field_becomes_a_plain_one() -> None:
    class Model(BaseModel):
        field: Annotated[int, Field(ge=0, le=9, description="Some  words.")] | None = None

    assert structural_schema(Model, {})["properties"]["field"] == {
        "description": "Some words.",
        "type": "integer",
        "format": "int32",
        "minimum": 0,
        "maximum": 9,
    }


def test_what_is_omitted_is_filled_as_the_types_fill_it() -> None:
    """By the API server, field by field: an omitted object may differ from an empty one."""

    def filled(schema: Mapping[str, Any], value: Any) -> Any:
        if schema.get("type") != "object" or "properties" not in schema:
            return value
        given = dict(value)
        for name, field in schema["properties"].items():
            if name not in given and "default" in field:
                given[name] = field["default"]
            if name in given:
                given[name] = filled(field, given[name])
        return given

    smallest = {"profile": "x", "model": {"hostPath": {"path": "/x"}}, "auth": {"allowAnonymous": True}}
    stored = filled(SCHEMA["properties"]["spec"], smallest)
    assert Spec.model_validate(stored) == Spec.model_validate(smallest)
    empty = filled(SCHEMA["properties"]["spec"], {**smallest, "qualification": {}})
    assert Spec.model_validate(empty) == Spec.model_validate({**smallest, "qualification": {}})


def test_the_smallest_spec_and_an_empty_status_are_read() -> None:
    spec = Spec.model_validate(
        {"profile": "x", "model": {"hostPath": {"path": "/x"}}, "auth": {"allowAnonymous": True}}
    )
    assert (spec.replicas, spec.rollout.drain_timeout_seconds) == (1, 120)
    assert Status.model_validate({}) == Status()
    assert Status.model_validate({"placement": [{"pod": "p", "node": "n", "gpuUUIDs": ["GPU-1"], "new": 1}]}).placement


def test_what_is_absent_or_empty_does_not_change_a_revisions_name() -> None:
    class Before(BaseModel):
        field: int = 1

    class After(BaseModel):
        field: int = 1
        added: list[str] = []
        other: dict[str, list[str]] = {"x": []}
        third: str | None = None

    assert revision_name(Before()) == revision_name(After())
    assert revision_name(Before()) != revision_name(Before(field=2))
    assert len(revision_name(Before())) == 10
