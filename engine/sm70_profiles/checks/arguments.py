"""Refusals about extra arguments: the engine has them, and no typed field owns them."""

from __future__ import annotations

from sm70_profiles.checks.refuse import Found, refuse
from sm70_profiles.flags import OWNED_FLAGS
from sm70_profiles.plan import Plan
from sm70_profiles.reasons import RefusalCode
from sm70_profiles.settings import (
    RequestMetrics,
)


def extra_arguments(plan: Plan) -> Found:
    """`extraArgs` hold options that the engine has and no typed field owns."""
    for position, argument in enumerate(plan.request.extra_args):
        if not argument.startswith("-") or argument.lstrip("-")[:1].isdigit() or argument in ("-", "--"):
            continue
        option = argument.partition("=")[0]
        option = option.replace("_", "-") if option.startswith("--") else option
        owner = OWNED_FLAGS.get(option.partition(".")[0])
        if owner is not None:
            yield refuse(
                RefusalCode.OWNED_FLAG,
                f"extraArgs[{position}]",
                "must not hold an option that a typed field owns",
                f"`{option}`",
                f"Use `{owner}` instead." if "." in owner or owner == "model" else f"It is set by {owner}.",
            )
        elif not plan.table.has_option(option):
            yield refuse(
                RefusalCode.FLAG_UNKNOWN,
                f"extraArgs[{position}]",
                f"must hold options that {plan.table.title} has, spelled out",
                f"`{option}`",
                "Correct the option or remove it.",
            )


def metrics(plan: Plan) -> Found:
    """Request metrics ride on the engine's statistics."""
    if plan.value("request_metrics") in (None, RequestMetrics.OFF) or not plan.has_argument("--disable-log-stats"):
        return
    yield refuse(
        RefusalCode.METRICS_WITHOUT_STATS,
        "request_metrics",
        "must be Off while the engine keeps no statistics",
        "`--disable-log-stats` in `extraArgs`",
        "Remove the option, or set `requestMetrics: Off`.",
    )
