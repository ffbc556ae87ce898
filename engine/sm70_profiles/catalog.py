"""The built-in profiles: one YAML or TOML file each under data/profiles, read when first asked for."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import PurePath

from sm70_profiles.documents import parse_profile
from sm70_profiles.profile import Profile

SUFFIXES = (".yaml", ".toml")


class ProfileNotFoundError(LookupError):
    """No built-in profile has this name."""


@cache
def _files() -> dict[str, str]:
    entries = (PurePath(entry.name) for entry in files(__package__).joinpath("data/profiles").iterdir())
    return {entry.stem: entry.name for entry in sorted(entries) if entry.suffix in SUFFIXES}


@cache
def profile_names() -> tuple[str, ...]:
    """Names of the built-in profiles, sorted."""
    return tuple(_files())


@cache
def load_profile(name: str) -> Profile:
    """The built-in profile of this name. Raises ProfileNotFoundError, whose message lists the names there are."""
    if name not in _files():
        raise ProfileNotFoundError(f"there is no built-in profile `{name}`; there are: {', '.join(profile_names())}")
    return parse_profile(files(__package__).joinpath("data/profiles", _files()[name]).read_bytes())
