"""The base of every document model: frozen, strict about unknown keys, camelCase outside and snake_case inside."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints
from pydantic.alias_generators import to_camel

QUANTITY_PATTERN = r"^[0-9]{1,12}(Ki|Mi|Gi|Ti)?$"
QUANTITY_UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}

Quantity = Annotated[str, StringConstraints(pattern=QUANTITY_PATTERN)]
"""A whole number of bytes with an optional binary unit, as Kubernetes writes it: `16Gi`."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
"""The name of a Kubernetes object."""

ProfileName = Annotated[
    str, StringConstraints(min_length=1, max_length=63, pattern=r"^[a-z0-9]([a-z0-9_-]*[a-z0-9])?$")
]
Token = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:+-]*$")]
"""A word that reaches a command line: no white space, no shell metacharacter."""

Figure = Annotated[str, StringConstraints(max_length=40, pattern=r"^(-?(0|[1-9][0-9]{0,17})(\.[0-9]{0,8}[1-9])?)$")]
"""A number as canonical decimal text: no exponent, no trailing zero, so that equal figures are equal text."""

RelativePath = Annotated[
    str, StringConstraints(min_length=1, max_length=512, pattern=r"^[A-Za-z0-9._-][A-Za-z0-9._/ +@=-]*$")
]
AbsolutePath = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^/[A-Za-z0-9._/ +@=-]*$")]


class Document(BaseModel):
    """A part of a resource, a profile or a report. Instances are immutable and compare by value."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True, protected_namespaces=()
    )


def quantity_bytes(quantity: str) -> int:
    """The bytes that a `Quantity` stands for. Raises ValueError for anything that the type refuses."""
    if re.fullmatch(QUANTITY_PATTERN, quantity) is None:
        raise ValueError(f"`{printable(quantity, 40)}` is not a quantity of bytes such as `16Gi`")
    digits = quantity.rstrip("KMGTi")
    return int(digits) * QUANTITY_UNITS[quantity[len(digits) :]]


def printable(text: str, limit: int = 1024) -> str:
    """Text from outside made safe to show: control characters out, length bounded."""
    clean = "".join(character if character.isprintable() else " " for character in text[: 4 * limit])
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def shown(value: object) -> str:
    """A value as a user would write it: `true`, `none`, `1, 2`."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(shown, value))
    return value.model_dump_json(by_alias=True, exclude_none=True) if isinstance(value, Document) else str(value)
