"""The CPU lane's worker: vLLM's own, which also says what each batch is for and reports when it shuts down."""

from __future__ import annotations

import os
from typing import Any

from vllm.logger import init_logger
from vllm.v1.worker.cpu_worker import CPUWorker

from sm70_engine.acceleration.routes import read_counters, set_stages
from sm70_engine.plugin.stages import stages_of
from sm70_engine.session import session_folder

logger = init_logger("vllm.sm70")


class CpuReferenceWorker(CPUWorker):  # type: ignore[misc]
    """Executes models; see vLLM's worker for all that is not here."""

    def execute_model(self, scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
        # The stages stand until the next batch: a draft model runs after this call has returned.
        set_stages(stages_of(scheduler_output))
        return super().execute_model(scheduler_output, *arguments, **options)

    def sm70_facts(self) -> dict[str, str | int | None]:
        """What only a worker knows; reached through vLLM's `collective_rpc`."""
        cache = self.vllm_config.cache_config
        backends = {group.backend.get_name() for groups in self.model_runner.attn_groups for group in groups}
        return {
            "rank": self.rank,
            "pid": os.getpid(),
            "block_size": cache.block_size,
            "mamba_block_size": cache.mamba_block_size,
            "blocks": cache.num_gpu_blocks,
            "kv_cache_dtype": str(cache.cache_dtype),
            "attention_backends": ",".join(sorted(backends)),
            "model_runner": type(self.model_runner).__name__,
        }

    def shutdown(self) -> None:
        folder = session_folder()
        if folder is not None:
            counts = (row for row in read_counters(folder.counters) if row.dispatches)
            text = ", ".join(f"{row.route}/{row.stage}={row.dispatches}" for row in counts)
            logger.info("sm70: routes at shutdown: %s", text or "none")
        super().shutdown()
