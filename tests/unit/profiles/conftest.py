"""Shortcuts of the contract's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sm70_profiles.catalog import load_profile
from sm70_profiles.facts import Facts
from sm70_profiles.profile import Profile
from sm70_profiles.resolver import Resolution, ServeRequest, resolve
from sm70_profiles.settings import Overrides

RELEASE = "qwen38_27b_nvfp4_dflash2"


class Serve:
    """Builds requests and resolutions from a profile's name and overrides as a user writes them."""

    def request(
        self, profile: str | Profile = RELEASE, overrides: dict[str, Any] | None = None, **more: Any
    ) -> ServeRequest:
        document = load_profile(profile) if isinstance(profile, str) else profile
        checkpoint = document.draft.checkpoint
        local = document.draft.required and (checkpoint is None or checkpoint.hugging_face is None)
        values = {"model_path": "/models/target", "draft_path": "/models/draft" if local else None, "served_name": "m"}
        settings = Overrides.model_validate(overrides or {})
        return ServeRequest.model_validate({"profile": document, "overrides": settings, **values, **more})

    def __call__(
        self,
        profile: str | Profile = RELEASE,
        overrides: dict[str, Any] | None = None,
        facts: Facts | None = None,
        **more: Any,
    ) -> Resolution:
        return resolve(self.request(profile, overrides, **more), facts)


@pytest.fixture
def serve() -> Callable[..., Resolution]:
    return Serve()
