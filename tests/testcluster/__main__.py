"""The command line of the embedded test cluster: `python -m testcluster --help`, with PYTHONPATH=tests."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from testcluster.cluster import Cluster, all_clusters, build_all, down_all
from testcluster.errors import ClusterError
from testcluster.options import GpuSource, Options
from testcluster.progress import say


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="testcluster", description="A real Kubernetes cluster inside this machine.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, *arguments: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        for argument in arguments:
            sub.add_argument(argument)
        where = sub.add_mutually_exclusive_group()
        where.add_argument("--name", default="default", help="of a cluster in $SM70_CACHE/clusters (default: default)")
        where.add_argument("--dir", type=Path, help="the cluster's folder, instead of a name")
        return sub

    commands.add_parser("build", help="build the programs from their Go modules, which `up` also does")
    up = command("up", "start what does not run, and wait until it is ready; also heals a crash")
    up.add_argument("--nodes", type=int, default=2)
    up.add_argument("--gpus", type=int, default=4, help="fake V100s of each node")
    up.add_argument("--gpu-source", type=GpuSource, choices=list(GpuSource), default=GpuSource.DEVICE_PLUGIN)
    up.add_argument(
        "--image", type=Path, action="append", default=[], metavar="FILE", help="an OCI archive; repeatable"
    )
    up.add_argument("--audit-log", action="store_true", help="write logs/audit.log: every request, without contents")
    up.add_argument("--apiserver-arg", action="append", default=[], metavar="ARG")
    down = command("down", "end everything, keep the logs")
    down.add_argument("--all", action="store_true", help="every cluster of this host, also one that lost its launcher")
    command("env", "print the shell's settings: eval $(… env)")
    command("status", "print which daemons run; exit code 1 if one does not")
    command("list", "print the folders of all clusters of this host")
    command("load-image", "unpack an OCI archive on every node of a running cluster", "archive")
    command("exec", "run a command inside a machine: hub, node-1, …", "machine").add_argument("words", nargs="+")
    command("signal", "send a signal (KILL, STOP, CONT, …) to a daemon", "machine", "daemon", "signal")
    command("crash", "cut a machine's power; `up` boots it again", "machine")
    link = command("link", "plug (up) or pull (down) a node's cable", "node")
    link.add_argument("way", choices=["up", "down"])
    sick = command("break-gpus", "make exactly these GPUs of a node sick; none: all are well", "node")
    sick.add_argument("indexes", nargs="*", type=int)
    return top


def options(arguments: argparse.Namespace) -> Options:
    return Options(
        nodes=arguments.nodes,
        gpus=arguments.gpus,
        gpu_source=arguments.gpu_source,
        audit_log=arguments.audit_log,
        apiserver_args=tuple(arguments.apiserver_arg),
        images=tuple(path.resolve() for path in arguments.image),
    )


def number(name: str) -> signal.Signals:
    """The signal of a name such as KILL or SIGKILL."""
    try:
        return signal.Signals[f"SIG{name.upper().removeprefix('SIG')}"]
    except KeyError:
        raise ClusterError(f"a signal must have a name such as KILL, STOP or CONT, not {name!r}") from None


def _down(cluster: Cluster, everything: bool) -> None:
    if not everything:
        cluster.down()
    for removed in down_all() if everything else []:
        say(f"removed {removed}")


def _status(cluster: Cluster) -> int:
    status = cluster.status()
    for machine, daemons in status.items():
        print(machine, *(f"{name}={'running' if runs else 'DOWN'}" for name, runs in daemons.items()))
    if not status:
        print(f"no cluster in {cluster.folder}")
    return 0 if status and all(all(daemons.values()) for daemons in status.values()) else 1


def run(arguments: argparse.Namespace) -> int:
    if arguments.command == "build":
        build_all()
        return 0
    wanted = options(arguments) if arguments.command == "up" else None
    cluster = Cluster(arguments.dir, wanted) if arguments.dir else Cluster.named(arguments.name, wanted)
    a = arguments
    actions: dict[str, Callable[[], int | None]] = {
        "up": cluster.up,
        "down": lambda: _down(cluster, a.all),
        "env": lambda: print(f"export KUBECONFIG={cluster.kubeconfig}\nexport PATH={cluster.files.bin}:$PATH"),
        "status": lambda: _status(cluster),
        "list": lambda: print(*(found.folder for found in all_clusters()), sep="\n"),
        "load-image": lambda: cluster.load_image(Path(a.archive)),
        "exec": lambda: os.execvp("nsenter", cluster.machine(a.machine).command(a.words)),
        "signal": lambda: cluster.signal(a.machine, a.daemon, number(a.signal)),
        "crash": lambda: cluster.crash(a.machine),
        "link": lambda: cluster.heal(a.node) if a.way == "up" else cluster.partition(a.node),
        "break-gpus": lambda: cluster.break_gpus(a.node, *a.indexes),
    }
    return actions[arguments.command]() or 0


def main(words: Sequence[str] | None = None) -> int:
    try:
        return run(parser().parse_args(words))
    except (RuntimeError, TimeoutError, subprocess.CalledProcessError) as error:
        print(f"testcluster: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
