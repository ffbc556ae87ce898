"""Prints what `sm70-serve` decided, for a person who reads the log."""

from __future__ import annotations

import shlex

from sm70_engine.serve.launch import Launch
from sm70_profiles.resolver import Origin


def decisions(launch: Launch) -> str:
    """Every value and who decided it, the paths as far as they can be predicted, and the command."""
    resolution = launch.resolution
    lines = [f"profile {resolution.profile} ({resolution.profile_hash[:10]}), engine {resolution.flavour}", "settings"]
    for item in resolution.provenance:
        origin = str(item.origin) if item.origin is Origin.PROFILE else f"{item.origin} <--"
        lines.append(f"  {item.field:<28} {item.value:<28} {origin} {item.because}".rstrip())
    lines.append("paths (predicted; the report says what holds)")
    for path in resolution.paths:
        expected = "expected" if path.expected else ""
        lines.append(f"  {path.name:<28} {path.state:<14} {expected:<9} {path.reason or ''} {path.message}".rstrip())
    lines += [f"warning: {warning}" for warning in resolution.warnings]
    lines.append("environment")
    lines += [f"  {name}={value}" for name, value in sorted(launch.environment.items())]
    lines += ["command", f"  {shlex.join(launch.command)}"]
    return "\n".join(lines)
