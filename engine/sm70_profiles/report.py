"""The acceleration report: what a serving engine says of itself. Built by the engine, read by operator and judge.

A reader must treat it as untrusted: `parse_report` bounds its size and refuses what the schema does not admit.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import ConfigDict, Field, StringConstraints, ValidationError
from pydantic.alias_generators import to_camel

from sm70_profiles.base import Document
from sm70_profiles.base import printable as printable
from sm70_profiles.routes import Stage

SCHEMA_VERSION = 1
MAX_REPORT_BYTES = 256 * 1024

Word = Annotated[str, StringConstraints(max_length=128)]
Text = Annotated[str, StringConstraints(max_length=1024)]


class ReportPart(Document):
    """Like any document, but a newer engine's extra members are ignored rather than refused."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True, protected_namespaces=()
    )


class PathState(StrEnum):
    ENABLED = "enabled"
    DISABLED = "disabled"
    NOT_APPLICABLE = "not_applicable"


class PathReport(ReportPart):
    """One acceleration path: what may run. Whether it did run is for the route counters to say."""

    name: Word
    expected: bool
    state: PathState
    reason: Word | None = None
    message: Text = ""
    route: Word | None = None


class RouteCount(ReportPart):
    """Dispatches of a route since the server started, summed over workers. Graph replays are not counted."""

    route: Word
    stage: Stage
    dispatches: int = Field(ge=0)
    captures: int = Field(default=0, ge=0)
    fallback: bool = False


class FallbackCount(ReportPart):
    """Dispatches of a fallback route for one reason; the same dispatches are in the route's own row."""

    route: Word
    stage: Stage
    reason: Word
    """A `sm70_profiles.routes.FallbackReason`; a newer engine may know others."""
    dispatches: int = Field(ge=0)
    captures: int = Field(default=0, ge=0)


class EngineFacts(ReportPart):
    build: Word
    vllm: Word
    torch: Word
    cuda: Word | None = None
    image: Text | None = None


class ProfileFacts(ReportPart):
    name: Word
    hash: Word


class UuidSource(StrEnum):
    NVML = "NVML"
    ENVIRONMENT = "NVIDIA_VISIBLE_DEVICES"
    NONE = "none"


class DeviceFacts(ReportPart):
    name: Word
    compute_capability: Word | None = None
    count: int = Field(ge=0, le=1024)
    memory_bytes: int | None = None
    driver: Word | None = None
    uuids: tuple[Word, ...] = Field(default=(), max_length=64)
    uuid_source: UuidSource = UuidSource.NONE
    nvlink: bool | None = None


class EffectiveConfiguration(ReportPart):
    argv: tuple[Text, ...] = Field(max_length=512)
    env_hash: Word
    switches: dict[Word, Word] = Field(default_factory=dict, max_length=128)


class Summary(ReportPart):
    enabled: int = Field(ge=0)
    total: int = Field(ge=0)

    def __str__(self) -> str:
        return f"{self.enabled}/{self.total}"


class CacheState(StrEnum):
    """What the compile cache did for this start."""

    OFF = "Off"
    """Compiled code is not kept: it was switched off, nothing is compiled, or the cache is not ours to keep."""
    WARMING = "Warming"
    """The start is not over, or what it added is not published yet."""
    COLD = "Cold"
    """No usable entry was there; what this start compiled is published for the next one."""
    WARM = "Warm"
    """An entry was there and this start added nothing to it."""
    UNWRITABLE = "Unwritable"
    """What this start compiled cannot be published, so the next one will be no faster."""


class CompileCacheReport(ReportPart):
    """Hits are measured, never assumed: a start that found everything has added no file."""

    enabled: bool
    state: CacheState | None = None
    key: Word | None = None
    directory: Text | None = None
    files_before: int | None = None
    files_added: int | None = None
    """Files added since the start began, up to now."""
    files_added_at_last_start: int | None = None
    """Files that this start added until the server answered; None before that."""
    message: Text = ""
    """Why it is not warm, and what was wrong with the volume."""


class CapacityReport(ReportPart):
    """What the KV cache holds, in tokens: of one replica, as the worker of rank 0 has allocated it."""

    kv_tokens: int = Field(ge=0)
    block_size: int = Field(ge=1)
    """Tokens of a KV page, the real one."""
    max_model_len: int = Field(ge=1)
    residents_at_max_len: int = Field(ge=0)
    """Requests of `maxModelLen` tokens that fit at once."""


class StartupPhase(StrEnum):
    """Where a start is, in the order in which phases follow each other."""

    DOWNLOADING = "Downloading"
    """`sm70-fetch` fills the volume; the server is not started yet."""
    STARTING = "Starting"
    """Programs are being loaded and the configuration is being completed."""
    LOADING_WEIGHTS = "LoadingWeights"
    COMPILING = "Compiling"
    CAPTURING_GRAPHS = "CapturingGraphs"
    WARMING = "Warming"
    """The engine is complete and the server is not listening yet."""
    SERVING = "Serving"


class StartupReport(ReportPart):
    """The phase of now, and how long the ones before it took."""

    phase: StartupPhase
    since: Word
    """When the phase began, in UTC."""
    seconds: dict[StartupPhase, float] = Field(default_factory=dict)
    """Duration of each phase that is over."""
    done_bytes: int | None = Field(default=None, ge=0, le=2**53)
    total_bytes: int | None = Field(default=None, ge=0, le=2**53)
    """While downloading: how much of the whole is there."""


class CheckpointReport(ReportPart):
    """What became of the checks against pinned checksums."""

    what: Word
    """`model` or `draft`."""
    verdict: Word
    """`passed`, `unverified` (nothing to compare with) or `skipped` (by the user); a failed one never serves."""
    files: dict[Word, Word] = Field(default_factory=dict, max_length=64)
    reason: Text = ""
    """Why it is not `passed`."""


class SettledValue(ReportPart):
    """A value that the engine changed: the rules judge the requested one, and this says what it runs with."""

    field: Word
    requested: Word
    settled: Word
    view: Word
    """Whose view it is: `worker 0`, or `prediction` before anything runs."""
    message: Text = ""


class AccelerationReport(ReportPart):
    """`GET /v1/sm70/acceleration`."""

    schema_version: int = SCHEMA_VERSION
    engine: EngineFacts
    profile: ProfileFacts
    device: DeviceFacts
    effective: EffectiveConfiguration
    paths: tuple[PathReport, ...] = Field(max_length=256)
    expected_acceleration: tuple[Word, ...] = Field(max_length=256)
    summary: Summary
    compile_cache: CompileCacheReport | None = None
    routes: tuple[RouteCount, ...] = Field(default=(), max_length=1024)
    fallbacks: tuple[FallbackCount, ...] = Field(default=(), max_length=1024)
    """Why fallback routes are taken: a row a route, stage and reason, those of this engine with zero as well."""
    worker_facts: dict[Word, Word | int | None] = Field(default_factory=dict, max_length=64)
    """Facts that only a worker knows (the real block sizes), by RPC; the view is the worker's of rank 0."""
    settled: tuple[SettledValue, ...] = Field(default=(), max_length=64)
    capacity: CapacityReport | None = None
    startup: StartupReport | None = None
    checkpoints: tuple[CheckpointReport, ...] = Field(default=(), max_length=2)
    observed_at: Word


class ReportError(ValueError):
    """The bytes are not a report that this version can read. The message says why, in bounded printable text."""


def parse_report(data: bytes) -> AccelerationReport:
    """Reads a report that came over the network. Raises ReportError."""
    if len(data) > MAX_REPORT_BYTES:
        raise ReportError(f"the report must not exceed {MAX_REPORT_BYTES} bytes, found {len(data)}")
    try:
        report = AccelerationReport.model_validate_json(data)
    except ValidationError as error:
        first: Any = error.errors(include_url=False, include_input=False)[0]
        what = printable(".".join(str(part) for part in first["loc"]) + f": {first['type']}")
        raise ReportError(f"the report does not fit schema {SCHEMA_VERSION}: {what}") from None
    if report.schema_version != SCHEMA_VERSION:
        raise ReportError(f"the report's schemaVersion must be {SCHEMA_VERSION}, found {report.schema_version}")
    return report
