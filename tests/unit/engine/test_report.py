"""The acceleration report: states, readiness, series and devices, without an engine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sm70_engine.acceleration import capabilities as process
from sm70_engine.acceleration.capabilities import capabilities, provide
from sm70_engine.acceleration.device import cpu_device, gpu_facts, nvml_facts
from sm70_engine.acceleration.report import (
    blocking_path,
    build_report,
    cache_directory,
    readable,
)
from sm70_engine.acceleration.series import SPECULATION_SAMPLES, ReportCollector, SpeculationCollector
from sm70_engine.plugin.effective import effective_settings
from sm70_engine.session import Session, SessionError, SessionFolder, current_session
from sm70_profiles.catalog import load_profile
from sm70_profiles.facts import Interconnect
from sm70_profiles.report import (
    AccelerationReport,
    CacheState,
    CapacityReport,
    FallbackCount,
    PathReport,
    PathState,
    RouteCount,
    StartupPhase,
    StartupReport,
    UuidSource,
    parse_report,
)
from sm70_profiles.resolver import Facts, ServeRequest, resolve
from sm70_profiles.routes import ROUTES, FallbackReason, Stage
from sm70_profiles.spec import Acceleration, AccelerationPolicy, AllowedDisabledPath, KvCacheDtype, Overrides

OPERATORS = ("attention", "gdn", "nvfp4_linear")


@pytest.fixture(autouse=True)
def _operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_operators", set())
    for operator in OPERATORS:
        provide(operator)


def session(**overrides: object) -> Session:
    request = ServeRequest(
        profile=load_profile("tiny_hybrid_reference"),
        model_path="/models/tiny",
        served_name="tiny",
        overrides=Overrides.model_validate(overrides),
    )
    resolution = resolve(request)
    return Session(
        request=request,
        facts=Facts(),
        settings=resolution.settings,
        argv=resolution.argv,
        profile_hash=resolution.profile_hash,
        env_hash="0" * 64,
    )


def report(
    counts: tuple[RouteCount, ...] = (),
    environment: dict[str, str] | None = None,
    fallbacks: tuple[FallbackCount, ...] = (),
    **overrides: object,
) -> AccelerationReport:
    found, around = session(**overrides), environment or {}
    return build_report(found, found.settings, capabilities(found, around), counts, around, fallbacks=fallbacks)


def test_the_profiles_paths_are_enabled_and_the_gpus_are_not_pretended() -> None:
    found = report()
    assert str(found.summary) == f"{len(found.expected_acceleration)}/{len(found.expected_acceleration)}"
    assert {path.state for path in found.paths if path.expected} == {PathState.ENABLED}
    others = [path for path in found.paths if not path.name.startswith("reference_")]
    assert all(path.state is PathState.NOT_APPLICABLE for path in others)


def test_another_kv_dtype_disables_its_path_by_name() -> None:
    (path,) = (path for path in report(kvCacheDtype="fp8_e5m2").paths if path.name == "reference_attention_e4m3")
    assert (path.state, path.reason) == (PathState.DISABLED, "kv_dtype")


def test_a_missing_operator_disables_its_path_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_operators", {"attention"})
    reasons = {path.name: path.reason for path in report().paths}
    assert reasons["reference_gdn"] == "operator_missing:gdn"


def test_the_report_is_what_the_operator_reads() -> None:
    found = report(environment={"NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-2", "SM70_ENGINE_IMAGE": "registry/x@sha256:1"})
    assert parse_report(found.model_dump_json(by_alias=True).encode()) == found
    assert found.device.uuids == ("GPU-1", "GPU-2")
    assert found.engine.image == "registry/x@sha256:1"


def test_routes_that_may_run_are_shown_with_zero_and_others_only_when_they_ran() -> None:
    idle = tuple(RouteCount(route=name, stage=stage, dispatches=0) for name in ROUTES for stage in Stage)
    shown = {row.route for row in report(idle).routes}
    assert "gdn_reference" in shown
    assert "attention_e5m2_reference" not in shown
    ran = RouteCount(route="attention_e5m2_reference", stage=Stage.DECODE, dispatches=3, fallback=True)
    assert ran in report((ran,)).routes


def test_reasons_of_another_engines_fallbacks_are_shown_only_when_they_were_taken() -> None:
    def row(route: str, reason: FallbackReason, dispatches: int) -> FallbackCount:
        return FallbackCount(route=route, stage=Stage.DECODE, reason=reason, dispatches=dispatches)

    own = row("attention_e5m2_reference", FallbackReason.KV_DTYPE, 0)
    idle = row("attention_triton", FallbackReason.BACKEND_NOT_CHOSEN, 0)
    taken = row("gdn_triton", FallbackReason.NO_KERNEL, 2)
    assert report(fallbacks=(own, idle, taken)).fallbacks == (own, taken)


def test_the_log_names_every_path_with_its_reason() -> None:
    found = report(kvCacheDtype="fp8_e5m2")
    text = readable(found)
    assert f"acceleration {found.summary} enabled" in text
    assert all(path.name in text for path in found.paths)
    assert "kv_dtype" in text


def allowing(paths: Iterable[PathReport]) -> Acceleration:
    allowed = tuple(AllowedDisabledPath(path=path.name, because="a test") for path in paths)
    return Acceleration(allow_disabled=allowed)


def test_readiness_follows_the_policy() -> None:
    require, watch = Acceleration(), Acceleration(policy=AccelerationPolicy.REPORT)
    assert blocking_path(report().paths, require) is None
    paths = report(kvCacheDtype="fp8_e5m2").paths
    disabled = [path for path in paths if path.expected and path.state is PathState.DISABLED]
    assert disabled[0].name == "reference_attention_e4m3"
    assert blocking_path(paths, require) == disabled[0]
    assert blocking_path(paths, allowing(disabled)) is None
    assert blocking_path(paths, watch) is None


def test_what_is_not_applicable_is_not_enabled() -> None:
    paths = tuple(
        path.model_copy(update={"state": PathState.NOT_APPLICABLE}) if path.expected else path
        for path in report().paths
    )
    expected = [path for path in paths if path.expected]
    assert blocking_path(paths, allowing(expected[:1])) == expected[1]


def test_the_series_are_those_that_dashboards_know() -> None:
    counts = (
        RouteCount(route="gdn_reference", stage=Stage.DECODE, dispatches=7),
        RouteCount(route="attention_e5m2_reference", stage=Stage.PREFILL, dispatches=3, fallback=True),
    )
    registry = CollectorRegistry()
    now: list[AccelerationReport] = []
    registry.register(ReportCollector(lambda: SimpleNamespace(report=lambda: now[-1]) if now else None))
    assert generate_latest(registry) == b""  # the engine is not there yet
    started = StartupReport(phase=StartupPhase.SERVING, since="now", seconds={StartupPhase.LOADING_WEIGHTS: 2.5})
    held = CapacityReport(kv_tokens=4096, block_size=16, max_model_len=4096, residents_at_max_len=1)
    reason = FallbackReason.KV_DTYPE
    why = tuple(
        FallbackCount(route="attention_e5m2_reference", stage=stage, reason=reason, dispatches=dispatches)
        for stage, dispatches in ((Stage.PREFILL, 3), (Stage.DECODE, 0))
    )
    now.append(report(counts, fallbacks=why).model_copy(update={"startup": started, "capacity": held}))
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }
    assert samples["sm70_acceleration_path", "enabled", "reference_gdn"] == 1
    assert samples["sm70_acceleration_path", "disabled", "reference_gdn"] == 0
    assert samples["sm70_route_dispatch_total", "decode", "gdn_reference"] == 7
    assert samples["sm70_route_dispatch_total", "attention_e5m2_reference", "prefill"] == 3
    # With zero before the first one, so that a rule on its increase sees it.
    assert samples["sm70_route_fallback_total", "attention_e5m2_reference", "kv_dtype", "prefill"] == 3
    assert samples["sm70_route_fallback_total", "attention_e5m2_reference", "decode", "kv_dtype"] == 0
    assert samples[("sm70_compile_cache_files_added",)] == 0
    assert samples["sm70_compile_cache_state", "Off"] == 1
    assert samples["sm70_compile_cache_state", "Warm"] == 0
    assert samples["sm70_startup_seconds", "LoadingWeights"] == 2.5
    assert samples[("sm70_kv_cache_tokens",)] == 4096


def test_a_round_of_speculation_is_a_mean_over_what_vllm_counts() -> None:
    registry = CollectorRegistry()
    drafts = Counter("vllm:spec_decode_num_drafts", "", ["engine"], registry=registry)
    accepted = Counter("vllm:spec_decode_num_accepted_tokens", "", ["engine"], registry=registry)
    steps = Histogram("vllm:inter_token_latency_seconds", "", ["engine"], registry=registry)
    registry.register(SpeculationCollector(lambda: registry.restricted_registry(SPECULATION_SAMPLES).collect()))
    assert "sm70_spec" not in generate_latest(registry).decode()
    for engine in ("0", "1"):
        drafts.labels(engine).inc(10)
        accepted.labels(engine).inc(15)
        steps.labels(engine).observe(0.25)
    text = generate_latest(registry).decode()
    assert "sm70_spec_tokens_per_round 2.5" in text
    assert "sm70_spec_round_seconds 0.25" in text


@pytest.mark.parametrize(
    ("value", "uuids"),
    [
        (None, ()),
        ("", ()),
        ("all", ()),
        ("void", ()),
        ("0,1", ()),
        ("GPU-a, GPU-b ,", ("GPU-a", "GPU-b")),
        ("MIG-c", ("MIG-c",)),
        ("GPU-" + "x" * 500, ()),
        (",".join(["GPU-a"] * 500), ("GPU-a",) * 64),
    ],
)
def test_devices_are_those_that_the_environment_names(value: str | None, uuids: tuple[str, ...]) -> None:
    facts = cpu_device({} if value is None else {"NVIDIA_VISIBLE_DEVICES": value})
    assert facts.uuids == uuids
    assert facts.count == len(uuids)
    assert facts.uuid_source is (UuidSource.ENVIRONMENT if uuids else UuidSource.NONE)
    assert facts.compute_capability is None


def test_a_cache_that_is_off_is_where_vllm_keeps_it() -> None:
    assert cache_directory({"VLLM_CACHE_ROOT": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}) == Path("/a")
    assert cache_directory({"XDG_CACHE_HOME": "/b", "HOME": "/c"}) == Path("/b/vllm")
    assert cache_directory({"HOME": "/c"}) == Path("/c/.cache/vllm")


def test_a_cache_that_is_off_names_where_vllm_keeps_it_before_and_after_the_start(tmp_path: Path) -> None:
    found, folder = session(), SessionFolder(tmp_path)
    for _ in range(2):
        cache = build_report(
            found, found.settings, capabilities(found, {}), (), {"HOME": "/c"}, folder=folder
        ).compile_cache
        assert cache is not None
        assert (cache.state, cache.directory) == (CacheState.OFF, "/c/.cache/vllm")
        folder.write_cache(found.cache.finish())


def test_what_was_left_to_the_engine_is_judged_by_its_choice() -> None:
    vllm = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=True, cache_dtype="fp8_e4m3"),
        model_config=SimpleNamespace(max_model_len=64, enforce_eager=False),
        scheduler_config=SimpleNamespace(max_num_seqs=1, max_num_batched_tokens=2),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
    )
    auto = effective_settings(Overrides(kv_cache_dtype=KvCacheDtype.AUTO), vllm)
    assert (auto.kv_cache_dtype, auto.max_model_len, auto.enforce_eager) == (KvCacheDtype.FP8_E4M3, 64, False)
    asked = effective_settings(Overrides(kv_cache_dtype=KvCacheDtype.FP8_E5M2, max_model_len=32), vllm)
    assert (asked.kv_cache_dtype, asked.max_model_len) == (KvCacheDtype.FP8_E5M2, 32)
    vllm.cache_config.cache_dtype = "some_other"
    assert effective_settings(Overrides(), vllm).kv_cache_dtype is None


def test_a_session_is_read_back_and_announced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = SessionFolder.create({"TMPDIR": str(tmp_path)})
    try:
        assert folder.path.stat().st_mode & 0o777 == 0o700
        folder.write(session(kvCacheDtype="fp8_e5m2"))
        assert folder.read() == session(kvCacheDtype="fp8_e5m2")
        assert [folder.announce_once(), folder.announce_once()] == [True, False]
        folder.path.joinpath("session.json").write_text("{}")
        with pytest.raises(SessionError):
            folder.read()
    finally:
        folder.remove()
    assert not folder.path.exists()
    monkeypatch.delenv("SM70_SESSION", raising=False)
    current_session.cache_clear()
    with pytest.raises(SessionError, match="not started"):
        current_session()
    assert os.environ.get("SM70_SESSION") is None


class Nvml:
    """An NVML with four V100 of which one pair has no NVLink."""

    NVMLError = RuntimeError
    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0
    apart: tuple[int, int] | None = None

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 4

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetCudaComputeCapability(self, _: int) -> tuple[int, int]:  # noqa: N802
        return 7, 0

    def nvmlDeviceGetName(self, _: int) -> bytes:  # noqa: N802
        return b"Tesla V100-SXM2-16GB"

    def nvmlDeviceGetMemoryInfo(self, _: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=16384 << 20)

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.159.04"

    def nvmlDeviceGetUUID(self, index: int) -> str:  # noqa: N802
        return f"GPU-0000000{index}-2222"

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, _: int) -> int:  # noqa: N802
        return 1 if (one, other) == self.apart else 0


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, [0, 1, 2, 3]),
        ("2,0", [2, 0]),
        ("GPU-00000003", [3]),
        ("1,nonsense,2", [1]),
        ("", []),
    ],
)
def test_the_gpus_are_those_that_cuda_would_see(visible: str | None, uuids: list[int]) -> None:
    device = nvml_facts(Nvml(), visible)
    if not uuids:
        assert device is None
        return
    assert device is not None
    assert device.uuids == tuple(f"GPU-0000000{index}-2222" for index in uuids)
    assert (device.count, device.uuid_source) == (len(uuids), UuidSource.NVML)


def test_the_rules_judge_the_gpus_that_are_there() -> None:
    nvml = Nvml()
    device = nvml_facts(nvml, None)
    assert device is not None
    gpu = gpu_facts(device, pretend=False)
    assert gpu is not None
    assert (gpu.product, gpu.memory_mib, gpu.compute_capability) == ("Tesla-V100-SXM2-16GB", 16384, "7.0")
    assert gpu.interconnect is Interconnect.NVLINK_MESH
    nvml.apart = (1, 3)
    device = nvml_facts(nvml, None)
    assert device is not None
    apart = gpu_facts(device, pretend=False)
    assert apart is not None
    assert apart.interconnect is Interconnect.ANY
    other = device.model_copy(update={"compute_capability": "9.0"})
    judged = gpu_facts(other, pretend=True)
    assert judged is not None
    assert judged.compute_capability is None
    assert gpu_facts(cpu_device({}), pretend=False) is None
