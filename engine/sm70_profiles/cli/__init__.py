"""The command line `sm70-profiles`: the contract on a laptop, in the words of the operator and the pod."""

from __future__ import annotations

from sm70_profiles.cli.main import main

__all__ = ["main"]
