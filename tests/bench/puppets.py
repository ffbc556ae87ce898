"""Plays the cluster for a benchmark of the operator: it makes pods of Deployments and writes their statuses, no more.

No scheduler, no kubelet and no engine take part, so thousands of services fit on a laptop. All pods have one address,
at which one constant acceleration report is served. Whatever is measured with it is the operator and the API server.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Self

import aiohttp

from sm70_operator.api import names
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.termination import Termination, TerminationKind

Raw = dict[str, Any]
NAMESPACE = "bench"
DEPLOYMENTS = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
JOBS = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
SERVICES = f"/api/v1/namespaces/{NAMESPACE}/services"
CUSTOM = f"/apis/{names.API_VERSION}/namespaces/{NAMESPACE}/{names.PLURAL}"
MERGE = "application/merge-patch+json"


class KubeApi:
    """A few requests with a kubeconfig's certificate, over kept connections."""

    def __init__(self, server: str, session: aiohttp.ClientSession) -> None:
        self._server, self._session = server, session

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, kubeconfig: str) -> AsyncIterator[Self]:
        """`kubeconfig` is the text of a kubeconfig in JSON, with certificates in it."""
        document = json.loads(kubeconfig)
        cluster, user = document["clusters"][0]["cluster"], document["users"][0]["user"]
        context = ssl.create_default_context(cadata=base64.b64decode(cluster["certificate-authority-data"]).decode())
        with tempfile.NamedTemporaryFile() as file:
            for part in ("client-certificate-data", "client-key-data"):
                file.write(base64.b64decode(user[part]))
            file.flush()
            context.load_cert_chain(file.name)
        connector = aiohttp.TCPConnector(limit=64, ssl=context)
        timeout = aiohttp.ClientTimeout(total=None, connect=30)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            yield cls(cluster["server"], session)

    async def send(self, method: str, path: str, body: Raw | None = None, kind: str = "application/json") -> Raw:
        """The answer's object; an empty one where the object is gone or already there. Waits while it is told to."""
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": kind}
        for _ in range(60):
            found = await self._once(method, path, data, headers)
            if found is not None:
                return found
            await asyncio.sleep(1)
        raise RuntimeError(f"{method} {path}: the API server is too busy")

    async def _once(self, method: str, path: str, data: str | None, headers: dict[str, str]) -> Raw | None:
        async with self._session.request(method, self._server + path, data=data, headers=headers) as response:
            text = await response.text()
            if response.status in (404, 409):
                return {}
            if response.status == 429:
                return None
            if response.status >= 300:
                raise RuntimeError(f"{method} {path}: {response.status} {text[:300]}")
            found: Raw = json.loads(text)
            return found

    async def watch(self, path: str, seen: Callable[[str, Raw], None]) -> None:
        """Lists and watches until it is cancelled; `seen` gets (ADDED, MODIFIED or DELETED, object)."""
        while True:
            listed = await self.send("GET", path)
            for item in listed.get("items") or []:
                seen("ADDED", item)
            version = listed["metadata"]["resourceVersion"]
            url = f"{self._server}{path}?watch=true&resourceVersion={version}&timeoutSeconds=3600"
            async with self._session.get(url) as response:
                buffer = b""
                async for part in response.content.iter_any():
                    *lines, buffer = (buffer + part).split(b"\n")
                    for line in lines:
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            break
                        seen(event["type"], event["object"])


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Puppets:
    """Deployment controller, ReplicaSet controller, scheduler and kubelet in one, without their limits."""

    api: KubeApi
    address: str
    """The address of every pod."""
    writes: int = 0
    _dirty: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    _deployments: dict[str, Raw] = field(default_factory=dict)
    _pods: dict[str, set[str]] = field(default_factory=dict)
    """Names of pods by Deployment."""
    _queued: set[str] = field(default_factory=set)

    async def run(self, workers: int = 16) -> None:
        """Runs until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.api.watch(DEPLOYMENTS, self._deployment))
            group.create_task(self.api.watch(JOBS, self._job))
            for _ in range(workers):
                group.create_task(self._work())

    def _deployment(self, event: str, found: Raw) -> None:
        name = found["metadata"]["name"]
        if event == "DELETED":
            self._deployments.pop(name, None)
        else:
            self._deployments[name] = found
        self._wake(name)

    def _job(self, event: str, found: Raw) -> None:
        done = any(one["status"] == "True" for one in (found.get("status") or {}).get("conditions") or ())
        if event != "DELETED" and not done:
            self._wake(f"job/{found['metadata']['name']}")

    def _wake(self, name: str) -> None:
        if name not in self._queued:
            self._queued.add(name)
            self._dirty.put_nowait(name)

    async def _work(self) -> None:
        while True:
            name = await self._dirty.get()
            self._queued.discard(name)
            if name.startswith("job/"):
                await self._finish(name.removeprefix("job/"))
            else:
                await self._play(name)

    async def _play(self, name: str) -> None:
        deployment = self._deployments.get(name)
        wanted = 0 if deployment is None else int(deployment["spec"].get("replicas", 1))
        pods = self._pods.setdefault(name, set())
        for number in range(wanted):
            if (pod := f"{name}-{number}") not in pods and deployment is not None:
                await self._make(deployment, pod)
                pods.add(pod)
        for pod in sorted(pods, reverse=True)[: max(0, len(pods) - wanted)]:
            await self._send("DELETE", f"{PODS}/{pod}", {"gracePeriodSeconds": 0})
            pods.discard(pod)
        if deployment is not None:
            await self._tell(deployment, wanted)

    async def _make(self, deployment: Raw, name: str) -> None:
        template = deployment["spec"]["template"]
        metadata = {**template["metadata"], "name": name, "namespace": NAMESPACE}
        await self._send(
            "POST", PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        )
        ready = [{"type": kind, "status": "True", "lastTransitionTime": _now()} for kind in ("PodScheduled", "Ready")]
        container = {
            "name": names.CONTAINER,
            "image": template["spec"]["containers"][0]["image"],
            "imageID": "",
            "containerID": f"containerd://{name}",
            "restartCount": 0,
            "ready": True,
            "started": True,
            "state": {"running": {"startedAt": _now()}},
        }
        status = {"phase": "Running", "podIP": self.address, "podIPs": [{"ip": self.address}], "conditions": ready}
        await self._send("PATCH", f"{PODS}/{name}/status", {"status": {**status, "containerStatuses": [container]}})

    async def _tell(self, deployment: Raw, replicas: int) -> None:
        generation = deployment["metadata"]["generation"]
        counts = dict.fromkeys(("replicas", "readyReplicas", "updatedReplicas", "availableReplicas"), replicas)
        status = {"observedGeneration": generation, **(counts if replicas else dict.fromkeys(counts))}
        known = deployment.get("status") or {}
        if {key: known.get(key) for key in status} == status:
            return
        progressing = {
            "type": "Progressing",
            "status": "True",
            "reason": "NewReplicaSetAvailable",
            "lastUpdateTime": _now(),
            "lastTransitionTime": _now(),
        }
        body = {"status": {**status, "conditions": [progressing]}}
        await self._send("PATCH", f"{DEPLOYMENTS}/{deployment['metadata']['name']}/status", body)

    async def _finish(self, name: str) -> None:
        """A Job whose one pod has said that all is well."""
        job = await self.api.send("GET", f"{JOBS}/{name}")
        if not job:
            return
        template = job["spec"]["template"]
        metadata = {**template["metadata"], "name": f"{name}-x", "namespace": NAMESPACE}
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {**metadata, "ownerReferences": [owner]}}
        await self._send("POST", PODS, {**pod, "spec": template["spec"]})
        words = Termination(kind=TerminationKind.PREFLIGHT, reason=TerminationReason.PASSED, message="puppet").encode()
        terminated = {"exitCode": 0, "reason": "Completed", "message": words.decode(), "finishedAt": _now()}
        container = {
            "name": names.JOB_CONTAINER,
            "image": template["spec"]["containers"][0]["image"],
            "imageID": "",
            "restartCount": 0,
            "ready": False,
            "state": {"terminated": terminated},
        }
        ended = {"phase": "Succeeded", "containerStatuses": [container]}
        await self._send("PATCH", f"{PODS}/{name}-x/status", {"status": ended})
        complete = [
            {"type": kind, "status": "True", "lastTransitionTime": _now(), "lastProbeTime": _now()}
            for kind in ("SuccessCriteriaMet", "Complete")
        ]
        status = {"startTime": _now(), "completionTime": _now(), "succeeded": 1, "conditions": complete}
        await self._send("PATCH", f"{JOBS}/{name}/status", {"status": status})

    async def _send(self, method: str, path: str, body: Raw) -> None:
        self.writes += 1
        await self.api.send(method, path, body, MERGE if method == "PATCH" else "application/json")


@contextlib.asynccontextmanager
async def report_server(address: str, port: int, report: bytes) -> AsyncIterator[Callable[[], int]]:
    """Answers every request with the report; yields a function that counts the answers."""
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(report)}\r\n\r\n".encode()
    answered = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal answered
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(head + report)
                await writer.drain()
                answered += 1
        writer.close()

    server = await asyncio.start_server(serve, address, port)
    async with server:
        yield lambda: answered
