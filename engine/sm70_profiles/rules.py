"""The acceleration rules: one row a path, judged from the settings alone.

The offline prediction and the engine's report both come from this table; the engine adds what only a process knows
(is the operator present, which device) through `Capabilities`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sm70_profiles.profile import EngineFlavour, Profile
from sm70_profiles.reasons import PathReason
from sm70_profiles.report import PathReport, PathState, Summary
from sm70_profiles.spec import KvCacheDtype, Overrides


@dataclass(frozen=True)
class Capabilities:
    """What the process offers. `operators` None means: not asked (an offline prediction), so nothing is missing."""

    flavour: EngineFlavour
    operators: frozenset[str] | None = None


Judgement = tuple[str, str] | None
"""Reason and message of why a path is disabled; None when nothing stands against it."""


@dataclass(frozen=True)
class Rule:
    path: str
    flavour: EngineFlavour
    """The engine flavour on which the path exists; elsewhere it is not applicable."""
    route: str | None
    operator: str | None = None
    """The operator that must be registered in the process."""
    contracts: tuple[Callable[[Overrides], Judgement], ...] = field(default=())


def _wants_kv(*admitted: KvCacheDtype) -> Callable[[Overrides], Judgement]:
    def judge(settings: Overrides) -> Judgement:
        found = settings.kv_cache_dtype or KvCacheDtype.AUTO
        if found in admitted:
            return None
        return PathReason.KV_DTYPE, f"needs a KV cache of {' or '.join(admitted)}; found {found}"

    return judge


def _graphs(settings: Overrides) -> Judgement:
    if settings.enforce_eager:
        return PathReason.USER_OVERRIDE, "`enforceEager` turns compilation off"
    return None


RULES = (
    Rule("reference_nvfp4_linear", EngineFlavour.CPU, "nvfp4_linear_reference", operator="nvfp4_linear"),
    Rule("reference_attention", EngineFlavour.CPU, "attention_reference", operator="attention"),
    Rule(
        "reference_attention_e4m3",
        EngineFlavour.CPU,
        "attention_e4m3_reference",
        operator="attention",
        contracts=(_wants_kv(KvCacheDtype.FP8, KvCacheDtype.FP8_E4M3),),
    ),
    Rule("reference_gdn", EngineFlavour.CPU, "gdn_reference", operator="gdn"),
    Rule("reference_compile", EngineFlavour.CPU, None, contracts=(_graphs,)),
)


def judge_paths(profile: Profile, settings: Overrides, capabilities: Capabilities) -> tuple[PathReport, ...]:
    """Every path's state under these settings, in the table's order; expected ones that no rule knows come last."""
    expected = frozenset(profile.expected_acceleration)
    rows = [_judge(rule, rule.path in expected, settings, capabilities) for rule in RULES]
    known = {rule.path for rule in RULES}
    rows += [
        PathReport(
            name=name,
            expected=True,
            state=PathState.DISABLED,
            reason=f"{PathReason.OPERATOR_MISSING}:{name}",
            message="this engine has no such path",
        )
        for name in profile.expected_acceleration
        if name not in known
    ]
    return tuple(rows)


def summarize(paths: tuple[PathReport, ...]) -> Summary:
    """Enabled over expected. An expected path that is not applicable counts as not enabled."""
    expected = [path for path in paths if path.expected]
    return Summary(enabled=sum(path.state is PathState.ENABLED for path in expected), total=len(expected))


def _judge(rule: Rule, expected: bool, settings: Overrides, capabilities: Capabilities) -> PathReport:
    def row(state: PathState, reason: str | None = None, message: str = "") -> PathReport:
        return PathReport(
            name=rule.path, expected=expected, state=state, reason=reason, message=message, route=rule.route
        )

    if capabilities.flavour is not rule.flavour:
        message = f"a path of the {rule.flavour} engine; this is the {capabilities.flavour} engine"
        return row(PathState.NOT_APPLICABLE, PathReason.NOT_APPLICABLE, message)
    if rule.operator and capabilities.operators is not None and rule.operator not in capabilities.operators:
        reason = f"{PathReason.OPERATOR_MISSING}:{rule.operator}"
        return row(PathState.DISABLED, reason, f"the operator `{rule.operator}` is not registered in this process")
    for contract in rule.contracts:
        judgement = contract(settings)
        if judgement is not None:
            return row(PathState.DISABLED, *judgement)
    return row(PathState.ENABLED)
