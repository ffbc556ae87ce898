"""vLLM's entry points. Loaded in every vLLM process of an installation that has our package, so they stand aside unless
`sm70-serve` started the server.

Nothing of vLLM is imported before that is known.
"""

from __future__ import annotations

from sm70_engine.session import current_session, session_folder
from sm70_profiles.profile import EngineFlavour

_registered = False


def platform() -> str | None:
    """`vllm.platform_plugins`: the class of our platform, or None to leave vLLM its own."""
    if session_folder() is None:
        return None
    if current_session().flavour is not EngineFlavour.CPU:
        return None
    return "sm70_engine.plugin.platform.CpuReferencePlatform"


def register() -> None:
    """`vllm.general_plugins`: registers our operators; vLLM calls it once or more in each of its processes.

    Raises `MissingHookError` when this vLLM lacks something that we build on; vLLM then does not start.
    """
    global _registered
    if _registered or session_folder() is None:
        return
    _registered = True
    from sm70_engine.plugin import hooks

    hooks.check()
    hooks.register_operators()
