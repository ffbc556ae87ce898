"""When the plugin is active, what it sets, and how it refuses a vLLM that it was not made for."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest

from sm70_engine import session
from sm70_engine.plugin import capability, entrypoints, hooks
from sm70_engine.plugin.autotune import choose
from sm70_engine.plugin.settings import EngineSettings, SettingsError, read_settings
from sm70_profiles.profile import EngineFlavour


@pytest.fixture
def sm70_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server that `sm70-serve` started with a profile of the sm70 engine."""
    monkeypatch.setenv(session.SESSION_ENVIRONMENT, str(tmp_path))
    monkeypatch.setattr(session, "current_session", lambda: SimpleNamespace(flavour=EngineFlavour.SM70))
    monkeypatch.setattr(hooks, "stand_in", lambda: None)
    for name in ("SM70_PRETEND", "VLLM_USE_AOT_COMPILE", "VLLM_USE_FLASHINFER_SAMPLER"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("found", "pretend", "ours"),
    [
        ((7, 0), "0", True),
        ((7, 0), "1", True),
        ((9, 0), "1", True),
        ((8, 6), "1", True),
        ((9, 0), "0", False),
        ((7, 5), "1", False),
        ((10, 0), "1", False),
        (None, "1", False),
    ],
)
def test_the_platform_is_for_its_gpu_and_stands_aside_elsewhere(
    monkeypatch: pytest.MonkeyPatch, sm70_session: None, found: tuple[int, int] | None, pretend: str, ours: bool
) -> None:
    monkeypatch.setenv("SM70_PRETEND", pretend)
    monkeypatch.setattr(capability, "device_capability", lambda: found)
    assert entrypoints.platform() == (entrypoints.CUDA_PLATFORM if ours else None)


def test_the_platform_sets_what_vllm_must_know_and_leaves_what_the_user_set(
    monkeypatch: pytest.MonkeyPatch, sm70_session: None
) -> None:
    monkeypatch.setattr(capability, "device_capability", lambda: (7, 0))
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "1")
    entrypoints.platform()
    import os

    assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert os.environ["VLLM_USE_AOT_COMPILE"] == "1"


def test_without_a_session_the_plugin_stands_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    assert entrypoints.SESSION_ENVIRONMENT == session.SESSION_ENVIRONMENT
    monkeypatch.delenv(session.SESSION_ENVIRONMENT, raising=False)
    monkeypatch.setattr(capability, "device_capability", lambda: (7, 0))
    assert entrypoints.platform() is None
    entrypoints.register()
    assert not entrypoints._registered


def test_other_settings_are_another_cache_key() -> None:
    assert EngineSettings().key() == EngineSettings().key()
    keys = {EngineSettings().key(), EngineSettings(prune_autotune=False).key(), EngineSettings(pretend=True).key()}
    assert len(keys) == 3


def test_settings_are_read_and_every_wrong_one_is_named() -> None:
    assert read_settings({"SM70_PRUNE_AUTOTUNE": "0", "SM70_SHUTDOWN_SECONDS": "9"}) == EngineSettings(
        prune_autotune=False, shutdown_seconds=9
    )
    with pytest.raises(SettingsError) as caught:
        read_settings({"SM70_PRUNE_AUTOTUNE": "maybe", "SM70_SHUTDOWN_SECONDS": "0", "SM70_DTYPE": "bfloat16"})
    for name in ("SM70_PRUNE_AUTOTUNE", "SM70_SHUTDOWN_SECONDS", "SM70_DTYPE"):
        assert name in str(caught.value)


def _vllm(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """A vLLM of this version with one module."""
    vllm, module = types.ModuleType("vllm"), types.ModuleType("vllm.somewhere")
    vars(vllm)["__version__"] = version
    vars(module)["Thing"] = SimpleNamespace(method=None)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.somewhere", module)


HERE = hooks.Hook("vllm.somewhere", "Thing.method", "what is there")
GONE = hooks.Hook("vllm.somewhere", "Thing.renamed", "the attention backend")
NO_MODULE = hooks.Hook("vllm.moved", "Thing", "the worker")


def test_another_vllm_is_refused_by_the_name_of_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    _vllm(monkeypatch, "0.31.0")
    with pytest.raises(hooks.MissingHookError) as caught:
        hooks.check((HERE, GONE, NO_MODULE), activated=False)
    message = str(caught.value)
    assert "vllm.somewhere.Thing.renamed (the attention backend)" in message
    assert "vllm.moved.Thing (the worker)" in message
    assert "Thing.method" not in message
    assert "vLLM 0.31.0" in message
    assert "checked with vLLM 0.32 only" in message


def test_a_version_that_was_not_checked_is_refused_even_with_every_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    _vllm(monkeypatch, "0.33.1")
    with pytest.raises(hooks.MissingHookError, match=r"vLLM 0\.33\.1: it was checked with vLLM 0\.32 only"):
        hooks.check((HERE,), activated=False)
    _vllm(monkeypatch, "0.32.4+empty")
    hooks.check((HERE,), activated=False)


def test_the_autotuner_takes_the_same_small_configuration_every_time() -> None:
    def config(warps: int, stages: int, **tiles: int) -> SimpleNamespace:
        return SimpleNamespace(num_warps=warps, num_stages=stages, kwargs=tiles)

    small = config(4, 2, BK=32, BV=32)
    others = [config(8, 2, BK=32, BV=32), config(4, 3, BK=32, BV=32), config(4, 2, BK=64, BV=64)]
    for order in ([small, *others], [*others, small], [*reversed(others), small]):
        assert choose(order) is small
