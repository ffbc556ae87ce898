"""The worker of the sm70 engine: vLLM's GPU worker, which also says what each batch is for and what it runs on."""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu_worker import Worker

from sm70_engine.acceleration.routes import set_captured_stages, set_stages
from sm70_engine.attention.backend import NAME, refusals, reserved_bytes
from sm70_engine.kernels import torch_ops
from sm70_engine.ops.gated_mlp import FALLBACK
from sm70_engine.ops.linear_nvfp4_vllm import fuse_gated
from sm70_engine.plugin.autotune import pruned
from sm70_engine.plugin.facts import Facts, routes_at_shutdown, worker_facts
from sm70_engine.plugin.phases import PhasedWorker
from sm70_engine.plugin.settings import read_settings
from sm70_engine.plugin.stages import stages_of
from sm70_profiles.base import printable
from sm70_profiles.routes import FallbackReason, Stage

logger = init_logger("vllm.sm70")


class Sm70Worker(PhasedWorker, Worker):  # type: ignore[misc]
    """Executes models; see vLLM's worker for all that is not here."""

    def init_device(self) -> None:
        super().init_device()
        # Kernels cannot be loaded while a graph is captured.
        torch_ops.prepare(self.device)

    def load_model(self, *arguments: Any, **options: Any) -> Any:
        found = super().load_model(*arguments, **options)
        self._fuse()
        return found

    def _fuse(self) -> None:
        """Before anything is compiled, profiled or captured."""
        if not read_settings(os.environ).gated_swiglu:
            return
        rows, runner = int(self.vllm_config.scheduler_config.max_num_batched_tokens), self.model_runner
        draft = getattr(runner, "get_draft_model", lambda: None)()
        for model in (runner.get_model(), draft):
            fused = fuse_gated(model, rows) if model is not None else None
            if fused is not None and (fused.fused or fused.refused):
                logger.info("sm70: gate, up and silu in one launch: %s", fused)
                if fused.refused:
                    refusals[FALLBACK] = FallbackReason.NOT_FUSED

    def compile_or_warm_up_model(self) -> Any:
        drafts = self.vllm_config.speculative_config is not None
        set_captured_stages((Stage.VERIFY if drafts else Stage.DECODE,))
        return super().compile_or_warm_up_model()

    def execute_model(self, scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
        # The stages stand until the next batch: a draft model runs after this call has returned.
        set_stages(stages_of(scheduler_output))
        return super().execute_model(scheduler_output, *arguments, **options)

    def sm70_facts(self) -> Facts:
        """Reached through vLLM's `collective_rpc`."""
        facts = worker_facts(self)
        major, minor = torch.cuda.get_device_capability(self.device)
        backends = str(facts["attention_backends"]).split(",")
        return {
            **facts,
            # CUSTOM is the name that vLLM has room for; the backend's own is what users know.
            "attention_backends": ",".join(NAME if name == "CUSTOM" else name for name in backends),
            "cuda": torch.version.cuda,
            "device": torch.cuda.get_device_name(self.device),
            "compute_capability": f"{major}.{minor}",
            "cudagraph_mode": str(self.vllm_config.compilation_config.cudagraph_mode),
            "compilation_mode": str(self.vllm_config.compilation_config.mode),
            # A fact is a short word; the log has the whole.
            "fallbacks": printable("; ".join(f"{name}: {why}" for name, why in sorted(refusals.items())), 128),
            "autotune_pruned": len(pruned()),
            "prefill_bridge_bytes": reserved_bytes(),
        }

    def shutdown(self) -> None:
        routes_at_shutdown()
        super().shutdown()
