"""One level of load: so many requests of so many tokens, so many at a time, and what the server counted meanwhile."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from sm70_qualify.client import ASKING_ERRORS, Answer, Endpoint, EndpointError, why
from sm70_qualify.prompts import Prompts
from sm70_qualify.threads import at_once
from sm70_qualify.timing import Timing, timing

VLLM_ONLY = ("return_token_ids", "ignore_eos", "min_tokens", "top_k")
"""Members of a request that OpenAI's own interface does not have."""
COUNTERS = {
    "vllm:spec_decode_num_drafts": "num_drafts",
    "vllm:spec_decode_num_draft_tokens": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "num_accepted_tokens",
}
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
POSITIONS = 64


@dataclass(frozen=True)
class Level:
    """What is asked, and how often."""

    prompt_tokens: int
    output_tokens: int
    concurrency: int = 1
    requests: int = 8
    warm_up: int = 1


@dataclass(frozen=True)
class Sample:
    """One request: its times, or what went wrong."""

    timing: Timing | None
    finish_reason: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Rounds:
    """What the server's speculation did during a level, from the counters of /metrics."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_tokens_per_pos: tuple[int, ...] = ()

    @property
    def draft_acceptance_rate(self) -> float | None:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens a round, with the one that the target adds itself."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None


@dataclass(frozen=True)
class Measured:
    """A finished level."""

    level: Level
    samples: tuple[Sample, ...]
    wall_seconds: float
    exact_prompts: bool
    rounds: Rounds | None = None
    """None where the server does not speculate, or does not say."""

    @property
    def timings(self) -> list[Timing]:
        return [sample.timing for sample in self.samples if sample.timing is not None]

    @property
    def errors(self) -> Counter[str]:
        return Counter(sample.error for sample in self.samples if sample.error is not None)


@dataclass
class Sender:
    """Sends requests to one endpoint, without what it was found to refuse."""

    endpoint: Endpoint
    prompts: Prompts
    options: dict[str, Any] = field(default_factory=dict)
    refused: tuple[str, ...] = ()

    def negotiate(self, prompt_tokens: int) -> None:
        """Asks once with everything; an endpoint that refuses vLLM's members is asked without them from then on.

        Raises one of ASKING_ERRORS when it refuses that too.
        """
        prompt = self.prompts.make(prompt_tokens)
        try:
            self.send(prompt, 2)
        except EndpointError as error:
            found = tuple(name for name in VLLM_ONLY if name in self._options(2))
            if error.status not in (400, 422) or not found:
                raise
            self.refused = found
            self.send(prompt, 2)

    def send(self, prompt: str | tuple[int, ...], output_tokens: int) -> Answer:
        return self.prompts.send(prompt, max_tokens=output_tokens, **self._options(output_tokens))

    def _options(self, output_tokens: int) -> dict[str, Any]:
        options = {"return_token_ids": True, **self.options}
        if options.get("ignore_eos"):
            options["min_tokens"] = output_tokens
        return {name: value for name, value in options.items() if name not in self.refused}


def measure(sender: Sender, level: Level, done: Callable[[Sample], None] = lambda _sample: None) -> Measured:
    """Runs one level. What single requests run into is counted, not raised."""

    def one(prompt: str | tuple[int, ...]) -> Sample:
        try:
            answer = sender.send(prompt, level.output_tokens)
        except ASKING_ERRORS as error:
            return Sample(None, error=why(error))
        found = timing(answer)
        return Sample(found, answer.finish_reason, None if found else "no token came")

    for _ in range(level.warm_up):
        one(sender.prompts.make(level.prompt_tokens))
    prompts = [sender.prompts.make(level.prompt_tokens) for _ in range(level.requests)]
    before = speculation(sender.endpoint.metrics())
    start = time.perf_counter()
    samples = []
    for sample in at_once(one, prompts, level.concurrency):
        samples.append(sample)
        done(sample)
    wall = time.perf_counter() - start
    after = speculation(sender.endpoint.metrics())
    return Measured(level, tuple(samples), wall, sender.prompts.exact, _moved(before, after))


def speculation(text: str | None) -> Rounds | None:
    """The counters of speculation in a text of /metrics, over all engines; None where there are none."""
    sums: Counter[str] = Counter()
    positions: Counter[int] = Counter()
    try:
        for family in text_string_to_metric_families(text or ""):
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                if family.name in COUNTERS:
                    sums[COUNTERS[family.name]] += int(sample.value)
                elif family.name == PER_POSITION:
                    positions[_position(sample.labels)] += int(sample.value)
    except (ValueError, OverflowError):
        return None
    if len(sums) < len(COUNTERS):
        return None
    width = max((place for place in positions if place < POSITIONS), default=-1) + 1
    return Rounds(**sums, accepted_tokens_per_pos=tuple(positions[place] for place in range(width)))


def _position(labels: Mapping[str, str]) -> int:
    text = labels.get("position", "")
    return int(text) if text.isdecimal() and len(text) < 4 else POSITIONS


def _moved(before: Rounds | None, after: Rounds | None) -> Rounds | None:
    """What was counted between two looks; None when nothing was, or a counter went back (the server restarted)."""
    if before is None or after is None or after.num_drafts <= before.num_drafts:
        return None
    earlier = (*before.accepted_tokens_per_pos, *[0] * POSITIONS)
    return Rounds(
        after.num_drafts - before.num_drafts,
        after.num_draft_tokens - before.num_draft_tokens,
        after.num_accepted_tokens - before.num_accepted_tokens,
        tuple(now - then for now, then in zip(after.accepted_tokens_per_pos, earlier, strict=False)),
    )
