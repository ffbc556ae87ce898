"""What there is of a cluster: the state in its folder, and the machines and addresses that follow from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from testcluster.api import Api
from testcluster.files import Files, Node
from testcluster.machine import Machine
from testcluster.network import Network
from testcluster.options import Options


@dataclass(frozen=True)
class Layout:
    folder: Path
    network: Network
    options: Options
    programs: Path
    images: Mapping[str, str]  # path of an archive that the nodes have, to its digest

    @property
    def files(self) -> Files:
        return Files(self.folder)

    @property
    def api(self) -> Api:
        return Api(self.network.hub, self.files.pki)

    @property
    def hub(self) -> Machine:
        return Machine(self.folder, "hub", f"{self.network.link}-hub")

    @property
    def nodes(self) -> list[Node]:
        net = self.network
        numbers = range(1, self.options.nodes + 1)
        return [Node(self.folder, f"node-{n}", f"{net.link}-node-{n}", net.node(n), net.node_pods(n)) for n in numbers]

    @property
    def machines(self) -> dict[str, Machine]:
        return {machine.name: machine for machine in (self.hub, *self.nodes)}

    def write(self, path: Path) -> None:
        data = {
            "network": self.network.index,
            "options": self.options.dump(),
            "programs": str(self.programs),
            "images": dict(self.images),
        }
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(data, indent=1))
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> Layout:
        data = json.loads(path.read_text())
        options = Options.load(data["options"])
        return cls(path.parent, Network(data["network"]), options, Path(data["programs"]), data["images"])
