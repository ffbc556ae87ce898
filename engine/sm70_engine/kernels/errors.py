"""The error that every part of the kernel workshop raises for something a user can act on."""


class KernelError(RuntimeError):
    """Says what must hold, what was found and what to do."""
