"""`sm70-bench`: measures any OpenAI-compatible endpoint. See docs/operations/benchmarking.md."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sm70_profiles.base import printable
from sm70_qualify import inputs
from sm70_qualify.bench.load import Level, Sender, measure
from sm70_qualify.bench.plot import plot, require_matplotlib
from sm70_qualify.bench.result import BenchResult, Distribution, LevelResult, Sampling, level_result
from sm70_qualify.client import ASKING_ERRORS, Endpoint, why
from sm70_qualify.inputs import USAGE_STATUS, UsageError
from sm70_qualify.prompts import Prompts
from sm70_qualify.run import now, tool_version

MAX_PROMPT = 262_144


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(
        prog="sm70-bench", allow_abbrev=False, description="Measures a model server by the tokens that it returns."
    )
    whole.add_argument("--url", required=True, help="root of the server, without /v1")
    whole.add_argument("--model", metavar="NAME", help="served name; default: the only one")
    whole.add_argument(
        "--prompt-tokens", default="1K", metavar="N,N…", help="lengths of prompts, 1K to 256K (%(default)s)"
    )
    whole.add_argument("--output-tokens", type=int, default=128, metavar="N", help="(%(default)s)")
    whole.add_argument("--concurrency", default="1", metavar="N,N…", help="requests at a time (%(default)s)")
    whole.add_argument(
        "--requests", type=int, metavar="N", help="measured requests a level (8, or twice the concurrency)"
    )
    whole.add_argument("--warm-up", type=int, default=1, metavar="N", help="requests before those (%(default)s)")
    whole.add_argument("--temperature", type=float, default=0.0, help="(%(default)s)")
    whole.add_argument("--top-p", type=float)
    whole.add_argument("--top-k", type=int)
    whole.add_argument("--seed", type=int, default=0, help="of prompts and sampling (%(default)s)")
    whole.add_argument("--natural-stop", action="store_true", help="let answers end by themselves (else ignore_eos)")
    whole.add_argument("--chat", action="store_true", help="ask /v1/chat/completions, with text")
    whole.add_argument("--prompt-file", type=Path, metavar="FILE", help="text to make prompts of")
    whole.add_argument("--label", help="what the result is of; goes into the file")
    whole.add_argument("--out", type=Path, metavar="FILE", help="where the result goes as JSON")
    whole.add_argument("--plot", type=Path, metavar="FILE", help="a chart as PNG (extra `plots`)")
    whole.add_argument("--json", action="store_true", help="the result on the standard output instead of the table")
    whole.add_argument("--api-key-file", type=Path, metavar="FILE", help=f"else ${inputs.KEY_VARIABLE}")
    whole.add_argument("--timeout", type=float, default=1800, metavar="SECONDS", help="of one request (%(default)s)")
    return whole


def numbers(text: str, option: str, most: int) -> list[int]:
    """`1K,4K` or `1,2,8`: whole numbers, K of 1024. Raises UsageError."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"([1-9][0-9]{0,6})([kK]?)", part.strip())
        value = int(match[1]) * (1024 if match[2] else 1) if match else 0
        if not 1 <= value <= most:
            raise UsageError(f"`{option}` must be numbers from 1 to {most}, found `{printable(part, 40)}`")
        found.append(value)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0 all answered, 1 requests failed, 3 nothing could be asked, 64 usage."""
    try:
        options = parser().parse_args(arguments)
    except SystemExit as end:
        return USAGE_STATUS if end.code else 0
    try:
        return _run(options)
    except UsageError as error:
        print(f"sm70-bench: {error}", file=sys.stderr)
        return USAGE_STATUS
    except ASKING_ERRORS as error:
        print(f"sm70-bench: {why(error)}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("sm70-bench: stopped; nothing is written", file=sys.stderr, flush=True)
        os._exit(130)  # Threads still wait for answers that nobody needs.


def _levels(options: argparse.Namespace) -> list[Level]:
    if not 1 <= options.output_tokens <= MAX_PROMPT or options.warm_up < 0 or (options.requests or 1) < 1:
        raise UsageError("`--output-tokens` and `--requests` must be at least 1, `--warm-up` at least 0")
    return [
        Level(length, options.output_tokens, concurrency, options.requests or max(8, 2 * concurrency), options.warm_up)
        for length in numbers(options.prompt_tokens, "--prompt-tokens", MAX_PROMPT)
        for concurrency in numbers(options.concurrency, "--concurrency", 1024)
    ]


def _sampling(options: argparse.Namespace) -> Sampling:
    return Sampling(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        ignore_eos=not options.natural_stop,
    )


def _options(sampling: Sampling) -> dict[str, Any]:
    """The members of a request; what is None or off is left out, so that endpoints that lack it can be measured."""
    members = sampling.model_dump(exclude_none=True)
    if not members["ignore_eos"]:
        del members["ignore_eos"]
    return members


def _run(options: argparse.Namespace) -> int:
    levels, sampling = _levels(options), _sampling(options)
    url, key = inputs.root(options.url), inputs.api_key(options.api_key_file)
    passage = None if options.prompt_file is None else inputs.read(options.prompt_file).decode(errors="replace")
    if passage is not None and not passage.strip():
        raise UsageError(f"`{options.prompt_file}` must hold text")
    if options.plot is not None:
        require_matplotlib()
    started = now()
    endpoint = Endpoint(
        url, model=options.model or "", api_key=key, timeout_seconds=options.timeout, total_seconds=options.timeout
    )
    with endpoint:
        if options.model is None:
            endpoint.model = inputs.only_model(endpoint)
        prompts = Prompts(endpoint, seed=options.seed, chat=options.chat, passage=passage)
        sender = Sender(endpoint, prompts, _options(sampling))
        sender.negotiate(min(level.prompt_tokens for level in levels))
        results = _measure_all(sender, levels, sampling)
    result = BenchResult(
        tool_version=tool_version(),
        started_at=started,
        finished_at=now(),
        url=url,
        model=endpoint.model,
        label=options.label,
        refused_options=sender.refused,
        levels=tuple(results),
    )
    _leave(result, options)
    return 1 if any(level.failed for level in results) else 0


def _measure_all(sender: Sender, levels: Sequence[Level], sampling: Sampling) -> list[LevelResult]:
    results = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for level in levels:
            what = f"{level.prompt_tokens} prompt tokens, {level.concurrency} at a time"
            task = progress.add_task(what, total=level.requests)
            measured = measure(sender, level, lambda _sample, task=task: progress.advance(task))  # type: ignore[misc]
            results.append(level_result(measured, sampling))
    return results


def _leave(result: BenchResult, options: argparse.Namespace) -> None:
    text = result.model_dump_json(indent=2) + "\n"
    try:
        if options.out is not None:
            options.out.write_text(text)
        if options.plot is not None:
            plot(result, options.plot)
    except OSError as error:
        print(f"sm70-bench: `{error.filename}` cannot be written: {error.strerror}", file=sys.stderr)
    if options.json:
        print(text, end="")
    else:
        _show(result, Console())


HEADERS = ("prompt", "×", "n", "TTFT", "p99", "prefill", "TPOT", "p99", "decode", "total", "tok/chunk", "tok/round")


def _show(result: BenchResult, console: Console) -> None:
    caption = "times in ms (median, p99), rates in tokens/s; × requests at a time, n completed"
    title = f"{result.model} at {result.url}"
    table = Table(title=title, caption=caption, box=box.SIMPLE, title_justify="left", caption_justify="left", padding=0)
    for name in HEADERS:
        table.add_column(name, justify="right", no_wrap=True)
    for level in result.levels:
        table.add_row(*_cells(level))
    console.print(table)
    for note in _notes(result):
        console.print(note, style="yellow", highlight=False)


def _cells(level: LevelResult) -> list[str]:
    speculation = level.spec_decode
    return [
        str(level.contract.input_len),
        str(level.contract.concurrency),
        str(level.completed),
        _quantile(level.ttft_ms, "p50"),
        _quantile(level.ttft_ms, "p99"),
        _quantile(level.prefill_tokens_per_second, "p50"),
        _quantile(level.tpot_ms, "p50"),
        _quantile(level.tpot_ms, "p99"),
        _quantile(level.decode_tokens_per_second, "p50"),
        _figure(level.output_tokens_per_second),
        _figure(level.tokens_per_chunk),
        _figure(speculation.mean_acceptance_length if speculation else None),
    ]


def _notes(result: BenchResult) -> list[str]:
    notes = []
    for level in result.levels:
        where = f"{level.contract.input_len} prompt tokens, {level.contract.concurrency} at a time: "
        notes += [f"{where}{count} failed: {error}" for error, count in level.errors.items()]
        if not level.contract.input_len_exact and level.completed:
            found = level.contract.input_len_found
            said = f"from {found[0]} to {found[1]}" if found else "not said by the server"
            notes.append(f"{where}prompt tokens {said}")
        if level.token_source not in (("token ids",), ()):
            notes.append(f"{where}tokens counted by {', '.join(level.token_source)}, not by returned ids")
    if result.refused_options:
        notes.append(f"the endpoint refuses {', '.join(result.refused_options)}; it was asked without")
    return notes


def _quantile(found: Distribution | None, which: Literal["p50", "p99"]) -> str:
    return _figure(None if found is None else getattr(found, which))


def _figure(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"


if __name__ == "__main__":
    sys.exit(main())
