"""TCP connections of pods, read in the pods themselves, and judged by the NetworkPolicies there are."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from support.network_policies import Host, connects

_LISTEN: Final = "0A"
_ESTABLISHED: Final = "01"


@dataclass(frozen=True, slots=True)
class Socket:
    address: str
    port: int
    peer: str
    peer_port: int
    listens: bool


@dataclass(frozen=True, slots=True, order=True)
class Connection:
    source: str
    """Address of who opened it."""

    target: str
    port: int


def parse(table: str) -> Iterator[Socket]:
    """The lines of /proc/net/tcp and /proc/net/tcp6 (what `ss -ta` shows) that listen or are established."""
    for line in table.splitlines():
        words = line.split()
        if len(words) < 4 or words[3] not in (_LISTEN, _ESTABLISHED):
            continue
        (address, port), (peer, peer_port) = _endpoint(words[1]), _endpoint(words[2])
        yield Socket(address, port, peer, peer_port, words[3] == _LISTEN)


def _endpoint(text: str) -> tuple[str, int]:
    """An address in hexadecimal, each 32 bits in this machine's order."""
    address, port = text.split(":")
    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    raw = struct.pack(f"={len(words)}I", *words)
    if len(raw) == 4:
        return socket.inet_ntoa(raw), int(port, 16)
    long = ipaddress.IPv6Address(raw)
    return str(long.ipv4_mapped or long), int(port, 16)


def connections(sockets: Iterable[Socket]) -> set[Connection]:
    """Of one pod. Who listens on a port was called; else it called."""
    held = list(sockets)
    listening = {each.port for each in held if each.listens}
    return {
        Connection(each.peer, each.address, each.port)
        if each.port in listening
        else Connection(each.address, each.peer, each.peer_port)
        for each in held
        if not each.listens and not ipaddress.ip_address(each.address).is_loopback
    }


@dataclass(frozen=True, slots=True)
class Judge:
    policies: tuple[dict[str, Any], ...]
    pods: Mapping[str, Host]
    """By address."""

    services: Mapping[str, tuple[Host, ...]]
    """By cluster address, the pods behind; none for the API server's, which is no pod."""

    nodes: frozenset[str]
    """Addresses that a node has: kubelet's probes come from them, and every network plugin lets these in."""

    def allowed(self, connection: Connection) -> bool:
        if connection.source in self.nodes:
            return True
        outside = Host(None, {})
        source = self.pods.get(connection.source, outside)
        behind = self.services.get(connection.target)
        targets = behind if behind is not None else (self.pods.get(connection.target, outside),)
        return all(connects(self.policies, source, target, connection.port) for target in targets or (outside,))
