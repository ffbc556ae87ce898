"""The JSON Schemas in the package are those of the types, and admit what an engine says."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest

from sm70_profiles import schemas
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.report import (
    AccelerationReport,
    CacheState,
    CapacityReport,
    CompileCacheReport,
    DeviceFacts,
    EffectiveConfiguration,
    EngineFacts,
    PathReport,
    PathState,
    ProfileFacts,
    RouteCount,
    StartupPhase,
    StartupReport,
    Summary,
)
from sm70_profiles.routes import Stage
from sm70_profiles.termination import (
    FindingSeverity,
    PreflightFinding,
    Termination,
    TerminationKind,
)

REPORT = AccelerationReport(
    engine=EngineFacts(build="1", vllm="2", torch="3"),
    profile=ProfileFacts(name="p", hash="0"),
    device=DeviceFacts(name="CPU", count=0),
    effective=EffectiveConfiguration(argv=("m",), env_hash="0"),
    paths=(PathReport(name="a", expected=True, state=PathState.ENABLED),),
    expected_acceleration=("a",),
    summary=Summary(enabled=1, total=1),
    compile_cache=CompileCacheReport(enabled=True, state=CacheState.WARM, key="k"),
    routes=(RouteCount(route="r", stage=Stage.DECODE, dispatches=1),),
    capacity=CapacityReport(kv_tokens=1, block_size=1, max_model_len=1, residents_at_max_len=1),
    startup=StartupReport(phase=StartupPhase.SERVING, since="now", seconds={StartupPhase.STARTING: 1.5}),
    observed_at="now",
)
WORDS = Termination(
    kind=TerminationKind.PREFLIGHT,
    reason=TerminationReason.PATH_NOT_FOUND,
    message="m",
    findings=(
        PreflightFinding(
            severity=FindingSeverity.ERROR, reason=TerminationReason.PATH_NOT_FOUND, subject="model", message="m"
        ),
    ),
)
SAID = {"acceleration-report": REPORT, "startup": REPORT.startup, "termination": WORDS}


def test_the_schemas_are_up_to_date(tmp_path: Path) -> None:
    assert schemas.stale(schemas.folder()) == []
    assert set(schemas.stale(tmp_path)) == set(schemas.MODELS)


@pytest.mark.parametrize("name", SAID)
def test_what_is_said_fits_its_schema(name: str) -> None:
    validator = jsonschema.Draft202012Validator(schemas.schema(name))
    said = SAID[name]
    assert said is not None
    document = said.model_dump(mode="json", by_alias=True)
    validator.validate(document)
    validator.validate(document | {"somethingNew": 1})  # a newer engine's
    del document[next(key for key in ("paths", "phase", "reason") if key in document)]
    assert not validator.is_valid(document)
