"""What the judge says and what it is asked: the report of a qualification run, and the document of a suite.

The judge runs in a pod and hands its report to the operator in the termination message, which Kubernetes cuts off at
4096 bytes: `QualificationReport.encode` fits it in, and `parse_qualification` reads it back as text from a stranger.
Figures are canonical decimal strings, so that the same measurement is the same text in every status, file and hash.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from functools import cache
from importlib.resources import files
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, ValidationError, model_validator

from sm70_profiles.base import Document, Figure, ProfileName, printable
from sm70_profiles.documents import DocumentError, describe, parse_document
from sm70_profiles.identity import digest

MAX_TERMINATION_BYTES = 4096
MAX_REPORT_BYTES = 256 * 1024
MAX_GATES = 64


class Verdict(StrEnum):
    """How a gate or a whole run ended."""

    PASSED = "Passed"
    FAILED = "Failed"
    """Measured, and not good enough."""
    INCONCLUSIVE = "Inconclusive"
    """Measured, and the samples do not decide it."""
    ERROR = "Error"
    """Not measured: the endpoint could not be asked."""

    @property
    def exit_status(self) -> int:
        """Of `sm70-qualify`."""
        return list(Verdict).index(self)


PRECEDENCE = (Verdict.FAILED, Verdict.ERROR, Verdict.INCONCLUSIVE, Verdict.PASSED)
"""Of several gates the first in this order is the run's: one that failed is a fact, whatever else went wrong."""


def combined(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict of a run from those of its gates; of none at all it is Error."""
    return min(verdicts, key=PRECEDENCE.index, default=Verdict.ERROR)


def decimal(value: int | float | Decimal, places: int = 3) -> str:
    """A figure as it is written everywhere: at most `places` digits behind the point, no exponent, no trailing zero.

    Raises ValueError for what is not finite.
    """
    number = Decimal(repr(value) if isinstance(value, float) else value)
    if not number.is_finite():
        raise ValueError(f"a figure must be finite, found {number}")
    text = f"{round(number, places):f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def _one_line(text: str) -> str:
    return " ".join(printable(text, 1024).split())


GateName = Annotated[str, StringConstraints(max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
Unit = Annotated[str, StringConstraints(max_length=32, pattern=r"^[A-Za-z0-9 /%]*$")]
Message = Annotated[str, StringConstraints(max_length=600), AfterValidator(_one_line)]
Version = Annotated[str, StringConstraints(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9.+_-]*$")]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Instant = Annotated[
    str, StringConstraints(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?Z$")
]


class Bound(StrEnum):
    """On which side of its threshold a measurement passes; reaching it passes."""

    AT_LEAST = "AtLeast"
    AT_MOST = "AtMost"


class Gate(Document):
    """One question and its answer. `measured` and `threshold` are in `unit`; `samples` is what they were taken from."""

    name: GateName
    verdict: Verdict
    bound: Bound = Bound.AT_MOST
    measured: Figure | None = None
    threshold: Figure | None = None
    unit: Unit = ""
    samples: int = Field(default=0, ge=0, le=10_000_000)
    message: Message = ""

    @model_validator(mode="after")
    def _is_backed(self) -> Self:
        if self.verdict is not Verdict.PASSED:
            return self
        if self.measured is None or self.threshold is None or self.samples < 1:
            raise ValueError("a gate passes only with `measured`, `threshold` and at least one sample")
        measured, threshold = Decimal(self.measured), Decimal(self.threshold)
        if measured < threshold if self.bound is Bound.AT_LEAST else measured > threshold:
            raise ValueError("a gate passes only when `measured` keeps to `threshold`")
        return self


class Skipped(Document):
    """A gate of the suite that does not concern this server, and why."""

    name: GateName
    because: Message


class SuiteReference(Document):
    """Which suite was run: two runs are comparable when all three agree."""

    name: ProfileName
    version: int = Field(ge=1, le=1_000_000)
    digest: Digest


class QualificationReport(Document):
    """One run of one suite against one endpoint."""

    schema_version: Literal[1]
    suite: SuiteReference
    tool_version: Version
    started_at: Instant
    finished_at: Instant
    verdict: Verdict
    message: Message = ""
    """Why the run is an error where no gate says it, else the first thing that is wrong."""
    profile: ProfileName | None = None
    """The profile whose floors and gates were taken."""
    profile_hash: Annotated[str, StringConstraints(max_length=64, pattern=r"^[0-9a-f]*$")] | None = None
    """As the endpoint's own report gives it."""
    gates: tuple[Gate, ...] = Field(default=(), max_length=MAX_GATES)
    omitted_gates: int = Field(default=0, ge=0, le=MAX_GATES)
    """Gates left out of a termination message that would be too long, the best verdicts first."""
    skipped: tuple[Skipped, ...] = Field(default=(), max_length=MAX_GATES)
    raw_digest: Digest
    """SHA-256 of the canonical JSON of everything measured, which `--raw` writes to a file."""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        names = [gate.name for gate in self.gates]
        if len(set(names)) != len(names):
            raise ValueError("`gates` must name each gate once")
        of_gates = combined(gate.verdict for gate in self.gates)
        if self.verdict is not of_gates:
            raise ValueError(f"`verdict` must be that of the gates, {of_gates}; found {self.verdict}")
        if datetime.fromisoformat(self.finished_at) < datetime.fromisoformat(self.started_at):
            raise ValueError("`finishedAt` must not be before `startedAt`")
        return self

    def encode(self) -> bytes:
        """The report as a termination message: JSON of at most 4096 bytes.

        What is too long loses, in this order: messages of passed gates, skipped gates, long messages, all messages of
        gates, and gates from the best verdict on (never the one that decides), which `omittedGates` counts.
        """
        for report in self._shorter():
            data = report.model_dump_json(by_alias=True, exclude_defaults=True).encode()
            if len(data) <= MAX_TERMINATION_BYTES:
                return data
        raise AssertionError("a report with one gate and short messages always fits")

    def _shorter(self) -> Iterable[QualificationReport]:
        yield self
        gates = [
            gate.model_copy(update={"message": ""}) if gate.verdict is Verdict.PASSED else gate for gate in self.gates
        ]
        report = self.model_copy(update={"gates": tuple(gates)})
        yield report
        report = report.model_copy(update={"skipped": ()})
        yield report
        for length in (200, 80, 0):
            gates = [gate.model_copy(update={"message": gate.message[:length]}) for gate in gates]
            report = report.model_copy(update={"gates": tuple(gates), "message": report.message[: max(length, 200)]})
            yield report
        order = sorted(range(len(gates)), key=lambda index: PRECEDENCE.index(gates[index].verdict))
        for kept in range(len(gates) - 1, 0, -1):
            chosen = tuple(gates[index] for index in sorted(order[:kept]))
            yield report.model_copy(
                update={"gates": chosen, "omitted_gates": self.omitted_gates + len(gates) - kept, "message": ""}
            )


class QualificationError(ValueError):
    """The text is no report or no suite. The message says why, in bounded printable text."""


def parse_qualification(text: str | bytes, limit: int = MAX_TERMINATION_BYTES) -> QualificationReport:
    """Reads a report that came from a pod or a file. Raises QualificationError.

    `limit` is in bytes: that of a termination message, or `MAX_REPORT_BYTES` for a report's file.
    """
    data = text.encode(errors="replace") if isinstance(text, str) else text
    if len(data) > limit:
        raise QualificationError(f"a qualification report must not exceed {limit} bytes, found {len(data)}")
    try:
        return QualificationReport.model_validate_json(data)
    except ValidationError as error:
        raise QualificationError(f"this is no qualification report: {_first(error)}") from None


def _first(error: ValidationError) -> str:
    first: Any = error.errors(include_url=False, include_input=False)[0]
    return printable(f"`{'.'.join(map(str, first['loc']))}`: {first['msg']}", 300)


# ---------------------------------------------------------------------------------------------------------- suites

Words = Annotated[str, StringConstraints(min_length=1, max_length=8000)]
Glob = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=r"^[a-z0-9_*-]+$")]
Key = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class ValueType(StrEnum):
    """The type of one member of an object that a model is asked for."""

    STRING = "string"
    INTEGER = "integer"
    NUMBER = "number"
    BOOLEAN = "boolean"
    STRINGS = "strings"
    """A list of strings."""


Members = Annotated[dict[Key, ValueType], Field(min_length=1, max_length=32)]


class Check(Document):
    """What every gate of a suite has. A gate is asked of the profiles that match one of `profiles`; empty: of all."""

    name: GateName
    profiles: tuple[Glob, ...] = Field(default=(), max_length=16)


class Determinism(Check):
    """The same greedy request gives the same tokens. Measured: answers that differ from the first of their prompt."""

    check: Literal["Determinism"]
    prompts: tuple[Words, ...] = Field(min_length=1, max_length=16)
    repeats: int = Field(default=3, ge=2, le=100)
    max_tokens: int = Field(default=64, ge=1, le=4096)


class TextHealth(Check):
    """Long answers are text and not noise. Measured: answers that break one of the limits."""

    check: Literal["TextHealth"]
    prompts: tuple[Words, ...] = Field(min_length=1, max_length=64)
    max_tokens: int = Field(default=256, ge=1, le=32768)
    minimum_tokens: int = Field(default=64, ge=0, le=32768, description="A shorter answer fails.")
    same_token_run: int = Field(default=48, ge=1, description="Longest run of one token.")
    digit_run: int = Field(default=80, ge=1, description="Longest run of digits.")
    character_run: int = Field(default=120, ge=1, description="Longest run of one character.")
    line_run: int = Field(default=12, ge=1, description="Longest run of one line that is not empty.")
    windows: dict[Annotated[int, Field(ge=1, le=10_000)], int] = Field(
        default={20: 80, 50: 40, 100: 20},
        max_length=8,
        description="How often a window of so many characters may occur.",
    )
    markers: tuple[Annotated[str, StringConstraints(min_length=1, max_length=64)], ...] = Field(
        default=("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<unk>", "<pad>"),
        max_length=32,
        description="Text that must not occur, as U+FFFD must not.",
    )


class StructuredOutput(Check):
    """A JSON Schema is kept to. Measured: answers that are no such object."""

    check: Literal["StructuredOutput"]
    prompts: tuple[Words, ...] = Field(min_length=1, max_length=64)
    members: Members
    max_tokens: int = Field(default=256, ge=1, le=4096)


class ToolUse(Check):
    """A tool is called as it is declared. Measured: answers without exactly one call that fits, streamed and not."""

    check: Literal["ToolUse"]
    prompts: tuple[Words, ...] = Field(min_length=1, max_length=64)
    tool: Key
    description: Words
    members: Members
    max_tokens: int = Field(default=256, ge=1, le=4096)


class StreamParity(Check):
    """A stream adds up to the answer that is not streamed. Measured: prompts with a difference."""

    check: Literal["StreamParity"]
    prompts: tuple[Words, ...] = Field(min_length=1, max_length=64)
    max_tokens: int = Field(default=64, ge=1, le=4096)


class PrefixHit(Check):
    """A prompt asked again is not computed again. Measured: the least share of its tokens that came from the cache."""

    check: Literal["PrefixHit"]
    prompt_tokens: int = Field(default=1024, ge=16, le=262_144)
    repeats: int = Field(default=2, ge=1, le=16)
    minimum_percent: int = Field(default=50, ge=1, le=100)


class MixedLoad(Check):
    """Requests of every kind at once all end as they should. Measured: those that do not."""

    check: Literal["MixedLoad"]
    requests: int = Field(default=16, ge=1, le=512)
    concurrency: int = Field(default=16, ge=1, le=512)
    prompts: tuple[Words, ...] = Field(min_length=1, max_length=64)
    members: Members
    max_tokens: int = Field(default=64, ge=1, le=4096)


class Expected(Document):
    """What is right. What is None is not compared."""

    content: Annotated[str, StringConstraints(max_length=16_000)] | None = None
    tool: Key | None = None
    arguments: dict[Key, Any] | None = Field(default=None, max_length=32)
    finish_reason: Annotated[str, StringConstraints(max_length=32)] | None = None
    completion_tokens: int | None = Field(default=None, ge=0)


class Question(Document):
    """A greedy request and what is right."""

    prompt: Words
    tool: Key | None = None
    members: Members | None = None
    """Of the tool's arguments, else of the object that is asked for."""
    max_tokens: int = Field(default=256, ge=1, le=4096)
    expected: Expected


class RightAnswers(Check):
    """Questions with known answers. Measured: wrong answers."""

    check: Literal["RightAnswers"]
    questions: tuple[Question, ...] = Field(min_length=1, max_length=512)


class Metric(StrEnum):
    """What a performance gate measures, one request at a time, by the tokens that the server returns."""

    PREFILL_RATE = "PrefillRate"
    """Prompt tokens that were computed, per second until the first token."""
    DECODE_RATE = "DecodeRate"
    """Tokens per second after the first piece."""
    FIRST_TOKEN = "FirstToken"  # noqa: S105  (no password)
    """Milliseconds until the first token."""

    @property
    def unit(self) -> str:
        return "ms" if self is Metric.FIRST_TOKEN else "tokens/s"

    @property
    def bound(self) -> Bound:
        return Bound.AT_MOST if self is Metric.FIRST_TOKEN else Bound.AT_LEAST


class Performance(Check):
    """A rate keeps to its floor. Gates with the same load share its runs. The profile's floor comes before `floor`.

    Passed when the median keeps to the floor, Failed when no run does, otherwise Inconclusive.
    """

    check: Literal["Performance"]
    metric: Metric
    floor: Figure
    prompt_tokens: int = Field(default=1024, ge=16, le=262_144)
    output_tokens: int = Field(default=64, ge=2, le=16_384)
    warm_up: int = Field(default=1, ge=0, le=16)
    runs: int = Field(default=3, ge=1, le=100)


AnyCheck = Annotated[
    Determinism
    | TextHealth
    | StructuredOutput
    | ToolUse
    | StreamParity
    | PrefixHit
    | MixedLoad
    | RightAnswers
    | Performance,
    Field(discriminator="check"),
]


class Suite(Document):
    """A versioned list of gates. Whoever changes a gate raises `version`; the digest tells the rest."""

    schema_version: Literal[1]
    name: ProfileName
    version: int = Field(ge=1, le=1_000_000)
    title: Annotated[str, StringConstraints(max_length=200)]
    description: Annotated[str, StringConstraints(max_length=4000)] = ""
    timeout_seconds: int = Field(default=1800, ge=1, le=86_400, description="Of the whole run.")
    request_timeout_seconds: int = Field(default=300, ge=1, le=3600)
    chat_template_arguments: dict[Key, bool | int | Annotated[str, StringConstraints(max_length=64)]] = Field(
        default_factory=dict, max_length=16, description="What every chat passes to the model's template."
    )
    gates: tuple[AnyCheck, ...] = Field(min_length=1, max_length=MAX_GATES)

    @model_validator(mode="after")
    def _names_each_gate_once(self) -> Self:
        names = [gate.name for gate in self.gates]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"`gates` must name each gate once, found `{'`, `'.join(twice)}` again")
        return self

    @property
    def reference(self) -> SuiteReference:
        return SuiteReference(name=self.name, version=self.version, digest=digest(self))


def parse_suite(text: bytes) -> Suite:
    """Reads a suite's YAML or JSON, from a file or a ConfigMap. Raises QualificationError with every mistake."""
    try:
        return Suite.model_validate(parse_document(text, "a suite"))
    except DocumentError as error:
        raise QualificationError(f"this is no suite: {printable(str(error), 600)}") from None
    except ValidationError as error:
        raise QualificationError(f"this is no suite: {describe(error)}") from None


@cache
def suite_names() -> tuple[str, ...]:
    """Names of the built-in suites, sorted."""
    entries = (PurePath(entry.name) for entry in files(__package__).joinpath("data/suites").iterdir())
    return tuple(sorted(entry.stem for entry in entries if entry.suffix == ".yaml"))


@cache
def load_suite(name: str) -> Suite:
    """The built-in suite of this name. Raises QualificationError, whose message lists the names there are."""
    if name not in suite_names():
        raise QualificationError(
            f"there is no built-in suite `{printable(name, 80)}`; there are: {', '.join(suite_names())}"
        )
    return parse_suite(files(__package__).joinpath("data/suites", f"{name}.yaml").read_bytes())
