"""Gate and up of an NVFP4 MLP in one launch with their activation, inside vLLM's own modules.

vLLM's MLPs call a merged linear layer, then an activation module on its product, then another linear layer; there is no
extension point around the pair. Once a model is loaded, an MLP that does just that is changed in place: its linear
layer multiplies with the gated kernel, whose result is half as wide and already activated, and its activation hands on
what it gets. No class of vLLM is changed, and eager mode, torch.compile and CUDA graphs all begin after loading.

That an MLP does just that is not guessed from its name. Its `forward` is run once with stand-ins for its three layers
that pass opaque objects along: whatever looks into the product, or gives it to something else, fails with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from sm70_engine.acceleration.routes import count
from sm70_engine.kernels.errors import KernelError
from sm70_profiles.routes import FallbackReason

FALLBACK = "swiglu_separate"


@torch.library.custom_op("sm70::silu_and_mul", mutates_args=())
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu of the first half of the last dimension times the second: the counted way of layers that are not fused."""
    count(FALLBACK, capture=x.is_cuda and torch.cuda.is_current_stream_capturing(), reason=FallbackReason.NOT_FUSED)
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@silu_and_mul.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


class Activated(torch.nn.Module):
    """In the place of an activation whose linear layer has applied it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class CountedActivation(torch.nn.Module):
    """In the place of an activation that could not be fused."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = silu_and_mul(x)
        return result


@dataclass
class Fused:
    """What became of a model's NVFP4 MLPs."""

    fused: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """MLPs by the reason why they were left."""

    def __str__(self) -> str:
        left = "; ".join(f"{number} not: {reason}" for reason, number in self.refused.items())
        return f"{self.fused} MLPs{'; ' + left if left else ''}"


def fuse(
    modules: Iterable[torch.nn.Module],
    linear: type[Any],
    activation: type[Any],
    workspace: Callable[[torch.device, int, int], torch.Tensor],
) -> Fused:
    """Fuses what can be among a model's modules, and makes the others count.

    linear, activation: vLLM's `MergedColumnParallelLinear` and `SiluAndMul`; a subclass may do more than they.
    workspace: by device, columns and K of a gated weight.
    """
    result = Fused()
    for module in modules:
        layer, act = getattr(module, "gate_up_proj", None), getattr(module, "act_fn", None)
        if not getattr(layer, "sm70_columns", 0) or type(act) is not activation:
            continue
        refusal = _refusal(module, layer, linear)
        if refusal is None:
            refusal = _gate(layer, workspace)
        if refusal is None:
            module.act_fn = Activated()
            result.fused += 1
        else:
            module.act_fn = CountedActivation()
            result.refused[refusal] += 1
    return result


def _refusal(module: torch.nn.Module, layer: Any, linear: type[Any]) -> str | None:
    if layer.__class__ is not linear:
        return f"gate and up are a {type(layer).__name__}"
    sizes = list(layer.output_partition_sizes)
    if len(sizes) != 2 or sizes[0] != sizes[1]:
        return f"gate and up must have as many columns, not {sizes}"
    if layer.bias is not None or layer.gather_output:
        return "gate and up have a bias or are gathered"
    return None if passes_on(module) else f"{type(module).__name__}.forward does more than apply its layers in turn"


def _gate(layer: Any, workspace: Callable[[torch.device, int, int], torch.Tensor]) -> str | None:
    from sm70_engine.kernels.torch_weights import PackedWeights, gate

    words, n = layer.weight.data, int(layer.sm70_columns)
    try:
        gated = gate(PackedWeights(words, n, int(layer.sm70_inputs), float(layer.sm70_global_scale)))
    except KernelError as error:
        return str(error)
    layer.weight = torch.nn.Parameter(gated.words, requires_grad=False)
    layer.sm70_columns, layer.sm70_up_scale = gated.n, gated.up_scale
    layer.sm70_workspace = workspace(words.device, gated.n, gated.k)
    return None


# ---------------------------------------------------------------- what a forward does


class _Token:
    """A value that can only be handed on."""


class _Layers:
    """The module that is asked, with stand-ins for its layers."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module, self._calls = module, list[str]()
        self.given, self.product, self.activated = _Token(), _Token(), _Token()

    def __getattr__(self, name: str) -> Any:
        steps: dict[str, tuple[Any, Any]] = {
            "gate_up_proj": (self.given, self.product),
            "act_fn": (self.product, self.activated),
            "down_proj": (self.activated, torch.zeros(1)),
        }
        found = getattr(self._module, name)
        if name in steps:
            return _Step(name, found, self._calls, *steps[name])
        if isinstance(found, torch.nn.Module):  # a gate beside the three: what it says does not matter
            return lambda *_: (torch.zeros(1), None)
        return found

    def in_turn(self) -> bool:
        return self._calls == ["gate_up_proj", "act_fn", "down_proj"]


class _Step:
    """A stand-in for one layer: takes what it must be given and nothing else."""

    def __init__(self, name: str, layer: Any, calls: list[str], wanted: Any, made: Any) -> None:
        self._name, self._layer, self._calls, self._wanted, self._made = name, layer, calls, wanted, made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, x: Any) -> Any:
        if x is not self._wanted:
            raise TypeError(f"{self._name} is given something else")
        self._calls.append(self._name)
        return (self._made, None) if getattr(self._layer, "return_bias", False) else self._made


def passes_on(module: torch.nn.Module) -> bool:
    """Whether the module's `forward` hands the product of gate and up to its activation, that to `down_proj`, and
    neither to anything else.
    """
    layers = _Layers(module)
    try:
        type(module).forward(layers, layers.given)  # type: ignore[arg-type]
    except Exception:  # whatever a forward does with an opaque object, it does more than pass it on
        return False
    return layers.in_turn()
