"""A thin client of the API server: plain dictionaries in and out, with kopf's credentials."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

import aiohttp
import kopf
from yarl import URL

from sm70_profiles.report import printable

Raw = dict[str, Any]
TOKEN_SECONDS = 60.0
MAX_CONNECTIONS = 64
MAX_RESPONSE_BYTES = 32 * 1024 * 1024
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
JSON = "application/json"

PATHS = {
    "Deployment": "/apis/apps/v1/namespaces/{namespace}/deployments",
    "ControllerRevision": "/apis/apps/v1/namespaces/{namespace}/controllerrevisions",
    "Job": "/apis/batch/v1/namespaces/{namespace}/jobs",
    "ResourceClaimTemplate": "/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaimtemplates",
    "Service": "/api/v1/namespaces/{namespace}/services",
    "PersistentVolumeClaim": "/api/v1/namespaces/{namespace}/persistentvolumeclaims",
    "Pod": "/api/v1/namespaces/{namespace}/pods",
    "ConfigMap": "/api/v1/namespaces/{namespace}/configmaps",
    "Event": "/api/v1/namespaces/{namespace}/events",
    "Lease": "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases",
    "events.k8s.io/Event": "/apis/events.k8s.io/v1/namespaces/{namespace}/events",
    "Sm70InferenceService": "/apis/inference.sm70.io/v1alpha1/namespaces/{namespace}/sm70inferenceservices",
    "Sm70Qualification": "/apis/inference.sm70.io/v1alpha1/namespaces/{namespace}/sm70qualifications",
}


class ApiError(Exception):
    """The API server said no, or nothing (`code` 0). The message is bounded and printable."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code

    @property
    def refused(self) -> bool:
        """The request as such is not wanted: repeating it helps only after something else has changed."""
        return self.code in (400, 403, 405, 413, 415, 422)


async def connect(timeout_seconds: int) -> ApiServer:
    """A client with the pod's service account, or else with the kubeconfig of the environment. Raises OSError."""
    info = _credentials()
    connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS, ssl=info.as_ssl_context())
    session = aiohttp.ClientSession(connector=connector)
    return ApiServer(session, info.server, Authorization(_credentials), timeout_seconds)


def _credentials() -> kopf.ConnectionInfo:
    try:
        settings = kopf.OperatorSettings()
        found = kopf.login_with_service_account(settings=settings) or kopf.login_with_kubeconfig(settings=settings)
    except (LookupError, ValueError, kopf.LoginError) as error:
        raise OSError(f"the kubeconfig cannot be used: {error!r}") from error
    if found is None:
        raise OSError("there is neither a service account nor a kubeconfig")
    return found


class Authorization:
    """The headers of a request. Read again every minute, because the kubelet replaces a service account's token."""

    def __init__(
        self, credentials: Callable[[], kopf.ConnectionInfo], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._credentials, self._clock = credentials, clock
        self._headers: dict[str, str] = {}
        self._read_at: float | None = None

    def headers(self) -> dict[str, str]:
        """Never raises: what cannot be read now stays what it was."""
        now = self._clock()
        if self._read_at is None or now - self._read_at >= TOKEN_SECONDS:
            self._read_at = now
            with contextlib.suppress(OSError):
                self._headers = self._credentials().as_http_headers()
        return self._headers


class ApiServer:
    """Reads and writes objects. Every call raises ApiError and nothing else."""

    def __init__(
        self, session: aiohttp.ClientSession, server: str, authorization: Authorization, timeout_seconds: int
    ) -> None:
        self._session = session
        self._server = server.rstrip("/")
        self._authorization = authorization
        self._timeout = timeout_seconds
        self.observe: Callable[[str, str, int], None] = lambda verb, kind, code: None
        """Told of every request: verb, kind and status code."""

    async def close(self) -> None:
        await self._session.close()

    async def get(self, kind: str, namespace: str, name: str) -> Raw | None:
        """The object, or None if there is none."""
        try:
            return await self._call("GET", kind, namespace, name)
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    async def list(self, kind: str, namespace: str, **selectors: str) -> list[Raw]:
        """The objects that the selectors (`labelSelector`, `fieldSelector`) admit."""
        items: list[Raw] = (await self._call("GET", kind, namespace, query=selectors)).get("items") or []
        return items

    async def create(self, kind: str, namespace: str, body: Raw) -> Raw:
        return await self._call("POST", kind, namespace, body=body)

    async def replace(self, kind: str, namespace: str, name: str, body: Raw) -> Raw:
        return await self._call("PUT", kind, namespace, name, body=body)

    async def apply(self, kind: str, namespace: str, name: str, body: Raw, manager: str, subresource: str = "") -> Raw:
        """Server-side apply of the whole intended object; it is made if it does not exist."""
        query = {"fieldManager": manager, "force": "true"}
        return await self._call("PATCH", kind, namespace, name, body, query, APPLY, subresource)

    async def merge(self, kind: str, namespace: str, name: str, body: Raw, manager: str) -> Raw:
        """Changes single members of an object that exists."""
        return await self._call("PATCH", kind, namespace, name, body, {"fieldManager": manager}, MERGE)

    async def delete(self, kind: str, namespace: str, name: str, uid: str, version: str) -> None:
        """Deletes exactly this state of this object; its dependents are collected in the background."""
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid, "resourceVersion": version},
            "propagationPolicy": "Background",
        }
        await self._call("DELETE", kind, namespace, name, body)

    async def _call(
        self,
        method: str,
        kind: str,
        namespace: str,
        name: str = "",
        body: Raw | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = JSON,
        subresource: str = "",
    ) -> Raw:
        path = "/".join(filter(None, (PATHS[kind].format(namespace=quote(namespace)), quote(name), subresource)))
        code = 0
        try:
            async with asyncio.timeout(self._timeout):
                headers = {"Content-Type": content_type, "Accept": JSON, **self._authorization.headers()}
                url = URL(self._server + path, encoded=True).with_query(query or {})
                sent = None if body is None else json.dumps(body)
                async with self._session.request(method, url, data=sent, headers=headers) as response:
                    code = response.status
                    data = await _bounded(response)
        except (aiohttp.ClientError, ssl.SSLError, TimeoutError, OSError) as error:
            raise ApiError(0, f"{method} {path}: no answer ({type(error).__name__})") from error
        finally:
            self.observe(method, kind, code)
        return _read(method, path, code, data)


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    data = b""
    async for chunk in response.content.iter_chunked(1 << 16):
        data += chunk
        if len(data) > MAX_RESPONSE_BYTES:
            response.close()
            raise ApiError(0, f"the API server's answer exceeds {MAX_RESPONSE_BYTES} bytes")
    return data


def _read(method: str, path: str, code: int, data: bytes) -> Raw:
    try:
        found = json.loads(data) if data else {}
    except ValueError:
        found = {}
    if not 200 <= code <= 299:
        message = found.get("message") if isinstance(found, dict) else None
        raise ApiError(code, printable(str(message or f"{method} {path} was answered with {code}"), 700))
    return found if isinstance(found, dict) else {}
