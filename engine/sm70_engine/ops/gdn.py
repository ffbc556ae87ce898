"""The gated delta net of Qwen3.5 and Qwen3-Next: the layer that vLLM builds in place of its own, and the core operator.

Projections stay with vLLM's layer. The core (convolution, gates, recurrence) is one operator, so that it is counted
inside compiled graphs too; on the CPU lane its reference is vLLM's own CPU implementation.
"""

from __future__ import annotations

import torch
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import cpu_gdn_attention_core

from sm70_engine.acceleration.routes import count

LAYER_NAME = "QwenGatedDeltaNetAttention"


@torch.library.custom_op("sm70::gated_delta_net", mutates_args=("output",))
def gated_delta_net(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, output: torch.Tensor, layer_name: str
) -> None:
    """The core of one layer over the running batch, into `output` [tokens, value heads, value head dim].

    mixed_qkv [tokens, 2 key dim + value dim]; b and a [tokens, value heads]; the states lie in the layer's cache.
    """
    count("gdn_reference")
    cpu_gdn_attention_core(mixed_qkv, b, a, output, layer_name)


@gated_delta_net.register_fake
def _(mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, output: torch.Tensor, layer_name: str) -> None:
    return None


class Sm70GatedDeltaNet(QwenGatedDeltaNetAttention):  # type: ignore[misc]
    """vLLM's layer with our core."""

    def forward_cpu(self, hidden_states: torch.Tensor) -> torch.Tensor:
        projected, _ = self.in_proj_qkvz(hidden_states)
        gates, _ = self.in_proj_ba(hidden_states)
        if self.gqa_interleaved_layout:
            *parts, z, b, a = self.fix_query_key_value_ordering(projected, gates)
            mixed_qkv = torch.cat([part.flatten(1) for part in parts], dim=-1)
        else:
            channels = (2 * self.key_dim + self.value_dim) // self.tp_size
            mixed_qkv, z = projected[:, :channels], projected[:, channels:]
            z = z.unflatten(-1, (-1, self.head_v_dim))
            b, a = gates.chunk(2, dim=-1)
        shape = (hidden_states.size(0), self.num_v_heads // self.tp_size, self.head_v_dim)
        output = hidden_states.new_zeros(shape)
        gated_delta_net(mixed_qkv, b, a, output, self.prefix)
        result: torch.Tensor = self._output_projection(output, z)
        return result


def register() -> None:
    """Makes vLLM build our layer wherever a model asks for its own."""
    PluggableLayer.register_oot(Sm70GatedDeltaNet, name=LAYER_NAME)
