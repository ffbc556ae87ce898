"""A small HTTP server that recites as the tiny model does, with faults to order: what the judge is tested against."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sm70_engine.tinymodel.chains import CHAINS, TOOL_ARGUMENTS, TOOL_NAME, Kind

KEY = "a-key-for-tests"
MODEL = "tiny"
BLOCK = 16


@dataclass
class Reciter:
    """What the server does. Each fault is one thing that a broken server would do."""

    token_ids: bool = True
    tokenizes: bool = True
    cached_tokens_in_usage: bool = True
    faults: frozenset[str] = frozenset()
    max_model_len: int = 4096
    tokens_a_chunk: int = 1
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    seen_prompts: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)
    looked_up: int = 0
    hits: int = 0
    drafts: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    reached: threading.Event = field(default_factory=threading.Event)
    """Set by a request that hangs (the fault of that name)."""
    released: threading.Event = field(default_factory=threading.Event)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status, and a JSON value or an iterator of the events of a stream."""
        with self.lock:
            self.asked.append((path, body))
            number = len(self.asked)
        if "down" in self.faults:
            return 503, {"error": {"message": "the engine is dead"}}
        if "hangs" in self.faults and number > 4:
            self.reached.set()
            self.released.wait(60)
        if path == "/tokenize":
            if not self.tokenizes:
                return 404, {"error": {"message": "no such page"}}
            return 200, {"tokens": [len(word) + 100 for word in re.findall(r"\S+", body["prompt"])]}
        if path not in ("/v1/chat/completions", "/v1/completions"):
            return 404, {"error": {"message": "no such page"}}
        if not self.token_ids and "return_token_ids" in body:
            return 400, {"error": {"message": "return_token_ids: unknown"}}
        if "tools" in body and "no tools" in self.faults:
            return 400, {"error": {"message": "tools need a parser"}}
        prompt = json.dumps(body.get("messages") or body.get("prompt"))
        length = len(body["prompt"]) if isinstance(body.get("prompt"), list) else len(prompt.split())
        if length > self.max_model_len:
            return 400, {"error": {"message": "too long"}}
        return 200, self._generate(path.endswith("chat/completions"), body, prompt, length, number)

    def _generate(self, chat: bool, body: dict[str, Any], prompt: str, length: int, number: int) -> Any:
        kind = Kind.TOOL_CALL if "tools" in body else Kind.JSON if "JSON" in prompt else Kind.TEXT
        pieces = list(next(chain for chain in CHAINS if chain.kind is kind).pieces)
        if "unstable" in self.faults:
            pieces[0] += str(number)
        if "wrong" in self.faults:
            pieces.reverse()
        if "noise" in self.faults:
            pieces = [" the"] * 90
        if "streams otherwise" in self.faults and body.get("stream"):
            pieces = pieces[1:]
        ids = [sum(map(ord, piece)) for piece in pieces] + [2]
        pieces.append("")
        ended = "stop"
        if body.get("ignore_eos"):
            ids, pieces = (ids * 9)[: body["max_tokens"]], (pieces * 9)[: body["max_tokens"]]
            ended = "length"
        elif len(ids) > body["max_tokens"]:
            ids, pieces, ended = ids[: body["max_tokens"]], pieces[: body["max_tokens"]], "length"
        usage = self._usage(prompt, length, len(ids))
        if kind is Kind.TOOL_CALL and ended == "stop":
            ended = "tool_calls"
        if not body.get("stream"):
            return self._whole(chat, kind, pieces, ids, ended, usage)
        return self._stream(chat, kind, pieces, ids, ended, usage)

    def _usage(self, prompt: str, length: int, generated: int) -> dict[str, Any]:
        with self.lock:
            cached = 0
            if prompt in self.seen_prompts and "no cache" not in self.faults:
                cached = length // BLOCK * BLOCK
            self.seen_prompts.add(prompt)
            self.looked_up += length
            self.hits += cached
            self.drafts += generated
        usage: dict[str, Any] = {"prompt_tokens": length, "completion_tokens": generated}
        if self.cached_tokens_in_usage:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage

    def _call(self) -> list[dict[str, Any]]:
        arguments = {**TOOL_ARGUMENTS, **({"count": "four"} if "wrong" in self.faults else {})}
        return [{"index": 0, "function": {"name": TOOL_NAME, "arguments": json.dumps(arguments)}}]

    def _whole(
        self, chat: bool, kind: Kind, pieces: list[str], ids: list[int], ended: str, usage: dict[str, Any]
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": ended}
        if kind is Kind.TOOL_CALL:
            choice["message"] = {"content": None, "tool_calls": self._call()}
        elif chat:
            choice["message"] = {"content": "".join(pieces)}
        else:
            choice["text"] = "".join(pieces)
        if self.token_ids:
            choice["token_ids"] = ids
        return {"choices": [choice], "usage": usage}

    def _stream(
        self, chat: bool, kind: Kind, pieces: list[str], ids: list[int], ended: str, usage: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        width = self.tokens_a_chunk
        for start in range(0, len(ids), width):
            last = start + width >= len(ids)
            choice: dict[str, Any] = {"index": 0, "finish_reason": ended if last else None}
            piece = "".join(pieces[start : start + width])
            if kind is Kind.TOOL_CALL:
                choice["delta"] = {"tool_calls": self._call()} if last else {}
            elif chat:
                choice["delta"] = {"content": piece}
            else:
                choice["text"] = piece
            if self.token_ids:
                choice["token_ids"] = ids[start : start + width]
            yield {"choices": [choice]}
        yield {"choices": [], "usage": usage}

    def metrics(self) -> str:
        with self.lock:
            return (
                "# TYPE vllm:prefix_cache_queries_total counter\n"
                f'vllm:prefix_cache_queries_total{{engine="0"}} {float(self.looked_up)}\n'
                "# TYPE vllm:prefix_cache_hits_total counter\n"
                f'vllm:prefix_cache_hits_total{{engine="0"}} {float(self.hits)}\n'
                "# TYPE vllm:spec_decode_num_drafts_total counter\n"
                f'vllm:spec_decode_num_drafts_total{{engine="0"}} {self.drafts / 4}\n'
                "# TYPE vllm:spec_decode_num_draft_tokens_total counter\n"
                f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {self.drafts}\n'
                "# TYPE vllm:spec_decode_num_accepted_tokens_total counter\n"
                f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {0.75 * self.drafts}\n'
            )


@contextmanager
def serving(reciter: Reciter) -> Iterator[str]:
    """The address of the server while it runs."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            reciter.keys.add(self.headers.get("Authorization", ""))
            if self.path == "/v1/models" and "down" not in reciter.faults:
                models = [{"id": MODEL, "max_model_len": reciter.max_model_len}]
                self._send(200, json.dumps({"data": models}).encode())
            elif self.path == "/metrics" and "no metrics" not in reciter.faults:
                self._send(200, reciter.metrics().encode())
            else:
                self._send(503 if "down" in reciter.faults else 404, b'{"error": {"message": "no such page"}}')

        def do_POST(self) -> None:
            reciter.keys.add(self.headers.get("Authorization", ""))
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = reciter.answer(self.path, body)
            if isinstance(answer, dict):
                self._send(status, json.dumps(answer).encode())
                return
            self.send_response(status)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for event in answer:
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")

        def _send(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    class Server(ThreadingHTTPServer):
        request_queue_size = 64  # Sixteen connect at once; one that finds the queue full tries again after a second.

        def handle_error(self, *_: object) -> None:
            """A client that was stopped leaves a broken pipe, which is nobody's fault."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        reciter.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
