"""The addresses of a cluster, and the host's side of its network.

The control plane is one machine (the hub), each node another. A cluster owns 10.(200+I).0.0/16,
I being the first free of 0 to 7:

    .0.1 the host   .0.2 the hub   .0.11… the nodes   .65.0/24… pods   .128.0/18 Services

The host reaches all of them through one virtual cable, whose alias is the cluster's folder.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from testcluster.errors import ClusterError, CommandError
from testcluster.machine import Machine, cgroup_hierarchies, ip, links

PREFIX = "sm70-test"
COUNT = 8
STATE = "cluster.json"  # in a cluster's folder while the cluster exists
WIRED = "wired"
# No packet for a cluster that is gone leaves the host: its sender gets an error at once.
GUARD = ["unreachable", "10.200.0.0/13", "metric", "9999"]


@dataclass(frozen=True)
class Network:
    index: int

    @property
    def link(self) -> str:
        """The host's end of the cable; also the prefix of the cluster's cgroups."""
        return f"{PREFIX}{self.index}"

    @property
    def base(self) -> str:
        return f"10.{200 + self.index}"

    @property
    def host(self) -> str:
        return f"{self.base}.0.1"

    @property
    def hub(self) -> str:
        return f"{self.base}.0.2"

    @property
    def server(self) -> str:
        return f"https://{self.hub}:6443"

    @property
    def services(self) -> str:
        return f"{self.base}.128.0/18"

    @property
    def kubernetes_service(self) -> str:
        return f"{self.base}.128.1"

    @property
    def pods(self) -> str:
        return f"{self.base}.64.0/18"

    def node(self, number: int) -> str:
        return f"{self.base}.0.{10 + number}"

    def node_pods(self, number: int) -> str:
        return f"{self.base}.{64 + number}.0/24"


def claim(owner: Path, folder: Path) -> Network:
    """Notes in `folder` that a cluster's folder has a network; it keeps one that it has. The caller holds the lock.

    A claim counts while the cluster's folder says that it exists, also when none of its machines runs.
    Raises ClusterError if all are in use.
    """
    folder.mkdir(parents=True, exist_ok=True)
    claims = {index: Path(path.read_text()) for index in range(COUNT) if (path := folder / str(index)).exists()}
    for index, holder in claims.items():
        if holder == owner:
            return Network(index)
    used = in_use()
    for index in range(COUNT):
        taken = index in claims and (claims[index] / STATE).exists()
        if index not in used and not taken:
            (folder / str(index)).write_text(str(owner))
            return Network(index)
    raise ClusterError(f"all {COUNT} test networks of this host are in use; `down` one of the clusters (`down --all`)")


def in_use() -> set[int]:
    """The networks with a cable or with cgroups, whoever claimed them: another cache, another root file system."""
    names = [*links(), *(path.name for root in cgroup_hierarchies() for path in root.glob(f"{PREFIX}*"))]
    return {index for index in range(COUNT) for name in names if name.startswith(Network(index).link)}


def claimants(folder: Path) -> set[Path]:
    return {Path((folder / str(index)).read_text()) for index in range(COUNT) if (folder / str(index)).exists()}


def release(owner: Path, folder: Path) -> None:
    for index in range(COUNT):
        path = folder / str(index)
        if path.exists() and path.read_text() == str(owner):
            path.unlink()


def guard() -> None:
    subprocess.run(["ip", "route", "replace", *GUARD], check=True)


def unguard() -> None:
    """Removes the guard once the last cluster of the host is gone."""
    if not any(name.startswith(PREFIX) for name in links()):
        subprocess.run(["ip", "route", "delete", *GUARD], capture_output=True, check=False)


def unplug(owner: Path, own: Network | None = None) -> None:
    """Removes the cables of a cluster's folder, also one of its network that nobody has put a name on yet.

    A dead hub's network, and with it the cable, can outlive it while TCP retries.
    """
    for name, alias in links().items():
        unnamed = own is not None and name == own.link and not alias
        if name.startswith(PREFIX) and (alias == str(owner) or unnamed):
            delete(name)


def plug(network: Network, owner: Path, hub: Machine, node_routes: Mapping[str, str]) -> bool:
    """Connects the host and the hub; False if they are. `node_routes` are the nodes' pods and addresses."""
    if links().get(network.link) == str(owner) and hub.alias("host") is not None:
        return False
    if network.link in links():  # cut short, or its other end died
        delete(network.link)
    for end in ("host", "bridge"):
        hub.unplug(end)
    ip(f"link add {network.link} type veth peer name host netns {hub.pid()}")
    # node-1's kube-proxy serves the host and the hub, for which it masquerades.
    routes = [f"route add {network.services} via {network.node(1)}"]
    routes += [f"route add {pods} via {address}" for pods, address in node_routes.items()]
    hub.ip(
        "link add bridge type bridge",
        f"address add {network.hub}/24 dev bridge",
        "link set bridge up",
        "link set host master bridge up",
        *routes,
    )
    ip(f"address add {network.host}/24 dev {network.link}", f"link set {network.link} up", *routes)
    ip(f"link set {network.link} alias {owner}")  # the last step: without it the cable is not whole
    return True


def wire(network: Network, hub: Machine, node: Machine, address: str, others: Mapping[str, str]) -> None:
    """Connects a node to the hub's bridge; `others` are the other nodes' pods and addresses."""
    for machine, end in ((node, "eth0"), (hub, node.name)):
        machine.unplug(end)  # a dead machine's end, which the kernel would remove some time later
    ip(f"link add {node.name} netns {hub.pid()} type veth peer name eth0 netns {node.pid()}")
    hub.ip(f"link set {node.name} master bridge up")
    node.ip(
        f"address add {address}/24 dev eth0",
        "link set eth0 up",
        # A Service's address needs a route before kube-proxy can rewrite it. Nothing else leaves the cluster.
        f"route replace {network.services} dev eth0",
        "route replace unreachable default metric 9999",
        *(f"route replace {pods} via {other}" for pods, other in others.items()),
        f"link set eth0 alias {WIRED}",  # the last step, too
    )


def wired(hub: Machine, node: Machine) -> bool:
    return node.alias("eth0") == WIRED and hub.alias(node.name) is not None


def delete(link: str) -> None:
    """Removes a network device; the kernel may remove it meanwhile, because its other end dies."""
    done = subprocess.run(["ip", "link", "delete", link], capture_output=True, text=True, check=False)
    if done.returncode and link in links():
        raise CommandError(["ip", "link", "delete", link], done.returncode, done.stderr)
