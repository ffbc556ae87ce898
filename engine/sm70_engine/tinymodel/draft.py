"""Draft models that agree with the tiny target, so that speculation has something to accept.

DFlash drafts every position at once, from the last accepted token and mask tokens behind it. In the draft made here one
attention head looks from a mask token at the accepted token (the only one whose embedding starts with +1 among the
draft's inputs) and copies its embedding, which the target's output head turns into the successor: the first drafted
token is right, the ones after it repeat it and are rejected. DFlash2 chains the positions through two codebooks, which
hold the successor relation itself: every drafted token is right.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import numpy as np

from sm70_engine.tinymodel.target import Target
from sm70_engine.tinymodel.tensors import Floats, Source, Tensor, bfloat16
from sm70_engine.tinymodel.tokenizer import END_OF_TURN, PAD, vocabulary

HEAD_DIM = 128
SLOWEST = 63
"""The slowest rotating coordinate of a head: over a block's few positions its rotation is nothing."""
COPY_GAIN = 4.0
TAPS, CONVOLUTION_GROUP, RANK = 4, 32, 64
BLOCK = 8
MISMATCHED_EXTRA = 64
"""How many ids more a mismatched draft's vocabulary has."""


class DraftKind(StrEnum):
    DFLASH = "dflash"
    DFLASH2 = "dflash2"


ARCHITECTURES = {DraftKind.DFLASH: "DFlashDraftModel", DraftKind.DFLASH2: "DFlash2DraftModel"}


def _heads(target: Target) -> int:
    """Enough to copy a whole embedding, and as much cache a token as a layer of the target has."""
    size = target.size
    return max(size.kv_heads * size.head_dim // HEAD_DIM, size.hidden // HEAD_DIM)


def _taps(target: Target) -> list[int]:
    """The target layers whose outputs the draft sees."""
    return [0, target.size.layers // 2]


def draft_config(target: Target, kind: DraftKind, mismatched: bool = False) -> dict[str, Any]:
    """`config.json` of the draft. A mismatched draft is for another vocabulary."""
    size, ids, taps = target.size, vocabulary(), _taps(target)
    tokens = size.vocabulary + (MISMATCHED_EXTRA if mismatched else 0)
    dflash: dict[str, Any] = {"mask_token_id": target.mask, "target_layer_ids": taps}
    if kind is DraftKind.DFLASH2:
        dflash |= {
            "sample_from_anchor": False,
            "conv_kernel_size": TAPS,
            "conv_group_size": CONVOLUTION_GROUP,
            "selector_rank": RANK,
            "selector_top_k": min(512, size.vocabulary),
        }
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": BLOCK,
        "bos_token_id": None,
        "dflash_config": dflash,
        "draft_vocab_size": tokens,
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in taps],
        "eos_token_id": ids[END_OF_TURN],
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": size.hidden,
        "initializer_range": 0.02,
        "intermediate_size": size.intermediate,
        "layer_types": ["full_attention"],
        "max_position_embeddings": size.positions,
        "max_window_layers": 1,
        "num_attention_heads": _heads(target),
        "num_hidden_layers": 1,
        "num_key_value_heads": _heads(target),
        "num_target_layers": size.layers,
        "pad_token_id": ids[PAD],
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
        "sliding_window": None,
        "target_hidden_size": size.hidden,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": tokens,
    }


def draft_tensors(target: Target, kind: DraftKind) -> dict[str, Tensor]:
    """The weights; embeddings and output head are the target's and not in the file."""
    source = Source(target.seed)
    size, layer = target.size, "layers.0"
    name = f"draft.{kind}"
    matrices = _attention(source, f"{name}.self_attn", target, copies=kind is DraftKind.DFLASH)
    ones = bfloat16(np.ones(size.hidden, np.float32))
    combined = source.linear(f"{name}.fc", size.hidden, size.hidden * len(_taps(target)))
    combined[0] = 0  # what comes from the target's layers attracts no attention by the first sign
    tensors = {
        "fc.weight": bfloat16(combined),
        "hidden_norm.weight": ones,
        "norm.weight": ones,
        f"{layer}.input_layernorm.weight": ones,
        f"{layer}.post_attention_layernorm.weight": ones,
        f"{layer}.self_attn.q_norm.weight": bfloat16(np.ones(HEAD_DIM, np.float32)),
        f"{layer}.self_attn.k_norm.weight": bfloat16(np.full(HEAD_DIM, 2, np.float32)),
    }
    tensors |= {f"{layer}.self_attn.{part}.weight": bfloat16(matrix) for part, matrix in matrices.items()}
    for part, rows, columns, gain in (
        ("gate_proj", size.intermediate, size.hidden, 1.0),
        ("up_proj", size.intermediate, size.hidden, 1.0),
        ("down_proj", size.hidden, size.intermediate, 0.02),
    ):
        matrix = source.linear(f"{name}.mlp.{part}", rows, columns, gain=gain)
        tensors[f"{layer}.mlp.{part}.weight"] = bfloat16(matrix)
    if kind is DraftKind.DFLASH2:
        tensors |= _dflash2(source, name, layer, target)
    return tensors


def _attention(source: Source, name: str, target: Target, copies: bool) -> dict[str, Floats]:
    """The projections of the one attention layer; with `copies`, its first heads copy the accepted token."""
    hidden, width = target.size.hidden, _heads(target) * HEAD_DIM
    matrices = {part: source.linear(f"{name}.{part}", width, hidden) for part in ("q_proj", "k_proj", "v_proj")}
    matrices["o_proj"] = source.linear(f"{name}.o_proj", hidden, width, gain=0.02)
    if not copies:
        return matrices
    for start in range(0, hidden, HEAD_DIM):
        rows = slice(start, start + HEAD_DIM)
        # Query +1 at a mask token (whose first sign is -1), key +1 at any other token.
        for part, sign in (("q_proj", -1), ("k_proj", 1)):
            matrices[part][rows] = 0
            matrices[part][start + SLOWEST, 0] = sign
        matrices["v_proj"][rows] = np.eye(HEAD_DIM, hidden, k=start, dtype=np.float32)
        matrices["o_proj"][:, rows] = np.eye(hidden, HEAD_DIM, k=-start, dtype=np.float32) * COPY_GAIN
    return matrices


def _dflash2(source: Source, name: str, layer: str, target: Target) -> dict[str, Tensor]:
    size = target.size
    groups = size.hidden // CONVOLUTION_GROUP
    tensors = {}
    for convolution in ("attention_conv", "mlp_conv"):
        part = f"{name}.{convolution}"
        base = source.uniform(f"{part}.base", 2, TAPS, size.hidden, gain=0.05)
        base[:, 0] += 1
        projection = source.linear(f"{part}.projection", 2 * TAPS * groups, size.hidden, gain=0.1)
        tensors[f"{layer}.{convolution}.base_kernel"] = bfloat16(base)
        tensors[f"{layer}.{convolution}.kernel_projection.weight"] = bfloat16(projection)
    codes = source.signs(f"{name}.codes", size.vocabulary, RANK)
    successors = np.array([target.successor(token) for token in range(size.vocabulary)])
    # A mask token's hidden state is nearly its embedding, of length sqrt(hidden): this projection makes it ones.
    ones = np.tile(target.embeddings[target.mask] / np.float32(size.hidden), (RANK, 1)).astype(np.float32)
    tensors |= {
        "candidate_selector.predecessor_codebook": bfloat16(codes[successors]),
        "candidate_selector.successor_codebook": bfloat16(codes),
        "candidate_selector.hidden_projection.weight": bfloat16(ones),
    }
    return tensors
