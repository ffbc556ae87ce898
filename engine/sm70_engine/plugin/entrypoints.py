"""vLLM's entry points. Loaded in every vLLM process of an installation that has our package, so they stand aside unless
`sm70-serve` started the server.

Nothing of vLLM, and nothing else of ours, is imported before that is known.
"""

from __future__ import annotations

import os

SESSION_ENVIRONMENT = "SM70_SESSION"  # as `sm70_engine.session` has it
CPU_PLATFORM = "sm70_engine.plugin.platform.CpuReferencePlatform"
CUDA_PLATFORM = "sm70_engine.plugin.cuda_platform.Sm70Platform"
_registered = False


def platform() -> str | None:
    """`vllm.platform_plugins`: the class of our platform, or None to leave vLLM its own.

    The sm70 engine's platform is for a GPU of compute capability 7.0 and, with SM70_PRETEND=1, for 8.x and 9.x.
    """
    if not os.environ.get(SESSION_ENVIRONMENT):
        return None
    from sm70_engine.session import current_session
    from sm70_profiles.profile import EngineFlavour

    flavour = current_session().flavour
    if flavour is EngineFlavour.CPU:
        return CPU_PLATFORM
    if flavour is not EngineFlavour.SM70:
        return None
    from sm70_engine.plugin.capability import device_capability, serves
    from sm70_engine.plugin.settings import read_settings

    settings = read_settings(os.environ)
    # A preflight only has arguments parsed: it needs the platform and no device.
    if not serves(device_capability(), settings.pretend) and os.environ.get("SM70_PREFLIGHT") != "1":
        return None
    settings.apply(os.environ)
    from sm70_engine.plugin import hooks

    hooks.stand_in()
    return CUDA_PLATFORM


def register() -> None:
    """`vllm.general_plugins`: registers our operators; vLLM calls it once or more in each of its processes.

    Raises `MissingHookError` when this vLLM lacks something that we build on; vLLM then does not start.
    """
    global _registered
    if _registered or not os.environ.get(SESSION_ENVIRONMENT):
        return
    _registered = True
    from sm70_engine.plugin import hooks

    hooks.check()
    hooks.register_operators()
