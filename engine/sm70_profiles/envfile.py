"""Reads the launcher's knobs from an environment file or a start script, without running any of it.

`NAME=value`, `export NAME=value` and `NAME=${NAME:-value}` are read; of a script's other lines nothing is. A value that
only a shell could compute is refused.
"""

from __future__ import annotations

import re

from sm70_profiles.base import printable
from sm70_profiles.reasons import Refusal, RefusalCode

MAX_FILE_BYTES = 1 << 20
MAX_VALUE = 4096
BOOLEANS = frozenset(
    {
        "LOOKUP",
        "LOOKUP_ADAPTIVE",
        "SPEC_ATTN",
        "ASYNC_SCHED",
        "EMBED_UVA",
        "FA2_FP8KV",
        "PTH_FA",
        "PREFIX_CACHE",
        "TOOLS",
        "REQ_METRICS",
        "REQ_METRICS_DETAILED",
        "VISION",
        "VISION_OFFLOAD",
        "VLLM_WSL2_ENABLE_PIN_MEMORY",
    }
)
"""Knobs that are 0 or 1. Any other spelling once read as off without a word, so it is refused."""
OTHER = frozenset(
    {
        "CTX",
        "SPEC",
        "MODEL",
        "DRAFT",
        "DRAFT_METHOD",
        "DRAFT_SAMPLE",
        "DRAFT_TOKENS",
        "DFLASH_TOKENS",
        "DYNAMIC_K",
        "VLLM_SPEC_DECODE_ATTN_QMAX",
        "MAX_LEN",
        "DFLASH_MAX_LEN",
        "MAX_SEQS",
        "KV_MEM",
        "CG",
        "GPU_UTIL",
        "API_SERVERS",
        "KVARN_POOL_MEM_FRAC",
        "PREFIX_RETENTION",
        "VLLM_PREFIX_CACHE_RETENTION_INTERVAL",
        "CUDAGRAPH_MODE",
        "INT8_ACT",
        "INT8_LAYERS",
        "PREFILL_ATTN",
        "TOOL_PARSER",
        "TOOL_STRICT",
        "SSE_KEEP_ALIVE",
        "VLLM_API_KEY",
        "HOST",
        "PORT",
        "VLLM_VISION_CPU_OFFLOAD_GB",
        "KV_OFFLOAD_GB",
        "PYTORCH_CUDA_ALLOC_CONF",
        "EXTRA_ARGS",
        "KV",
    }
)
LEFT_TO_THE_POD = frozenset(
    {
        "VLLM_OFFLOAD_KEEP_SHM",
        "CUDA_HOME",
        "PRINT_ARGV",
        "WARMUP",
    }
)
"""Knobs of the launcher's own machine, which a pod and its operator have other means for."""
KNOBS = BOOLEANS | OTHER | LEFT_TO_THE_POD

_ASSIGNMENT = re.compile(r"""([A-Za-z_][A-Za-z0-9_]*)=("(?:[^"\\]|\\.)*"|'[^']*'|\$\{[^{}]*\}|[^\s"';&|]*)(?=\s|;|$)""")
_DEFAULTED = re.compile(r"^\$\{([A-Za-z_][A-Za-z0-9_]*):?-([^${}`]*)\}$")


def read_environment(text: str | bytes) -> tuple[dict[str, str], tuple[Refusal, ...]]:
    """The knobs that an environment file or a start script sets, and what could not be read."""
    data = text.encode() if isinstance(text, str) else text
    if len(data) > MAX_FILE_BYTES:
        return {}, (_syntax("file", f"must not exceed {MAX_FILE_BYTES} bytes", str(len(data))),)
    try:
        lines = data.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        return {}, (_syntax("file", "must be text in UTF-8", f"byte {error.start}"),)
    knobs: dict[str, str] = {}
    refusals: list[Refusal] = []
    for position, line in enumerate(lines, start=1):
        for name, raw in _assignments(line.strip()):
            if name not in KNOBS:
                continue
            value = _value(raw)
            if value is None:
                refusals.append(_syntax(name, f"must be a plain value (line {position})", raw))
            else:
                knobs[name] = value
    return knobs, tuple(refusals)


def _assignments(line: str) -> list[tuple[str, str]]:
    """The assignments at the start of a line; after them may stand a command, for which they are set."""
    rest = line.removeprefix("export ").lstrip()
    found = []
    while match := _ASSIGNMENT.match(rest):
        found.append((match.group(1), match.group(2)))
        rest = rest[match.end() :].lstrip(" \t;")
    if not found and (name := re.match(r"([A-Za-z_][A-Za-z0-9_]*)=", rest)):
        # An assignment that cannot be read must not look as if it were not there.
        found.append((name.group(1), "$"))
    return found


def _value(raw: str) -> str | None:
    """The value without its quotes, or None where a shell would have to compute it."""
    text = raw.strip()
    if len(text) >= 2 and text[0] == text[-1] == "'":
        return text[1:-1][:MAX_VALUE]
    if len(text) >= 2 and text[0] == text[-1] == '"':
        text = text[1:-1]
    defaulted = _DEFAULTED.match(text)
    if defaulted is not None:
        text = defaulted.group(2)
    return None if any(sign in text for sign in ("$", "`", "\\")) else text[:MAX_VALUE]


def _syntax(name: str, must: str, found: str) -> Refusal:
    return Refusal(
        code=RefusalCode.KNOB_SYNTAX,
        field=name,
        must=must,
        found=f"`{printable(found, 60)}`",
        remedy="Write the value out; nothing is run to find it.",
    )
