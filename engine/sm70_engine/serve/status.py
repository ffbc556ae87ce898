"""Answers for the phases of a start while the server does not listen yet: `GET /sm70/startup` on a port of its own.

vLLM opens its port when everything is loaded and captured, minutes after the start. The operator's patience is for a
start that stands still, not for one that moves, so it has to see it move. Off unless `SM70_STATUS_PORT` is set.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from sm70_engine.acceleration.startup import read_startup
from sm70_engine.serve.failure import ServeError
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.report import StartupReport

PORT_ENVIRONMENT = "SM70_STATUS_PORT"
PATH = "/sm70/startup"


@contextmanager
def answered(environment: Mapping[str, str], startup: Path) -> Iterator[int | None]:
    """Answers from the file of the phases while the context lasts; see `telling`."""
    with telling(environment, lambda: read_startup(startup)) as port:
        yield port


@contextmanager
def telling(environment: Mapping[str, str], report_of_now: Callable[[], StartupReport | None]) -> Iterator[int | None]:
    """Answers while the context lasts; the port, or None where none is asked for. Raises ServeError."""
    text = environment.get(PORT_ENVIRONMENT, "")
    if not text:
        yield None
        return
    if not text.isdigit() or int(text) > 65535:
        raise _refused(f"must be a port; found `{text[:40]}`")

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            report = report_of_now() if self.path == PATH else None
            body = report.model_dump_json(by_alias=True).encode() if report is not None else b"{}"
            self.send_response(HTTPStatus.OK if report is not None else HTTPStatus.NOT_FOUND)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """The log is the server's."""

    try:
        server = ThreadingHTTPServer(("", int(text)), Handler)
    except OSError as error:
        raise _refused(f"must be a free port; {text}: {error.strerror or error}") from None
    server.daemon_threads = True
    with server:
        thread = threading.Thread(target=server.serve_forever, name="sm70-status", daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


def _refused(what: str) -> ServeError:
    return ServeError(TerminationReason.REFUSED, f"{PORT_ENVIRONMENT} {what}", f"Correct or unset {PORT_ENVIRONMENT}.")
