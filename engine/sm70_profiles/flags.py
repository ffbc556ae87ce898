"""Settings as options and variables of `vllm serve`: one table for both directions.

Rendering turns settings into options; `OWNED_FLAGS` says which field owns an option, so that `extraArgs` cannot set it
a second time; `typed.py` reads options back into settings. Nothing is emitted that the engine's table lacks: it is
returned as `Missing` instead, and the resolver decides whether that refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sm70_profiles.base import Document, quantity_bytes
from sm70_profiles.engines import EngineTable, Feature
from sm70_profiles.identity import compact_json
from sm70_profiles.settings import (
    KvCacheDtype,
    LongContextKernel,
    Overrides,
    RequestMetrics,
    SpeculationMethod,
)

Arguments = tuple[str, ...]


@dataclass(frozen=True)
class Flag:
    """A vLLM option that a typed setting owns. `setting` is the dotted path of the attribute in `Overrides`.

    `neutral` is the value that means what the engine does without the option: it needs no option that the engine lacks.
    """

    option: str
    setting: str
    arguments: Callable[[Any], Arguments]
    aliases: tuple[str, ...] = ()
    neutral: Any = None


@dataclass(frozen=True)
class Variable:
    """A variable of the engine's environment that a typed setting owns, and the feature that reads it."""

    name: str
    setting: str
    value: Callable[[Any], str | None]
    feature: Feature
    only_if: str | None = None
    """Another setting that must be on for this one to mean anything."""


@dataclass(frozen=True)
class Missing:
    """What a setting needs and the engine lacks. `feature` is set when it is a feature rather than an option."""

    setting: str
    needs: str
    feature: Feature | None = None


def _value(option: str, convert: Callable[[Any], str] = str) -> Callable[[Any], Arguments]:
    return lambda value: (option, convert(value))


def _switch(on: str | None, off: str | None = None) -> Callable[[Any], Arguments]:
    return lambda value: tuple(option for option in ((on if value else off),) if option is not None)


def percent(value: int) -> str:
    """A share as the engine reads it: 86 is `0.86`, 100 is `1.00`."""
    return f"{value // 100}.{value % 100:02d}"


def _bytes(option: str) -> Callable[[Any], Arguments]:
    return lambda quantity: (option, str(quantity_bytes(quantity))) if quantity_bytes(quantity) else ()


def _metrics(value: RequestMetrics) -> Arguments:
    if value is RequestMetrics.OFF:
        return ()
    detail = "detailed" if value is RequestMetrics.DETAILED else "summary"
    options = ("--enable-per-request-metrics", "--enable-force-include-usage")
    return (*options, "--per-request-spec-decode-metrics", detail)


def _retention(value: Any) -> Arguments:
    interval = "None" if value.dense else str(value.interval_tokens)
    return ("--prefix-cache-retention-interval", interval)


def _sampling(value: Any) -> Arguments:
    # A whole percent over 100 is the double nearest to two decimals, which is how it is written.
    numbers = {
        "temperature": None if value.temperature_percent is None else value.temperature_percent / 100,
        "top_p": None if value.top_p_percent is None else value.top_p_percent / 100,
        "top_k": value.top_k,
    }
    config = {key: number for key, number in numbers.items() if number is not None}
    return ("--override-generation-config", compact_json(config)) if config else ()


FLAGS = (
    Flag("--dtype", "dtype", _value("--dtype")),
    Flag("--attention-backend", "attention_backend", _value("--attention-backend")),
    Flag("--kv-cache-dtype", "kv_cache_dtype", _value("--kv-cache-dtype")),
    Flag("--max-model-len", "max_model_len", _value("--max-model-len")),
    Flag("--max-num-seqs", "max_num_seqs", _value("--max-num-seqs")),
    Flag("--max-num-batched-tokens", "max_num_batched_tokens", _value("--max-num-batched-tokens")),
    Flag(
        "--gpu-memory-utilization",
        "gpu_memory_utilization_percent",
        _value("--gpu-memory-utilization", percent),
        ("--device-memory-utilization",),
    ),
    Flag(
        "--kv-cache-memory-bytes",
        "kv_cache_memory_bytes",
        _bytes("--kv-cache-memory-bytes"),
        ("--kv-cache-memory",),
    ),
    Flag("--block-size", "block_size", _value("--block-size")),
    Flag("--mamba-block-size", "mamba_block_size", _value("--mamba-block-size")),
    Flag("--tensor-parallel-size", "tensor_parallel_size", _value("--tensor-parallel-size"), ("-tp",)),
    Flag("--pipeline-parallel-size", "pipeline_parallel_size", _value("--pipeline-parallel-size"), ("-pp",)),
    Flag("--enforce-eager", "enforce_eager", _switch("--enforce-eager"), ("--no-enforce-eager",)),
    Flag(
        "--enable-prefix-caching",
        "prefix_caching",
        _switch("--enable-prefix-caching", "--no-enable-prefix-caching"),
        ("--no-enable-prefix-caching",),
    ),
    Flag("--mamba-cache-mode", "mamba_cache_mode", _value("--mamba-cache-mode")),
    Flag("--mamba-ssm-cache-dtype", "mamba_ssm_cache_dtype", _value("--mamba-ssm-cache-dtype")),
    Flag("--prefix-match-unit", "prefix_match_unit", _value("--prefix-match-unit")),
    Flag("--prefix-cache-retention-interval", "prefix_retention", _retention),
    Flag(
        "--partial-prefix-cache",
        "partial_prefix_cache",
        _switch("--partial-prefix-cache", "--no-partial-prefix-cache"),
        ("--no-partial-prefix-cache",),
        neutral=False,
    ),
    Flag(
        "--mixed-prefill-step-latency-ms",
        "mixed_prefill_step_latency_milliseconds",
        lambda bound: ("--mixed-prefill-step-latency-ms", str(bound)) if bound else (),
        neutral=0,
    ),
    Flag(
        "--async-scheduling",
        "async_scheduling",
        _switch("--async-scheduling", "--no-async-scheduling"),
        ("--no-async-scheduling",),
    ),
    Flag(
        "--disable-custom-all-reduce",
        "custom_all_reduce",
        _switch(None, "--disable-custom-all-reduce"),
        ("--no-disable-custom-all-reduce",),
    ),
    Flag(
        "--kv-offloading-size",
        "kv_offload.size_gib",
        lambda size: ("--kv-offloading-size", str(size)) if size else (),
    ),
    Flag("--api-server-count", "api_server_count", _value("--api-server-count"), ("-asc",)),
    Flag("--trust-remote-code", "trust_remote_code", _switch("--trust-remote-code"), ("--no-trust-remote-code",)),
    Flag(
        "--language-model-only", "vision.enabled", _switch(None, "--language-model-only"), ("--no-language-model-only",)
    ),
    Flag("--reasoning-parser", "reasoning_parser", _value("--reasoning-parser")),
    Flag(
        "--enable-prompt-tokens-details",
        "prompt_tokens_details",
        _switch("--enable-prompt-tokens-details"),
        ("--no-enable-prompt-tokens-details",),
    ),
    Flag(
        "--enable-per-request-metrics",
        "request_metrics",
        _metrics,
        (
            "--no-enable-per-request-metrics",
            "--enable-force-include-usage",
            "--no-enable-force-include-usage",
            "--per-request-spec-decode-metrics",
        ),
    ),
    Flag("--override-generation-config", "sampling", _sampling),
    Flag(
        "--default-chat-template-kwargs",
        "thinking",
        _value("--default-chat-template-kwargs", lambda on: compact_json({"enable_thinking": on})),
    ),
    Flag(
        "--sse-keep-alive-interval",
        "sse_keep_alive_seconds",
        lambda seconds: () if seconds < 0 else ("--sse-keep-alive-interval", str(seconds)),
        neutral=0,
    ),
)
"""Settings with an option of their own, in the order in which they are written."""


def _flag(value: bool) -> str:
    return "1" if value else "0"


def _only(on: str) -> Callable[[Any], str | None]:
    return lambda value: on if value else None


VARIABLES = (
    Variable("VLLM_DFLASH2_LOOKUP", "speculation.lookup", _flag, Feature.LOOKUP),
    Variable("VLLM_DFLASH2_LOOKUP_ADAPTIVE", "speculation.lookup_adaptive", _flag, Feature.LOOKUP),
    Variable(
        "FA2_FP8KV",
        "single_gpu.long_context_kernel",
        lambda kernel: "1" if kernel is LongContextKernel.FA2_FP8 else None,
        Feature.FA2_FP8,
    ),
    Variable("VLLM_SPEC_DECODE_ATTN", "single_gpu.split_kv_verify", _flag, Feature.SPLIT_KV_VERIFY),
    Variable("VLLM_SPEC_DECODE_ATTN_QMAX", "single_gpu.split_kv_max_queries", str, Feature.SPLIT_KV_VERIFY),
    Variable("VLLM_MARLIN_INPUT_DTYPE", "single_gpu.int8_activations", _only("int8"), Feature.INT8_ACTIVATIONS),
    Variable(
        "VLLM_MARLIN_INT8_INCLUDE_RE",
        "single_gpu.int8_layers",
        "|".join,
        Feature.INT8_LAYERS,
        "single_gpu.int8_activations",
    ),
    Variable("VLLM_PREFILL_ATTN", "single_gpu.prefill_attention", str, Feature.PREFILL_ATTENTION),
    Variable("VLLM_EMBED_UVA", "single_gpu.embedding_in_host_memory", _only("1"), Feature.EMBEDDING_IN_HOST_MEMORY),
    Variable("KVARN_POOL_MEM_FRAC", "single_gpu.kvarn_pool_percent", percent, Feature.KVARN),
    Variable("VLLM_WSL2_ENABLE_PIN_MEMORY", "single_gpu.wsl_pin_memory", _flag, Feature.WSL_PIN_MEMORY),
    Variable(
        "VLLM_VISION_CPU_OFFLOAD_GB",
        "vision.tower_offload_gib",
        lambda size: str(size) if size else None,
        Feature.TOWER_OFFLOAD,
        "vision.enabled",
    ),
)
"""Settings that the engine reads from its environment."""

PREFIX_CACHE_SETTINGS = frozenset(
    {"mamba_block_size", "mamba_cache_mode", "prefix_match_unit", "prefix_retention", "partial_prefix_cache"}
)
"""Settings that mean nothing, or are refused by the engine, without prefix caching."""
COMPILE_CACHE_OFF = "VLLM_DISABLE_COMPILE_CACHE"
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
SERVER_ENVIRONMENT = {"DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
"""Nothing leaves the pod: no usage statistics, and no look-up of a checkpoint that is already there."""

OWNED_ELSEWHERE = {
    "--model": "model",
    "--served-model-name": "model.servedName",
    "--speculative-config": "overrides.speculation",
    "-sc": "overrides.speculation",
    "--spec-method": "overrides.speculation.method",
    "--spec-model": "draft",
    "--spec-tokens": "overrides.speculation.tokens",
    "--enable-auto-tool-choice": "overrides.tools.enabled",
    "--no-enable-auto-tool-choice": "overrides.tools.enabled",
    "--tool-call-parser": "overrides.tools.parser",
    "--tool-strict-level": "overrides.tools.strictLevel",
    "--compilation-config": "overrides.compilation",
    "-cc": "overrides.compilation",
    "--max-cudagraph-capture-size": "overrides.compilation.maxCaptureSize",
    "--limit-mm-per-prompt": "overrides.vision.maxImages",
    "--mm-processor-kwargs": "overrides.vision",
    "--host": "the operator",
    "--port": "the operator",
    "--uds": "the operator",
    "--shutdown-timeout": "the operator",
    "--api-key": "auth.apiKeySecretRef",
}


def path_of(setting: str) -> str:
    """A setting's path as a user writes it: `speculation.draft_sample_method` is `speculation.draftSampleMethod`."""
    parts, model = [], Overrides
    for name in setting.split("."):
        field = model.model_fields[name]
        parts.append(field.alias or name)
        model = next((part for part in _members(field.annotation) if _is_document(part)), model)
    return ".".join(parts)


def spec_path(setting: str) -> str:
    """The field of the spec: a setting's path under `overrides`, anything else as it is."""
    return f"overrides.{path_of(setting)}" if setting.partition(".")[0] in Overrides.model_fields else setting


def _members(annotation: Any) -> tuple[Any, ...]:
    return getattr(annotation, "__args__", None) or (annotation,)


def _is_document(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Document)


def setting_of(settings: Overrides, setting: str) -> Any:
    """The value at a dotted path, or None where a section on the way is absent."""
    value: Any = settings
    for name in setting.split("."):
        if value is None:
            return None
        value = getattr(value, name)
    return value


OWNED_FLAGS = {
    **{name: f"overrides.{path_of(flag.setting)}" for flag in FLAGS for name in (flag.option, *flag.aliases)},
    **OWNED_ELSEWHERE,
}
"""Every option that `extraArgs` must not hold, and the field that owns it."""


@dataclass(frozen=True)
class Rendered:
    """The options and variables of a server, and what was left out because the engine lacks it."""

    arguments: Arguments
    environment: dict[str, str]
    missing: tuple[Missing, ...]


@dataclass(frozen=True)
class DraftChoice:
    """Where the draft is: a local folder, or a repository at a commit."""

    path: str | None = None
    repo: str | None = None
    revision: str | None = None


def render(settings: Overrides, draft: DraftChoice, table: EngineTable) -> Rendered:
    """Options and variables for these settings on this engine."""
    arguments: list[str] = []
    missing: list[Missing] = []
    for setting, group, neutral in _groups(settings, draft, table):
        lacking = [word for word in group if word.startswith("--") and not table.has_option(table.spelling(word))]
        if not lacking:
            arguments += _spelled(group, table)
        elif not neutral:
            missing.append(Missing(setting, lacking[0], _feature_of(lacking[0])))
    environment, lacking_variables = _environment(settings, table)
    dtype = settings.kv_cache_dtype
    if dtype is not None and dtype not in table.kv_cache_dtypes:
        feature = Feature.KVARN if dtype is KvCacheDtype.KVARN_K4V2 else None
        missing.append(Missing("kv_cache_dtype", f"--kv-cache-dtype {dtype}", feature))
    return Rendered(tuple(arguments), environment, (*missing, *lacking_variables))


def _groups(settings: Overrides, draft: DraftChoice, table: EngineTable) -> Iterator[tuple[str, Arguments, bool]]:
    """The setting, its words on the command line, and whether they say only what the engine does anyway."""
    for flag in FLAGS:
        value = setting_of(settings, flag.setting)
        if value is None or (flag.setting in PREFIX_CACHE_SETTINGS and settings.prefix_caching is False):
            continue
        if flag.setting == "attention_backend":
            value = table.backends.get(value, value)
        yield flag.setting, flag.arguments(value), flag.neutral is not None and value == flag.neutral
    yield from _vision(settings)
    yield from _tools(settings)
    yield from _compilation(settings)
    config = speculative_config(settings, draft, table)
    if config:
        # The members keep their order: a reader expects the method first.
        yield "speculation", ("--speculative-config", compact_json(config)), False


def _spelled(group: Arguments, table: EngineTable) -> list[str]:
    first, *rest = group or ("",)
    spelling = table.spelling(first)
    if spelling != first and len(rest) == 1:
        return [f"{spelling}={rest[0]}"]
    return [table.spelling(word) if word.startswith("--") else word for word in group]


def _feature_of(option: str) -> Feature | None:
    return Feature.PARTIAL_PREFIX_CACHE if option.endswith("-partial-prefix-cache") else None


def _vision(settings: Overrides) -> Iterator[tuple[str, Arguments, bool]]:
    vision = settings.vision
    if vision is None or not vision.enabled:
        return
    if vision.max_images is not None:
        limit = compact_json({"image": {"count": vision.max_images}})
        yield "vision.max_images", ("--limit-mm-per-prompt", limit), False
    size = {
        key: pixels
        for key, pixels in (("shortest_edge", vision.min_pixels), ("longest_edge", vision.max_pixels))
        if pixels is not None
    }
    if size:
        yield "vision.max_pixels", ("--mm-processor-kwargs", compact_json({"size": size})), False


def _tools(settings: Overrides) -> Iterator[tuple[str, Arguments, bool]]:
    tools = settings.tools
    if tools is None or not tools.enabled:
        return
    yield "tools.enabled", ("--enable-auto-tool-choice",), False
    if tools.parser is not None:
        yield "tools.parser", ("--tool-call-parser", tools.parser), False
    if tools.strict_level is not None:
        yield "tools.strict_level", ("--tool-strict-level", tools.strict_level), False


def _compilation(settings: Overrides) -> Iterator[tuple[str, Arguments, bool]]:
    compilation = settings.compilation
    if compilation is None:
        return
    config: dict[str, Any] = {}
    if compilation.max_capture_size is not None:
        config["max_cudagraph_capture_size"] = compilation.max_capture_size
    if compilation.custom_ops is not None:
        config["custom_ops"] = list(compilation.custom_ops)
    if compilation.cudagraph_mode is not None:
        config["cudagraph_mode"] = compilation.cudagraph_mode
    if config:
        yield "compilation", ("--compilation-config", compact_json(config)), False


def speculates(settings: Overrides) -> bool:
    """Whether anything drafts."""
    speculation = settings.speculation
    return speculation is not None and speculation.method not in (None, SpeculationMethod.NONE)


def speculative_config(settings: Overrides, draft: DraftChoice, table: EngineTable) -> dict[str, Any]:
    """The engine's speculative configuration; empty without speculation."""
    speculation = settings.speculation
    if speculation is None or not speculates(settings):
        return {}
    backend = speculation.attention_backend
    members: dict[str, Any] = {
        "method": speculation.method,
        "model": draft.path or draft.repo,
        "revision": None if draft.path else draft.revision,
        "num_speculative_tokens": speculation.tokens,
        "draft_sample_method": speculation.draft_sample_method,
        "attention_backend": table.backends.get(backend, backend) if backend else None,
        "kv_cache_dtype": speculation.kv_cache_dtype,
    }
    if speculation.dynamic_tokens is not None:
        members["num_speculative_tokens_per_batch_size"] = [
            [one.batch_from, one.batch_to, one.tokens] for one in speculation.dynamic_tokens
        ]
    return {key: value for key, value in members.items() if value is not None}


def _environment(settings: Overrides, table: EngineTable) -> tuple[dict[str, str], list[Missing]]:
    environment = dict(table.environment)
    missing = []
    for variable in VARIABLES:
        setting = setting_of(settings, variable.setting)
        idle = variable.only_if is not None and not setting_of(settings, variable.only_if)
        value = None if setting is None or idle else variable.value(setting)
        if value is None:
            continue
        if variable.feature in table.features:
            environment[variable.name] = value
        elif setting not in (False, None):
            missing.append(Missing(variable.setting, variable.name, variable.feature))
    if settings.compilation is not None and settings.compilation.cache is False:
        environment[COMPILE_CACHE_OFF] = "1"
    if settings.expandable_segments is not None:
        environment[ALLOCATOR] = f"expandable_segments:{settings.expandable_segments}"
    return environment, missing
