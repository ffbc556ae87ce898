"""The CPU lane's worker: vLLM's own, which also says what each batch is for and reports when it shuts down."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from sm70_engine.acceleration.routes import set_stages
from sm70_engine.plugin.facts import routes_at_shutdown, worker_facts
from sm70_engine.plugin.phases import PhasedWorker
from sm70_engine.plugin.stages import stages_of


class CpuReferenceWorker(PhasedWorker, CPUWorker):  # type: ignore[misc]
    """Executes models; see vLLM's worker for all that is not here."""

    def execute_model(self, scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
        # The stages stand until the next batch: a draft model runs after this call has returned.
        set_stages(stages_of(scheduler_output))
        return super().execute_model(scheduler_output, *arguments, **options)

    def sm70_facts(self) -> dict[str, str | int | None]:
        """Reached through vLLM's `collective_rpc`."""
        return worker_facts(self)

    def shutdown(self) -> None:
        routes_at_shutdown()
        super().shutdown()
