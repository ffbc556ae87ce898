"""`sm70-profiles` as a user runs it: output, JSON and exit codes."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sm70_profiles.catalog import load_profile, profile_names
from sm70_profiles.cli import main
from sm70_profiles.cli.output import ExitCode
from sm70_profiles.documents import parse_profile, write_document

RELEASE = "qwen38_27b_nvfp4_dflash2"
SERVICE: dict[str, Any] = {
    "apiVersion": "inference.sm70.io/v1alpha1",
    "kind": "Sm70InferenceService",
    "metadata": {"name": "demo", "namespace": "models"},
    "spec": {
        "profile": RELEASE,
        "model": {"hostPath": {"path": "/data/models/x"}, "servedName": "qwen"},
        "auth": {"allowAnonymous": True},
        "rollout": {"drainTimeoutSeconds": 5},
    },
}

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def service(tmp_path: Path, **changes: Any) -> str:
    path = tmp_path / "service.yaml"
    path.write_text(write_document({**SERVICE, "spec": {**SERVICE["spec"], **changes}}), "utf-8")
    return str(path)


def test_list(run: Run) -> None:
    code, out, _ = run("list")
    assert code == ExitCode.FINE
    assert all(name in out for name in profile_names())
    code, out, _ = run("list", "--json")
    assert [row["name"] for row in json.loads(out)] == list(profile_names())


def test_show(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("show", RELEASE)
    assert (code, parse_profile(out)) == (0, load_profile(RELEASE))
    path = tmp_path / "mine.yaml"
    path.write_text(out, "utf-8")
    assert json.loads(run("show", str(path), "--json")[1])["name"] == RELEASE


def test_resolve(run: Run) -> None:
    code, out, _ = run("resolve", RELEASE, "--", "--kv-cache-dtype", "fp8_e5m2")
    assert code == ExitCode.FINE
    assert "--kv-cache-dtype fp8_e5m2" in out
    assert "acceleration 8/11 predicted" in out
    assert out.count("kv_dtype") >= 3
    code, out, _ = run("resolve", RELEASE, "--json", "--set", "dtype=bfloat16")
    answer = json.loads(out)
    assert code == ExitCode.REFUSED
    assert [refusal["code"] for refusal in answer["refusals"]] == ["Dtype"]
    assert answer["argv"][0] == "/models/target"


def test_resolve_reads_checkpoints_that_are_at_hand(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}', "utf-8")
    code, out, _ = run("resolve", RELEASE, "--model", str(tmp_path))
    assert code == ExitCode.REFUSED
    assert "ModelIncompatible" in out


def test_explain(run: Run) -> None:
    code, out, _ = run("explain", "rtx3090_huge_dflash2", "--set", "speculation.tokens=15")
    assert code == ExitCode.FINE
    line = next(line for line in out.splitlines() if line.startswith("speculation.lookupAdaptive"))
    assert "adjustment" in line
    assert "correct after a prefix hit" in line
    rows = json.loads(run("explain", "custom", "--json")[1])["provenance"]
    assert {row["origin"] for row in rows} == {"profile"}


def test_memory(run: Run) -> None:
    code, out, _ = run("memory", RELEASE, "--gpu", "Tesla-V100-SXM2-16GB")
    assert code == ExitCode.FINE
    assert "4.06 GiB" in out
    assert "423840" in out
    code, out, _ = run("memory", RELEASE, "--gpu", "Tesla-V100-SXM2-16GB", "--set", "gpuMemoryUtilizationPercent=92")
    assert code == ExitCode.REFUSED
    assert "below zero" in out
    assert "380 x" in run("memory", "rtx3090_fast_dflash2")[1]
    assert "cannot be predicted" in run("memory", "custom")[1]
    assert json.loads(run("memory", RELEASE, "--json")[1])["memory"]["pool"]["tokens"] == 423840


def test_check(run: Run, tmp_path: Path) -> None:
    assert run("check", "-f", service(tmp_path))[0] == ExitCode.FINE
    code, out, _ = run("check", "-f", service(tmp_path, overrides={"dtype": "bfloat16"}, extraArgs=["--port", "1"]))
    assert code == ExitCode.REFUSED
    assert "Dtype: `overrides.dtype`" in out
    assert "OwnedFlag: `extraArgs[0]`" in out
    code, out, _ = run("check", "-f", service(tmp_path, profile="nope"), "--json")
    assert (code, json.loads(out)[0]["refusals"][0]["code"]) == (ExitCode.REFUSED, "ProfileNotFound")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"colour": "red"}, "colour"),
        ({"model": {}}, "exactly one of"),
        ({"profile": None}, "exactly one of `profile`"),
        ({"overrides": {"maxModelLen": -1}}, "maxModelLen"),
        ({"draft": {"hostPath": {"path": "relative"}}}, "draft"),
    ],
)
def test_check_refuses_what_the_schema_refuses(run: Run, tmp_path: Path, change: dict[str, Any], word: str) -> None:
    code, out, _ = run("check", "-f", service(tmp_path, **change))
    assert code == ExitCode.REFUSED
    assert "ResourceInvalid" in out
    assert word in out


def test_check_with_a_profile_of_ones_own(run: Run, tmp_path: Path) -> None:
    reference = {"profile": None, "profileRef": {"configMap": {"name": "mine", "key": "profile.yaml"}}}
    path = service(tmp_path, **{key: value for key, value in reference.items() if value})
    document = json.loads(json.dumps(SERVICE))
    del document["spec"]["profile"]
    document["spec"]["profileRef"] = reference["profileRef"]
    Path(path).write_text(write_document(document), "utf-8")
    code, _, err = run("check", "-f", path)
    assert code == ExitCode.UNREADABLE
    assert "--profile-file" in err
    mine = tmp_path / "profile.yaml"
    mine.write_text(write_document(load_profile("custom")), "utf-8")
    assert run("check", "-f", path, "--profile-file", str(mine))[0] == ExitCode.FINE
    mine.write_text("name: x\n", "utf-8")
    code, out, _ = run("check", "-f", path, "--profile-file", str(mine))
    assert code == ExitCode.REFUSED
    assert "ProfileInvalid" in out


def test_check_reads_streams_and_stdin(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    text = write_document(SERVICE) + "---\n" + write_document({**SERVICE, "kind": "Pod"})
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    code, out, _ = run("check", "-f", "-")
    assert code == ExitCode.REFUSED
    assert "demo: accepted" in out
    assert "must be inference.sm70.io/v1alpha1 Sm70InferenceService" in out


def test_diff(run: Run) -> None:
    code, out, _ = run("diff", RELEASE, "qwen38_27b_quasar_nvfp4_dflash2_e5m2", "--json")
    rows = {row["field"]: (row["left"], row["right"]) for row in json.loads(out)}
    assert code == ExitCode.FINE
    assert rows["kvCacheDtype"] == ("fp8_e4m3", "fp8_e5m2")
    assert rows["gpuMemoryUtilizationPercent"] == ("86", "80")
    assert "maxModelLen" not in rows
    assert "kvCacheDtype" in run("diff", RELEASE, "custom")[1]


def test_import_env(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "launch.env"
    path.write_text("CTX=long\nSPEC=mtp\nMODEL=/m/x\nVLLM_API_KEY=hush\n", "utf-8")
    code, out, _ = run("import-env", str(path), "--name", "chat")
    assert code == ExitCode.FINE
    assert "hush" not in out
    path.write_text(out, "utf-8")
    assert run("check", "-f", str(path))[0] == ExitCode.FINE
    path.write_text("CTX=xl\n", "utf-8")
    code, _, err = run("import-env", str(path))
    assert code == ExitCode.REFUSED
    assert "fast, long, huge" in err
    assert json.loads(run("import-env", str(path), "--json")[1])["resource"] is None


@pytest.mark.parametrize("name", ["profile", "overrides", "facts", "request", "resolution", "report", "service"])
def test_schema(run: Run, name: str) -> None:
    code, out, _ = run("schema", name)
    assert code == ExitCode.FINE
    jsonschema.Draft202012Validator.check_schema(json.loads(out))


def test_schema_admits_the_profiles(run: Run) -> None:
    schema = json.loads(run("schema", "profile")[1])
    for name in profile_names():
        jsonschema.validate(json.loads(run("show", name, "--json")[1]), schema)


def test_pin(run: Run, tmp_path: Path) -> None:
    code, _, err = run("pin", str(tmp_path))
    assert (code, "found neither" in err) == (ExitCode.UNREADABLE, True)
    (tmp_path / "config.json").write_text("{}", "utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"w")
    code, out, _ = run("pin", str(tmp_path))
    assert code == ExitCode.FINE
    sums = json.loads(run("pin", str(tmp_path), "--json")[1])["sha256"]
    assert set(sums) == {"config.json", "model.safetensors"}
    code, out, _ = run("pin", str(tmp_path), "--against", RELEASE)
    assert code == ExitCode.UNVERIFIED
    assert "verdict: unverified" in out
    mine = load_profile(RELEASE)
    assert mine.draft.checkpoint is not None
    for wanted, expected in ((sums, ExitCode.FINE), ({**sums, "config.json": "0" * 64}, ExitCode.REFUSED)):
        checkpoint = mine.draft.checkpoint.model_copy(update={"sha256": wanted})
        draft = mine.draft.model_copy(update={"checkpoint": checkpoint})
        path = tmp_path / "mine.yaml"
        path.write_text(write_document(mine.model_copy(update={"draft": draft})), "utf-8")
        assert run("pin", str(tmp_path), "--against", str(path))[0] == expected


BAD_INPUT = [
    ("show", "nope"),
    ("show", "/no/such/file.yaml"),
    ("resolve", RELEASE, "--set", "maxModelLen"),
    ("resolve", RELEASE, "--set", "maxModelLen=-1"),
    ("resolve", RELEASE, "--set", "maxModelLen=0.5"),
    ("resolve", RELEASE, "--set", "colour=red"),
    ("resolve", RELEASE, "--set", "tools=1", "--set", "tools.parser=x"),
    ("resolve", RELEASE, "--served-name", "a b"),
    ("resolve", RELEASE, "--model", "/a;b"),
    ("check", "-f", "/no/such/file"),
    ("import-env", "/no/such/file"),
    ("diff", RELEASE, "nope"),
]


@pytest.mark.parametrize("arguments", BAD_INPUT, ids=" ".join)
@pytest.mark.parametrize("as_json", [False, True])
def test_bad_input_is_one_message(run: Run, arguments: tuple[str, ...], as_json: bool) -> None:
    code, out, err = run(arguments[0], *(["--json"] if as_json else []), *arguments[1:])
    assert (code, out) == (ExitCode.UNREADABLE, "")
    assert "Traceback" not in err
    if as_json:
        assert json.loads(err)["error"]
    else:
        assert err.startswith("error ")


def test_options_of_vllm_that_do_not_fit_are_refused(run: Run) -> None:
    code, out, _ = run("resolve", RELEASE, "--", "--max-model-len", "64k", "--host", "x")
    assert code == ExitCode.REFUSED
    assert "KnobValue" in out
    assert "OwnedFlag" in out
