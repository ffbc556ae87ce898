"""What each engine flavour can do, as data: its options, KV types and features.

The resolver emits nothing that the table lacks. A table is read from the package when its flavour is first asked for.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from pydantic import Field

from sm70_profiles.base import Document
from sm70_profiles.facts import EngineFlavour, KvGroups
from sm70_profiles.reasons import Vocabulary
from sm70_profiles.settings import Dtype, KvCacheDtype


class Feature(Vocabulary):
    """What an engine may have beyond its options. The second word is the switch or option that a user would miss."""

    LOOKUP = "lookup", "VLLM_DFLASH2_LOOKUP"
    SPLIT_KV_VERIFY = "split_kv_verify", "VLLM_SPEC_DECODE_ATTN"
    EMBEDDING_IN_HOST_MEMORY = "embedding_in_host_memory", "VLLM_EMBED_UVA"
    PREFILL_ATTENTION = "prefill_attention", "VLLM_PREFILL_ATTN"
    INT8_ACTIVATIONS = "int8_activations", "VLLM_MARLIN_INPUT_DTYPE"
    INT8_LAYERS = "int8_layers", "VLLM_MARLIN_INT8_INCLUDE_RE"
    TOWER_OFFLOAD = "tower_offload", "VLLM_VISION_CPU_OFFLOAD_GB"
    KVARN = "kvarn", "--kv-cache-dtype kvarn_k4v2_g128"
    PTH_FLASH_ATTENTION = "pth_flash_attention", "--attention-backend CUSTOM"
    FA2_FP8 = "fa2_fp8", "FA2_FP8KV"
    WSL_PIN_MEMORY = "wsl_pin_memory", "VLLM_WSL2_ENABLE_PIN_MEMORY"
    PARTIAL_PREFIX_CACHE = "partial_prefix_cache", "--partial-prefix-cache"
    CUSTOM_ALL_REDUCE = "custom_all_reduce", "--disable-custom-all-reduce"


class EngineTable(Document):
    """One engine flavour."""

    flavour: EngineFlavour
    title: str
    options: frozenset[str]
    kv_cache_dtypes: frozenset[KvCacheDtype]
    features: frozenset[Feature] = frozenset()
    degrades: frozenset[Feature] = frozenset()
    """Features that it lacks and serves without, only slower; any other missing feature is a refusal."""
    backends: dict[str, str] = Field(default_factory=dict)
    """Attention backends that it registers under another name."""
    spellings: dict[str, str] = Field(default_factory=dict)
    environment: dict[str, str] = Field(default_factory=dict)
    dtypes: frozenset[Dtype] = frozenset(Dtype)
    speculation_dtypes: frozenset[Dtype] = frozenset(Dtype)
    kv_groups: KvGroups

    def spelling(self, option: str) -> str:
        """How this engine spells an option of stock vLLM."""
        return self.spellings.get(option, option)

    def has_option(self, option: str) -> bool:
        """Whether the option may stand on the command line. `--config.member` counts as `--config`."""
        return option.partition(".")[0] in self.options


def engine_table(flavour: EngineFlavour) -> EngineTable:
    """The table of a flavour."""
    return _tables()[flavour]


@cache
def _tables() -> dict[EngineFlavour, EngineTable]:
    folder = files(__package__).joinpath("data/engines")
    document: dict[str, dict[str, Any]] = tomllib.loads(folder.joinpath("engines.toml").read_text("utf-8"))
    tables = {}
    for name, table in document.items():
        options = folder.joinpath(f"{table.pop('options')}.txt").read_text("utf-8").split()
        known = frozenset(options) | frozenset(table.pop("extraOptions", ()))
        tables[EngineFlavour(name)] = EngineTable.model_validate({"flavour": name, "options": known, **table})
    return tables
