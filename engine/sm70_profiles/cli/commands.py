"""The commands: each reads its input, asks the pure core and writes the answer."""

from __future__ import annotations

import argparse
from typing import Any

from pydantic import BaseModel

from sm70_profiles.base import shown
from sm70_profiles.catalog import load_profile, profile_names
from sm70_profiles.checkpoints import Verdict, checksums, overall, verify
from sm70_profiles.cli.inputs import InputError, profile_of, read_bytes, read_facts, request_of
from sm70_profiles.cli.output import ExitCode, Output, plain
from sm70_profiles.documents import MAX_DOCUMENT_BYTES, DocumentError, parse_documents, parse_profile, write_document
from sm70_profiles.envfile import read_environment
from sm70_profiles.facts import Facts
from sm70_profiles.flags import path_of
from sm70_profiles.importenv import import_knobs
from sm70_profiles.memory import GIB, MIB, MemoryBudget, Pool
from sm70_profiles.profile import Checkpoint, Profile
from sm70_profiles.reasons import Refusal, RefusalCode
from sm70_profiles.report import AccelerationReport
from sm70_profiles.resolver import Resolution, ServeRequest, leaves, resolve
from sm70_profiles.resource import ResourceError, ServiceSpec, read_resource, serve_request
from sm70_profiles.rules import summarize
from sm70_profiles.settings import Overrides

FINE, REFUSED = ExitCode.FINE, ExitCode.REFUSED

SCHEMAS: dict[str, type[BaseModel]] = {
    "profile": Profile,
    "overrides": Overrides,
    "facts": Facts,
    "request": ServeRequest,
    "resolution": Resolution,
    "report": AccelerationReport,
    "service": ServiceSpec,
}


def list_profiles(_: argparse.Namespace, output: Output) -> int:
    """The built-in profiles."""
    profiles = [load_profile(name) for name in profile_names()]
    if output.as_json:
        output.json([_summary(profile) for profile in profiles])
        return FINE
    rows = (
        (
            profile.name,
            profile.tier,
            profile.engine.flavour,
            str(profile.hardware.count),
            profile.hardware.compute_capability or "-",
            profile.title,
        )
        for profile in profiles
    )
    output.table(("NAME", "TIER", "ENGINE", "GPUS", "CC", "TITLE"), rows)
    return FINE


def _summary(profile: Profile) -> dict[str, Any]:
    return {
        "name": profile.name,
        "tier": profile.tier,
        "engine": profile.engine.flavour,
        "gpus": profile.hardware.count,
        "computeCapability": profile.hardware.compute_capability,
        "title": profile.title,
        "expectedAcceleration": list(profile.expected_acceleration),
    }


def show(options: argparse.Namespace, output: Output) -> int:
    """One profile, as its document."""
    profile = profile_of(options.profile)
    if output.as_json:
        output.json(profile)
    else:
        output.text(write_document(profile))
    return FINE


def explain(options: argparse.Namespace, output: Output) -> int:
    """Every final value, who decided it and why."""
    request, facts, misread = request_of(options)
    resolution = resolve(request, facts)
    refusals = (*misread, *resolution.refusals)
    if output.as_json:
        output.json({"provenance": resolution.provenance, "notices": resolution.notices, "refusals": refusals})
    else:
        rows = ((one.field, one.value, one.origin, one.because) for one in resolution.provenance)
        output.table(("FIELD", "VALUE", "FROM", "BECAUSE"), rows)
        output.line()
        output.notices(resolution.notices)
        output.refusals(refusals)
    return REFUSED if refusals else FINE


def resolve_profile(options: argparse.Namespace, output: Output) -> int:
    """The command line, the environment and the predicted report."""
    request, facts, misread = request_of(options)
    resolution = resolve(request, facts)
    refusals = (*misread, *resolution.refusals)
    if output.as_json:
        output.json(resolution.model_copy(update={"refusals": refusals}))
        return REFUSED if refusals else FINE
    output.heading("command line")
    for line in _lines(resolution.argv):
        output.text(f"  {line}")
    output.heading("environment")
    for name, value in resolution.env.items():
        output.text(f"  {name}={value}")
    output.heading(f"acceleration {summarize(resolution.paths)} predicted")
    output.paths(resolution.paths)
    output.line()
    output.notices(resolution.notices)
    output.refusals(refusals)
    return REFUSED if refusals else FINE


def _lines(argv: tuple[str, ...]) -> list[str]:
    """One option a line, with its value."""
    lines = [f"vllm serve {argv[0]}"]
    for word in argv[1:]:
        if word.startswith("-"):
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return lines


def memory(options: argparse.Namespace, output: Output) -> int:
    """The memory of one GPU, and the KV cache that it leaves."""
    request, facts, misread = request_of(options)
    resolution = resolve(request, facts)
    budget, pool = resolution.memory, resolution.pool
    refusals = [*misread, *resolution.refusals]
    if output.as_json:
        output.json({"memory": budget, "pool": pool, "refusals": refusals})
        return REFUSED if refusals else FINE
    if budget is None and pool is None:
        output.line("The memory cannot be predicted: the shape or the size of the weights is not known.")
    if budget is not None:
        _budget(budget, output)
    elif pool is not None:
        _pool("KV cache of one GPU, fixed in bytes", pool, output)
    output.line()
    output.notices(resolution.notices)
    output.refusals(refusals)
    return REFUSED if refusals else FINE


def _budget(budget: MemoryBudget, output: Output) -> None:
    output.heading(f"one {budget.gpu}, {_gib(budget.device_bytes)}")
    rows = [(term.name, _gib(term.bytes), term.source) for term in budget.terms]
    rows += [
        ("KV cache", _gib(budget.kv_bytes), "what the utilisation leaves"),
        ("budget of the engine", _gib(budget.budget_bytes), "device memory times utilisation"),
        *((f"beyond it: {term.name}", _gib(term.bytes), term.source) for term in budget.reserve),
        ("headroom", f"{budget.headroom_bytes // MIB} MiB", "of the device, under a mixed load"),
        ("allocator headroom", f"{budget.allocator_headroom_bytes // MIB} MiB", "of what torch can allocate"),
    ]
    output.table(("PART", "SIZE", "FROM"), rows)
    if budget.pool is not None:
        _pool("KV cache as the recipe's figures group layers", budget.pool, output)
    if budget.engine_pool is not None:
        _pool("KV cache as the serving engine groups layers", budget.engine_pool, output)


def _pool(title: str, pool: Pool, output: Output) -> None:
    output.heading(title)
    rows = (
        ("tokens", f"{pool.tokens}", "at the full context length"),
        ("residents", f"{pool.residents}", "requests of the full length at once"),
        ("short residents", f"{pool.residents_short}", "requests of about a thousand tokens at once"),
        ("longest request", f"{pool.largest_context}", "tokens"),
        ("pages", f"{pool.pages} x {pool.page_bytes / MIB:.2f} MiB", f"of {pool.block_size} tokens"),
        ("a token", f"{pool.token_bytes / 1024:.1f} KiB", "in all attention layers of one rank"),
        ("a state", f"{pool.state_bytes / MIB:.1f} MiB", "in all linear-attention layers of one rank, as paged"),
        ("pages a request", f"{pool.pages_per_request}", f"of which {pool.state_pages} for recurrent states"),
    )
    output.table(("POOL", "VALUE", ""), rows)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def check(options: argparse.Namespace, output: Output) -> int:
    """Every refusal of every service in a file, as the operator would put them."""
    documents = parse_documents(read_bytes(options.file), str(options.file))
    if not documents:
        raise InputError(f"{options.file} must hold a resource; found none")
    facts = Facts() if options.facts is None else read_facts(options.facts)
    results = [_checked(document, options, facts) for document in documents]
    if output.as_json:
        output.json([{"name": name, "refusals": refusals, "notices": notices} for name, refusals, notices in results])
    else:
        for name, refusals, notices in results:
            output.line(f"[bold]{name}[/bold]: {'refused' if refusals else 'accepted'}")
            output.notices(notices)
            output.refusals(refusals)
    return REFUSED if any(refusals for _, refusals, _ in results) else FINE


def _checked(
    document: dict[str, Any], options: argparse.Namespace, facts: Facts
) -> tuple[str, tuple[Refusal, ...], tuple[Any, ...]]:
    name = "(no name)"
    try:
        name, spec = read_resource(document)
        profile = _profile_of(spec, options)
    except ResourceError as error:
        return name, error.refusals, ()
    resolution = resolve(serve_request(name, spec, profile), facts)
    return name, resolution.refusals, resolution.notices


def _profile_of(spec: ServiceSpec, options: argparse.Namespace) -> Profile:
    if spec.profile is not None:
        if spec.profile not in profile_names():
            found, field = f"`{spec.profile}`", "profile"
            names = ", ".join(profile_names())
            raise ResourceError((_missing(RefusalCode.PROFILE_NOT_FOUND, field, f"must be one of {names}", found),))
        return load_profile(spec.profile)
    if options.profile_file is None:
        raise InputError(
            "`profileRef` names a ConfigMap, which is not read offline; give its document with --profile-file"
        )
    try:
        return parse_profile(read_bytes(options.profile_file, MAX_DOCUMENT_BYTES))
    except DocumentError as error:
        must = "must name a valid profile document"
        raise ResourceError((_missing(RefusalCode.PROFILE_INVALID, "profileRef", must, str(error)),)) from None


def _missing(code: RefusalCode, field: str, must: str, found: str) -> Refusal:
    return Refusal(code=code, field=field, must=must, found=found, remedy="Correct the profile's name or document.")


def diff(options: argparse.Namespace, output: Output) -> int:
    """The values in which two profiles differ."""
    left, right = profile_of(options.left), profile_of(options.right)
    one, two = dict(_values(left)), dict(_values(right))
    rows = [
        (field, one.get(field, "-"), two.get(field, "-"))
        for field in sorted(one.keys() | two.keys())
        if one.get(field) != two.get(field)
    ]
    if output.as_json:
        output.json([{"field": field, "left": a, "right": b} for field, a, b in rows])
    else:
        output.table(("FIELD", left.name, right.name), rows)
    return FINE


def _values(profile: Profile) -> list[tuple[str, str]]:
    settings = [(path_of(setting), shown(value)) for setting, value in leaves(profile.settings)]
    hardware = plain(profile.hardware)
    others = [(f"hardware.{key}", str(value)) for key, value in hardware.items()]
    paths = [(f"expects.{name}", "yes") for name in profile.expected_acceleration]
    return [*settings, *others, *paths, ("tier", profile.tier), ("engine", profile.engine.flavour)]


def import_environment(options: argparse.Namespace, output: Output) -> int:
    """The resource that serves as a launcher's environment file does."""
    knobs, unread = read_environment(read_bytes(options.file))
    imported = import_knobs(knobs)
    refusals = [*unread, *imported.refusals]
    notices = list(imported.notices)
    if imported.profile is not None and not refusals:
        resolution = resolve(imported.request())
        refusals += resolution.refusals
        notices += resolution.notices
    document = imported.resource(options.name) if imported.profile else None
    if output.as_json:
        output.json({"resource": document, "notices": notices, "refusals": refusals})
        return REFUSED if refusals else FINE
    if document is not None:
        output.text("".join(f"# {notice}\n" for notice in notices) + write_document(document))
    for refusal in refusals:
        output.fail(str(refusal))
    return REFUSED if refusals else FINE


def schema(options: argparse.Namespace, output: Output) -> int:
    """The JSON schema of a document."""
    output.json(SCHEMAS[options.document].model_json_schema(by_alias=True))
    return FINE


def pin(options: argparse.Namespace, output: Output) -> int:
    """The checksums of a checkpoint, or their comparison with a profile's pinned draft."""
    found = checksums(options.folder)
    if options.against is None:
        if output.as_json:
            output.json({"sha256": found})
        else:
            output.text(write_document({"sha256": found}))
        return FINE
    pinned = profile_of(options.against).draft.checkpoint or Checkpoint()
    verdicts = verify(pinned, found)
    worst = overall(verdicts)
    if output.as_json:
        output.json({"verdict": worst, "files": verdicts})
    else:
        output.table(("FILE", "VERDICT"), ((name, verdict) for name, verdict in verdicts.items()))
        output.line(f"verdict: {worst}")
    return {Verdict.PASSED: FINE, Verdict.UNVERIFIED: ExitCode.UNVERIFIED}.get(worst, REFUSED)
