"""Small checkpoints with random weights, made where torch and transformers are: dense, hybrid, mixture, gelu, NVFP4.

python3 checkpoints.py FOLDER

Weights are drawn so that logits are of a real model's spread; a wrong kernel then changes tokens, and a rounding only
where two tokens are nearly tied. Routers choose by wide margins, as trained ones do. NVFP4 checkpoints have a twin with
the same values in half precision, which transformers can read. Tokenizers come from `sm70-tiny-model`; the models whose
answers are known are made by it.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sm70_engine.tinymodel.cli import main as tiny_model

VOCABULARY = 512
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
MERGED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
"""Projections that vLLM merges must share their global scale."""


def _randomize(model: torch.nn.Module) -> None:
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        width = parameter.shape[-1] ** 0.5
        spread = (
            1.0 if "embed" in name else 0.5 if "conv1d" in name else 3.0 / width if "lm_head" in name else 1.5 / width
        )
        parameter.data.normal_(0, spread)


def _save(folder: Path, model: Any, tokenizer: Path, settle: Callable[[torch.nn.Module], None] | None = None) -> None:
    torch.manual_seed(0)
    _randomize(model)
    if settle is not None:
        settle(model)
    model.half().save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(tokenizer / name, folder)


def dense(folder: Path, tokenizer: Path) -> None:
    """Qwen3, head size 128."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=4096, eos_token_id=2, bos_token_id=None,
        tie_word_embeddings=False, dtype="float16",
    )  # fmt: skip
    _save(folder, Qwen3ForCausalLM(config), tokenizer)


def hybrid(folder: Path, tokenizer: Path) -> None:
    """Qwen3.5: three layers of gated delta net to one of attention, head size 256, six query heads to a KV head."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=12,
        num_key_value_heads=2, head_dim=256, max_position_embeddings=262144, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
        eos_token_id=2, bos_token_id=None, dtype="float16",
    )  # fmt: skip
    _save(folder, Qwen3_5ForCausalLM(config), tokenizer)


def gelu(folder: Path, tokenizer: Path) -> None:
    """Gemma: gelu in place of silu, head size 256, eight query heads to the one KV head, the embedding as the head."""
    from transformers import GemmaConfig, GemmaForCausalLM

    config = GemmaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=1, head_dim=256, hidden_activation="gelu_pytorch_tanh", max_position_embeddings=4096,
        eos_token_id=2, bos_token_id=None, pad_token_id=0, dtype="float16",
    )  # fmt: skip
    _save(folder, GemmaForCausalLM(config), tokenizer, _balance)


def _balance(model: torch.nn.Module) -> None:
    """The embedding, scaled by sqrt(hidden) on the way in, is also the head: layers must outweigh it, or every token
    is followed by itself.
    """
    for name, parameter in model.named_parameters():
        if "embed" in name:
            parameter.data.mul_(3.0 / parameter.shape[-1] ** 0.5)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.mul_(8.0)


def _route_by_token(model: torch.nn.Module) -> None:
    """Gives every router margins that a rounding does not reach: a random one has ties of 1e-4 among a few thousand.

    Each expert has a direction in the residual stream. A token's embedding lies along those of its two experts, with
    unequal weights; the layers add nothing along any of them, so the routers, which look in these directions, find what
    the embedding has put there. A small random part is left to depend on the context.
    """
    experts = next(p for name, p in model.named_parameters() if name.endswith("mlp.gate.weight")).shape[0]
    hidden = model.config.hidden_size
    directions = torch.linalg.qr(torch.randn(hidden, experts))[0]
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            pair = torch.stack([torch.randperm(experts)[:2] for _ in range(parameter.shape[0])])
            code = 6.0 * directions[:, pair[:, 0]].T + 4.0 * directions[:, pair[:, 1]].T
            parameter.data.sub_(parameter.data @ directions @ directions.T).add_(code)
        elif name.endswith("mlp.gate.weight"):
            parameter.data.copy_(2.0 * directions.T + 0.05 * parameter.data)
        elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")):
            # Rows of the output: stacked experts have them in the dimension before the last as well.
            parameter.data.sub_(directions @ (directions.T @ parameter.data))


def mixture(folder: Path, tokenizer: Path) -> None:
    """Qwen3.5 with eight experts."""
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    config = Qwen3_5MoeTextConfig(
        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=128, max_position_embeddings=4096, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4, num_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64, eos_token_id=2,
        bos_token_id=None, dtype="float16",
    )  # fmt: skip
    _save(folder, Qwen3_5MoeForCausalLM(config), tokenizer, _route_by_token)


def _quantize(weight: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 [N, K / 2], scales E4M3 [N, K / 16] and the values that they stand for."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // 16, 16)
    scales = (groups.abs().amax(-1) / 6 / scale).clamp(min=2**-9, max=448).to(torch.float8_e4m3fn)
    unit = scales.float() * scale
    scaled = groups / unit[..., None]
    index = torch.bucketize(scaled.abs(), (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2)
    codes = (index | ((scaled < 0).long() << 3)).to(torch.uint8).view(rows, columns)
    values = MAGNITUDES[index] * torch.where(scaled < 0, -1.0, 1.0) * unit[..., None]
    return (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous(), scales, values.view(rows, columns).half()


def nvfp4(source: Path, quantized: Path, values: Path, tensors_folder: Path) -> None:
    """`source` in ModelOpt's NVFP4 with an FP8 KV cache, in compressed-tensors', and the twin with the same values."""
    for folder in (quantized, values, tensors_folder):
        shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    chosen = {
        name: name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if name.endswith(".weight") and tensor.dim() == 2 and ("self_attn." in name or "mlp." in name)
    }
    largest: dict[str, float] = {}
    for name, module in chosen.items():
        group = _group(module)
        largest[group] = max(largest.get(group, 0.0), float(tensors[name].float().abs().max()) / (6 * 448))
    stored, twin, others = dict(tensors), dict(tensors), dict(tensors)
    for name, module in chosen.items():
        scale = largest[_group(module)]
        stored[name], stored[f"{module}.weight_scale"], twin[name] = _quantize(tensors[name], scale)
        stored[f"{module}.weight_scale_2"] = torch.tensor(scale)
        # The same codes under other names; the global scale is what weights were divided by.
        del others[name]
        others[f"{module}.weight_packed"], others[f"{module}.weight_scale"] = (
            stored[name],
            stored[f"{module}.weight_scale"],
        )
        others[f"{module}.weight_global_scale"] = torch.tensor([1 / scale])
        stored[f"{module}.input_scale"] = torch.tensor(1 / 448)
        for part in ("k", "v"):
            if module.endswith(f"{part}_proj"):
                stored[f"{module}.{part}_scale"] = torch.tensor(0.03)
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    save_file(twin, values / "model.safetensors", {"format": "pt"})
    save_file(others, tensors_folder / "model.safetensors", {"format": "pt"})
    config: dict[str, Any] = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8",
        "ignore": ["lm_head", "*linear_attn*"], "producer": {"name": "modelopt", "version": "0.33"},
    }  # fmt: skip
    (quantized / "config.json").write_text(json.dumps(config, indent=1))
    weights = {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True,
        "dynamic": False, "observer": "minmax",
    }  # fmt: skip
    layout = "nvfp4-pack-quantized"
    linears: dict[str, Any] = {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": layout}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
        "config_groups": {"group_0": linears}, "ignore": ["lm_head", "re:.*linear_attn.*"], "kv_cache_scheme": None,
    }  # fmt: skip
    (tensors_folder / "config.json").write_text(json.dumps(config, indent=1))


def _group(module: str) -> str:
    parent, _, own = module.rpartition(".")
    return f"{parent}.{MERGED.get(own, own)}"


def make(folder: Path) -> None:
    """All of them; what is there already is kept."""
    if (folder / "ready").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    size = ["--size", "small"]
    tiny_model(["--out", str(folder / "reciter"), *size, "--draft", "dflash2", "--draft-out", str(folder / "draft")])
    tiny_model(["--out", str(folder / "reciter-values"), *size, "--weights", "plain"])
    tiny_model(["--out", str(folder / "words")])
    words = folder / "words"
    dense(folder / "dense", words)
    hybrid(folder / "hybrid", words)
    mixture(folder / "mixture", words)
    gelu(folder / "gelu", words)
    nvfp4(folder / "hybrid", folder / "nvfp4", folder / "nvfp4-values", folder / "nvfp4-tensors")
    (folder / "ready").touch()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
