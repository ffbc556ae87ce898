"""Which operators this process has registered: what may run. Whether it did run is for the route counters to say."""

from __future__ import annotations

from collections.abc import Mapping

from sm70_engine.acceleration.device import gpu_facts, nvml_device
from sm70_engine.plugin.settings import read_settings
from sm70_engine.session import Session
from sm70_profiles.facts import GpuFacts
from sm70_profiles.profile import EngineFlavour
from sm70_profiles.rules import Capabilities

_operators: set[str] = set()


def provide(operator: str) -> None:
    """Says that the operator of this name (as `sm70_profiles.rules` spells it) is registered."""
    _operators.add(operator)


def _gpu(session: Session, environment: Mapping[str, str]) -> GpuFacts | None:
    """The GPU that computes; on the CPU lane none does, whatever the pod holds."""
    device = nvml_device() if session.flavour is EngineFlavour.SM70 else None
    return gpu_facts(device, read_settings(environment).pretend) if device is not None else None


def capabilities(session: Session, environment: Mapping[str, str]) -> Capabilities:
    """What this process offers now, for this session's checkpoints and under these variables."""
    return Capabilities(
        flavour=session.flavour,
        operators=frozenset(_operators),
        gpu=_gpu(session, environment),
        model=session.facts.model,
        draft=session.facts.draft,
        environment=environment,
    )
