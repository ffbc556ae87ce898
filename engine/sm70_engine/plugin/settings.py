"""What this engine needs vLLM to be set to on compute capability 7.0, as one typed object.

vLLM's own defaults are made for newer GPUs. The object is part of the compile-cache key (`key`): code that was compiled
under other settings is not used again. Users change a value by a variable of ours (`SM70_...`); a variable of vLLM that
is already set is left alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass, fields

PREFIX = "SM70_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


class SettingsError(ValueError):
    """A variable holds a value that it cannot have."""


@dataclass(frozen=True)
class EngineSettings:
    """Each field is read from the variable `SM70_` and its name in capitals."""

    pretend: bool = False
    """Serve on a GPU of compute capability 8.x or 9.x as if it were 7.0: for tests on such machines."""
    dtype: str = "half"
    """Compute type of models whose checkpoint leaves the choice; 7.0 has no bfloat16."""
    flashinfer_sampler: bool = False
    """vLLM's sampler imports FlashInfer before it looks at the GPU."""
    prune_autotune: bool = True
    """One configuration for each autotuned Triton kernel: a full sweep is minutes of compiling at the first start."""
    shutdown_seconds: int = 5
    """vLLM kills its workers at once when the timeout is 0; they need a moment to report."""
    reload_compiled_graphs: bool = False
    """Loading whole saved graphs (AOT) instead of the compiled subgraphs, which are reused either way."""

    gated_swiglu: bool = True
    """Gate and up of NVFP4 MLPs in one launch with their activation; compiled graphs differ by it."""

    def environment(self) -> dict[str, str]:
        """The variables of vLLM that say the same to every process of the server."""
        return {
            "VLLM_USE_FLASHINFER_SAMPLER": str(int(self.flashinfer_sampler)),
            "VLLM_USE_AOT_COMPILE": str(int(self.reload_compiled_graphs)),
        }

    def apply(self, environment: MutableMapping[str, str]) -> None:
        """Sets what is not set yet. `VLLM_DISABLE_COMPILE_CACHE` is not touched: the user's word stands."""
        for name, value in self.environment().items():
            environment.setdefault(name, value)

    def key(self) -> str:
        """16 hexadecimal digits: what code was compiled under."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def read_settings(environment: Mapping[str, str]) -> EngineSettings:
    """The settings of a process. Raises `SettingsError` that names every wrong variable."""
    values: dict[str, object] = {}
    wrong = []
    for field in fields(EngineSettings):
        variable = PREFIX + field.name.upper()
        text = environment.get(variable)
        if text is None:
            continue
        try:
            values[field.name] = _parse(text, field.default)
        except ValueError as error:
            wrong.append(f"{variable} must be {error}, found `{text[:40]}`")
    if wrong:
        raise SettingsError("; ".join(wrong))
    return EngineSettings(**values)  # type: ignore[arg-type]


def _parse(text: str, default: object) -> object:
    word = text.strip().lower()
    if isinstance(default, bool):
        if word not in (*_TRUE, *_FALSE):
            raise ValueError("0 or 1")
        return word in _TRUE
    if isinstance(default, int):
        if not word.isdigit() or not 1 <= int(word) <= 600:
            raise ValueError("a whole number from 1 to 600")
        return int(word)
    if word not in ("half", "float16", "float32"):
        raise ValueError("half, float16 or float32")
    return word
