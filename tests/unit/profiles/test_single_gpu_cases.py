"""The single-GPU launcher's recorded launches, through `import-env` and the resolver.

Every accepted case must give the same command line and environment, every refused one must be refused for the recorded
reason among ours. Where the launcher itself is wrong, `DEVIATIONS` says what we do instead and why.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sm70_profiles.engines import Feature
from sm70_profiles.facts import EngineFacts, Facts, GpuFacts, HostFacts, ModelFacts
from sm70_profiles.importenv import Imported, import_knobs
from sm70_profiles.reasons import NoticeCode, RefusalCode
from sm70_profiles.resolver import SERVER_ENVIRONMENT, Resolution, resolve

CASES = Path(__file__).parent / "data" / "single_gpu_cases.json"

CODES = {
    "R-CTX-UNKNOWN": RefusalCode.KNOB_VALUE,
    "R-SPEC-UNKNOWN": RefusalCode.KNOB_VALUE,
    "R-FP16-SPEC": RefusalCode.DTYPE_WITH_SPECULATION,
    "R-DYNK-HUGE-PC": RefusalCode.DYNAMIC_TOKENS_WITH_PREFIX_CACHE,
    "R-FA2-NOT-INSTALLED": RefusalCode.KERNEL_MISSING,
    "R-FA2-ARM": RefusalCode.KERNEL_ARM,
    "R-FA2-KVTIER": RefusalCode.KERNEL_WITH_OFFLOAD,
    "R-FA2-PTH-BOTH": RefusalCode.KERNEL_CONFLICT,
    "R-PTH-ARM": RefusalCode.KERNEL_ARM,
    "R-PTH-VALUE": RefusalCode.KNOB_VALUE,
    "R-PTH-NOT-INSTALLED": RefusalCode.KERNEL_MISSING,
    "R-PTH-TOKENS": RefusalCode.KERNEL_SETUP,
    "R-PTH-METHOD": RefusalCode.KERNEL_SETUP,
    "R-PTH-LOOKUP": RefusalCode.KERNEL_SETUP,
    "R-PTH-DYNK": RefusalCode.KERNEL_SETUP,
    "R-PTH-EXTRA": RefusalCode.KERNEL_OVERRIDDEN,
    "R-PTH-KVCONN": RefusalCode.KERNEL_WITH_OFFLOAD,
    "R-DRAFT-MISSING": RefusalCode.DRAFT_MISSING,
}
NOTICES = {
    "N-RESIDENT": NoticeCode.SEATS_OVER_RESIDENTS,
    "N-PTH-ON": NoticeCode.KERNEL_CHOSEN,
    "A-PTH-OVER-FA2": NoticeCode.KERNEL_OVER_DEFAULT,
    "N-FA2-SPECATTN": NoticeCode.SPLIT_KV_WITHOUT_EFFECT,
    "A-ALLOC-KVCONN": NoticeCode.ALLOCATOR_FOR_OFFLOAD,
    "A-ALLOC-TP": NoticeCode.ALLOCATOR_FOR_ALL_REDUCE,
    "A-ALLOC-WSL": NoticeCode.ALLOCATOR_FOR_WSL,
    "A-WSL-PIN": NoticeCode.PINNED_MEMORY_FOR_WSL,
    "A-TP-NOPIN": NoticeCode.POOL_UNPINNED,
    "A-PIN-VERIFY": NoticeCode.VERIFY_LENGTH_PINNED,
    "W-RETENTION-UNMEASURED": NoticeCode.RETENTION_UNMEASURED,
    "W-HUGE-SEATS": NoticeCode.SEATS_OVER_MEASURED,
    "W-TP-DFLASH15": NoticeCode.LONG_BLOCK_ON_SEVERAL_GPUS,
    "W-KVMEM-OVER": NoticeCode.POOL_OVER_DEFAULT,
    "W-DYNK-IGNORED": NoticeCode.DYNAMIC_TOKENS_IGNORED,
    "W-KVOFF-IGNORED": NoticeCode.CONNECTOR_WINS,
    "W-DRAFT-BIG": NoticeCode.LARGE_DRAFT,
    "N-DRAFT-BIG": NoticeCode.LARGE_DRAFT,
}


@dataclass(frozen=True)
class Deviation:
    """One case in which we refuse what the launcher starts."""

    case: str
    ours: RefusalCode
    why: str


DEVIATIONS = (
    Deviation(
        "long-dflash2-15-int8",
        RefusalCode.POOL_TOO_SMALL,
        "The pool holds no request of the default length at 15 drafts: 350 pages, 386 needed.",
    ),
    Deviation(
        "long-dflash2-15-fa2",
        RefusalCode.POOL_TOO_SMALL,
        "The pool holds no request of the default length at 15 drafts: 354 pages, 382 needed.",
    ),
    Deviation(
        "long-dflash2-pth-blocked-k15",
        RefusalCode.POOL_TOO_SMALL,
        "The same pool; the launcher only avoids the kernel.",
    ),
    Deviation(
        "fast-dflash2-15-nolookup",
        RefusalCode.POOL_TOO_SMALL,
        "With asynchronous scheduling a request of the default length takes 356 of 354 pages; the arithmetic that gives"
        " the five measured pools to the token says that the engine would not start.",
    ),
    Deviation(
        "long-mtp-pth-explicit-k4",
        RefusalCode.KERNEL_SETUP,
        "The kernel was measured with three drafts; the launcher checks that for dflash2 and forgets it for mtp.",
    ),
    Deviation(
        "long-mtp-pth-explicit-dynk",
        RefusalCode.KERNEL_SETUP,
        "The kernel was measured with one draft length for every batch; refused for dflash2, forgotten for mtp.",
    ),
    Deviation(
        "long-dflash2-pth-explicit-cc89",
        RefusalCode.KERNEL_SETUP,
        "The kernel was measured on compute capability 8.6 only; the launcher checks that for the default alone.",
    ),
    Deviation(
        "huge-mtp-cgmode",
        RefusalCode.CUDAGRAPH_UNSAFE,
        "Full graphs corrupt one prompt length in 128 after a prefix hit; it takes an acknowledgement.",
    ),
    Deviation(
        "fast-mtp-alloc-explicit",
        RefusalCode.ALLOCATOR_WITH_OFFLOAD,
        "The engine rejects expandable segments beside a KV connector, minutes later.",
    ),
)
"""The table of deviations: everything else is equal."""


@cache
def cases() -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(CASES.read_text("utf-8"))["cases"])


def run(case: dict[str, Any]) -> tuple[Imported, Resolution | None]:
    """Imports and resolves one case. Its placeholders for folders become paths."""
    knobs = {name: str(value).replace("@", "/", 1).replace("@", "") for name, value in case["knobs"].items()}
    known = case["facts"]
    if not known["drafter.present"]:
        knobs["DRAFT"] = ""
    imported = import_knobs(knobs, container=known["container"])
    if imported.profile is None:
        return imported, None
    installed = {
        Feature.PTH_FLASH_ATTENTION: known["pthfa.installed"],
        Feature.FA2_FP8: known["fa2.installed"],
    }
    facts = Facts(
        gpu=GpuFacts(compute_capability=known["gpu.computeCapability"]),
        engine=EngineFacts(features=frozenset(feature for feature, there in installed.items() if there)),
        host=HostFacts(wsl=known["wsl"], container=known["container"]),
        draft=ModelFacts.model_validate(
            {**_draft_shape(imported), "weight_bytes": known["drafter.bytes"]} if imported.draft else {}
        ),
    )
    return imported, resolve(imported.request(), facts)


def _draft_shape(imported: Imported) -> dict[str, Any]:
    shape = imported.request().profile.draft.shape
    return shape.model_dump() if shape else {}


def options(argv: list[str] | tuple[str, ...]) -> dict[str, Any]:
    """A command line as options and values: order does not matter, of an option given twice the last one counts."""
    result: dict[str, Any] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        option, given, value = word.partition("=")
        if not option.startswith("-"):
            result.setdefault("", []).append(word)
            continue
        if not given and words and not words[0].startswith("-"):
            value = words.pop(0)
        option = {"-tp": "--tensor-parallel-size"}.get(option, option)
        result[option] = json.loads(value) if value.startswith("{") else value
    return result


def _expected_argv(case: dict[str, Any]) -> dict[str, Any]:
    return options(
        [
            word.replace("@MODEL@", "/MODEL").replace("@DRAFT@", "/DRAFT").replace("@BIGDRAFT@", "/BIGDRAFT")
            for word in case["argv"][2:]
        ]
    )


ACCEPTED = [case for case in cases() if case["exit"] == 0]
REFUSED = [case for case in cases() if case["exit"] != 0]
DEVIATING = {one.case: one for one in DEVIATIONS}


def test_all_cases_are_here() -> None:
    assert (len(ACCEPTED), len(REFUSED)) == (101, 25)
    assert set(DEVIATING) <= {case["name"] for case in ACCEPTED}


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case["name"])
def test_accepted(case: dict[str, Any]) -> None:
    imported, resolution = run(case)
    assert resolution is not None
    assert options(resolution.argv) == _expected_argv(case)
    # The key never passes through a resolution, and ours adds what keeps a pod from calling home.
    expected = {name: value for name, value in case["env"].items() if (name, value) != ("FA2_FP8KV", "0")}
    assert (expected.pop("VLLM_API_KEY", None) is not None) == imported.keyed
    ours = {**resolution.env, **imported.environment}
    assert {name: value for name, value in ours.items() if name not in SERVER_ENVIRONMENT} == expected
    codes = {refusal.code for refusal in (*imported.refusals, *resolution.refusals)}
    deviation = DEVIATING.get(case["name"])
    assert codes == ({deviation.ours} if deviation else set())


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case["name"])
def test_warnings(case: dict[str, Any]) -> None:
    imported, resolution = run(case)
    assert resolution is not None
    found = {notice.code for notice in (*imported.notices, *resolution.notices)}
    assert found >= {NOTICES[code] for code in case["codes"]}
    # Whatever the recorded vocabulary can say, we say in the same cases, and more besides.
    assert found & set(NOTICES.values()) == {NOTICES[code] for code in case["codes"]}


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case["name"])
def test_refused(case: dict[str, Any]) -> None:
    imported, resolution = run(case)
    refusals = [*imported.refusals, *(resolution.refusals if resolution else ())]
    assert {CODES[code] for code in case["codes"]} <= {refusal.code for refusal in refusals}
    assert all(refusal.must and refusal.found and refusal.remedy for refusal in refusals)
