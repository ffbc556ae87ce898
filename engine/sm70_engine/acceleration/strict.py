"""Strict start: with SM70_REQUIRE_PROFILE_ACCELERATION=1 a server has every expected path enabled, or does not start.

It refuses as early as the answer is known: `sm70-serve` by the prediction, the completed configuration with the
operators of the process (before any worker reads weights), and the engine's own last word before the server listens.
Under the operator it is off: there the pod has a policy, `/sm70/ready` judges by it, and the report stays readable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sm70_profiles.base import Document, printable
from sm70_profiles.reasons import PathReason, TerminationReason
from sm70_profiles.report import PathReport, PathState
from sm70_profiles.spec import AllowedDisabledPath

STRICT_ENVIRONMENT = ("SM70_REQUIRE_PROFILE_ACCELERATION", "VLLM_SM70_REQUIRE_PROFILE_ACCELERATION")
"""The variable, and the one that users of the release know."""
_ON = ("1", "true", "yes", "on")
_REMEDIES: dict[str, str] = {
    PathReason.KV_DTYPE: "set `kvCacheDtype` to the type that the path reads",
    PathReason.BUDGET: "set `maxNumBatchedTokens` to the path's native size or to 8000 and more",
    PathReason.PAGE_SIZE: "raise `blockSize`",
    PathReason.PAGE_ALIGNMENT: "make `blockSize` a multiple of 16",
    PathReason.USER_OVERRIDE: "remove the setting or variable that turns it off",
    PathReason.COMPILATION_DISABLED: "remove `compilation.cudagraphMode: NONE`",
    PathReason.COMPILE_CACHE_DISABLED: "unset VLLM_DISABLE_COMPILE_CACHE and `compilation.cache: false`",
    PathReason.INDUCTOR_CACHE_DISABLED: "unset the variable that turns the compiler's cache off",
    PathReason.OPERATOR_MISSING: "use an engine image that has the operator",
    PathReason.CONTRACT_MISMATCH: "use the model, draft and hardware that the profile is for",
    PathReason.NOT_APPLICABLE: "use the engine, GPU and model that the profile is for",
    PathReason.METHOD: "set `speculation.method` to the one that the path verifies",
    PathReason.NUM_SPECULATIVE_TOKENS: "set `speculation.tokens` to the length that the path verifies",
    PathReason.PREFIX_CACHING_DISABLED: "set `prefixCaching: true`",
}
_OTHER_REMEDY = "remove the override that the message names"


class StrictRefusal(Document):
    """Why a strict start ends, as the last words will say it."""

    reason: TerminationReason
    message: str
    remedy: str


class StrictStartError(RuntimeError):
    """An expected path is not enabled and a strict start was asked for."""

    def __init__(self, refusal: StrictRefusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def strict(environment: Mapping[str, str]) -> bool:
    """Whether a strict start is asked for."""
    return any(environment.get(name, "").strip().lower() in _ON for name in STRICT_ENVIRONMENT)


def waiting_paths(paths: Iterable[PathReport], allowed: Iterable[AllowedDisabledPath] = ()) -> list[PathReport]:
    """Expected paths that are not enabled, save the allowed ones. One that is not applicable counts as not enabled."""
    names = {allowance.path for allowance in allowed}
    return [path for path in paths if path.expected and path.state is not PathState.ENABLED and path.name not in names]


def refuse_unless_complete(paths: Iterable[PathReport], allowed: Iterable[AllowedDisabledPath] = ()) -> None:
    """Raises StrictStartError that names every path in the way, its reason and its remedy."""
    waiting = waiting_paths(paths, allowed)
    if not waiting:
        return
    named = "; ".join(f"{path.name} is {path.state}: {path.reason} ({path.message})" for path in waiting)
    remedies = dict.fromkeys(f"{path.name}: {remedy_of(path)}" for path in waiting)
    raise StrictStartError(
        StrictRefusal(
            reason=TerminationReason.ACCELERATION_REFUSED,
            message=printable(f"{len(waiting)} expected paths must be enabled and are not: {named}", 1500),
            remedy=printable(f"{'. '.join(remedies)}. Or unset {STRICT_ENVIRONMENT[0]}.", 500),
        )
    )


def remedy_of(path: PathReport) -> str:
    """What to do about a path that is not enabled, by its reason; what a reason's spelling ends with is cut off."""
    reason = path.reason or ""
    spelled = next((known for known in _REMEDIES if reason == known), None)
    stem = reason.partition(":")[0].partition("=")[0]
    return _REMEDIES.get(spelled or stem, _OTHER_REMEDY)
