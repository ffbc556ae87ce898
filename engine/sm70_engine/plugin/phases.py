"""Says which phase of the start a worker is in, by the calls that vLLM makes to it."""

from __future__ import annotations

from typing import Any

from sm70_engine.acceleration.startup import enter
from sm70_engine.session import session_folder
from sm70_profiles.report import StartupPhase


def enter_phase(phase: StartupPhase) -> None:
    """Enters the phase in this process's session; nothing outside of one."""
    folder = session_folder()
    if folder is not None:
        enter(folder.startup, phase)


class PhasedWorker:
    """To be put before one of vLLM's workers: its steps of a start become phases."""

    def load_model(self, *arguments: Any, **options: Any) -> Any:
        enter_phase(StartupPhase.LOADING_WEIGHTS)
        return super().load_model(*arguments, **options)  # type: ignore[misc]

    def determine_available_memory(self) -> Any:
        # The profile run compiles what the model's graphs need.
        enter_phase(StartupPhase.COMPILING)
        return super().determine_available_memory()  # type: ignore[misc]

    def compile_or_warm_up_model(self) -> Any:
        enter_phase(StartupPhase.CAPTURING_GRAPHS)
        found = super().compile_or_warm_up_model()  # type: ignore[misc]
        enter_phase(StartupPhase.WARMING)
        return found
