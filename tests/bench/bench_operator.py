"""What the operator costs at 1, 100, 1,000 and 5,000 services, on a real API server with pods played by puppets.

    make bench-operator [SERVICES="1 100 1000"]          about 10 minutes; 5,000 take as long again
    PYTHONPATH=tests:tools .venv/bin/python -m bench.bench_operator --services 1000 --json FILE

A benchmark, not a test: it prints and asserts nothing. docs/operations/scale.md explains the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.puppets import CUSTOM, DEPLOYMENTS, NAMESPACE, SERVICES, KubeApi, Puppets, report_server
from sm70_operator.api import names
from testcluster import audit
from testcluster.client import Client
from testcluster.cluster import Cluster
from testcluster.options import Options
from testcluster.pki import Authority
from toolbox import ROOT
from unit.operator import builders

USER = "bench-operator"
PORT = 18080
REST_SECONDS, EDITS, ROLLOUTS, RATE = 40, 100, 40, 1.0
"""Seconds for which the rest is watched, edits and rollouts that are measured, and how many are sent a second."""
MADE_AT_ONCE = 16
START_SECONDS = 3600
"""Longest wait until all services are Ready."""
SAY_SECONDS = 15


@dataclass
class Row:
    """The figures of one number of services. Times in seconds, memory in MiB, CPU in seconds of one core."""

    services: int
    measured: list[str] = field(default_factory=list)
    """The phases whose figures are in; of a run that was cut, the others are zero."""
    start_seconds: float = 0
    start_memory_peak: float = 0
    start_cpu_per_service: float = 0
    start_calls_per_service: float = 0
    rest_writes: int = 0
    rest_reads: int = 0
    rest_cpu_percent: float = 0
    rest_polls_per_second: float = 0
    edit_p50: float = 0
    edit_p99: float = 0
    edit_cpu_milliseconds: float = 0
    edit_calls: float = 0
    rollout_p50: float = 0
    rollout_p99: float = 0
    rollout_calls: float = 0
    rollout_cpu_milliseconds: float = 0
    memory: float = 0
    memory_peak: float = 0
    restart_to_first_look: float = 0
    restart_to_all_seen: float = 0
    restart_writes: int = 0
    restart_memory_peak: float = 0
    load_average: float = 0
    """Of the machine at the end: what else ran."""
    calls: dict[str, dict[str, float]] = field(default_factory=dict)
    """By kind of event: the calls of each kind for one event, or for one service after a restart."""


@dataclass
class Calls:
    """Requests to the API server, by verb and resource."""

    writes: Counter[str] = field(default_factory=Counter)
    reads: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.writes.total() + self.reads.total()

    def each(self, events: int) -> dict[str, float]:
        """Calls of each kind for one event."""
        return {what: round(count / events, 2) for what, count in (self.writes + self.reads).most_common()}


@dataclass
class Operator:
    """The operator as a process of this machine, with its own certificate, so that the audit log knows it."""

    kubeconfig: Path
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SM70_OPERATOR")}
        environment |= {
            "KUBECONFIG": str(self.kubeconfig),
            "SM70_OPERATOR_PORT": str(PORT),
            "SM70_OPERATOR_LISTEN": "127.0.0.1",
            "SM70_OPERATOR_ENGINE_IMAGE_CPU": "bench/engine:1",
            "SM70_OPERATOR_LOG_LEVEL": "WARNING",
            "POD_NAME": "bench-operator",
        }
        program = Path(sys.executable).with_name("sm70-operator")
        with (self.folder / "operator.log").open("ab") as log:
            self.process = subprocess.Popen([str(program)], env=environment, stdout=log, stderr=log)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def cpu(self) -> float:
        """User and system seconds so far."""
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self, name: str) -> float:
        """`VmRSS` or `VmHWM`, in MiB."""
        assert self.process is not None
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


@dataclass
class Bench:
    """One cluster, one operator, and the watches that see what it does."""

    cluster: Cluster
    api: KubeApi
    operator: Operator
    http: aiohttp.ClientSession
    services: int = 0
    ready: dict[str, int] = field(default_factory=dict)
    """The generation at which each service was seen Ready."""
    all_ready: int = 0
    """How many of them are."""
    began: float = field(default_factory=time.monotonic)
    replicas: dict[str, int] = field(default_factory=dict)
    """What the Deployments of each service ask for."""
    selected: dict[str, str] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def see_service(self, event: str, found: dict[str, Any]) -> None:
        metadata, status = found["metadata"], found.get("status") or {}
        ready = any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions") or ())
        current = status.get("observedGeneration") == metadata["generation"]
        name, before = metadata["name"], self.ready.get(metadata["name"], 0)
        self.ready[name] = metadata["generation"] if ready and current and event != "DELETED" else 0
        self.all_ready += bool(self.ready[name]) - bool(before)
        self.changed.set()

    def see_deployment(self, event: str, found: dict[str, Any]) -> None:
        name = found["metadata"]["labels"][names.SERVICE_LABEL]
        if event != "DELETED" and found["spec"]["replicas"]:
            self.replicas[name] = found["spec"]["replicas"]
            self.changed.set()

    def see_public(self, event: str, found: dict[str, Any]) -> None:
        name, selector = found["metadata"]["name"], found["spec"].get("selector") or {}
        self.selected[name] = selector.get(names.REVISION_LABEL, "")
        self.changed.set()

    def say(self, text: str) -> None:
        """One line of progress."""
        print(f"bench: {time.monotonic() - self.began:6.0f} s  {text}", file=sys.stderr, flush=True)

    async def until(self, reached: Callable[[], bool], seconds: float) -> None:
        """Waits until something that was watched makes it so. Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            while not reached():
                self.changed.clear()
                await self.changed.wait()

    async def series(self, name: str, **labels: str) -> float:
        """The sum of one of the operator's series; 0 while it does not answer."""
        try:
            async with self.http.get(f"http://127.0.0.1:{PORT}/metrics") as response:
                text = await response.text()
        except aiohttp.ClientError:
            return 0.0
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.split()[-1]) for line in lines if all(part in line for part in wanted))

    async def reaches(self, value: float, name: str, **labels: str) -> None:
        """Waits until one of the operator's series has at least this value."""
        for _ in range(3000):
            if await self.series(name, **labels) >= value:
                return
            await asyncio.sleep(0.1)
        raise TimeoutError(f"{name} does not reach {value}")

    def calls(self, start: int) -> Calls:
        """What the operator asked of the API server since then; watches and the lease aside."""
        found = Calls()
        for one in audit.requests(self.cluster.audit_log, start):
            if one.user == USER and one.resource != "leases" and one.verb != "watch":
                (found.writes if one.write else found.reads)[f"{one.verb} {one.resource}"] += 1
        return found


def service(number: int) -> dict[str, Any]:
    """A service of the tiny profile that asks for next to nothing."""
    small = {"requests": {"cpu": "1m", "memory": "1Mi"}}
    document = builders.spec(pod={"resources": small}, rollout={"bakeSeconds": 0, "strategy": "InPlace"})
    metadata = {"name": f"s{number}", "namespace": NAMESPACE}
    return {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": metadata, "spec": document}


async def add_services(bench: Bench, row: Row) -> None:
    """Makes services until there are as many as the row says, and waits until all are Ready."""
    start, cpu, before = time.monotonic(), bench.operator.cpu(), audit.position(bench.cluster.audit_log)
    added = row.services - bench.services
    gate = asyncio.Semaphore(MADE_AT_ONCE)

    async def make(number: int) -> None:
        async with gate:
            await bench.api.send("POST", CUSTOM, service(number))

    async def progress() -> None:
        while True:
            await asyncio.sleep(SAY_SECONDS)
            memory = bench.operator.memory("VmRSS")
            bench.say(f"{len(bench.ready)} made, {bench.all_ready} Ready, the operator has {memory:.0f} MiB")

    async with asyncio.TaskGroup() as group:
        saying = group.create_task(progress())
        await asyncio.gather(*(make(number) for number in range(bench.services, row.services)))
        bench.services = row.services
        await bench.until(lambda: bench.all_ready >= row.services, START_SECONDS)
        saying.cancel()
    row.start_seconds = time.monotonic() - start
    row.start_memory_peak = bench.operator.memory("VmHWM")
    if added:
        row.start_cpu_per_service = (bench.operator.cpu() - cpu) / added
        row.start_calls_per_service = bench.calls(before).total / added
        row.calls["start"] = bench.calls(before).each(added)
    await settle(bench)


async def settle(bench: Bench) -> None:
    """Waits until the operator has written nothing for five seconds."""
    quiet = time.monotonic()
    position = audit.position(bench.cluster.audit_log)
    while time.monotonic() < quiet + 5:
        await asyncio.sleep(0.5)
        if bench.calls(position).writes:
            quiet, position = time.monotonic(), audit.position(bench.cluster.audit_log)


async def measure_rest(bench: Bench, row: Row, seconds: float) -> None:
    position, cpu = audit.position(bench.cluster.audit_log), bench.operator.cpu()
    polls = await bench.series("sm70_operator_engine_polls_total")
    await asyncio.sleep(seconds)
    calls = bench.calls(position)
    row.rest_writes, row.rest_reads = calls.writes.total(), calls.reads.total()
    row.rest_cpu_percent = 100 * (bench.operator.cpu() - cpu) / seconds
    row.rest_polls_per_second = (await bench.series("sm70_operator_engine_polls_total") - polls) / seconds
    row.memory, row.memory_peak = bench.operator.memory("VmRSS"), bench.operator.memory("VmHWM")


async def measure_edits(bench: Bench, row: Row, count: int, rate: float) -> None:
    """From the edit of `replicas` to the Deployment that follows it, as a watch sees it."""
    position, cpu, start = audit.position(bench.cluster.audit_log), bench.operator.cpu(), time.monotonic()

    async def edit(name: str) -> float:
        wanted = 3 - bench.replicas[name]
        sent = time.perf_counter()
        body = {"spec": {"replicas": wanted}}
        await bench.api.send("PATCH", f"{CUSTOM}/{name}", body, "application/merge-patch+json")
        await bench.until(lambda: bench.replicas[name] == wanted, 300)
        return time.perf_counter() - sent

    times = await _paced(edit, row.services, count, rate)
    row.edit_p50, row.edit_p99 = _percentiles(times)
    await settle(bench)
    _charge(bench, row, "edit", count, position, cpu, start)


async def measure_rollouts(bench: Bench, row: Row, count: int, rate: float) -> None:
    """From the edit of a setting to the public Service that selects the new revision; the pods are puppets."""
    position, cpu, start = audit.position(bench.cluster.audit_log), bench.operator.cpu(), time.monotonic()

    async def change(name: str) -> float:
        before, sent = bench.selected[name], time.perf_counter()
        body = {"spec": {"overrides": {"maxNumSeqs": random.choice([2, 3, 4, 5, 6, 7])}}}
        body["spec"]["overrides"]["maxModelLen"] = random.randrange(1024, 4096, 128)
        await bench.api.send("PATCH", f"{CUSTOM}/{name}", body, "application/merge-patch+json")
        await bench.until(lambda: bench.selected[name] not in (before, "none", ""), 600)
        return time.perf_counter() - sent

    times = await _paced(change, row.services, count, rate)
    row.rollout_p50, row.rollout_p99 = _percentiles(times)
    await settle(bench)
    _charge(bench, row, "rollout", count, position, cpu, start)


async def _paced(act: Callable[[str], Any], services: int, count: int, rate: float) -> list[float]:
    """Acts on services one after the other in random order, so many a second, however long each takes."""
    chosen = [f"s{number}" for number in random.sample(range(services), min(count, services))]
    if services < 20:  # one at a time where the same one is meant again and again
        return [await act(chosen[number % len(chosen)]) for number in range(min(count, 20))]
    tasks = []
    for name in chosen:
        tasks.append(asyncio.create_task(act(name)))
        await asyncio.sleep(1 / rate)
    return list(await asyncio.gather(*tasks))


def _charge(bench: Bench, row: Row, kind: str, count: int, position: int, cpu: float, start: float) -> None:
    """What each event cost beyond the operator's rest."""
    done = min(count, row.services) if row.services >= 20 else min(count, 20)
    rest = row.rest_cpu_percent / 100 * (time.monotonic() - start)
    setattr(row, f"{kind}_cpu_milliseconds", max(0.0, 1000 * (bench.operator.cpu() - cpu - rest) / done))
    calls = bench.calls(position)
    setattr(row, f"{kind}_calls", calls.total / done)
    row.calls[kind] = calls.each(done)


async def measure_restart(bench: Bench, row: Row) -> None:
    """Killed without a word and started at once: the lease of the dead one has to run out first."""
    bench.operator.kill()
    position, start = audit.position(bench.cluster.audit_log), time.monotonic()
    bench.operator.start()
    await bench.reaches(1, "sm70_operator_reconciles_total")
    row.restart_to_first_look = time.monotonic() - start
    await bench.reaches(row.services, "sm70_operator_reconciles_total", result="success")
    row.restart_to_all_seen = time.monotonic() - start
    await settle(bench)
    row.restart_writes = bench.calls(position).writes.total()
    row.restart_memory_peak = bench.operator.memory("VmHWM")
    row.calls["restart"] = bench.calls(position).each(row.services)


def _percentiles(times: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(times)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


@contextlib.contextmanager
def empty_cluster() -> Iterator[Cluster]:
    """A cluster whose controllers and scheduler are gone: the puppets play them."""
    cluster = Cluster.named(f"bench-{os.getpid()}", Options(nodes=1, gpus=0, audit_log=True))
    try:
        cluster.up()
        _prepare(cluster)
        yield cluster
    finally:
        cluster.down()


def _prepare(cluster: Client) -> None:
    assert isinstance(cluster, Cluster)
    cluster.kubectl("create", "namespace", NAMESPACE)
    cluster.kubectl("apply", "--server-side", "-f", str(ROOT / "charts/sm70-operator/crds"))
    cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
    while not cluster.get("serviceaccount", "default", NAMESPACE):
        time.sleep(0.1)
    for daemon in ("kube-controller-manager", "kube-scheduler"):
        cluster.kill("hub", daemon)


@contextlib.asynccontextmanager
async def bench_of(cluster: Cluster) -> AsyncIterator[Bench]:
    layout = cluster.layout
    authority = Authority(layout.files.pki)
    authority.issue(USER, USER, ["system:masters"])
    kubeconfig = layout.files.conf / f"{USER}.kubeconfig"
    authority.kubeconfig(kubeconfig, layout.network.server, USER)
    report = builders.report().model_dump_json(by_alias=True).encode()
    async with (
        KubeApi.connect(cluster.kubeconfig.read_text()) as api,
        aiohttp.ClientSession() as http,
        report_server(layout.network.host, names.HTTP_PORT, report),
        asyncio.TaskGroup() as group,
    ):
        bench = Bench(cluster, api, Operator(kubeconfig, cluster.folder), http)
        watches = [(CUSTOM, bench.see_service), (DEPLOYMENTS, bench.see_deployment), (SERVICES, bench.see_public)]
        tasks = [group.create_task(api.watch(*one)) for one in watches]
        tasks.append(group.create_task(Puppets(api, layout.network.host).run()))
        bench.operator.start()
        try:
            yield bench
        finally:
            bench.operator.kill()
            for task in tasks:
                task.cancel()


async def measure(cluster: Cluster, options: argparse.Namespace, keep: Callable[[list[Row]], None]) -> None:
    """All figures for each number of services, the smallest first. `keep` gets what there is after every phase."""
    rows: list[Row] = []
    async with bench_of(cluster) as bench:
        await bench.reaches(1, "sm70_operator_leader")
        for number in sorted(options.services):
            rows.append(Row(number))
            await _measure_row(bench, rows[-1], options, lambda: keep(rows))
            show(rows[-1])


async def _measure_row(bench: Bench, row: Row, options: argparse.Namespace, keep: Callable[[], None]) -> None:
    phases: dict[str, Callable[[], Awaitable[None]]] = {
        "start": lambda: add_services(bench, row),
        "rest": lambda: measure_rest(bench, row, options.rest),
        "edits": lambda: measure_edits(bench, row, options.edits, options.rate),
        "rollouts": lambda: measure_rollouts(bench, row, options.rollouts, options.rate),
        "restart": lambda: measure_restart(bench, row),
    }
    for phase, work in phases.items():
        bench.say(f"{row.services} services: {phase}")
        await work()
        row.measured.append(phase)
        row.load_average = os.getloadavg()[0]
        keep()


def show(row: Row) -> None:
    """One column of figures."""
    print(f"\n{row.services} services")
    for name, value in dataclasses.asdict(row).items():
        if isinstance(value, dict):
            for kind, calls in value.items():
                print(f"  calls: {kind:<21} {', '.join(f'{what} {count:g}' for what, count in calls.items())}")
            continue
        print(f"  {name:<28} {value:.4g}" if isinstance(value, float) else f"  {name:<28} {value}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measures the operator against the number of services.")
    parser.add_argument("--services", type=int, nargs="+", default=[1, 100, 1000])
    parser.add_argument("--edits", type=int, default=EDITS, help="edits that are measured")
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS, help="rollouts that are measured")
    parser.add_argument("--rate", type=float, default=RATE, help="edits and rollouts that are sent a second")
    parser.add_argument("--rest", type=float, default=REST_SECONDS, help="seconds for which the rest is watched")
    parser.add_argument("--json", type=Path, help="also write the figures here, after every phase")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))

    def keep(rows: list[Row]) -> None:
        if options.json:
            options.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")

    with empty_cluster() as cluster:
        asyncio.run(measure(cluster, options, keep))


if __name__ == "__main__":
    main()
