"""Prompts of an exact number of tokens, each one new, so that no cache answers in the model's place.

Where the server tokenizes (`/tokenize` of vLLM) a prompt is a list of token ids and exact by construction. Elsewhere it
is text whose length is found by asking: the server's usage says how many tokens it was.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sm70_qualify.client import Answer, Endpoint, EndpointError

PASSAGE = """\
The harbour master kept two books. In the first he wrote what arrived: the name of the ship, its flag, the hour, \
the weight of its cargo, and whether the crew had been ill on the way. In the second he wrote what he had not \
understood. A lantern seen twice in one night on the far side of the breakwater. A captain who paid in coins of \
a country that no longer minted any. A cat that went ashore from one vessel and sailed off on another as though \
it had changed trains. When he retired, the council asked for the first book only, bound it in leather and put \
it on a shelf where nobody has opened it since. The second book went to his granddaughter, who studied \
engineering and read it like a list of faults. She wrote to the lighthouse service about the lantern, to a \
museum about the coins, and to nobody about the cat. Two of the three letters were answered. The lantern had \
been a mirror in the window of a closed hotel, turned by the wind; the coins were worth more than the ship. She \
noted both answers beside the questions, in green ink, with the date and the source, and drew a line under each. \
Then she began a second book of her own. \
"""
NONCE_WORDS = (
    *("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven"),
    *("inlet", "jetty", "knoll", "ledge", "maple", "north", "ocean", "pearl"),
)
MAX_PROBES = 10


@dataclass(frozen=True)
class Calibration:
    """How many words of the passage, and how many fillers behind them, make a prompt of so many tokens."""

    words: int
    fillers: int
    tokens: int


class Prompts:
    """Makes prompts for one endpoint. The same seed makes the same prompts."""

    def __init__(self, endpoint: Endpoint, *, seed: int = 0, chat: bool = False, passage: str | None = None) -> None:
        self._endpoint = endpoint
        self._random = random.Random(seed)  # noqa: S311  (prompts need no secrecy)
        self._chat = chat
        self._words = (passage or PASSAGE).split()
        self._ids: tuple[int, ...] | None = None if chat else endpoint.tokenize(passage or PASSAGE)
        self._nonces: tuple[int, ...] = tuple(sorted(set(self._ids or ())))
        self._calibrated: dict[int, Calibration] = {}

    @property
    def exact(self) -> bool:
        """Whether prompts are token ids, and exact by construction."""
        return self._ids is not None

    def make(self, tokens: int) -> str | tuple[int, ...]:
        """A new prompt of so many tokens: ids, or text where the server does not tokenize.

        Text that cannot be made exact is a little shorter; the answer's usage tells.
        """
        if self._ids is None:
            return self._text(self._calibration(tokens))
        nonce = self._random.choices(self._nonces, k=min(16, tokens))
        passages = -(-tokens // len(self._ids))
        return (*nonce, *(self._ids * passages))[:tokens]

    def send(self, prompt: str | tuple[int, ...], **options: object) -> Answer:
        """Asks with a prompt by the interface that it was made for."""
        if self._chat:
            assert isinstance(prompt, str)
            return self._endpoint.ask(prompt, **options)  # type: ignore[arg-type]
        return self._endpoint.complete(prompt, **options)  # type: ignore[arg-type]

    def _text(self, of: Calibration) -> str:
        # The same words in another order: as many tokens, and no prefix in common.
        nonce = self._random.sample(NONCE_WORDS, len(NONCE_WORDS))
        return _text(self._words, nonce, of.words, of.fillers)

    def _calibration(self, tokens: int) -> Calibration:
        if tokens not in self._calibrated:
            self._calibrated[tokens] = calibrate(tokens, self._words, self._usage)
        return self._calibrated[tokens]

    def _usage(self, text: str) -> int:
        answer = self.send(text, max_tokens=1, stream=False)
        if answer.prompt_tokens is None:
            raise EndpointError("prompts of a known length need a server that tokenizes or reports its usage")
        return answer.prompt_tokens


def _text(passage: Sequence[str], nonce: Sequence[str], words: int, fillers: int) -> str:
    body = (list(passage) * (-(-words // len(passage))))[:words]
    return "go " + " ".join([*nonce, *body]) + " a" * fillers


def calibrate(tokens: int, passage: Sequence[str], count: Callable[[str], int]) -> Calibration:
    """Finds a text of so many tokens by asking how long texts are.

    Returns the nearest one that is not longer after `MAX_PROBES` questions. Raises EndpointError when even the shortest
    is longer.
    """
    best: Calibration | None = None
    words, fillers = int(tokens * 0.7), 0
    for _ in range(MAX_PROBES):
        found = count(_text(passage, NONCE_WORDS, words, fillers))
        if found <= tokens and (best is None or found > best.tokens):
            best = Calibration(words, fillers, found)
        missing = tokens - found
        if missing == 0:
            break
        if 0 < missing <= 64 or (missing < 0 and fillers >= -missing):
            fillers += missing  # A filler is one token almost everywhere; asking again tells.
        elif words == 0 and missing < 0:
            break
        else:
            fillers = 0
            words = max(0, words + int((missing - 8) * max(1, words) / max(found, 1)))
    if best is None:
        raise EndpointError(f"no prompt of {tokens} tokens can be made: the shortest is longer")
    return best
