"""A hub on one address: what a download needs of Hugging Face's and ModelScope's interfaces, with faults to order.

The address is the loopback's, unless a test names one of a cluster's own network.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

REPO = "owner/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_a-token-for-tests"
WEIGHTS = bytes(range(256)) * 4096


def git_blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Gate:
    """What connections in a pause wait for."""

    opened: threading.Event = field(default_factory=threading.Event)
    hung_up: bool = False


@dataclass
class LoopbackHub:
    """What the hub holds and what it does wrong."""

    files: dict[str, bytes] = field(
        default_factory=lambda: {
            "config.json": b'{"architectures": []}',
            "model.safetensors": WEIGHTS,
            "sub/part.safetensors": b"part" * 1000,
            "modeling_tiny.py": b"import os",
            "README.md": b"# tiny",
        }
    )
    gated: bool = False
    cut_after: int | None = None
    """Bytes of the weights after which the connection breaks, once."""
    corrupt: str | None = None
    """A file whose bytes are wrong."""
    pause_in: str | None = None
    """A file in which the hub pauses, each time that it passes `pause_at`, until `resume` or `hang_up`."""
    pause_at: int = 0
    """Bytes from the file's beginning."""
    pauses: int = 0
    """Connections that have come to the pause so far."""
    sent: list[tuple[str, str | None]] = field(default_factory=list)
    """Path and `Range` of each GET of a file."""
    ranges: list[tuple[str, int, int]] = field(default_factory=list)
    """Path, first byte and end of what each GET of a file was given."""
    tokens: set[str | None] = field(default_factory=set)
    asked: int = 0
    _gate: Gate = field(default_factory=Gate)

    def resume(self) -> None:
        """Ends the pause, and makes no other."""
        self.pause_in = None
        self._gate.opened.set()

    def hang_up(self) -> None:
        """Breaks the connections that wait. The next one will wait again."""
        gate, self._gate = self._gate, Gate()
        gate.hung_up = True
        gate.opened.set()

    def passes(self) -> bool:
        """Waits where a pause is ordered; False when the connection is to break."""
        gate = self._gate
        self.pauses += 1
        gate.opened.wait()
        return not gate.hung_up

    def content(self, path: str) -> bytes:
        data = self.files[path]
        return bytes([data[0] ^ 1]) + data[1:] if path == self.corrupt else data

    def listing(self) -> dict[str, Any]:
        siblings = []
        for path, data in self.files.items():
            entry: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": git_blob(data)}
            if path.endswith(".safetensors"):
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        return {"id": REPO, "modelId": REPO, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}

    def tree(self) -> list[dict[str, Any]]:
        entries = []
        for path, data in self.files.items():
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": git_blob(data)}
            if path.endswith(".safetensors"):
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            entries.append(entry)
        return entries

    def scope_listing(self) -> dict[str, Any]:
        files = [
            {"Path": path, "Size": len(data), "Sha256": hashlib.sha256(data).hexdigest(), "Type": "blob"}
            for path, data in self.files.items()
        ]
        return {"Code": 200, "Success": True, "Data": {"Files": files}}


class Handler(BaseHTTPRequestHandler):
    """Answers for the hub of its server."""

    hub: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        self.hub.asked += 1
        self.hub.tokens.add(self.headers.get("Authorization"))
        url = urlsplit(self.path)
        if self.hub.gated and TOKEN not in (self.headers.get("Authorization") or ""):
            headers = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}
            self._send(401, b'{"error": "gated"}', headers, body=body)
        elif url.path == f"/api/models/{REPO}/revision/{COMMIT}":
            self._send(200, json.dumps(self.hub.listing()).encode(), {}, body=body)
        elif url.path == f"/api/models/{REPO}/tree/{COMMIT}":
            self._send(200, json.dumps(self.hub.tree()).encode(), {}, body=body)
        elif match := re.fullmatch(f"/{REPO}/resolve/{COMMIT}/(.+)", url.path):
            self._file(match[1], body=body)
        elif url.path == f"/api/v1/models/{REPO}/repo/files":
            self._send(200, json.dumps(self.hub.scope_listing()).encode(), {}, body=body)
        elif url.path == f"/api/v1/models/{REPO}/repo":
            self._file(parse_qs(url.query)["FilePath"][0], body=body)
        else:
            headers = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            self._send(404, b'{"error": "Repository not found"}', headers, body=body)

    def _file(self, path: str, *, body: bool) -> None:
        if path not in self.hub.files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body=body)
            return
        data = self.hub.content(path)
        asked = self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        headers = {"X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes", "ETag": f'"{git_blob(self.hub.files[path])}"'}
        if path.endswith(".safetensors"):
            headers["ETag"] = f'"{hashlib.sha256(self.hub.files[path]).hexdigest()}"'
        if asked:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if body:
            self.hub.sent.append((path, asked))
        self._send(206 if asked else 200, data[start:], headers, body=body, path=path, start=start)

    def _send(
        self,
        status: int,
        data: bytes,
        headers: dict[str, str],
        *,
        body: bool,
        path: str | None = None,
        start: int = 0,
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if not body:
            return
        if path == "model.safetensors" and self.hub.cut_after is not None:
            self.wfile.write(data[: self.hub.cut_after])
            self.wfile.flush()
            self.hub.cut_after = None
            self.hub.gated = True  # Whatever a library tries again by itself fails now: the run ends here.
            self.close_connection = True
            return
        if path is not None:
            self._give(path, data, start)
        else:
            self.wfile.write(data)

    def _give(self, path: str, data: bytes, start: int) -> None:
        """A file's bytes, with the ordered pause."""
        ahead = self.hub.pause_at - start if path == self.hub.pause_in else -1
        stops = (ahead, len(data)) if 0 <= ahead < len(data) else (len(data),)
        begin = 0
        for place, stop in enumerate(stops):
            if place and not self.hub.passes():
                self.close_connection = True
                return
            try:
                self.wfile.write(data[begin:stop])
            except ConnectionError:  # The client was killed.
                self.close_connection = True
                return
            self.hub.ranges.append((path, start + begin, start + stop))
            begin = stop


@contextmanager
def serving(hub: LoopbackHub, address: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """The hub's address while it runs. `port`: a free one, unless it has to be the one that clients know already."""

    server = ThreadingHTTPServer((address, port), type("Handler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://{address}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
