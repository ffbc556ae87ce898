"""The device lane: the sm70 engine on a GPU, end to end, against transformers.

    make device-bundle                          here: what such a machine cannot fetch (build/device/*.tar.xz)
    make test-device [STAGE=...] [DEVICE_OUT=...]    there: runs what has no result yet

Stages take under eight minutes each and leave a result of their own, so that a run can go on where it was cut:
`models`, the groups of cases (`first`, `rest`, `more`), `reference`, `tp2` (two GPUs). Each case is a server
that `sm70-serve` starts with a profile of the sm70 engine, as a user would, on a port of its own; the cases of a group
run side by side. Needs Python 3.12, torch, transformers and nothing that must be fetched.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ARCHIVES = ("packages.tar.xz", "sm70.tar.xz")
KEY = "a-key-for-tests"
PROMPTS = (5, 37, 200, 1100)
TOKENS = 24
START_SECONDS, STAGE_SECONDS = 330, 450
EAGER = ("--enforce-eager",)
TWO_GPUS = "two_gpus.yaml"
GRAPHS = (
    *("--optimization-level", "0", "--compilation-config", '{"cudagraph_mode":"FULL_DECODE_ONLY"}'),
    *("--max-cudagraph-capture-size", "16"),
)
COMPILED = ("--max-cudagraph-capture-size", "16")
COMMON = (
    *("--max-num-seqs", "4", "--enable-prompt-tokens-details"),
    *("--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", "536870912"),
)
LONG_PROMPT = 12_300
"""Whatever the block: a chunk of at least 1,024 tokens begins after the 8,192nd, for steps of 2,048."""
GELU = ("--enforce-eager", "--compilation-config", '{"custom_ops":["none","+gelu_and_mul"]}')
"""With vLLM's own switch for its custom operator, which is ours where its extension is missing."""
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
SPECULATION = ("--speculative-config", '{"method":"dflash","num_speculative_tokens":3}')


@dataclass(frozen=True)
class Case:
    """One server and what is asked of it."""

    model: str
    arguments: tuple[str, ...] = ()
    reference: str = ""
    draft: str = ""
    kv: str = ""
    profile: str = "custom"
    """A built-in profile, or a file beside this one."""
    recites: bool = False
    """Whether the right answers are known (`answers.json`)."""
    routes: tuple[str, ...] = ()
    """Routes that must have been dispatched or captured."""
    environment: dict[str, str] = field(default_factory=dict)
    prompts: tuple[int, ...] = PROMPTS
    longest: int = 2048
    """Tokens that a request may have."""
    step: int = 1024
    """Tokens of a step of the scheduler."""

    def command(self, models: Path, port: int) -> list[str]:
        draft = ["--draft", str(models / self.draft), *SPECULATION] if self.draft else []
        kv = ["--kv-cache-dtype", self.kv] if self.kv else []
        served = ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port)]
        tools = TOOLS if self.recites else ()
        sizes = ["--max-model-len", str(self.longest), "--max-num-batched-tokens", str(self.step)]
        arguments = [*served, *sizes, *COMMON, *kv, *draft, *tools, *self.arguments]
        profile = str(HERE / self.profile) if "." in self.profile else self.profile
        return [sys.executable, "-m", "sm70_engine.cli", str(models / self.model), "--profile", profile, *arguments]


_NVFP4 = ("nvfp4_qpn2", "nvfp4_gated")
FIRST = {
    "dense-eager": Case("dense", EAGER, routes=("decode_scalar_paged",)),
    "hybrid-graphs": Case("hybrid", GRAPHS, routes=("decode_xqa_paged", "gdn_triton")),
    "nvfp4-e4m3-eager": Case("nvfp4", EAGER, "nvfp4-values", kv="fp8", routes=("decode_xqa_paged", *_NVFP4)),
    "mixture-eager": Case("mixture", EAGER, routes=("decode_scalar_paged",)),
    "dflash2-eager": Case(
        "reciter", (*EAGER, "--no-enable-prefix-caching"), "reciter-values", draft="draft", recites=True,
        routes=("draft_window", "verify_e4m3_grouped", *_NVFP4),
    ),
    "dense-compiled": Case("dense", COMPILED, routes=("decode_scalar_paged",)),
}  # fmt: skip
REST = {
    "dense-graphs": Case("dense", GRAPHS, routes=("decode_scalar_paged",)),
    "hybrid-compiled": Case("hybrid", COMPILED, routes=("decode_xqa_paged", "gdn_triton")),
    "nvfp4-e4m3-graphs": Case("nvfp4", GRAPHS, "nvfp4-values", kv="fp8", routes=("decode_xqa_paged", *_NVFP4)),
    "nvfp4-e4m3-compiled": Case("nvfp4", COMPILED, "nvfp4-values", kv="fp8", routes=("decode_xqa_paged", *_NVFP4)),
    "nvfp4-fp16": Case("nvfp4", EAGER, "nvfp4-values", kv="float16", routes=("decode_xqa_paged", *_NVFP4)),
    "reciter-e5m2": Case(
        "reciter", GRAPHS, "reciter-values", kv="fp8_e5m2", recites=True, routes=("decode_xqa_paged", *_NVFP4)
    ),
    "mixture-graphs": Case("mixture", GRAPHS, routes=("decode_scalar_paged",)),
    "dflash2-graphs": Case(
        "reciter", (*GRAPHS, "--no-enable-prefix-caching"), "reciter-values", draft="draft", recites=True,
        routes=("draft_window", "verify_e4m3_grouped", *_NVFP4),
    ),
    "dflash2-compiled": Case(
        "reciter", COMPILED, "reciter-values", draft="draft", recites=True,
        routes=("draft_window", "verify_e4m3_grouped", *_NVFP4),
    ),
    "dense-triton": Case("dense", (*EAGER, "--attention-backend", "TRITON_ATTN"), routes=("attention_triton",)),
}  # fmt: skip
MORE = {
    "nvfp4-tensors-eager": Case("nvfp4-tensors", EAGER, "nvfp4-values", routes=("decode_xqa_paged", *_NVFP4)),
    "long-e4m3-eager": Case(
        "nvfp4", EAGER, "nvfp4-values", kv="fp8", prompts=(5, LONG_PROMPT), longest=262_144, step=2048,
        routes=("prefill_fp8_bridge", "prefill_packed", "verify_e4m3_long", "decode_xqa_paged", *_NVFP4),
    ),
    "gelu-eager": Case("gelu", GELU, routes=("decode_xqa_paged",)),
}  # fmt: skip
TP2 = {
    "tp2-dense-graphs": Case("dense", GRAPHS, profile=TWO_GPUS, routes=("decode_scalar_paged",)),
    "tp2-nvfp4-e4m3": Case(
        "nvfp4", GRAPHS, "nvfp4-values", kv="fp8", profile=TWO_GPUS,
        routes=("decode_xqa_paged", *_NVFP4),
    ),
}  # fmt: skip
GROUPS = {"first": FIRST, "rest": REST, "more": MORE, "tp2": TP2, "all": {**FIRST, **REST, **MORE}}
STAGES = ("models", "first", "rest", "more", "reference", "tp2")


@dataclass(frozen=True)
class Lane:
    """Where things are on this machine."""

    bundle: Path
    work: Path
    out: Path

    @property
    def models(self) -> Path:
        return self.work / "models"

    def environment(self, name: str, extra: dict[str, str] | None = None) -> dict[str, str]:
        dropped = ("SM70_", "VLLM_", "PYTHON")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
        caches = self.work / "caches" / name
        return {
            **kept,
            "PYTHONPATH": str(self.work / "site"),
            "PYTHONUNBUFFERED": "1",
            "SM70_PRETEND": "1",
            "VLLM_API_KEY": KEY,
            "SM70_TERMINATION_LOG": str(self.out / f"{name}.termination.json"),
            "XDG_CACHE_HOME": str(caches),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "OMP_NUM_THREADS": "2",
            "TORCHINDUCTOR_COMPILE_THREADS": "4",
            **(extra or {}),
        }

    def unpack(self) -> None:
        """Once a machine and bundle."""
        archives = [self.bundle / name for name in ARCHIVES]
        digest = hashlib.sha256(b"".join(archive.read_bytes() for archive in archives)).hexdigest()
        stamp = self.work / "bundle"
        if stamp.exists() and stamp.read_text() == digest:
            return
        shutil.rmtree(self.work, ignore_errors=True)
        site = self.work / "site"
        site.mkdir(parents=True)
        for path in archives:
            with tarfile.open(path) as archive:
                archive.extractall(site, filter="tar")
        subprocess.run(
            [sys.executable, "-m", "compileall", "-q", "-j", "0", str(site)], check=False, stdout=subprocess.DEVNULL
        )
        stamp.write_text(digest)


class Server:
    """A running `sm70-serve`."""

    def __init__(self, lane: Lane, name: str, case: Case, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = lane.out / f"{name}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                case.command(lane.models, port),
                env=lane.environment(name, case.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def get(self, path: str, body: Any = None, key: str | None = KEY, timeout: float = 120) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    def await_healthy(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"ended with {self.process.returncode}: {self.tail()}")
            try:
                if self.get("/health", timeout=5)[0] == 200:
                    return
            except OSError:
                time.sleep(0.3)
        raise RuntimeError(f"not healthy in time: {self.tail()}")

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-2500:]

    def stop(self) -> int:
        """Exit status of a graceful end; negative when it had to be killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return -1


def complete(server: Server, prompt: list[int]) -> dict[str, Any]:
    body = {
        "model": "m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    status, answer = server.get("/v1/completions", body)
    if status != 200:
        raise RuntimeError(f"a completion ended with {status}: {answer}")
    choice = answer["choices"][0]
    return {
        "prompt": prompt,
        "tokens": choice["token_ids"],
        "cached": (answer["usage"].get("prompt_tokens_details") or {}),
    }


def ask(server: Server, lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    """One alone, all at once, and all again (prefixes may be cached by then)."""
    rnd = random.Random(7)
    prompts = [[rnd.randrange(300, 500) for _ in range(length)] for length in lengths]
    answers = [complete(server, prompts[0])]
    for _ in range(2):
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers += pool.map(lambda prompt: complete(server, prompt), prompts)
    return answers


def recite(server: Server, model: Path) -> list[str]:
    """Faults of the answers that are known."""
    faults = []
    for one in json.loads((model / "answers.json").read_text())["answers"]:
        expected = one["expected"]
        _, answer = server.get("/v1/chat/completions", {"model": "m", **one["request"]})
        try:
            choice, usage = answer["choices"][0], answer["usage"]
        except (KeyError, TypeError):
            faults.append(f"{one['kind']}: {str(answer)[:200]}")
            continue
        if usage["completion_tokens"] != expected["completionTokens"]:
            faults.append(f"{one['kind']}: {usage['completion_tokens']} tokens, not {expected['completionTokens']}")
        if "content" in expected and choice["message"]["content"] != expected["content"]:
            faults.append(f"{one['kind']}: {choice['message']['content']!r}")
    return faults


def faces(server: Server, too_long: int) -> dict[str, Any]:
    """The HTTP faces: status codes, and what must be in the answers. too_long: tokens that no request may have."""
    chat = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    asked = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    checks = {
        "models": server.get("/v1/models")[0],
        "no key": server.get("/v1/models", key=None)[0],
        "chat": server.get("/v1/chat/completions", chat)[0],
        "stream": server.get("/v1/chat/completions", {**chat, "stream": True})[0],
        "two choices": server.get(
            "/v1/chat/completions", {**chat, "n": 2, "temperature": 0.8, "top_p": 0.9, "top_k": 20}
        )[0],
        "JSON schema": server.get("/v1/chat/completions", {**chat, "max_tokens": 40, "response_format": asked})[0],
        "too long": server.get("/v1/completions", {"model": "m", "prompt": [9] * too_long, "max_tokens": 1})[0],
        "report, no key": server.get("/v1/sm70/acceleration", key=None)[0],
        "report": server.get("/v1/sm70/acceleration")[0],
        "open report": server.get("/sm70/acceleration", key=None)[0],
        "ready": server.get("/sm70/ready", key=None)[0],
        "series": int("sm70_route_dispatch_total" in str(server.get("/metrics", key=None)[1])),
    }
    wanted = {"no key": 401, "report, no key": 401, "too long": 400, "series": 1}
    return {"statuses": checks, "wrong": [name for name, found in checks.items() if found != wanted.get(name, 200)]}


def run_case(lane: Lane, name: str, case: Case, port: int) -> dict[str, Any]:
    """Starts, asks, reads the report, stops."""
    began = time.monotonic()
    result: dict[str, Any] = {"name": name, "reference": case.reference or case.model, "e4m3": case.kv == "fp8"}
    server = Server(lane, name, case, port)
    try:
        server.await_healthy(began + START_SECONDS)
        result["start_seconds"] = round(time.monotonic() - began, 1)
        result["answers"] = ask(server, case.prompts)
        if case.recites:
            result["faults"] = recite(server, lane.models / case.model)
        result["faces"] = faces(server, case.longest + 2000)
        _, report = server.get("/v1/sm70/acceleration")
        result["report"] = report
        counted = {row["route"]: row["dispatches"] + row["captures"] for row in report["routes"]}
        result["absent_routes"] = [route for route in case.routes if not counted.get(route)]
        if case.draft:
            metrics = str(server.get("/metrics", key=None)[1])
            result["speculation"] = [
                line for line in metrics.splitlines() if line.startswith("vllm:spec_decode") and "total" in line
            ]
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"[-3000:]
    finally:
        stopping = time.monotonic()
        result["exit"] = server.stop()
        result["stop_seconds"] = round(time.monotonic() - stopping, 1)
    good = not any(result.get(key) for key in ("error", "faults", "absent_routes")) and not result["faces"]["wrong"]
    result["passed"] = bool(good and result["exit"] == 0)
    (lane.out / f"{name}.case.json").write_text(json.dumps(result, indent=1) + "\n")
    log = server.log.read_bytes()
    server.log.write_bytes(log[:40_000] + b"\n...\n" + log[-60_000:] if len(log) > 100_000 else log)
    why = {key: result[key] for key in ("error", "faults", "absent_routes") if result.get(key)}
    word = "passed" if result["passed"] else "FAILED"
    print(f"{name}: {word} start {result.get('start_seconds')} s {str(why)[-1200:]}", flush=True)
    return result


def run_group(lane: Lane, stage: str, only: list[str]) -> dict[str, Any]:
    cases = {name: case for name, case in GROUPS[stage].items() if not only or name in only}
    base = 8100 + 100 * list(GROUPS).index(stage)
    ports = range(base, base + len(cases))
    with ThreadPoolExecutor(len(cases)) as pool:
        results = list(pool.map(partial(run_case, lane), cases.keys(), cases.values(), ports))
    return {"passed": all(result["passed"] for result in results), "cases": [result["name"] for result in results]}


def script(lane: Lane, name: str, *arguments: str) -> dict[str, Any]:
    """Runs a script beside this one."""
    process = subprocess.run(
        [sys.executable, str(HERE / f"{name}.py"), *arguments], env=lane.environment(name), check=False
    )
    return {"passed": process.returncode == 0}


MACHINE = """
import json, torch, triton
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "triton": triton.__version__, "gpus": names}))
"""


def machine() -> dict[str, Any]:
    """What the lane runs on, as torch says it."""
    process = subprocess.run([sys.executable, "-c", MACHINE], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(process.stdout)
    return found


def main() -> int:
    """The command line; 1 when something failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bundle", type=Path, default=Path("build/device"))
    parser.add_argument("--work", type=Path, default=Path("/var/tmp/sm70-device"))
    parser.add_argument("--out", type=Path, default=Path("build/device/results"))
    parser.add_argument(
        "--stage", default="", help=f"comma-separated: {', '.join(STAGES)}, all; by default all but tp2"
    )
    parser.add_argument("--only", default="", help="comma-separated cases of the stage")
    parser.add_argument("--again", action="store_true", help="also what has a result")
    options = parser.parse_args()
    lane = Lane(options.bundle.absolute(), options.work.absolute(), options.out.absolute())
    lane.out.mkdir(parents=True, exist_ok=True)
    began, good = time.monotonic(), True
    lane.unpack()
    (lane.out / "machine.json").write_text(json.dumps(machine(), indent=1) + "\n")
    print(f"ready after {time.monotonic() - began:.0f} s: {machine()}", flush=True)
    for stage in options.stage.split(",") if options.stage else STAGES[:-1]:
        result = lane.out / f"{stage}.stage.json"
        if (
            result.exists()
            and not options.again
            and json.loads(result.read_text())["passed"]
            and stage not in ("models", "reference")
        ):
            print(f"{stage}: has passed already", flush=True)
            continue
        start = time.monotonic()
        if stage == "models":
            found = script(lane, "checkpoints", str(lane.models))
        elif stage == "reference":
            found = script(lane, "reference", str(lane.models), str(lane.out))
        else:
            script(lane, "checkpoints", str(lane.models))
            found = run_group(lane, stage, [name for name in options.only.split(",") if name])
        found["seconds"] = round(time.monotonic() - start, 1)
        result.write_text(json.dumps(found, indent=1) + "\n")
        good &= found["passed"]
        print(f"{stage}: {'passed' if found['passed'] else 'FAILED'} in {found['seconds']} s", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
