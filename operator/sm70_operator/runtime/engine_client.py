"""Reads a pod's acceleration report, or the phase of its start: bounded in time and size, no redirect, no proxy, no
secret.
"""

from __future__ import annotations

import asyncio

import aiohttp
from pydantic import ValidationError

from sm70_operator.api import names
from sm70_operator.observe.snapshot import EngineAnswer
from sm70_profiles.report import (
    MAX_REPORT_BYTES,
    ReportError,
    StartupReport,
    parse_report,
    printable,
)


class EngineClient:
    """`timeout_seconds` is for a whole read. Ports other than the product's are for tests."""

    def __init__(
        self, timeout_seconds: float, port: int = names.HTTP_PORT, status_port: int = names.STATUS_PORT
    ) -> None:
        self._timeout = timeout_seconds
        self._port, self._status_port = port, status_port
        self._http: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def read(self, address: str) -> EngineAnswer:
        """The report of the engine at this address, or in plain words why there is none. Never raises."""
        try:
            async with asyncio.timeout(self._timeout):
                data = await self._get(address, self._port, names.REPORT_PATH)
            return EngineAnswer(report=parse_report(data))
        except TimeoutError:
            return EngineAnswer(error=f"no answer within {self._timeout:g} s")
        except (ReportError, _UnusableError) as error:
            return EngineAnswer(error=printable(str(error), 300))
        except aiohttp.ClientError as error:
            return EngineAnswer(error=type(error).__name__)

    async def read_phase(self, address: str) -> EngineAnswer:
        """The phase of a start; without one where the engine does not tell. Never raises."""
        try:
            async with asyncio.timeout(self._timeout):
                data = await self._get(address, self._status_port, names.STARTUP_PATH)
            report = StartupReport.model_validate_json(data)
            return EngineAnswer(phase=str(report.phase), progress=_progress(report), done_bytes=report.done_bytes)
        except (TimeoutError, ValidationError, _UnusableError, aiohttp.ClientError) as error:
            return EngineAnswer(error=type(error).__name__)

    async def _get(self, address: str, port: int, path: str) -> bytes:
        host = f"[{address}]" if ":" in address else address
        url = f"http://{host}:{port}{path}"
        # Compressed, a small answer could be a large one.
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        async with self._session().get(url, headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                raise _UnusableError(f"`GET {path}` was answered with {response.status}")
            data = b""
            async for chunk in response.content.iter_any():
                data += chunk
                if len(data) > MAX_REPORT_BYTES:
                    raise _UnusableError(f"the report exceeds {MAX_REPORT_BYTES} bytes")
            return data

    def _session(self) -> aiohttp.ClientSession:
        """Made in the loop that uses it. No connection is kept: each pod is asked once in a while."""
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
            )
        return self._http


class _UnusableError(Exception):
    """The answer is not a report."""


def _progress(report: StartupReport) -> str:
    """`1.2 of 18.3 GB (6 %)`; empty where nothing is downloaded, or its size is not known."""
    done, total = report.done_bytes, report.total_bytes
    if done is None or not total:
        return ""
    unit, word = (10**9, "GB") if total >= 10**9 else (10**6, "MB")
    return f"{min(done, total) / unit:.1f} of {total / unit:.1f} {word} ({100 * min(done, total) // total} %)"
