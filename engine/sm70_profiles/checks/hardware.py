"""Refusals about the GPUs and about the model that is split over them."""

from __future__ import annotations

from sm70_profiles.base import quantity_bytes
from sm70_profiles.checks.refuse import Found, refuse
from sm70_profiles.contracts import reaches
from sm70_profiles.memory import MIB
from sm70_profiles.plan import Plan
from sm70_profiles.profile import EngineFlavour
from sm70_profiles.reasons import RefusalCode


def gpu_count(plan: Plan) -> Found:
    """As many GPUs as ranks."""
    wanted, ranks = plan.request.gpus.count, plan.ranks
    count = plan.profile.hardware.count if wanted is None else wanted
    # The CPU engine computes nothing on its GPUs: it holds them so that scheduling and pinning are real, or holds none.
    admitted = {0, ranks} if plan.profile.engine.flavour is EngineFlavour.CPU else {ranks}
    if count not in admitted:
        yield refuse(
            RefusalCode.GPU_COUNT,
            "gpus.count",
            f"must be tensorParallelSize x pipelineParallelSize = {ranks}",
            count,
            f"Set `gpus.count: {ranks}` or change the parallel sizes in `overrides`.",
        )


def gpu_architecture(plan: Plan) -> Found:
    """The recipe's kernels run on this GPU."""
    hardware, found = plan.profile.hardware, plan.gpu.compute_capability
    if found is None or hardware.compute_capability is None:
        return
    least = hardware.min_compute_capability
    fits = tenths(found) >= tenths(least) if least else found == hardware.compute_capability
    if not fits:
        wanted = f"at least {least}" if least else hardware.compute_capability
        yield refuse(
            RefusalCode.GPU_ARCHITECTURE,
            "profile",
            f"must be a recipe for the GPU at hand; `{plan.profile.name}` needs compute capability {wanted}",
            found,
            "Choose a profile for this GPU, or another GPU.",
        )


def gpu_product(plan: Plan) -> Found:
    """The GPU is one that the recipe admits, and has the memory and the links that it demands."""
    products = _products(plan)
    at_hand = (plan.gpu.product,) if plan.gpu.product else plan.facts.gpu_products
    if products and at_hand and not set(products) & set(at_hand):
        yield refuse(
            RefusalCode.GPU_PRODUCT,
            "gpus.products",
            f"must name a GPU at hand; asked for {' or '.join(products)}",
            ", ".join(at_hand),
            "Widen `gpus.products`, or use nodes with such GPUs.",
        )
    least = plan.request.gpus.min_memory or plan.profile.hardware.min_memory
    memory = plan.gpu.memory_mib
    if least is not None and memory is not None and memory * MIB < quantity_bytes(least):
        yield refuse(
            RefusalCode.GPU_MEMORY,
            "gpus.minMemory",
            f"must not exceed the memory of the GPU at hand, {memory} MiB",
            least,
            "Use a larger GPU.",
        )
    wanted = plan.request.gpus.interconnect or plan.profile.hardware.interconnect
    if plan.gpu.interconnect is not None and not reaches(plan.gpu.interconnect, wanted):
        yield refuse(
            RefusalCode.TOPOLOGY,
            "gpus.interconnect",
            f"must be what the GPUs at hand have, {plan.gpu.interconnect}",
            wanted,
            "Use GPUs that are connected so, or lower the demand at the price of speed.",
        )


def _products(plan: Plan) -> tuple[str, ...]:
    asked = plan.request.gpus.products
    return plan.profile.hardware.products if asked is None else asked


def tenths(capability: str) -> int:
    """`8.6` as 86."""
    major, _, minor = capability.partition(".")
    return 10 * int(major) + int(minor)


def model_class(plan: Plan) -> Found:
    """The model is of the class that the recipe is for."""
    wanted, found = plan.profile.model_architectures, plan.facts.model.architectures if plan.facts.model else ()
    if wanted and found and not set(found) & set(wanted):
        yield refuse(
            RefusalCode.MODEL_INCOMPATIBLE,
            "model",
            f"must have architecture {' or '.join(wanted)}, which profile `{plan.profile.name}` is for",
            ", ".join(found),
            "Use another profile or another model.",
        )


def model_split(plan: Plan) -> Found:
    """Heads and layers can be dealt out to the ranks."""
    model = plan.model
    tensor, pipeline = plan.settings.tensor_parallel_size or 1, plan.settings.pipeline_parallel_size or 1
    heads, kv_heads = model.attention_heads, model.kv_heads
    uneven_heads = heads is not None and heads % tensor
    uneven_kv = kv_heads is not None and kv_heads % tensor and tensor % kv_heads
    if uneven_heads or uneven_kv:
        yield refuse(
            RefusalCode.PARALLEL_SHAPE,
            "tensor_parallel_size",
            f"must divide the model's {heads} attention heads and fit its {kv_heads} KV heads",
            tensor,
            "Use 1, 2, 4 or 8.",
        )
    if model.layers is not None and model.layers % pipeline:
        yield refuse(
            RefusalCode.PARALLEL_SHAPE,
            "pipeline_parallel_size",
            f"must divide the model's {model.layers} layers",
            pipeline,
            "Use a divisor of the number of layers.",
        )


def context_length(plan: Plan) -> Found:
    """The context is within the model's positions."""
    limit, asked = plan.model.max_position, plan.settings.max_model_len
    if limit is not None and asked is not None and asked > limit:
        yield refuse(
            RefusalCode.CONTEXT_TOO_LONG,
            "max_model_len",
            f"must not exceed the model's {limit} positions",
            asked,
            f"Set it to {limit} or less.",
        )
