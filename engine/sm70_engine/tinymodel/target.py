"""The target model: a Qwen3.5-style hybrid whose greedy decoding walks the chains.

The residual stream starts as the token's embedding, a vector of signs. Every layer is executed and adds a little to it.
The output head holds, as the row of a token, the embedding of the token before it; so the largest logit is that of the
successor, by a wide margin over the quantisation of weights and cache.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from sm70_engine.tinymodel.chains import CHAINS, Kind
from sm70_engine.tinymodel.tensors import Floats, Nvfp4, Source, Tensor, bfloat16, float32, global_scale, quantize_nvfp4
from sm70_engine.tinymodel.tensors import scalar as scalar_tensor
from sm70_engine.tinymodel.tokenizer import END_OF_TURN, MASK, PAD, START, piece_id, vocabulary

LAYER_GAIN = 0.2
"""How much of its input's size a layer adds to the stream."""
LOGIT = 16.0
"""The logit of the successor; the others are about LOGIT / sqrt(hidden size) from zero."""
KV_SCALES = (0.0625, 0.03125)
"""Stored scales of keys and values. Keys are normalised, so |key| < 28 = 448 * 0.0625 by far."""


@dataclass(frozen=True)
class Size:
    """The shape of a target model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    linear_key_heads: int
    linear_value_heads: int
    vocabulary: int
    positions: int

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Every fourth layer has full attention, the others a gated delta net."""
        return tuple(range(3, self.layers, 4))


LINEAR_HEAD_DIM, CONVOLUTION = 128, 4

SIZES = {
    # vLLM makes a page of the KV cache as large as a gated delta net's state: eight key heads keep it at 128 tokens.
    "tiny": Size(128, 256, 4, 16, 8, 128, 1, 2, 512, 8192),
    "small": Size(512, 1024, 8, 8, 2, 256, 4, 8, 2048, 32768),
    "medium": Size(1024, 3072, 8, 16, 4, 256, 16, 32, 151936, 262144),
}


@dataclass(frozen=True)
class Target:
    """A target model: its shape, what follows what, and its embeddings; drafts are built on the same."""

    size: Size
    seed: int
    source: Source
    successors: dict[int, int]
    """By token id; a token that is not in here is followed by the first piece of the text."""
    first: int
    embeddings: Floats
    """[vocabulary, hidden], signs."""
    common: Floats
    """[hidden]: what the embeddings of all tokens outside the chains have in common."""
    mask: int

    def successor(self, token: int) -> int:
        return self.successors.get(token, self.first)


def build_target(size: Size, seed: int, bad: bool = False) -> Target:
    """Lays out chains and embeddings. A bad target walks the same pieces in a shuffled order."""
    source = Source(seed)
    ids = vocabulary()
    successors = _successors(ids, source, bad)
    (first,) = {successors[ids[START[Kind.TEXT]]]}
    common = source.signs("common", size.hidden)
    embeddings = source.signs("embeddings", size.vocabulary, size.hidden)
    in_chain = set(successors) - {ids[START[Kind.TEXT]]}
    outside = np.array([token not in in_chain for token in range(size.vocabulary)])
    outside[ids[MASK]] = False
    # Seven of eight signs are the common ones: any text outside of the chains leads to the first piece.
    keep = source.uniform("common share", size.vocabulary, size.hidden) < 0.75
    embeddings = np.where(outside[:, None] & keep, common[None, :], embeddings)
    # The first sign tells the mask token of the drafts from every other token.
    embeddings[:, 0] = 1
    common[0] = 1
    embeddings[ids[MASK], 0] = -1
    return Target(size, seed, source, successors, first, embeddings, common, ids[MASK])


def _successors(ids: dict[str, int], source: Source, bad: bool) -> dict[int, int]:
    chains = [(START[chain.kind], [piece_id(ids, piece) for piece in chain.pieces]) for chain in CHAINS]
    if bad:
        pieces = [piece for _, chain in chains for piece in chain]
        shuffled = iter([pieces[position] for position in source.order("bad", len(pieces))])
        chains = [(start, [next(shuffled) for _ in chain]) for start, chain in chains]
    successors: dict[int, int] = {}
    for start, chain in chains:
        walk = [ids[start], *chain, ids[END_OF_TURN]]
        successors |= dict(itertools.pairwise(walk))
    return successors


def target_config(target: Target, quantized: bool) -> dict[str, Any]:
    """`config.json` of the target."""
    size, ids = target.size, vocabulary()
    layer_types = ["full_attention" if n in size.attention_layers else "linear_attention" for n in range(size.layers)]
    config: dict[str, Any] = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": ids[END_OF_TURN],
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "hidden_size": size.hidden,
        "initializer_range": 0.02,
        "intermediate_size": size.intermediate,
        "layer_types": layer_types,
        "linear_conv_kernel_dim": CONVOLUTION,
        "linear_key_head_dim": LINEAR_HEAD_DIM,
        "linear_num_key_heads": size.linear_key_heads,
        "linear_num_value_heads": size.linear_value_heads,
        "linear_value_head_dim": LINEAR_HEAD_DIM,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": size.positions,
        "num_attention_heads": size.heads,
        "num_hidden_layers": size.layers,
        "num_key_value_heads": size.kv_heads,
        "pad_token_id": ids[PAD],
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": size.vocabulary,
    }
    if quantized:
        config["quantization_config"] = {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "ignore": ["lm_head", "*linear_attn*"],
            "producer": {"name": "modelopt", "version": "0.39.0"},
        }
    return config


def target_tensors(target: Target, quantized: bool) -> dict[str, Tensor]:
    """The weights. Unquantized ones are the values of the quantized ones, exactly: a reference for engines."""
    size, source = target.size, target.source
    tensors = {
        "model.embed_tokens.weight": bfloat16(target.embeddings),
        "lm_head.weight": bfloat16(_output_head(target)),
        "model.norm.weight": bfloat16(np.zeros(size.hidden, np.float32)),
    }
    for layer in range(size.layers):
        name = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{norm}.weight"] = bfloat16(source.uniform(f"{name}.{norm}", size.hidden, gain=0.1))
        tensors |= _mlp(source, f"{name}.mlp", size, quantized)
        if layer in size.attention_layers:
            tensors |= _attention(source, f"{name}.self_attn", size, quantized)
        else:
            tensors |= _delta_net(source, f"{name}.linear_attn", size)
    return tensors


def _output_head(target: Target) -> Floats:
    size, ids = target.size, vocabulary()
    head = target.source.signs("head", size.vocabulary, size.hidden)
    # Ids without a token rank last where a draft looks at its mask token, so they are never candidates.
    head[len(ids) :] = -target.embeddings[target.mask]
    head[list(target.successors.values())] = 0
    for token, successor in target.successors.items():
        head[successor] += target.embeddings[token]  # the end of turn follows every chain
    head[target.first] = target.common
    head[:, 0] = 1
    return (head * np.float32(LOGIT / size.hidden)).astype(np.float32)


def _linears(fused: dict[str, Floats], quantized: bool) -> dict[str, Tensor]:
    """Matrices that vLLM fuses into one, by module name."""
    scale = global_scale(*fused.values())
    tensors: dict[str, Tensor] = {}
    for module, matrix in fused.items():
        rounded: Nvfp4 = quantize_nvfp4(matrix, scale)
        if quantized:
            tensors |= rounded.tensors(module)
        else:
            tensors[f"{module}.weight"] = bfloat16(rounded.dequantized())
    return tensors


def _mlp(source: Source, name: str, size: Size, quantized: bool) -> dict[str, Tensor]:
    wide, narrow = size.intermediate, size.hidden
    up = {f"{name}.{part}": source.linear(f"{name}.{part}", wide, narrow) for part in ("gate_proj", "up_proj")}
    down = {f"{name}.down_proj": source.linear(f"{name}.down_proj", narrow, wide, gain=LAYER_GAIN)}
    return _linears(up, quantized) | _linears(down, quantized)


def _attention(source: Source, name: str, size: Size, quantized: bool) -> dict[str, Tensor]:
    heads, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
    # The query projection holds query and output gate of each head.
    rows = {"q_proj": 2 * heads, "k_proj": keys, "v_proj": keys}
    inputs = {f"{name}.{part}": source.linear(f"{name}.{part}", count, size.hidden) for part, count in rows.items()}
    output = {f"{name}.o_proj": source.linear(f"{name}.o_proj", size.hidden, heads, gain=LAYER_GAIN)}
    tensors = _linears(inputs, quantized) | _linears(output, quantized)
    for norm in ("q_norm", "k_norm"):
        tensors[f"{name}.{norm}.weight"] = bfloat16(source.uniform(f"{name}.{norm}", size.head_dim, gain=0.1))
    if quantized:
        tensors[f"{name}.k_proj.k_scale"] = scalar_tensor(KV_SCALES[0])
        tensors[f"{name}.v_proj.v_scale"] = scalar_tensor(KV_SCALES[1])
    return tensors


def _delta_net(source: Source, name: str, size: Size) -> dict[str, Tensor]:
    keys, values = size.linear_key_heads * LINEAR_HEAD_DIM, size.linear_value_heads * LINEAR_HEAD_DIM
    channels = 2 * keys + values
    rows = {
        "in_proj_qkv": channels,
        "in_proj_z": values,
        "in_proj_b": size.linear_value_heads,
        "in_proj_a": size.linear_value_heads,
    }
    tensors = {
        f"{name}.{part}.weight": bfloat16(source.linear(f"{name}.{part}", count, size.hidden))
        for part, count in rows.items()
    }
    taps = source.uniform(f"{name}.conv1d", channels, 1, CONVOLUTION, gain=math.sqrt(3 / CONVOLUTION))
    decay = source.uniform(f"{name}.A_log", size.linear_value_heads) + np.float32(1)
    tensors |= {
        f"{name}.conv1d.weight": bfloat16(taps),
        f"{name}.A_log": float32(decay.astype(np.float32)),
        f"{name}.dt_bias": bfloat16(source.uniform(f"{name}.dt_bias", size.linear_value_heads)),
        f"{name}.norm.weight": bfloat16(np.ones(LINEAR_HEAD_DIM, np.float32)),
        f"{name}.out_proj.weight": bfloat16(source.linear(f"{name}.out_proj", size.hidden, values, gain=LAYER_GAIN)),
    }
    return tensors
