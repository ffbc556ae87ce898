"""`sm70-serve --preflight`: everything that can be known of a start without a GPU and without loading weights.

It reads the same request as a start and looks at the same things, so that a change that cannot work is refused while
the old server still serves. All findings come at once, in one termination message.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from sm70_engine.acceleration.routes import create_counters
from sm70_engine.acceleration.strict import remedy_of, waiting_paths
from sm70_engine.serve.checkpoint import read_checkpoint
from sm70_engine.serve.failure import ServeError
from sm70_engine.serve.launch import Launch, draft_of, launch_of
from sm70_engine.serve.parse import PREFIX, Fault
from sm70_engine.serve.pins import check_pins
from sm70_engine.serve.versions import check_versions
from sm70_engine.serve.weights import (
    has_chat_template,
    read_vocabulary,
    tokenizer_faults,
    vocabulary_difference,
    weight_faults,
)
from sm70_engine.session import SESSION_ENVIRONMENT, SessionFolder
from sm70_profiles.base import printable
from sm70_profiles.facts import Facts, ModelFacts
from sm70_profiles.profile import EngineFlavour
from sm70_profiles.reasons import RefusalCode, TerminationReason
from sm70_profiles.resolver import Resolution, ServeRequest
from sm70_profiles.spec import AccelerationPolicy
from sm70_profiles.termination import FindingSeverity, PreflightFinding, Termination, TerminationKind

FREE_BYTES = 1 << 30
"""Less than this on a disk that a start writes to is worth a warning."""
PARSE_SECONDS = 180
PREFLIGHT_ENVIRONMENT = "SM70_PREFLIGHT"
"""Tells the plugin that no device has to be there: our platform is chosen by the profile's flavour alone."""
ERROR, WARNING = FindingSeverity.ERROR, FindingSeverity.WARNING
Found = Iterator[PreflightFinding]


def preflight(
    request: ServeRequest,
    environment: Mapping[str, str],
    skip: Collection[str] = (),
    strictly: bool = False,
    parse: Callable[[Launch, Mapping[str, str]], PreflightFinding | None] | None = None,
) -> Termination:
    """The message with every finding. `parse` stands for the arguments' parsing by the installed vLLM.

    Raises ServeError for a wrong variable of ours.
    """
    findings: list[PreflightFinding] = []
    facts = Facts(
        model=_checkpoint(request.model_path, "model", findings),
        draft=_checkpoint(request.draft_path, "draft", findings) if request.draft_path else None,
    )
    launch = launch_of(request, facts, environment)
    findings += _refusals(launch.resolution)
    findings += _contents(request, facts)
    if not any(finding.subject in ("model", "draft") for finding in findings):
        hub = draft_of(launch, environment, fetch=False)
        findings += [_error(error, what) for what, error in check_pins(request, skip, hub)[1]]
    findings += _paths(launch, strictly)
    findings += _disks(launch, environment)
    findings += _engine(launch, environment, parse or parse_with_vllm)
    return conclusion(findings)


def conclusion(findings: list[PreflightFinding]) -> Termination:
    """The message of these findings, errors first."""
    ordered = tuple(sorted(findings, key=lambda finding: finding.severity is WARNING))[:32]
    errors = [finding for finding in ordered if finding.severity is ERROR]
    counted = f"errors: {len(errors)}, warnings: {len(ordered) - len(errors)}"
    if not errors:
        return Termination(
            kind=TerminationKind.PREFLIGHT,
            reason=TerminationReason.PASSED,
            message=f"nothing would keep the server from starting: {counted}",
            findings=ordered,
        )
    listed = ", ".join(dict.fromkeys(f"{finding.reason} ({finding.subject})" for finding in errors))
    return Termination(
        kind=TerminationKind.PREFLIGHT,
        reason=errors[0].reason,
        message=f"{counted}; {printable(listed, 400)}. {printable(errors[0].message, 800)}",
        remedy=errors[0].remedy,
        findings=ordered,
    )


def refused_preflight(error: ServeError) -> Termination:
    """The message when not even the request could be read."""
    return conclusion([_error(error, "request")])


def readable(termination: Termination) -> str:
    """The findings for a person who reads the log."""
    lines = [f"preflight {termination.reason}: {termination.message}"]
    for finding in termination.findings:
        lines.append(f"  {finding.severity:<8} {finding.reason} ({finding.subject}): {finding.message}")
        if finding.remedy:
            lines.append(f"           {finding.remedy}")
    return "\n".join(lines)


def parse_with_vllm(launch: Launch, environment: Mapping[str, str]) -> PreflightFinding | None:
    """Parses the launch's arguments with the installed vLLM in a process of its own, our platform forced."""
    folder = SessionFolder.create(environment)
    try:
        folder.write(launch.session())
        create_counters(folder.counters)
        process = subprocess.run(
            [sys.executable, "-m", "sm70_engine.serve.parse", *launch.resolution.argv],
            env={
                **environment,
                **launch.environment,
                SESSION_ENVIRONMENT: str(folder.path),
                PREFLIGHT_ENVIRONMENT: "1",
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PARSE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _finding(
            ERROR, TerminationReason.ENGINE_UNSUPPORTED, "engine", f"vLLM took over {PARSE_SECONDS} s to load"
        )
    finally:
        folder.remove()
    return read_parse(process.returncode, process.stdout, process.stderr)


def read_parse(status: int, output: str, log: str) -> PreflightFinding | None:
    """The finding in what the parsing process printed; None when the arguments were accepted."""
    answer = next((line for line in reversed(output.splitlines()) if line.startswith(PREFIX)), None)
    if answer is None:
        last = printable(" ".join(log.split()[-60:]), 500)
        message = f"vLLM could not be loaded (exit status {status}): {last}"
        return _finding(ERROR, TerminationReason.ENGINE_UNSUPPORTED, "engine", message)
    result = json.loads(answer.removeprefix(PREFIX))
    if result["fault"] == Fault.NONE:
        return None
    if result["fault"] == Fault.ARGUMENTS:
        return _finding(
            ERROR,
            TerminationReason.REFUSED,
            "arguments",
            f"`vllm serve` must accept its arguments; it says: {result['message']}",
            "Correct `extraArgs` or the setting that the message names.",
        )
    return _finding(
        ERROR,
        TerminationReason.ENGINE_UNSUPPORTED,
        "engine",
        result["message"],
        "Use the engine image that belongs to the profile's flavour.",
    )


def _finding(
    severity: FindingSeverity, reason: TerminationReason, subject: str, message: str, remedy: str = ""
) -> PreflightFinding:
    return PreflightFinding(
        severity=severity,
        reason=reason,
        subject=subject,
        message=printable(message, 800),
        remedy=printable(remedy, 300),
    )


def _error(error: ServeError, subject: str) -> PreflightFinding:
    return _finding(ERROR, error.reason, subject, error.message, error.remedy)


def _checkpoint(folder: str, what: str, findings: list[PreflightFinding]) -> ModelFacts | None:
    try:
        return read_checkpoint(Path(folder), what)
    except ServeError as error:
        findings.append(_error(error, what))
        return None


def _refusals(resolution: Resolution) -> Found:
    for refusal in resolution.refusals:
        draft = refusal.code is RefusalCode.DRAFT_INCOMPATIBLE
        yield _finding(
            ERROR,
            TerminationReason.DRAFT_INCOMPATIBLE if draft else TerminationReason.REFUSED,
            "draft" if draft else "request",
            f"{refusal.code}: `{refusal.field}` {refusal.must}; found {refusal.found}",
            refusal.remedy,
        )


def _contents(request: ServeRequest, facts: Facts) -> Found:
    """Weight files and tokenizers of the checkpoints that could be read."""
    copy = "Copy the checkpoint again."
    if facts.model is not None:
        folder = Path(request.model_path)
        for fault in weight_faults(folder):
            yield _finding(ERROR, TerminationReason.MODEL_INVALID, "model", fault, copy)
        for fault in tokenizer_faults(folder, facts.model.vocabulary):
            yield _finding(ERROR, TerminationReason.MODEL_INVALID, "tokenizer", fault, copy)
        if not has_chat_template(folder):
            yield _finding(
                WARNING,
                TerminationReason.MODEL_INVALID,
                "tokenizer",
                "the model has no chat template: chat requests will be refused",
                "Give one with `--chat-template`.",
            )
    if facts.draft is not None and request.draft_path is not None:
        folder = Path(request.draft_path)
        for fault in weight_faults(folder):
            yield _finding(ERROR, TerminationReason.MODEL_INVALID, "draft", fault, copy)
        difference = _tokenizers(request)
        if difference is not None:
            yield _finding(
                ERROR,
                TerminationReason.DRAFT_INCOMPATIBLE,
                "tokenizer",
                f"the draft's tokenizer must be the target's; {difference}",
                "Use the draft that was made for this target model.",
            )


def _tokenizers(request: ServeRequest) -> str | None:
    try:
        draft = read_vocabulary(Path(request.draft_path or ""))
        return vocabulary_difference(read_vocabulary(Path(request.model_path)), draft)
    except ValueError:
        return None  # said of the target already; a draft needs no tokenizer of its own


def _paths(launch: Launch, strictly: bool) -> Found:
    """Expected paths that are known not to be enabled: an error of a strict start, else a warning."""
    acceleration = launch.request.acceleration
    if acceleration.policy is AccelerationPolicy.REPORT and not strictly:
        return
    for path in waiting_paths(launch.resolution.paths, acceleration.allow_disabled):
        yield _finding(
            ERROR if strictly else WARNING,
            TerminationReason.ACCELERATION_REFUSED,
            "request",
            f"the expected path `{path.name}` will be {path.state} ({path.reason}): {path.message}",
            f"{remedy_of(path)}, or allow the path to be disabled.".capitalize(),
        )


def _disks(launch: Launch, environment: Mapping[str, str]) -> Found:
    """Room for what a start writes."""
    temporary = Path(environment.get("TMPDIR", "/tmp"))  # noqa: S108
    for what, folder in (("temporary files", temporary), ("the compile cache", launch.cache_home)):
        free = _free(folder)
        if free is not None and free < FREE_BYTES:
            yield _finding(
                WARNING,
                TerminationReason.DISK_FULL,
                "disk",
                f"{what} at {printable(str(folder), 200)} should have {FREE_BYTES >> 20} MiB free; found {free >> 20}",
                "Enlarge the volume or remove what is not needed.",
            )
    checkpoint = launch.request.profile.draft.checkpoint
    needed = checkpoint.download_bytes if checkpoint is not None else None
    if needed and launch.downloads_draft:
        hub = Path(environment.get("HF_HOME") or launch.cache_home / "huggingface")
        free = _free(hub)
        if free is not None and free < needed:
            yield _finding(
                ERROR,
                TerminationReason.DISK_FULL,
                "disk",
                f"the draft's download needs {needed >> 20} MiB at {printable(str(hub), 200)}; found {free >> 20}",
                "Enlarge the volume, or give the draft as a folder.",
            )


def _free(folder: Path) -> int | None:
    """Bytes that this user may still write there, or where the folder would be made; None when that is unknown."""
    there = next((place for place in (folder, *folder.parents) if place.is_dir()), None)
    try:
        return shutil.disk_usage(there).free if there is not None and os.access(there, os.W_OK) else None
    except OSError:
        return None


def _engine(
    launch: Launch,
    environment: Mapping[str, str],
    parse: Callable[[Launch, Mapping[str, str]], PreflightFinding | None],
) -> Found:
    """The installed engine, and whether it accepts the arguments. Without a known engine nothing is parsed."""
    try:
        check_versions(launch.resolution.flavour)
    except ServeError as error:
        yield _error(error, "engine")
        return
    finding = parse(launch, environment)
    if finding is not None:
        # An engine for GPUs may not load where there is none; that says nothing about where it will run.
        elsewhere = launch.resolution.flavour is not EngineFlavour.CPU and finding.subject == "engine"
        yield finding.model_copy(update={"severity": WARNING}) if elsewhere else finding
