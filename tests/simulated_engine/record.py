"""Writes down what the real engine answers on the CPU lane, for the simulated one to be compared with.

PYTHONPATH=tests:tools .venv/bin/python -m simulated_engine.record
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

import lane
from engine import server

PROFILE = "tiny_hybrid_reference"
TARGET = Path(__file__).parent / "recorded.json"
REFUSED = (
    ("no JSON", "{"),
    ("no messages", '{"model": "tiny"}'),
    ("another model", '{"model": "other", "messages": [{"role": "user", "content": "x"}]}'),
    ("too long", json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x" * 9000}]})),
)
PATHS = ("/health", "/metrics", "/sm70/ready", "/sm70/acceleration", "/v1/sm70/acceleration", "/v1/models")


def main() -> None:
    """Starts one server, asks it, and writes `recorded.json`."""
    python = lane.cpu_lane()
    with tempfile.TemporaryDirectory(prefix="sm70-record-") as name:
        folder = Path(name)
        model = folder / "tiny"
        generator = Path(sys.executable).with_name("sm70-tiny-model")
        subprocess.run([str(generator), "--out", str(model)], check=True, stdout=subprocess.DEVNULL)
        running = server.start(python, folder, PROFILE, model)
        try:
            running.await_healthy()
            TARGET.write_text(json.dumps(_ask(running), indent=1, ensure_ascii=False) + "\n")
        finally:
            running.stop()


def _ask(running: server.Server) -> dict[str, object]:
    series = text_string_to_metric_families(running.http.get("/metrics").text)
    report = running.http.get("/v1/sm70/acceleration").json()
    # Whatever names this machine or this run is no part of the record.
    report["effective"]["argv"] = [report["effective"]["argv"][0].rpartition("/")[2]]
    report["compileCache"]["directory"] = "/cache"
    report["workerFacts"] = dict.fromkeys(report["workerFacts"])
    return {
        "profileHash": report["profile"]["hash"],
        "report": report,
        "ready": running.http.get("/sm70/ready").json(),
        "series": sorted(family.name for family in series if family.name.startswith(("sm70_", "vllm:"))),
        "withoutKey": {path: httpx.get(f"{running.url}{path}", timeout=60).status_code for path in PATHS},
        "refused": [
            {
                "name": name,
                "body": body,
                "status": running.http.post(
                    "/v1/chat/completions", content=body.encode(), headers={"Content-Type": "application/json"}
                ).status_code,
            }
            for name, body in REFUSED
        ],
    }


if __name__ == "__main__":
    main()
