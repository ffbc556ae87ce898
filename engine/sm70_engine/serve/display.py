"""Prints what `sm70-serve` decided, for a person who reads the log."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from sm70_engine.serve.launch import Launch
from sm70_profiles.flags import path_of
from sm70_profiles.report import PathReport, PathState
from sm70_profiles.resolver import Origin, leaves, resolve
from sm70_profiles.settings import with_value


def decisions(launch: Launch) -> str:
    """Every value and who decided it, the paths as far as they can be predicted, and the command."""
    resolution = launch.resolution
    effects = override_effects(launch)
    lines = [f"profile {resolution.profile} ({resolution.profile_hash[:10]}), engine {resolution.flavour}", "settings"]
    for item in resolution.provenance:
        origin = str(item.origin) if item.origin is Origin.PROFILE else f"{item.origin} <--"
        effect = effects.get(item.field, "")
        lines.append(f"  {item.field:<28} {item.value:<28} {origin} {item.because}{effect}".rstrip())
    lines.append("paths (predicted; the report says what holds)")
    for path in resolution.paths:
        expected = "expected" if path.expected else ""
        lines.append(f"  {path.name:<28} {path.state:<14} {expected:<9} {path.reason or ''} {path.message}".rstrip())
    lines += [f"warning: {warning}" for warning in resolution.warnings]
    lines.append("environment")
    lines += [f"  {name}={value}" for name, value in sorted(launch.environment.items())]
    lines += ["command", f"  {shlex.join(launch.command)}"]
    return "\n".join(lines)


def override_effects(launch: Launch) -> dict[str, str]:
    """What each override does to the paths, by the setting's name in the spec: the difference to leaving it out."""
    request, found = launch.request, {}
    with_it = {path.name: path for path in launch.resolution.paths}
    for setting, _ in leaves(request.overrides):
        without = request.model_copy(update={"overrides": with_value(request.overrides, setting, None)})
        before = {path.name: path for path in resolve(without, launch.facts).paths}
        found[path_of(setting)] = _difference(before, with_it)
    return found


def _difference(before: Mapping[str, PathReport], after: Mapping[str, PathReport]) -> str:
    changed = [path for name, path in after.items() if path.state is not before[name].state]
    on = [path.name for path in changed if path.state is PathState.ENABLED]
    off = [f"{path.name} ({path.reason})" for path in changed if path.state is not PathState.ENABLED]
    parts = [f"{word} {', '.join(names)}" for word, names in (("enables", on), ("disables", off)) if names]
    return "; ".join(parts) or "changes no path"
