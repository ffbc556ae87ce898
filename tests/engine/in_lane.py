"""Runs with the lane's python, where torch, transformers and vLLM are; prints what it found as JSON.

python in_lane.py reference MODEL     greedy answers of transformers, and the NVFP4 operator against the generator
python in_lane.py aside               what our package changes in a vLLM that `sm70-serve` did not start
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def reference(folder: Path) -> dict[str, Any]:
    """Answers by kind for a checkpoint with plain weights, and facts about our operator."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    answers = {}
    for one in json.loads((folder / "answers.json").read_text())["answers"]:
        asked = one["request"]
        ids = tokenizer.apply_chat_template(
            asked["messages"], tools=asked.get("tools"), add_generation_prompt=True, return_dict=False
        )
        output = model.generate(torch.tensor([ids]), max_new_tokens=asked["max_tokens"], do_sample=False)[0, len(ids) :]
        answers[one["kind"]] = {
            "text": tokenizer.decode(output, skip_special_tokens=True),
            "tokens": len(output),
        }
    unexpected = sorted(loading["missing_keys"]) + sorted(loading["unexpected_keys"])
    return {"model": type(model).__name__, "unexpected": unexpected, "answers": answers, **operator()}


def operator() -> dict[str, Any]:
    import numpy as np
    import torch

    from sm70_engine.ops.linear_nvfp4 import dequantize_nvfp4, nvfp4_linear
    from sm70_engine.tinymodel.tensors import Source, global_scale, quantize_nvfp4

    matrix = Source(5).uniform("matrix", 48, 64, gain=2.0)
    quantized = quantize_nvfp4(matrix, global_scale(matrix))
    stored = quantized.tensors("m")
    packed = torch.frombuffer(bytearray(stored["m.weight"].data), dtype=torch.uint8).view(48, 32)
    scales = torch.frombuffer(bytearray(stored["m.weight_scale"].data), dtype=torch.float8_e4m3fn).view(48, 4)
    weight = dequantize_nvfp4(packed, scales, quantized.global_scale)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    result = torch.ops.sm70.nvfp4_linear(x, packed, scales, quantized.global_scale)
    exact = x.double() @ weight.double().T
    # The schema's own check multiplies tensors of every argument's dtype, which torch cannot do in E4M3.
    checks = ("test_faketensor", "test_autograd_registration")
    torch.library.opcheck(nvfp4_linear, (x, packed, scales, quantized.global_scale), test_utils=checks)
    return {
        "weights_equal": bool((weight.numpy() == quantized.dequantized()).all()),
        "codes_in_use": len(np.unique(quantized.codes)),
        "largest_error": float((result.double() - exact).abs().max() / exact.abs().max()),
        "dtype": str(result.dtype),
    }


def aside() -> dict[str, Any]:
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.quantization import get_quantization_config

    found = {
        "platform": f"{type(current_platform).__module__}.{type(current_platform).__name__}",
        "layers": sorted(op_registry_oot),
        "modelopt": get_quantization_config("modelopt_fp4").__module__,
        "ours": sorted(name for name in sys.modules if name.startswith("sm70_engine.")),
    }
    return {**found, **_failures()}


def _failures() -> dict[str, Any]:
    """How the plugin ends when it is active and something is not as it must be."""
    from sm70_engine.plugin import hooks

    def error_of(wanted: tuple[hooks.Hook, ...]) -> str:
        try:
            hooks.check(wanted)
        except hooks.MissingHookError as error:
            return str(error)
        return ""

    gone = hooks.Hook("vllm.platforms.cpu", "CpuPlatform.something_new", "a test")
    return {"missing_hook": error_of((*hooks.HOOKS, gone)), "other_platform": error_of(hooks.HOOKS)}


if __name__ == "__main__":
    task, *arguments = sys.argv[1:]
    found = reference(Path(arguments[0])) if task == "reference" else aside()
    print(json.dumps(found))
