"""Runs with the lane's python, where torch, transformers and vLLM are; prints what it found as JSON.

python in_lane.py reference MODEL     greedy answers of transformers, and the NVFP4 operator against the generator
python in_lane.py reports MODEL DRAFT CASES
                                      the report at configuration completion for each case of overrides (JSON by name)
python in_lane.py aside               what our package changes in a vLLM that `sm70-serve` did not start
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
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


def reports(model: str, draft: str, cases: str) -> dict[str, Any]:
    """By case: its paths' states and reasons as vLLM's completed configuration gives them, and how a strict start ends.

    No worker starts and no weight is read: this is where a server would log its report. `serving` is how the last
    check ends, which an API server makes when its engine is there; the engine is a stand-in.
    """
    from sm70_engine.acceleration.routes import create_counters
    from sm70_engine.acceleration.startup import read_startup
    from sm70_engine.serve.launch import plan_launch
    from sm70_engine.session import SESSION_ENVIRONMENT, SessionFolder, current_session
    from sm70_profiles.catalog import load_profile
    from sm70_profiles.resolver import ServeRequest

    os.environ["VLLM_PLUGINS"] = "sm70,sm70_platform"
    found: dict[str, Any] = {}
    config: Any = None
    for name, overrides in json.loads(cases).items():
        speculates = (overrides.get("speculation") or {}).get("method") != "None"
        document = {
            "profile": load_profile("tiny_hybrid_reference_release"),
            "modelPath": model,
            "servedName": "tiny",
            "overrides": overrides,
            **({"draftPath": draft} if speculates else {}),
        }
        launch = plan_launch(ServeRequest.model_validate(document), {})
        folder = SessionFolder.create(os.environ)
        try:
            folder.write(replace(launch, strict=True).session())
            create_counters(folder.counters)
            os.environ[SESSION_ENVIRONMENT] = str(folder.path)
            current_session.cache_clear()
            completed, made = _completed(launch.resolution.argv)
            config = made or config
            refusal = folder.refusal()
            serving = _about_to_serve(config)
            cache, phases = folder.cache(), read_startup(folder.startup)
            found[name] = {**completed, "refusal": None, "serving": serving}
            found[name]["cache"] = cache.state if cache is not None else None
            found[name]["phase"] = phases.phase if phases is not None else None
            if refusal is not None:
                found[name]["refusal"] = refusal.model_dump(mode="json", by_alias=True)
        finally:
            folder.remove()
    return found


def _about_to_serve(vllm_config: Any) -> str:
    """How the check before serving ends: the error's name, or nothing."""
    from sm70_engine.plugin.endpoints import Observer

    try:
        Observer(SimpleNamespace(vllm_config=vllm_config, errored=False)).started()
    except RuntimeError as error:
        return type(error).__name__
    return ""


def _completed(arguments: Sequence[str]) -> tuple[dict[str, Any], Any]:
    """The report that the plugin logs when vLLM completes the configuration of these arguments, and that one."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    lines: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        return True

    # A filter, since vLLM configures logging again on the way, which removes handlers.
    logger = logging.getLogger("vllm.sm70")
    logger.addFilter(keep)
    try:
        parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(list(arguments))
        parsed.model = parsed.model_tag
        error, config = "", None
        try:
            config = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
        except Exception as raised:  # a strict start's, which the caller looks at
            error = f"{type(raised).__name__}: {raised}"
    finally:
        logger.removeFilter(keep)
    said = [line.split(": ", 1)[1] for line in lines if line.startswith("sm70 acceleration report: ")]
    report = json.loads(said[-1]) if said else {"paths": [], "summary": {}}
    paths = {path["name"]: [path["state"], path["reason"]] for path in report["paths"] if path["expected"]}
    return {"paths": paths, "summary": report["summary"], "error": error}, config


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
    if task == "reference":
        found = reference(Path(arguments[0]))
    elif task == "reports":
        found = reports(*arguments)
    else:
        found = aside()
    print(json.dumps(found))
