"""Every refusal of the resolver: what must hold before anything boots.

A check reads the plan and yields what is wrong; none stops another, so a user sees all mistakes at once. An unknown
fact never refuses.
"""

from __future__ import annotations

from sm70_profiles.checks import arguments, cache, drafting, hardware, kernels, serving, steps
from sm70_profiles.checks.cache import memory_fits, pool_holds_a_request
from sm70_profiles.checks.refuse import Check, refuse
from sm70_profiles.checks.serving import missing_features

__all__ = ["CHECKS", "Check", "memory_fits", "missing_features", "pool_holds_a_request", "refuse"]

CHECKS: tuple[Check, ...] = (
    arguments.extra_arguments,
    arguments.metrics,
    steps.step_budget,
    steps.dtypes,
    steps.blocks,
    drafting.draft_presence,
    drafting.speculation_method,
    drafting.prefix_cache_on_cpu,
    drafting.draft_fits,
    drafting.target_path,
    drafting.dynamic_tokens,
    drafting.full_graphs,
    hardware.gpu_count,
    hardware.gpu_architecture,
    hardware.gpu_product,
    hardware.model_class,
    hardware.model_split,
    hardware.context_length,
    kernels.kernel_arm,
    kernels.kernel_setup,
    kernels.kernel_settings,
    kernels.kernel_connector,
    kernels.kernel_installed,
    kernels.kv_backend,
    cache.prefix_settings,
    cache.allocator,
    cache.capture,
    cache.measured_context,
    serving.vision,
    serving.int8_layers,
    serving.shared_memory,
    serving.allowed_paths,
)
"""The checks that need nothing but the plan."""
