"""`sm70-doctor`: the command line. See docs/operations/doctor.md."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sm70_engine.doctor import probes
from sm70_engine.doctor.facts import Facts, Needs
from sm70_engine.doctor.findings import Finding, Severity, examine, gravest
from sm70_profiles.base import printable, quantity_bytes
from sm70_profiles.catalog import load_profile, profile_names
from sm70_profiles.documents import DocumentError, describe, parse_profile
from sm70_profiles.facts import EngineFlavour, Interconnect
from sm70_profiles.profile import Profile
from sm70_profiles.resolver import ServeRequest

USAGE_STATUS = 64
REQUEST_VARIABLE = "SM70_SERVE_REQUEST"
STYLES = {
    Severity.OK: ("ok", "green"),
    Severity.NOTE: ("note", "dim"),
    Severity.WARNING: ("WARNING", "yellow"),
    Severity.ERROR: ("ERROR", "bold red"),
}


class UsageError(ValueError):
    """The command line, or what it names, cannot be used."""


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(
        prog="sm70-doctor", description="Says what keeps a server from starting or from being fast, here."
    )
    whole.add_argument("--profile", metavar="NAME|FILE", help=f"what is to be served; else ${REQUEST_VARIABLE}")
    whole.add_argument("--model", type=Path, metavar="FOLDER")
    whole.add_argument("--draft", type=Path, metavar="FOLDER")
    whole.add_argument(
        "--cache", type=Path, metavar="FOLDER", help="compile cache; default: $XDG_CACHE_HOME or ~/.cache"
    )
    whole.add_argument("--engine", choices=["sm70", "cpu"], help="default: the profile's; without one by what is here")
    whole.add_argument("--quick", action="store_true", help="do not import torch and vLLM, load no kernel")
    whole.add_argument("--json", action="store_true", help="findings and facts for machines")
    return whole


def main(
    arguments: Sequence[str] | None = None,
    environment: Mapping[str, str] = os.environ,
    gather: Callable[..., Facts] = probes.gather,
) -> int:
    """The command line: 0 nothing is wrong, 1 warnings, 2 errors, 64 usage. `gather` stands for the machine."""
    try:
        options = parser().parse_args(arguments)
    except SystemExit as end:
        return USAGE_STATUS if end.code else 0
    try:
        request = _request(environment) if options.profile is None else None
        profile = request.profile if request is not None else _profile(options.profile)
    except UsageError as error:
        print(f"sm70-doctor: {error}", file=sys.stderr)
        return USAGE_STATUS
    flavour = options.engine or _flavour(profile)
    facts = gather(
        model=options.model or (Path(request.model_path) if request else None),
        draft=options.draft or (Path(request.draft_path) if request and request.draft_path else None),
        cache=options.cache or _cache(environment),
        look_inside=not options.quick,
        flavour=flavour,
    )
    needs = needs_of(profile, flavour, environment)
    findings = examine(facts, needs)
    if options.json:
        print(json.dumps(_document(facts, needs, findings), indent=2))
    else:
        _show(findings, needs, Console())
    return gravest(findings).exit_status


def _request(environment: Mapping[str, str]) -> ServeRequest | None:
    text = environment.get(REQUEST_VARIABLE)
    if not text:
        return None
    try:
        return ServeRequest.model_validate_json(text)
    except ValidationError as error:
        raise UsageError(f"${REQUEST_VARIABLE} cannot be read: {describe(error, 3)}") from None


def _profile(name: str | None) -> Profile | None:
    if name is None:
        return None
    if name in profile_names():
        return load_profile(name)
    try:
        return parse_profile(Path(name).read_bytes())
    except OSError as error:
        raise UsageError(
            f"`{printable(name, 80)}` is neither a built-in profile nor a file that can be read ({error.strerror})"
        ) from None
    except DocumentError as error:
        raise UsageError(f"`{printable(name, 80)}` is no profile: {error}") from None


def _flavour(profile: Profile | None) -> str:
    """The engine's kind: the profile's, else by the installed vLLM."""
    if profile is not None:
        return "cpu" if profile.engine.flavour is EngineFlavour.CPU else "sm70"
    return "cpu" if "cpu" in (probes.installed_vllm() or "") else "sm70"


def _cache(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "/")) / ".cache")


def needs_of(profile: Profile | None, flavour: str, environment: Mapping[str, str]) -> Needs:
    """What the profile demands; without one the least that any does."""
    pretend = environment.get("SM70_PRETEND") in ("1", "true")
    if profile is None:
        return Needs(gpu_engine=flavour != "cpu", pretend=pretend)
    hardware, resources = profile.hardware, profile.resources
    capability = hardware.compute_capability or hardware.min_compute_capability
    major, _, minor = (capability or "7.0").partition(".")
    gpu = flavour != "cpu"
    return Needs(
        gpu_engine=gpu,
        profile=profile.name,
        count=hardware.count if gpu else None,
        products=hardware.products if gpu else (),
        capability=(int(major), int(minor or 0)),
        min_memory=quantity_bytes(hardware.min_memory) if gpu and hardware.min_memory else None,
        linked=hardware.interconnect is not Interconnect.ANY,
        shared_memory=quantity_bytes(resources.shared_memory),
        memory=quantity_bytes(resources.memory_limit),
        pretend=pretend,
    )


def _document(facts: Facts, needs: Needs, findings: list[Finding]) -> dict[str, Any]:
    return {
        "schemaVersion": 1,
        "severity": str(gravest(findings)),
        "findings": [
            {
                "subject": finding.subject,
                "severity": str(finding.severity),
                "message": finding.message,
                **(
                    {
                        "reason": str(finding.reason),
                        "remedy": finding.remedy,
                        "runbook": finding.reason.runbook,
                    }
                    if finding.reason
                    else {}
                ),
            }
            for finding in findings
        ],
        "needs": asdict(needs),
        "facts": asdict(facts),
    }


def _show(findings: list[Finding], needs: Needs, console: Console) -> None:
    engine = "the SM70 engine" if needs.gpu_engine else "the CPU engine"
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), title_justify="left")
    table.title = f"sm70-doctor for {engine}{f', profile {needs.profile}' if needs.profile else ''}"
    for finding in findings:
        word, style = STYLES[finding.severity]
        text = Text(finding.message)
        if finding.remedy:
            text.append(f"\n{finding.remedy}", style="italic")
        if finding.reason is not None:
            text.append(f"\n{finding.reason.runbook}", style="blue")
        table.add_row(Text(word, style=style), Text(finding.subject, style="bold"), text)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
