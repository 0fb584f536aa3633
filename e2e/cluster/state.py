"""Where the two-node cluster keeps what, and its fixed names and addresses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from e2e.cluster.binaries import bin_dir, cache_dir

BRIDGE: Final = "forebay-br0"
HOST_ADDRESS: Final = "10.77.0.1"
API_PORT: Final = 6443
ETCD_PORT: Final = 12379
SERVICES: Final = "10.96.0.0/16"
API_SERVICE_ADDRESS: Final = "10.96.0.1"
DNS_ADDRESS: Final = "10.96.0.10"
PODS: Final = "10.88.0.0/16"


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    index: int
    address: str
    pods: str
    """The range of its pods' addresses."""

    @property
    def namespace(self) -> str:
        """Its network namespace's name, and that of its cgroups."""
        return f"forebay-{self.name}"

    @property
    def link(self) -> str:
        """The host's end of its cable."""
        return f"forebay-v{self.index}"


NODES: Final = (
    Node("node1", 1, "10.77.0.21", "10.88.1.0/24"),
    Node("node2", 2, "10.77.0.22", "10.88.2.0/24"),
)


@dataclass(frozen=True, slots=True)
class State:
    """`bin`, `images` and `buildah` are kept between runs, `logs` until the next `up`, `run` while it is up."""

    root: Path

    @property
    def bin(self) -> Path:
        return bin_dir()

    @property
    def images(self) -> Path:
        return self.root / "images"

    @property
    def buildah(self) -> Path:
        return self.root / "buildah"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def run(self) -> Path:
        """Certificates, etcd's data, the nodes' disks. Its path is in every process's arguments."""
        return self.root / "run"

    @property
    def pki(self) -> Path:
        return self.run / "pki"

    @property
    def pids(self) -> Path:
        return self.run / "pids"

    @property
    def kubeconfig(self) -> Path:
        """An administrator's."""
        return self.run / "admin.kubeconfig"

    @property
    def complete(self) -> Path:
        """There once `up` has done all."""
        return self.run / "complete"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    def disk(self, node: Node) -> Path:
        return self.run / node.name

    def socket(self, node: Node) -> Path:
        """containerd's."""
        return self.disk(node) / "containerd.sock"


def state() -> State:
    """Of this user; one cluster a machine, since names and addresses are fixed."""
    return State(cache_dir())
