"""The built-in profiles: one YAML file each under data/profiles, read when first asked for."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from sm70_profiles.documents import parse_profile
from sm70_profiles.profile import Profile


class ProfileNotFoundError(LookupError):
    """No built-in profile has this name."""


@cache
def profile_names() -> tuple[str, ...]:
    """Names of the built-in profiles, sorted."""
    entries = files(__package__).joinpath("data/profiles").iterdir()
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in entries if entry.name.endswith(".yaml")))


@cache
def load_profile(name: str) -> Profile:
    """The built-in profile of this name. Raises ProfileNotFoundError, whose message lists the names there are."""
    if name not in profile_names():
        raise ProfileNotFoundError(f"there is no built-in profile `{name}`; there are: {', '.join(profile_names())}")
    return parse_profile(files(__package__).joinpath(f"data/profiles/{name}.yaml").read_bytes())
