"""Reads a pod's acceleration report: bounded in time and size, no redirect, no proxy, no secret."""

from __future__ import annotations

import asyncio

import httpx

from sm70_operator.api import names
from sm70_operator.observe.snapshot import EngineAnswer
from sm70_profiles.report import MAX_REPORT_BYTES, ReportError, parse_report, printable


class EngineClient:
    """`timeout_seconds` is for a whole read. A port other than the product's is for tests."""

    def __init__(self, timeout_seconds: float, port: int = names.HTTP_PORT) -> None:
        self._timeout = timeout_seconds
        self._port = port
        self._http = httpx.AsyncClient(timeout=timeout_seconds, trust_env=False, follow_redirects=False)

    async def close(self) -> None:
        await self._http.aclose()

    async def read(self, address: str) -> EngineAnswer:
        """The report of the engine at this address, or in plain words why there is none. Never raises."""
        host = f"[{address}]" if ":" in address else address
        try:
            async with asyncio.timeout(self._timeout):
                data = await self._get(f"http://{host}:{self._port}{names.REPORT_PATH}")
            return EngineAnswer(report=parse_report(data))
        except TimeoutError:
            return EngineAnswer(error=f"no answer within {self._timeout:g} s")
        except (ReportError, _UnusableError) as error:
            return EngineAnswer(error=printable(str(error), 300))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return EngineAnswer(error=type(error).__name__)

    async def _get(self, url: str) -> bytes:
        async with self._http.stream("GET", url, headers={"Accept": "application/json"}) as response:
            if response.status_code != 200:
                raise _UnusableError(f"`GET {names.REPORT_PATH}` was answered with {response.status_code}")
            data = b""
            async for chunk in response.aiter_bytes():
                data += chunk
                if len(data) > MAX_REPORT_BYTES:
                    raise _UnusableError(f"the report exceeds {MAX_REPORT_BYTES} bytes")
            return data


class _UnusableError(Exception):
    """The answer is not a report."""
