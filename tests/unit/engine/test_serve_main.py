"""`sm70-serve` as a program, with a scripted vLLM in the place of the real one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from sm70_engine.serve import launch
from sm70_engine.serve.failure import ServeError
from sm70_engine.tinymodel.cli import main as make_model
from sm70_profiles.catalog import load_profile
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.report import DeviceFacts
from sm70_profiles.resolver import ServeRequest
from sm70_profiles.termination import Termination, TerminationKind, parse_termination

PROFILE = "tiny_hybrid_reference"
# The scripted vLLM does what its seed says: it is an option that passes through to it.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from urllib.request import urlopen
what = sys.argv[sys.argv.index("--seed") + 1]
print("vllm argv", *sys.argv[1:], flush=True)
print("vllm plugins", os.environ["VLLM_PLUGINS"], flush=True)
session = Path(os.environ["SM70_SESSION"])
print("vllm session", sorted(path.name for path in session.iterdir()), session, flush=True)
if what == "count":
    from sm70_engine.acceleration.routes import attach, count
    from sm70_profiles.routes import Stage
    attach(session / "routes")
    count("gdn_reference", (Stage.DECODE,))
if what in ("wait", "count", "stubborn"):
    if what == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: (print("vllm says goodbye", flush=True), os._exit(0)))
    if os.fork() == 0:
        time.sleep(600)  # an engine process that outlives its server
        os._exit(0)
    print("vllm is up", flush=True)
    while True:
        time.sleep(60)
if what == "dead":
    print("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.", flush=True)
    sys.exit(0)
if what == "refuse":
    from sm70_engine.acceleration.enforce import enforce
    from sm70_engine.acceleration.report import build_report
    from sm70_engine.session import SessionFolder
    from sm70_profiles.rules import Capabilities
    folder = SessionFolder(session)
    document = folder.read()
    without = Capabilities(flavour=document.flavour, operators=frozenset({"attention", "nvfp4_linear"}))
    enforce(document, folder, build_report(document, document.settings, without, (), os.environ).paths)
if what == "compile":
    from sm70_engine.session import SessionFolder
    for place in (Path(os.environ["VLLM_CACHE_ROOT"], "torch_compile_cache"), Path(os.environ["TRITON_CACHE_DIR"])):
        place.mkdir(parents=True, exist_ok=True)
        (place / "code").write_text("compiled")
        (place / "x.lock").touch()
    found = SessionFolder(session).read().cache.finish()
    print("vllm cache", found.state, found.files_added_at_last_start, flush=True)
    sys.exit(1)
if what == "broken":
    raise ValueError("something is wrong here")
os.kill(os.getpid(), int(what))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_model(["--out", str(folder / "tiny")])
    make_model(["--draft", "dflash", "--draft-out", str(folder / "draft")])
    make_model(["--draft", "dflash", "--draft-out", str(folder / "mismatch"), "--mismatched"])
    return folder


class Serve:
    """Runs `sm70-serve` with the scripted vLLM installed."""

    def __init__(self, folder: Path, models: Path) -> None:
        self.folder, self.models = folder, models
        self.log = folder / "termination-log"
        site = folder / "site"
        for name, version in (("vllm", "0.32.0+cpu"), ("torch", "2.13.0")):
            self.install(name, version)
        module = site / "vllm/entrypoints/cli"
        module.mkdir(parents=True)
        (module / "main.py").write_text(SCRIPT)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SM70_", "VLLM_"))},
            "PYTHONPATH": str(site),
            "SM70_TERMINATION_LOG": str(self.log),
            "VLLM_API_KEY": "sekret",
            "TMPDIR": str(folder),
        }

    def install(self, name: str, version: str) -> None:
        info = self.folder / f"site/{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "sm70_engine.cli", *arguments],
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str, **environment: str) -> tuple[int, str]:
        process = self.start(*arguments, **environment)
        output, _ = process.communicate(timeout=120)
        return process.returncode, output

    def serve(self, what: str, *arguments: str) -> tuple[str, ...]:
        return (str(self.models / "tiny"), "--profile", PROFILE, "--seed", what, *arguments)

    def release(self) -> tuple[str, ...]:
        draft = str(self.models / "draft")
        return (str(self.models / "tiny"), "--profile", "tiny_hybrid_reference_release", "--draft", draft)

    def last_words(self) -> Termination:
        termination = parse_termination(self.log.read_text())
        assert termination is not None
        return termination


@pytest.fixture
def serve(tmp_path: Path, models: Path) -> Serve:
    return Serve(tmp_path, models)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def until(process: subprocess.Popen[str], words: str) -> str:
    """The output up to the line with these words."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if words in line:
            return "".join(lines)
    raise AssertionError("".join(lines))


@pytest.fixture
def up(serve: Serve) -> Iterator[subprocess.Popen[str]]:
    process = serve.start(*serve.serve("count"))
    yield process
    process.kill()
    process.wait()


def test_render_says_what_would_be_run_and_starts_nothing(serve: Serve) -> None:
    status, output = serve.run(*serve.serve("wait", "--kv-cache-dtype", "fp8_e5m2", "--render"))
    assert status == 0
    assert "vllm.entrypoints.cli.main serve" in output
    assert "vllm argv" not in output
    assert "--seed wait" in output
    (line,) = (line for line in output.splitlines() if line.strip().startswith("kvCacheDtype"))
    assert "override" in line
    (path,) = (line for line in output.splitlines() if line.strip().startswith("reference_attention_e4m3"))
    assert "disabled" in path
    assert "sekret" not in output
    assert not serve.log.exists()


def test_the_prediction_knows_the_switches_of_the_environment(serve: Serve) -> None:
    arguments = serve.serve("wait", "--no-enforce-eager", "--render")
    states = []
    for variables in ({}, {"VLLM_DISABLE_COMPILE_CACHE": "1"}):
        _, output = serve.run(*arguments, **variables)
        (path,) = (line for line in output.splitlines() if line.strip().startswith("reference_compile_cache"))
        states.append(path.split()[1])
    assert states == ["enabled", "disabled"]


def test_each_override_is_shown_with_its_effect_on_the_paths(serve: Serve) -> None:
    arguments = ("--render", "--max-num-batched-tokens", "6000", "--max-num-seqs", "4")
    _, output = serve.run(*serve.release(), *arguments)
    lines = {words[0]: line for line in output.splitlines() if (words := line.split())}
    assert lines["maxNumBatchedTokens"].endswith("override <-- disables reference_prefill (budget<8000)")
    assert lines["maxNumSeqs"].endswith("override <-- changes no path")


def test_a_strict_start_names_path_reason_and_remedy(serve: Serve) -> None:
    arguments = (*serve.serve("dead"), "--kv-cache-dtype", "fp8_e5m2")
    for variable in ("SM70_REQUIRE_PROFILE_ACCELERATION", "VLLM_SM70_REQUIRE_PROFILE_ACCELERATION"):
        status, output = serve.run(*arguments, **{variable: "1"})
        assert status == 2
        assert "vllm argv" not in output
        words = serve.last_words()
        assert (words.kind, words.reason) == (TerminationKind.FAILURE, TerminationReason.ACCELERATION_REFUSED)
        assert "reference_attention_e4m3 is disabled: kv_dtype" in words.message
        assert "`kvCacheDtype`" in words.remedy
    assert serve.run(*arguments)[0] == 1  # without the variable it is the server that ends


def test_a_process_of_the_server_can_refuse_a_strict_start(serve: Serve) -> None:
    status, output = serve.run(*serve.serve("refuse"), SM70_REQUIRE_PROFILE_ACCELERATION="1")
    assert "vllm argv" in output
    assert status == 2
    words = serve.last_words()
    assert words.reason is TerminationReason.ACCELERATION_REFUSED
    assert "reference_gdn is disabled: operator_missing:gdn" in words.message
    assert "image that has the operator" in words.remedy


def test_under_the_operator_a_start_is_never_strict(serve: Serve) -> None:
    request = operators_request(serve, overrides={"kvCacheDtype": "fp8_e5m2"}, extraArgs=["--seed", "dead"])
    _, output = serve.run(SM70_SERVE_REQUEST=request, SM70_REQUIRE_PROFILE_ACCELERATION="1")
    assert "vllm argv" in output
    assert "SM70_REQUIRE_PROFILE_ACCELERATION has no effect" in output


def test_a_checksum_that_differs_is_refused_unless_it_is_skipped(serve: Serve) -> None:
    pinned: dict[str, object] = {
        "draftSha256": {"model.safetensors": "0" * 64},
        "draftPath": str(serve.models / "draft"),
    }
    pinned |= {"profile": profile_json("tiny_hybrid_reference_dflash"), "extraArgs": ["--seed", "dead"]}
    request = operators_request(serve, **pinned)
    status, output = serve.run(SM70_SERVE_REQUEST=request)
    assert status == 2
    assert "vllm argv" not in output
    words = serve.last_words()
    assert words.reason is TerminationReason.CHECKSUM_MISMATCH
    assert "model.safetensors failed" in words.message
    for options, variables in ((("--skip-check", "draft-sha256"), {}), ((), {"SM70_SKIP_CHECKS": "draft-sha256"})):
        _, output = serve.run(*options, SM70_SERVE_REQUEST=request, **variables)
        assert "vllm argv" in output
    status, _ = serve.run("--skip-check=everything", SM70_SERVE_REQUEST=request)
    assert status == 2


def test_the_compile_cache_is_published_once_and_found_again(serve: Serve, tmp_path: Path) -> None:
    arguments = (*serve.release(), "--seed", "compile")
    variables = {"XDG_CACHE_HOME": str(tmp_path / "volume"), "TMPDIR": str(serve.folder)}
    states = []
    for _ in range(2):
        _, output = serve.run(*arguments, **variables)
        (line,) = (line for line in output.splitlines() if line.startswith("vllm cache"))
        states.append(line.removeprefix("vllm cache "))
    assert states == ["Cold 2", "Warm 0"]
    # A damaged entry costs a cold start and a warning, and is replaced.
    (entry,) = (tmp_path / "volume/sm70-compile").glob("*/1")
    (entry / "files/vllm/torch_compile_cache/code").write_text("damaged")
    _, output = serve.run(*arguments, **variables)
    assert "warning: compile cache: a cold start: the entry is damaged: `code` has another checksum" in output
    assert "vllm cache Cold 2" in output
    _, output = serve.run(*arguments, **variables)
    assert "vllm cache Warm 0" in output


def test_a_preflight_writes_its_findings_and_starts_nothing(serve: Serve) -> None:
    status, output = serve.run("--preflight", SM70_SERVE_REQUEST=operators_request(serve, modelPath="/nowhere/model"))
    assert status == 2
    assert "vllm argv" not in output
    words = serve.last_words()
    assert (words.kind, words.reason) == (TerminationKind.PREFLIGHT, TerminationReason.PATH_NOT_FOUND)
    assert any(finding.subject == "model" and "/nowhere/model" in finding.message for finding in words.findings)


def test_the_phases_of_a_start_can_be_asked_for(serve: Serve) -> None:
    port = free_port()
    process = serve.start(*serve.serve("wait"), SM70_STATUS_PORT=str(port))
    until(process, "vllm is up")
    with urlopen(f"http://127.0.0.1:{port}/sm70/startup", timeout=10) as answer:
        assert json.load(answer)["phase"] == "Starting"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0


def test_a_shutdown_that_was_asked_for_is_a_success_with_counts(serve: Serve, up: subprocess.Popen[str]) -> None:
    output = until(up, "vllm is up")
    session = Path(next(line for line in output.splitlines() if line.startswith("vllm session")).split()[-1])
    assert session.is_dir()
    up.send_signal(signal.SIGTERM)
    assert "vllm says goodbye" in until(up, "vllm says goodbye")
    assert up.wait(timeout=60) == 0
    words = serve.last_words()
    assert (words.kind, words.reason) == (TerminationKind.SHUTDOWN, TerminationReason.SHUTDOWN)
    assert [(row.route, row.stage, row.dispatches) for row in words.routes] == [("gdn_reference", "decode", 1)]
    assert not session.exists()


def test_nothing_of_the_server_survives(serve: Serve, up: subprocess.Popen[str]) -> None:
    until(up, "vllm is up")
    (child,) = children(up.pid)
    (grandchild,) = children(child)
    up.send_signal(signal.SIGINT)
    up.wait(timeout=60)
    assert not alive(grandchild)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    """Neither gone nor a corpse that nobody has collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except FileNotFoundError:
        return False


def test_a_second_signal_is_passed_on_too(serve: Serve) -> None:
    process = serve.start(*serve.serve("stubborn"))
    until(process, "vllm is up")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0
    words = serve.last_words()
    assert words.kind is TerminationKind.SHUTDOWN
    assert f"status was {-signal.SIGINT}" in words.message


def test_a_signal_before_the_server_exists_ends_it_too(serve: Serve) -> None:
    # The request is a pipe that nobody fills: it waits there, with its signal handlers in place.
    pipe = serve.models / "tiny/config.json"
    content = pipe.read_text()
    pipe.unlink()
    os.mkfifo(pipe)
    try:
        process = serve.start(*serve.serve("wait"))
        with pipe.open("w"):  # opens when the reader has opened
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
    finally:
        pipe.unlink()
        pipe.write_text(content)
    words = serve.last_words()
    assert words.kind is TerminationKind.SHUTDOWN
    assert "before the server was started" in words.message


def test_a_server_that_ends_by_itself_with_zero_has_failed(serve: Serve) -> None:
    status, output = serve.run(*serve.serve("dead"))
    assert status == 1
    assert serve.last_words().reason is TerminationReason.ENGINE_DIED
    assert "EngineDied" in output


def test_an_exception_is_in_the_last_words(serve: Serve) -> None:
    status, _ = serve.run(*serve.serve("broken"))
    assert status == 1
    assert "ValueError: something is wrong here" in serve.last_words().message


def test_a_killed_server_has_failed(serve: Serve) -> None:
    status, _ = serve.run(*serve.serve(str(int(signal.SIGKILL))))
    assert status == 1
    assert "SIGKILL" in serve.last_words().message


def test_the_users_plugins_are_loaded_besides_ours(serve: Serve) -> None:
    _, output = serve.run(*serve.serve("dead"), VLLM_PLUGINS="theirs,sm70")
    (line,) = (line for line in output.splitlines() if line.startswith("vllm plugins"))
    names = line.split()[-1].split(",")
    assert names == ["sm70", "sm70_endpoints", "sm70_platform", "theirs"]


def test_the_operators_request_is_served(serve: Serve) -> None:
    _, rendered = serve.run(*serve.serve("dead", "--render"))
    status, output = serve.run(SM70_SERVE_REQUEST=operators_request(serve, extraArgs=["--seed", "dead"]))
    assert status == 1
    command = next(line for line in rendered.splitlines() if "vllm.entrypoints.cli.main" in line)
    assert command in output


def operators_request(serve: Serve, **members: object) -> str:
    document = {"profile": profile_json(), "modelPath": str(serve.models / "tiny"), "servedName": "tiny", **members}
    return json.dumps(document)


def profile_json(name: str = PROFILE) -> object:
    return json.loads(load_profile(name).model_dump_json(by_alias=True, exclude_none=True))


def test_a_missing_model_is_refused_before_anything_starts(serve: Serve) -> None:
    status, output = serve.run("/nowhere/model", "--profile", PROFILE)
    assert status == 2
    assert "vllm argv" not in output
    words = serve.last_words()
    assert words.reason is TerminationReason.PATH_NOT_FOUND
    assert "/nowhere/model" in words.message


def test_a_copy_that_was_cut_short_is_refused_before_anything_starts(serve: Serve) -> None:
    folder = shutil.copytree(serve.models / "tiny", serve.folder / "tiny")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(5000)
    arguments = (str(folder), "--profile", PROFILE, "--seed", "dead")
    status, output = serve.run(*arguments)
    assert status == 2
    assert "vllm argv" not in output
    words = serve.last_words()
    assert words.reason is TerminationReason.MODEL_INVALID
    assert "model.safetensors: " in words.message
    assert "it has 5000" in words.message
    _, output = serve.run(*arguments, "--load-format", "dummy")
    assert "vllm argv" in output


def test_a_draft_for_another_model_is_refused_by_its_own_name(serve: Serve) -> None:
    draft = str(serve.models / "mismatch")
    model = str(serve.models / "tiny")
    status, _ = serve.run(model, "--profile", "tiny_hybrid_reference_dflash", "--draft", draft)
    assert status == 2
    words = serve.last_words()
    assert words.reason is TerminationReason.DRAFT_INCOMPATIBLE
    assert "512" in words.message


def test_all_refusals_come_at_once(serve: Serve) -> None:
    arguments = ("--draft", str(serve.models / "mismatch"), "--max-num-batched-tokens", "1")
    status, _ = serve.run(str(serve.models / "tiny"), "--profile", PROFILE, *arguments)
    assert status == 2
    words = serve.last_words()
    assert words.reason is TerminationReason.REFUSED
    assert "maxNumBatchedTokens" in words.message
    assert "`draft`" in words.message
    assert words.remedy


@pytest.mark.parametrize(("name", "version"), [("vllm", "0.31.0+cpu"), ("vllm", "0.32.0"), ("torch", "2.10.0")])
def test_another_version_of_the_engine_is_refused(serve: Serve, name: str, version: str) -> None:
    for info in (serve.folder / "site").glob(f"{name}-*.dist-info"):
        (info / "METADATA").unlink()
        info.rmdir()
    serve.install(name, version)
    status, output = serve.run(*serve.serve("dead"))
    assert status == 2
    assert "vllm argv" not in output
    words = serve.last_words()
    assert words.reason is TerminationReason.ENGINE_UNSUPPORTED
    assert version in words.message


def test_the_gpus_that_are_there_are_refused_before_anything_starts(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    ampere = DeviceFacts(name="NVIDIA GeForce RTX 3090", compute_capability="8.6", count=1, memory_bytes=24 << 30)
    monkeypatch.setattr(launch, "nvml_device", lambda: ampere)
    request = ServeRequest(
        profile=load_profile("qwen38_27b_nvfp4_target_only"), model_path=str(serve.models / "tiny"), served_name="x"
    )
    with pytest.raises(ServeError) as refused:
        launch.plan_launch(request, {})
    assert "GPUArchitecture" in refused.value.message
    assert "GPUProduct" in refused.value.message
    with pytest.raises(ServeError) as refused:
        launch.plan_launch(request, {"SM70_PRETEND": "1"})
    assert "GPU" not in refused.value.message  # the tiny model is another one than the recipe's


def test_help_needs_nothing(serve: Serve) -> None:
    status, output = serve.run("--help")
    assert status == 0
    assert "SM70_SERVE_REQUEST" in output
