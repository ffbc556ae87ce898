"""The gates of a suite: one function a kind of check, from the check's parameters to a judged gate.

A gate whose requests the endpoint refuses as malformed has failed: a server must be able to do what the suite asks. One
that could not be asked at all is an error.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from sm70_profiles import qualification as q
from sm70_profiles.base import printable
from sm70_profiles.qualification import Bound, Gate, Metric, Verdict, decimal
from sm70_qualify.asking import Asker, misfit, response_format, tool
from sm70_qualify.client import ASKING_ERRORS, Answer, EndpointError, why
from sm70_qualify.health import REPLACEMENT, ailments
from sm70_qualify.threads import at_once
from sm70_qualify.timing import Timing, TokenSource, spread, timing

REFUSALS = (400, 422)
METRICS_SECONDS = 5.0
ENDINGS = ("stop", "length", "tool_calls")


@dataclass
class Circumstances:
    """What the gates of one run share."""

    asker: Asker
    floors: dict[str, str] = field(default_factory=dict)
    """Thresholds by gate's name: the command line's, else the profile's."""
    floor_source: dict[str, str] = field(default_factory=dict)
    max_model_len: int | None = None
    measured: dict[tuple[int, ...], list[Timing]] = field(default_factory=dict)
    """Runs of a load, which several performance gates share."""


def judge(check: q.AnyCheck, about: Circumstances) -> Gate:
    """Asks what a check asks. Never raises for what the endpoint does."""
    try:
        return JUDGES[type(check)](check, about)
    except ASKING_ERRORS as error:
        refused = isinstance(error, EndpointError) and error.status in REFUSALS
        verdict = Verdict.FAILED if refused else Verdict.ERROR
        return Gate(name=check.name, verdict=verdict, message=_cut(why(error)))


def _counted(check: q.Check, faults: Sequence[str], samples: int, unit: str, message: str = "") -> Gate:
    """A gate that counts what is wrong and admits none of it."""
    said = f"{faults[0]}" + (f" (and {len(faults) - 1} more)" if len(faults) > 1 else "") if faults else message
    return Gate(
        name=check.name,
        verdict=Verdict.FAILED if faults else Verdict.PASSED,
        measured=decimal(len(faults)),
        threshold="0",
        unit=unit,
        samples=samples,
        message=_cut(said),
    )


def _determinism(check: q.Determinism, about: Circumstances) -> Gate:
    faults: list[str] = []
    by_ids = True
    for prompt in check.prompts:
        first: Answer | None = None
        for number in range(check.repeats):
            answer = about.asker.ask(check.name, prompt, max_tokens=check.max_tokens, stream=number % 2 == 0)
            by_ids = by_ids and answer.token_ids is not None
            if first is None:
                first = answer
            elif difference := _difference(first, answer):
                faults.append(f"answer {number + 1} to {_quoted(prompt)}: {difference}")
    samples = len(check.prompts) * check.repeats
    return _counted(check, faults, samples, "answers", "compared by token ids" if by_ids else "compared by text")


def _difference(one: Answer, other: Answer) -> str | None:
    """What differs between two answers that should be equal."""
    if one.token_ids is not None and other.token_ids is not None and one.token_ids != other.token_ids:
        place = next(
            (place for place, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=False)) if a != b),
            min(len(one.token_ids), len(other.token_ids)),
        )
        return f"another token at {place} of {len(one.token_ids)}"
    for what, a, b in (
        ("text", one.text, other.text),
        ("reasoning", one.reasoning, other.reasoning),
        ("tool calls", one.tool_calls, other.tool_calls),
        ("finish reason", one.finish_reason, other.finish_reason),
        ("number of tokens", one.completion_tokens, other.completion_tokens),
    ):
        if a != b:
            return f"another {what}"
    return None


def _text_health(check: q.TextHealth, about: Circumstances) -> Gate:
    faults = []
    for prompt in check.prompts:
        found = ailments(about.asker.ask(check.name, prompt, max_tokens=check.max_tokens), check)
        if found:
            faults.append(f"answer to {_quoted(prompt)}: {'; '.join(found)}")
    return _counted(check, faults, len(check.prompts), "answers")


def _structured_output(check: q.StructuredOutput, about: Circumstances) -> Gate:
    faults = []
    for prompt in check.prompts:
        answer = about.asker.ask(
            check.name, prompt, max_tokens=check.max_tokens, response_format=response_format(check.members)
        )
        if wrong := _no_object(answer.text, check.members):
            faults.append(f"answer to {_quoted(prompt)}: {wrong}")
    return _counted(check, faults, len(check.prompts), "answers")


def _no_object(text: str, members: q.Members) -> str | None:
    try:
        return misfit(json.loads(text), members)
    except (ValueError, RecursionError):
        return "not JSON"


def _tool_use(check: q.ToolUse, about: Circumstances) -> Gate:
    faults = []
    tools = [tool(check.tool, check.description, check.members)]
    for prompt in check.prompts:
        for stream in (False, True):
            answer = about.asker.ask(
                check.name, prompt, max_tokens=check.max_tokens, stream=stream, tools=tools, tool_choice="auto"
            )
            if wrong := _no_call(answer, check.tool, check.members):
                faults.append(f"{'streamed' if stream else 'whole'} answer to {_quoted(prompt)}: {wrong}")
    return _counted(check, faults, 2 * len(check.prompts), "answers")


def _no_call(answer: Answer, name: str, members: q.Members) -> str | None:
    if len(answer.tool_calls) != 1:
        return f"{len(answer.tool_calls)} tool calls"
    call = answer.tool_calls[0]
    if call.name != name:
        return f"a call of {_quoted(call.name)}"
    if wrong := _no_object(call.arguments, members):
        return f"arguments: {wrong}"
    return None if answer.finish_reason == "tool_calls" else f"finish reason {answer.finish_reason}"


def _stream_parity(check: q.StreamParity, about: Circumstances) -> Gate:
    faults = []
    for prompt in check.prompts:
        whole, streamed = (
            about.asker.ask(check.name, prompt, max_tokens=check.max_tokens, stream=stream) for stream in (False, True)
        )
        if difference := _difference(whole, streamed):
            faults.append(f"the stream for {_quoted(prompt)}: {difference}")
    return _counted(check, faults, len(check.prompts), "prompts")


def _prefix_hit(check: q.PrefixHit, about: Circumstances) -> Gate:
    tokens = _fitting(check.prompt_tokens, 2, about)
    prompt = about.asker.prompts.make(tokens)
    about.asker.send(check.name, prompt, max_tokens=1)
    shares: list[float] = []
    source = "by the answers' usage"
    for _ in range(check.repeats):
        before = _cache_counters(about)
        answer = about.asker.send(check.name, prompt, max_tokens=1)
        length = answer.prompt_tokens or tokens
        if answer.cached_tokens is not None:
            shares.append(100 * answer.cached_tokens / length)
        elif (hits := _hits_since(before, length, about)) is not None:
            shares.append(100 * hits / length)
            source = "by the counters of /metrics"
    common: dict[str, Any] = {
        "name": check.name,
        "bound": Bound.AT_LEAST,
        "threshold": decimal(check.minimum_percent),
        "unit": "% of tokens",
        "samples": len(shares),
    }
    if not shares:
        return Gate(
            verdict=Verdict.INCONCLUSIVE,
            message="neither usage nor /metrics say how many tokens came from the cache",
            **common,
        )
    measured = decimal(min(shares))
    passed = Decimal(measured) >= check.minimum_percent
    return Gate(verdict=Verdict.PASSED if passed else Verdict.FAILED, measured=measured, message=source, **common)


def _cache_counters(about: Circumstances) -> dict[str, float] | None:
    """vLLM's counts of prompt tokens looked up and found."""
    found = counters(about.asker.endpoint.metrics(), "vllm:prefix_cache_queries", "vllm:prefix_cache_hits")
    return found if len(found) == 2 else None


def counters(text: str | None, *names: str) -> dict[str, float]:
    """Sums of these counters over their labels, in a text of /metrics; absent when there are none."""
    found: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text or ""):
            if family.name in names:
                found[family.name] = sum(
                    sample.value for sample in family.samples if not sample.name.endswith("_created")
                )
    except ValueError:
        return {}
    return found


def _hits_since(before: dict[str, float] | None, length: int, about: Circumstances) -> float | None:
    """Cached tokens of the request after `before`; waits until the counters have seen it."""
    if before is None:
        return None
    deadline = time.monotonic() + METRICS_SECONDS
    while True:
        after = _cache_counters(about)
        if after is None:
            return None
        looked = after["vllm:prefix_cache_queries"] - before["vllm:prefix_cache_queries"]
        if looked >= length:
            return min(length, after["vllm:prefix_cache_hits"] - before["vllm:prefix_cache_hits"])
        if time.monotonic() > deadline:
            return None
        time.sleep(0.1)


def _mixed_load(check: q.MixedLoad, about: Circumstances) -> Gate:
    kinds = [_whole, _streamed, _structured, _long]
    jobs = [
        (kinds[number % len(kinds)], check.prompts[number % len(check.prompts)]) for number in range(check.requests)
    ]
    prompt = about.asker.prompts.make(_fitting(512, check.max_tokens, about))

    def run(job: tuple[Callable[..., str | None], str]) -> tuple[str | None, bool]:
        kind, words = job
        try:
            return kind(check, about, words, prompt), True
        except ASKING_ERRORS as error:
            return why(error), False

    found = list(at_once(run, jobs, check.concurrency))
    faults = [fault for fault, _ in found if fault]
    if not any(answered for _, answered in found):
        return Gate(name=check.name, verdict=Verdict.ERROR, samples=len(found), message=_cut(faults[0]))
    return _counted(check, faults, len(found), "requests")


def _whole(check: q.MixedLoad, about: Circumstances, words: str, _prompt: object) -> str | None:
    return _bad_ending(about.asker.ask(check.name, words, max_tokens=check.max_tokens, stream=False))


def _streamed(check: q.MixedLoad, about: Circumstances, words: str, _prompt: object) -> str | None:
    return _bad_ending(about.asker.ask(check.name, words, max_tokens=check.max_tokens // 2 or 1))


def _structured(check: q.MixedLoad, about: Circumstances, words: str, _prompt: object) -> str | None:
    options = {"max_tokens": check.max_tokens, "response_format": response_format(check.members)}
    answer = about.asker.ask(check.name, words + " Answer in JSON.", stream=False, **options)
    if answer.finish_reason == "stop" and (wrong := _no_object(answer.text, check.members)):
        return f"structured answer: {wrong}"
    return _bad_ending(answer)


def _long(check: q.MixedLoad, about: Circumstances, _words: str, prompt: str | tuple[int, ...]) -> str | None:
    return _bad_ending(about.asker.send(check.name, prompt, max_tokens=check.max_tokens))


def _bad_ending(answer: Answer) -> str | None:
    if answer.finish_reason not in ENDINGS:
        return f"finish reason {answer.finish_reason}"
    if not answer.tokens:
        return "no token"
    return "characters that could not be decoded" if REPLACEMENT in answer.text.rstrip(REPLACEMENT) else None


def _right_answers(check: q.RightAnswers, about: Circumstances) -> Gate:
    faults = []
    for question in check.questions:
        options: dict[str, Any] = {}
        if question.tool is not None:
            options["tools"] = [tool(question.tool, question.prompt, question.members or {})]
            options["tool_choice"] = "auto"
        elif question.members is not None:
            options["response_format"] = response_format(question.members)
        answer = about.asker.ask(check.name, question.prompt, max_tokens=question.max_tokens, stream=False, **options)
        if wrong := _wrong(answer, question.expected):
            faults.append(f"answer to {_quoted(question.prompt)}: {wrong}")
    return _counted(check, faults, len(check.questions), "answers")


def _wrong(answer: Answer, expected: q.Expected) -> str | None:
    if expected.content is not None and answer.text != expected.content:
        return f"text {_quoted(answer.text)}"
    if expected.tool is not None:
        calls = [(call.name, _loaded(call.arguments)) for call in answer.tool_calls]
        if calls != [(expected.tool, expected.arguments)]:
            return f"tool calls {_quoted(str(calls))}"
    if expected.finish_reason is not None and answer.finish_reason != expected.finish_reason:
        return f"finish reason {answer.finish_reason}, not {expected.finish_reason}"
    if expected.completion_tokens is not None and answer.completion_tokens != expected.completion_tokens:
        return f"{answer.completion_tokens} tokens, not {expected.completion_tokens}"
    return None


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _performance(check: q.Performance, about: Circumstances) -> Gate:
    tokens = _fitting(check.prompt_tokens, check.output_tokens, about)
    load = (tokens, check.output_tokens, check.warm_up, check.runs)
    if load not in about.measured:
        about.measured[load] = _measure(check, tokens, about)
    values = [value for run in about.measured[load] if (value := _value(check.metric, run)) is not None]
    floor = about.floors.get(check.name, check.floor)
    common: dict[str, Any] = {
        "name": check.name,
        "bound": check.metric.bound,
        "threshold": floor,
        "unit": check.metric.unit,
        "samples": len(values),
    }
    found = spread(values)
    if found is None:
        return Gate(verdict=Verdict.INCONCLUSIVE, message="the answers hold too few tokens to measure a rate", **common)
    sources = {run.token_source for run in about.measured[load]}
    notes = [
        f"{_lengths(about.measured[load])} prompt tokens, floor of {about.floor_source.get(check.name, 'the suite')}",
        f"runs from {decimal(found.minimum, 2)} to {decimal(found.maximum, 2)}",
    ]
    if sources != {TokenSource.TOKEN_IDS}:
        notes.append(f"tokens counted by {' and '.join(sorted(sources))}")
    measured = decimal(found.p50)
    return Gate(
        verdict=_by_floor(
            [Decimal(decimal(value)) for value in values], Decimal(measured), Decimal(floor), check.metric
        ),
        measured=measured,
        message="; ".join(notes),
        **common,
    )


def _lengths(runs: Sequence[Timing]) -> str:
    """Prompt tokens of the runs by the server's usage."""
    found = sorted({run.prompt_tokens for run in runs if run.prompt_tokens is not None})
    if not found:
        return "an unknown number of"
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _by_floor(values: Sequence[Decimal], median: Decimal, floor: Decimal, metric: Metric) -> Verdict:
    def keeps(value: Decimal) -> bool:
        return value >= floor if metric.bound is Bound.AT_LEAST else value <= floor

    if keeps(median):
        return Verdict.PASSED
    return Verdict.INCONCLUSIVE if any(map(keeps, values)) else Verdict.FAILED


def _measure(check: q.Performance, tokens: int, about: Circumstances) -> list[Timing]:
    found = []
    for number in range(check.warm_up + check.runs):
        prompt = about.asker.prompts.make(tokens)
        answer = about.asker.send(
            check.name, prompt, max_tokens=check.output_tokens, ignore_eos=True, min_tokens=check.output_tokens
        )
        run = timing(answer)
        if run is not None and number >= check.warm_up:
            found.append(run)
    return found


def _value(metric: Metric, run: Timing) -> float | None:
    match metric:
        case Metric.PREFILL_RATE:
            return run.prefill_rate
        case Metric.DECODE_RATE:
            return run.decode_rate
        case Metric.FIRST_TOKEN:
            return 1000 * run.first_token_seconds


def _fitting(tokens: int, output: int, about: Circumstances) -> int:
    """The length of a prompt that the context of the server has room for."""
    if about.max_model_len is None:
        return tokens
    return max(1, min(tokens, about.max_model_len - output - 16))


def _quoted(text: str) -> str:
    return f"“{printable(' '.join(text.split()), 48)}”"


def _cut(text: str) -> str:
    return printable(" ".join(text.split()), 500)


JUDGES: dict[type[q.Check], Callable[[Any, Circumstances], Gate]] = {
    q.Determinism: _determinism,
    q.TextHealth: _text_health,
    q.StructuredOutput: _structured_output,
    q.ToolUse: _tool_use,
    q.StreamParity: _stream_parity,
    q.PrefixHit: _prefix_hit,
    q.MixedLoad: _mixed_load,
    q.RightAnswers: _right_answers,
    q.Performance: _performance,
}
