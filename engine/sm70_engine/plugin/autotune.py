"""One configuration for each autotuned Triton kernel, instead of compiling and timing all of them.

vLLM's gated delta net tries about a hundred; on compute capability 7.0 each compiles for seconds. Which one is taken
depends on the configurations alone, never on timing, so every start and every rank runs the same code.
"""

from __future__ import annotations

from typing import Any

_pruned: dict[str, int] = {}
_WARPS = 4


def _cost(config: Any) -> tuple[int, int, int]:
    """Nearest to four warps, then the smallest tile, then the fewest stages."""
    tile = 1
    for value in config.kwargs.values():
        if isinstance(value, int) and value > 0:
            tile *= value
    return abs(config.num_warps - _WARPS), tile, config.num_stages


def choose(configs: list[Any]) -> Any:
    """The configuration that is compiled."""
    return min(configs, key=_cost)


def prune() -> None:
    """Replaces `Autotuner.run`; a second call changes nothing."""
    from triton.runtime.autotuner import Autotuner

    if getattr(Autotuner.run, "sm70_pruned", False):
        return
    original = Autotuner.run

    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        if len(self.configs) > 1:
            _pruned[str(getattr(self.base_fn, "__name__", self.base_fn))] = len(self.configs)
            self.configs = [choose(self.configs)]
        return original(self, *arguments, **options)

    run.sm70_pruned = True  # type: ignore[attr-defined]
    Autotuner.run = run


def pruned() -> dict[str, int]:
    """By kernel, how many configurations were there."""
    return dict(_pruned)
