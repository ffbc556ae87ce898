"""Turns a pydantic model's JSON schema into the structural schema that a CRD admits.

Stricter than it has to be: a float, an unbounded list or an unknown keyword is an error of the generator, because the
API server would refuse it, or refuse the CEL rules above it for their cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

DEFAULT_MAX_LENGTH = 256
INT32_MAX = 2**31 - 1
_COPIED = ("pattern", "minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum", "format")
_DROPPED = {"title", "propertyNames", "default", "description", "examples"}


class SchemaError(ValueError):
    """A type cannot be a part of a CRD. The message names the field."""


@dataclass(frozen=True)
class Rule:
    """One CEL rule with the message that a user gets. `message_expression` may refine it."""

    rule: str
    message: str
    message_expression: str | None = None
    field_path: str | None = None

    def render(self) -> dict[str, str]:
        body = {"rule": self.rule, "message": self.message}
        if self.message_expression is not None:
            body["messageExpression"] = self.message_expression
        if self.field_path is not None:
            body["fieldPath"] = self.field_path
        return body


Rules = Mapping[str, Iterable[Rule]]
"""Rules by the name of the model they belong to, or by `Model.field` for the items of a list or map."""


def structural_schema(model: type[BaseModel], rules: Rules, enums: bool = True) -> dict[str, Any]:
    """The OpenAPI v3 schema of a model. Without `enums` a set of words becomes any word. Raises SchemaError."""
    document = model.model_json_schema(by_alias=True, mode="validation")
    converter = _Converter(document.get("$defs", {}), rules, enums)
    return converter.object(document, model.__name__, model.__name__)


class _Converter:
    def __init__(self, definitions: Mapping[str, Any], rules: Rules, enums: bool) -> None:
        self._definitions = definitions
        self._rules = rules
        self._enums = enums

    def convert(self, schema: Mapping[str, Any], path: str, owner: str = "") -> dict[str, Any]:
        """`path` names the field in errors; `owner` is `Model.field`, by which rules of items are found."""
        schema, name = self._resolve(schema, path)
        kind = schema.get("type")
        makers: dict[Any, Callable[[], dict[str, Any]]] = {
            "object": lambda: self.object(schema, path, name) if "properties" in schema else self._map(schema, path),
            "array": lambda: self._array(schema, path, owner),
            "string": lambda: self._string(schema, path),
            "integer": lambda: self._integer(schema, path),
            "boolean": lambda: {"type": "boolean"},
        }
        if "x-kubernetes-int-or-string" in schema:
            result = {key: schema[key] for key in ("x-kubernetes-int-or-string", "pattern", "maxLength")}
        elif kind in makers:
            result = makers[kind]()
        else:
            raise SchemaError(f"{path}: `{kind or sorted(schema)}` has no place in a CRD")
        return self._annotated(result, schema)

    def object(self, schema: Mapping[str, Any], path: str, name: str) -> dict[str, Any]:
        properties = {
            key: self.convert(value, f"{path}.{key}", f"{name}.{key}") for key, value in schema["properties"].items()
        }
        result: dict[str, Any] = {"type": "object"}
        if description := schema.get("description"):
            result["description"] = " ".join(description.split())
        if required := schema.get("required"):
            result["required"] = sorted(required)
        result["properties"] = properties
        return self._with_rules(result, name)

    def _resolve(self, schema: Mapping[str, Any], path: str) -> tuple[Mapping[str, Any], str]:
        """Follows $ref and takes `X | None` for an optional X, keeping the description nearest to the field."""
        name = ""
        while True:
            if "$ref" in schema:
                name = schema["$ref"].removeprefix("#/$defs/")
                schema = {**self._definitions[name], **{k: v for k, v in schema.items() if k != "$ref"}}
            elif "anyOf" in schema or "allOf" in schema:
                key = "anyOf" if "anyOf" in schema else "allOf"
                given = [option for option in schema[key] if option.get("type") != "null"]
                rest = {k: v for k, v in schema.items() if k not in (key, "default")}
                if len(given) == 1:
                    default = {"default": schema["default"]} if schema.get("default") is not None else {}
                    schema = {**given[0], **rest, **default}
                else:
                    return {**_int_or_string(given, path), **rest}, name
            else:
                return schema, name

    def _map(self, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        values = schema.get("additionalProperties")
        keys = schema.get("propertyNames", {})
        if patterns := schema.get("patternProperties"):
            ((pattern, values),) = patterns.items()
            keys = {**keys, "pattern": pattern}
        if not isinstance(values, Mapping):
            raise SchemaError(f"{path}: a map must say of what")
        limit = _bound(schema, "maxProperties", path)
        result: dict[str, Any] = {"type": "object", "maxProperties": limit}
        result["additionalProperties"] = self.convert(values, f"{path}[]")
        longest = keys.get("maxLength", DEFAULT_MAX_LENGTH)
        checks = [Rule(f"self.all(key, size(key) <= {longest})", f"a key must not be longer than {longest} characters")]
        if pattern := keys.get("pattern"):
            checks.append(Rule(f"self.all(key, key.matches({cel_string(pattern)}))", f"a key must match {pattern}"))
        result["x-kubernetes-validations"] = [rule.render() for rule in checks]
        return result

    def _array(self, schema: Mapping[str, Any], path: str, owner: str) -> dict[str, Any]:
        result: dict[str, Any] = {"type": "array", "maxItems": _bound(schema, "maxItems", path)}
        if "minItems" in schema:
            result["minItems"] = schema["minItems"]
        result["items"] = self._with_rules(self.convert(schema["items"], f"{path}[]"), f"{owner}[]")
        result["x-kubernetes-list-type"] = "atomic"
        return result

    def _string(self, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        result: dict[str, Any] = {"type": "string"}
        words = [schema["const"]] if "const" in schema else schema.get("enum")
        if words is not None and self._enums:
            result["enum"] = list(words)
        elif words is not None:
            result["maxLength"] = DEFAULT_MAX_LENGTH
        else:
            result |= {key: schema[key] for key in _COPIED if key in schema}
            if "format" not in schema:
                result.setdefault("maxLength", DEFAULT_MAX_LENGTH)
        return result

    def _integer(self, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        low, high = _bound(schema, "minimum", path), _bound(schema, "maximum", path)
        return {"type": "integer", "format": "int32" if high <= INT32_MAX else "int64", "minimum": low, "maximum": high}

    def _annotated(self, result: dict[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
        result |= {key: value for key, value in schema.items() if key.startswith("x-kubernetes-")}
        if description := schema.get("description"):
            result = {"description": " ".join(description.split()), **result}
        default = schema.get("default")
        if isinstance(default, Mapping):
            # An absent object is filled from its own fields' defaults, if it has any; what differs is written out.
            if _has_defaults(result):
                result["default"] = _beyond(default, result)
        elif default is not None and default != []:
            result["default"] = default
        return result

    def _with_rules(self, result: dict[str, Any], name: str) -> dict[str, Any]:
        if rules := list(self._rules.get(name, ())):
            result.setdefault("x-kubernetes-validations", []).extend(rule.render() for rule in rules)
        return result


def _has_defaults(schema: Mapping[str, Any]) -> bool:
    return any("default" in field for field in schema.get("properties", {}).values())


def _beyond(default: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """The members of an object's default that its fields' own defaults would not give."""
    found = {}
    for name, value in default.items():
        field = schema["properties"][name]
        if isinstance(value, Mapping) and "properties" in field:
            value = _beyond(value, field)
        if value not in (None, {}, [], field.get("default")):
            found[name] = value
    return found


def _bound(schema: Mapping[str, Any], key: str, path: str) -> int:
    value = schema.get(key)
    if not isinstance(value, int):
        raise SchemaError(f"{path}: `{key}` must be given; the API server needs every bound to price the rules")
    return value


def _int_or_string(options: list[Any], path: str) -> dict[str, Any]:
    kinds = {option.get("type"): option for option in options}
    if set(kinds) != {"integer", "string"}:
        raise SchemaError(f"{path}: a union of {sorted(map(str, kinds))} has no place in a CRD")
    text = kinds["string"]
    return {"x-kubernetes-int-or-string": True, "pattern": text["pattern"], "maxLength": text["maxLength"]}


def cel_string(text: str) -> str:
    """A CEL string literal."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def cel_list(values: Iterable[str]) -> str:
    """A CEL list of string literals."""
    return "[" + ", ".join(cel_string(value) for value in values) + "]"
