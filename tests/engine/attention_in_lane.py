"""Runs with the lane's python: the sm70 engine inside vLLM's interfaces, without a GPU.

python attention_in_lane.py MODEL

Prints, as JSON: which hooks this vLLM lacks, what the platform makes of a configuration for a ModelOpt checkpoint, and
by KV cache type the largest error of a mixed batch (over the operators' references) with the routes that it took.
"""

from __future__ import annotations

import json
import sys
from typing import Any

PAGE, HEADS, KV_HEADS, DIM = 16, 8, 2, 128


def batch(
    kv_dtype: str,
    queries: list[int],
    context: list[int],
    causal: bool,
    window: int = 0,
    prefill: bool = True,
    bridge_rows: int = 0,
) -> dict[str, Any]:
    """One step over requests with these numbers of queries and of tokens before them."""
    import torch
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from sm70_engine.attention import backend

    torch.manual_seed(0)
    workspace = type("Workspace", (), {"tensor": torch.zeros(1 << 24, dtype=torch.uint8)})()
    backend._workspace_for = lambda heads: workspace
    backend._copy_for = lambda heads: (workspace, bridge_rows)
    backend._note_refusals = lambda heads: None
    layer = type("Layer", (), {"_k_scale_float": 0.5, "_v_scale_float": 0.25})()
    attention = backend.FlashAttnV100(HEADS, DIM, DIM**-0.5, KV_HEADS, None, window or None, kv_dtype)
    lengths = [q + c for q, c in zip(queries, context, strict=True)]
    pages = [-(-length // PAGE) for length in lengths]
    order = torch.randperm(sum(pages) + 3)
    table = torch.full((len(queries), max(pages)), 1 << 20, dtype=torch.int32)
    used = 0
    for row, count in enumerate(pages):
        table[row, :count] = order[used : used + count].int()
        used += count
    element = torch.float16 if kv_dtype == "float16" else torch.uint8
    cache = torch.zeros(len(order), KV_HEADS, PAGE, 2 * DIM, dtype=element)
    keys, values = (torch.randn(sum(lengths), KV_HEADS, DIM).half() for _ in range(2))
    slots = torch.cat([table[r, torch.arange(n) // PAGE].long() * PAGE + torch.arange(n) % PAGE
                       for r, n in enumerate(lengths)])  # fmt: skip
    attention.do_kv_cache_update(layer, keys, values, cache, slots)

    starts = torch.tensor([0, *queries]).cumsum(0).int()
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=len(queries), num_actual_tokens=sum(queries), max_query_len=max(queries), max_seq_len=max(lengths),
        block_table_tensor=table, slot_mapping=slots, causal=causal, seq_lens_cpu_upper_bound=torch.tensor(lengths),
    )  # fmt: skip
    builder = object.__new__(backend.FlashAttnV100Builder)
    builder._drafted, builder._prefill, builder._page, builder._capacity = 3, prefill, PAGE, 512
    metadata = builder.build(0, common)
    query = torch.randn(sum(queries) + 2, HEADS, DIM).half()  # two rows of padding behind the batch
    out = torch.full_like(query, 7.0)
    attention.forward(layer, query, keys, values, cache, metadata, out)

    stored_keys, stored_values = keys.float(), values.float()
    if kv_dtype != "float16":
        kind = torch.float8_e4m3fn if kv_dtype == "fp8" else torch.float8_e5m2
        stored_keys, stored_values = (
            (x / s).to(kind).float() * s for x, s in ((keys.float(), 0.5), (values.float(), 0.25))
        )
    worst, first = 0.0, 0
    for row, (asked, length) in enumerate(zip(queries, lengths, strict=True)):
        group = HEADS // KV_HEADS
        k, v = (x[first : first + length].repeat_interleave(group, 1) for x in (stored_keys, stored_values))
        q = query[starts[row] : starts[row + 1]].float()
        score = torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5
        token, place = torch.arange(length), torch.arange(length - asked, length)[:, None]
        if causal:
            score.masked_fill_(token > place, -torch.inf)
        if window:
            score.masked_fill_(token <= place - window, -torch.inf)
        want = torch.einsum("hqk,khd->qhd", score.softmax(-1), v)
        worst = max(worst, float((out[starts[row] : starts[row + 1]].float() - want).abs().max()))
        first += length
    choices = [part.choice for part in metadata.parts_of(attention.heads)]
    return {
        "error": worst,
        "padding": float((out[-2:] - 7.0).abs().max()),
        "routes": sorted({f"{choice.route}/{choice.stage}" for choice in choices}),
        "bridged": [choice.bridged for choice in choices],
    }


def become_sm70() -> list[str]:
    """This process takes the sm70 engine's platform; returns the hooks that are missing."""
    from sm70_engine.plugin import hooks

    hooks.stand_in()
    import vllm.platforms

    from sm70_engine.plugin import cuda_platform
    from sm70_engine.plugin.cuda_platform import Sm70Platform

    vars(cuda_platform)["choose_scheduler"] = lambda _: None  # it asks the session, and there is none

    class WithoutGpu(Sm70Platform):
        """Our platform where nobody can say which GPU it is."""

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "no GPU"

    vllm.platforms._current_platform = WithoutGpu()
    wanted = (*hooks.CUDA_HOOKS, *(replacement.hook for replacement in hooks.REPLACEMENTS))
    # The CPU lane has no Triton.
    missing = [str(hook) for hook in wanted if not hook.module.startswith("triton.") and not hook.exists()]
    hooks._attention("CUSTOM", "sm70_engine.attention.backend.FlashAttnV100Backend")
    from sm70_engine.plugin.settings import EngineSettings
    from sm70_engine.quantization import modelopt

    modelopt.register()
    for replacement in hooks.REPLACEMENTS:
        if not replacement.hook.module.startswith("triton."):
            replacement.apply(EngineSettings())
    return missing


def configuration(model: str) -> tuple[Any, dict[str, Any]]:
    """vLLM's completed configuration for a checkpoint whose FP8 KV cache has stored scales, asked for E5M2."""
    from vllm.engine.arg_utils import EngineArgs

    # With these given, vLLM asks no GPU for its memory.
    sizes = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 64 << 20}
    asked = EngineArgs(model=model, kv_cache_dtype="fp8_e5m2", **sizes)
    found = asked.create_engine_config()
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w4a4_nvfp4 as tensors,
    )

    with set_current_vllm_config(found):
        makers = [one.init_nvfp4_linear_kernel for one in (modelopt, tensors)]
        linears = sorted({type(make(use_a16)).__name__ for make in makers for use_a16 in (False, True)})
    return found, {
        "linears": linears,
        "compressed_tensors": tensors.CompressedTensorsW4A4Fp4.get_min_capability(),
        "dtype": str(found.model_config.dtype),
        "quantization": found.model_config.quantization,
        "kv": found.cache_config.cache_dtype,
        "worker": found.parallel_config.worker_cls,
        "shutdown": found.shutdown_timeout,
        "custom_ops": found.compilation_config.custom_ops,
        "key": found.additional_config["sm70_settings"],
    }


def operators() -> dict[str, float]:
    """Largest difference between an operator of the missing extension and what vLLM computes without it."""
    import torch
    from vllm.model_executor.layers.vocab_parallel_embedding import get_masked_input_and_mask

    ids, weight = torch.arange(120), torch.randn(40, 8)
    shard = (20, 45, 7, 100, 108)  # 25 of the vocabulary, 7 rows of padding, 8 that were added
    out = torch.full((120, 8), 9.0)
    torch.ops._C.vocab_parallel_embedding(out, ids, weight, *shard)
    rows, absent = get_masked_input_and_mask(ids, *shard)
    expected = weight[rows.long()].masked_fill(absent.unsqueeze(-1), 0)
    x, gated = torch.randn(5, 64), torch.empty(5, 32)
    torch.ops._C.silu_and_mul(gated, x)
    wanted = torch.nn.functional.silu(x[:, :32]) * x[:, 32:]
    gelu = {}
    for name, approximate in (("gelu_and_mul", "none"), ("gelu_tanh_and_mul", "tanh")):
        getattr(torch.ops._C, name)(gated, x)
        by_torch = torch.nn.functional.gelu(x[:, :32], approximate=approximate) * x[:, 32:]
        gelu[name] = float((gated - by_torch).abs().max())
    torch.ops._C.silu_and_mul(gated, x)
    topk, choices = torch.empty(6, 2), torch.empty(6, 2, dtype=torch.int32)
    logits = torch.randn(6, 8)
    torch.ops._moe_C.topk_softmax(topk, choices, torch.empty(6, 2, dtype=torch.int32), logits, True)
    best = logits.softmax(-1).topk(2).values
    return {
        "vocab_parallel_embedding": float((out - expected).abs().max()),
        **gelu,
        "silu_and_mul": float((gated - wanted).abs().max()),
        "topk_softmax": float((topk - best / best.sum(-1, keepdim=True)).abs().max()),
    }


def gated(vllm_config: Any) -> dict[str, Any]:
    """MLPs of vLLM over NVFP4 weights, before and after gate and up share a launch with their activation.

    The layers are vLLM's own, without what their constructors need a process group for.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.kernels.linear import NvFp4LinearLayerConfig
    from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear
    from vllm.model_executor.models.gemma import GemmaMLP
    from vllm.model_executor.models.llama import LlamaMLP
    from vllm.model_executor.models.qwen2 import Qwen2MLP
    from vllm.model_executor.models.qwen2_moe import Qwen2MoeMLP

    from sm70_engine.ops.linear_nvfp4_vllm import Sm70NvFp4Linear, fuse_gated

    class Wrapped(MergedColumnParallelLinear):  # type: ignore[misc]
        """As an adapter's layer: a subclass, which may do more."""

    class Normed(Qwen2MLP):  # type: ignore[misc]
        """Looks at the product."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            product, _ = self.gate_up_proj(x)
            result: torch.Tensor = self.act_fn(product) * (product.amax() > 0)
            return result

    class Down(torch.nn.Module):  # type: ignore[misc]
        return_bias = True

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return x, None

    class Gate(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return x[..., :1], None

    def layer(kind: type[Any], inner: int, kernel: Any) -> Any:
        made = object.__new__(kind)
        torch.nn.Module.__init__(made)
        made.weight = torch.nn.Parameter(torch.randint(0, 256, (2 * inner, 64)).to(torch.uint8), requires_grad=False)
        scales = torch.randint(0x28, 0x48, (2 * inner, 8)).to(torch.uint8).view(torch.float8_e4m3fn)
        made.weight_scale = torch.nn.Parameter(scales, requires_grad=False)
        made.weight_global_scale = torch.nn.Parameter(torch.tensor(0.25), requires_grad=False)
        made.output_partition_sizes, made.bias, made.gather_output = [inner, inner], None, False
        made.skip_bias_add, made.return_bias, made.tp_size = False, True, 1
        kernel.process_weights_after_loading(made)
        apply = staticmethod(lambda owner, x, bias=None: kernel.apply_weights(owner, x, bias))
        made.quant_method = type("Method", (), {"apply": apply})()
        return made

    def mlp(kind: type[Any], inner: int = 80, linear: type[Any] = MergedColumnParallelLinear) -> Any:
        made = object.__new__(kind)
        torch.nn.Module.__init__(made)
        made.gate_up_proj, made.down_proj = layer(linear, inner, Sm70NvFp4Linear(NvFp4LinearLayerConfig())), Down()
        made.act_fn = GeluAndMul() if kind is GemmaMLP else SiluAndMul()
        made.expert_gate = Gate() if kind is Qwen2MoeMLP else None
        return made

    torch.manual_seed(0)
    x = torch.randn(5, 128).half() * 0.1
    found: dict[str, Any] = {}
    with set_current_vllm_config(vllm_config):
        cases = {
            "qwen2": mlp(Qwen2MLP), "llama": mlp(LlamaMLP, 64), "shared expert": mlp(Qwen2MoeMLP, 32),
            "gelu": mlp(GemmaMLP), "looks": mlp(Normed), "wrapped": mlp(Qwen2MLP, linear=Wrapped),
            "odd": mlp(Qwen2MLP, 20),
        }  # fmt: skip
        for name, module in cases.items():
            before = module(x)
            said = fuse_gated(module, 512)
            compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
            difference = (module(x) - before).abs().max() / before.abs().max()
            found[name] = {
                "fused": said.fused, "refused": list(said.refused), "difference": float(difference),
                "compiled": bool(torch.equal(compiled(x), module(x))), "activation": type(module.act_fn).__name__,
                "words": int(module.gate_up_proj.weight.numel()),
            }  # fmt: skip
    return found


def main() -> None:
    missing, (config, settled) = become_sm70(), configuration(sys.argv[1])
    mixed = ([1, 1, 4, 37, 80], [40, 0, 96, 0, 23])
    from sm70_engine.attention import dispatch

    dispatch.BRIDGE_PREFIX, dispatch.BRIDGE_QUERIES = 20, 32  # so that a small batch reaches the bridge
    result = {
        "fp16": batch("float16", *mixed, causal=True),
        "e4m3": batch("fp8", *mixed, causal=True),
        "without prefill": batch("fp8", *mixed, causal=True, prefill=False),
        "bridged e4m3": batch("fp8", *mixed, causal=True, bridge_rows=128),
        "bridged e5m2": batch("fp8_e5m2", *mixed, causal=True, bridge_rows=128),
        "e5m2": batch("fp8_e5m2", *mixed, causal=True),
        "window": batch("float16", *mixed, causal=True, window=20),
        "draft": batch("float16", [4, 4, 4], [0, 30, 100], causal=False, window=20),
        "wide draft": batch("float16", [20, 20], [0, 50], causal=False, window=30),
    }
    rest = {"operators": operators(), "gated": gated(config)}
    print(json.dumps({"missing": missing, "configuration": settled, "batches": result, **rest}))


if __name__ == "__main__":
    main()
