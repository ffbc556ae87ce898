"""Refusals about images, activations, shared memory and the acceleration policy."""

from __future__ import annotations

from sm70_profiles.checks.refuse import Found, refuse, shown
from sm70_profiles.flags import Rendered
from sm70_profiles.memory import GIB, MIB
from sm70_profiles.plan import Plan
from sm70_profiles.reasons import RefusalCode
from sm70_profiles.rules import RULES
from sm70_profiles.settings import (
    ActivationLayer,
)


def vision(plan: Plan) -> Found:
    """Images have sane limits, and the tower fits beside a draft."""
    section = plan.settings.vision
    if section is None or not section.enabled:
        return
    low, high = section.min_pixels, section.max_pixels
    if low is not None and high is not None and low > high:
        yield refuse(
            RefusalCode.VISION_LIMITS,
            "vision.min_pixels",
            f"must not exceed maxPixels = {high}",
            low,
            "Lower `minPixels` or raise `maxPixels`.",
        )
    small = plan.gpu.memory_mib is None or plan.gpu.memory_mib <= 24 * 1024
    if plan.single_gpu and plan.drafts_with_model and small and section.tower_offload_gib == 0:
        yield refuse(
            RefusalCode.VISION_RESIDENT,
            "vision.tower_offload_gib",
            "must be at least 1 beside a draft model on 24 GiB",
            0,
            "Remove the override.",
        )


def int8_layers(plan: Plan) -> Found:
    """INT8 activations do not stop between linear attention and self attention."""
    layers = plan.value("single_gpu.int8_layers")
    crashing = {ActivationLayer.MLP, ActivationLayer.LINEAR_ATTENTION}
    if plan.value("single_gpu.int8_activations") and layers is not None and set(layers) == crashing:
        yield refuse(
            RefusalCode.ACTIVATION_LAYERS,
            "single_gpu.int8_layers",
            "must be mlp alone, gate_up alone, or mlp, linear_attn and self_attn: this choice crashes the compiler",
            ", ".join(layers),
            "Add `self_attn` or remove `linear_attn`.",
        )


def shared_memory(plan: Plan) -> Found:
    """A KV tier in host memory fits the shared memory, which backs it in full."""
    size, room = plan.value("kv_offload.size_gib"), plan.host.shared_memory_bytes
    if size and room is not None and size * GIB > room:
        yield refuse(
            RefusalCode.SHARED_MEMORY,
            "kv_offload.size_gib",
            f"must fit the shared memory of {room // MIB} MiB",
            size,
            "Lower it, or raise `pod.sharedMemory`.",
        )


def allowed_paths(plan: Plan) -> Found:
    """Paths that may be disabled are paths."""
    known = {rule.path for rule in RULES} | set(plan.profile.expected_acceleration)
    for position, allowance in enumerate(plan.request.acceleration.allow_disabled):
        if allowance.path not in known:
            yield refuse(
                RefusalCode.ALLOWED_PATH_UNKNOWN,
                f"acceleration.allowDisabled[{position}].path",
                "must be a path of the report",
                f"`{allowance.path}`",
                "Use a name from the profile's `expectedAcceleration`.",
            )


def missing_features(plan: Plan, rendered: Rendered) -> Found:
    """What the engine lacks and cannot serve without."""
    for missing in rendered.missing:
        if missing.feature in plan.table.degrades:
            continue
        yield refuse(
            RefusalCode.FLAG_UNSUPPORTED,
            missing.setting,
            f"needs `{missing.needs}`, which {plan.table.title} does not have",
            shown(plan.value(missing.setting)),
            "Remove the setting, or use an engine that has it.",
        )
