"""What every check is made of: the form of a refusal, and how a value is shown in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sm70_profiles.base import shown as shown
from sm70_profiles.flags import spec_path
from sm70_profiles.plan import Plan
from sm70_profiles.reasons import Refusal, RefusalCode

Found = Iterator[Refusal]
Check = Callable[[Plan], Found]


def refuse(code: RefusalCode, field: str, must: str, found: object, remedy: str) -> Refusal:
    """One refusal; `field` is a dotted path of attributes in the overrides, or a field of the spec as it is written."""
    return Refusal(code=code, field=spec_path(field), must=must, found=str(found), remedy=remedy)
