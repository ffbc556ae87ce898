"""Tells whether an object is as we want it. What we do not set, defaults of the API server included, is not ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sm70_operator.render.revision import quantity

_QUANTITIES = frozenset({"limits", "requests", "sizeLimit"})
"""Members whose values the API server rewrites to their canonical form: `1024Mi` becomes `1Gi`."""


def differs(wanted: Any, found: Any, quantities: bool = False) -> bool:
    """True if a member that we want is absent or has another value. Lists are compared item by item."""
    if isinstance(wanted, Mapping):
        if not isinstance(found, Mapping):
            return True
        return any(differs(value, found.get(key), quantities or key in _QUANTITIES) for key, value in wanted.items())
    if isinstance(wanted, list):
        if not isinstance(found, list) or len(found) != len(wanted):
            return True
        return any(differs(one, other, quantities) for one, other in zip(wanted, found, strict=True))
    if quantities and isinstance(wanted, str) and quantity(wanted) is not None:
        return quantity(wanted) != quantity(str(found))
    return bool(wanted != found)
