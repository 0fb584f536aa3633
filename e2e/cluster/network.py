"""The machine's network for two nodes: a bridge, and a namespace with one cable a node."""

from __future__ import annotations

import contextlib
from pathlib import Path

from e2e.cluster.shell import run
from e2e.cluster.state import BRIDGE, HOST_ADDRESS, NODES, SERVICES, Node

_NAMESPACES = Path("/run/netns")


def up() -> None:
    """Raises CommandFailed, also where something of these names is there already."""
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "addr", "add", f"{HOST_ADDRESS}/24", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")
    for node in NODES:
        _plug(node)
    # The host has no kube-proxy: it reaches Services through the first node's, which puts its own address in as source.
    run("ip", "route", "add", SERVICES, "via", NODES[0].address, "dev", BRIDGE)


def _plug(node: Node) -> None:
    def inside(*words: str) -> None:
        run("ip", "-n", node.namespace, *words)

    run("ip", "netns", "add", node.namespace)
    run("ip", "link", "add", node.link, "type", "veth", "peer", "name", "eth0", "netns", node.namespace)
    run("ip", "link", "set", node.link, "master", BRIDGE, "up")
    inside("addr", "add", f"{node.address}/24", "dev", "eth0")
    inside("link", "set", "lo", "up")
    inside("link", "set", "eth0", "up")
    # Without a default route no Service address is routable at all; link-local ones must not hang (metadata probes).
    inside("route", "add", "default", "via", HOST_ADDRESS)
    inside("route", "add", "blackhole", "169.254.0.0/16")
    for other in NODES:
        if other != node:
            inside("route", "add", other.pods, "via", other.address)
    run("ip", "route", "add", node.pods, "via", node.address, "dev", BRIDGE)


def down() -> None:
    """Also of a network that is half up."""
    for node in NODES:
        # The namespace can live on for a minute in orphaned sockets: the cable goes by itself.
        run("ip", "link", "del", node.link, check=False)
        run("ip", "netns", "del", node.namespace, check=False)
    run("ip", "link", "del", BRIDGE, check=False)
    # `ip netns add` made it a mount point.
    with contextlib.suppress(OSError):
        if not any(_NAMESPACES.iterdir()):
            run("umount", "--no-mtab", _NAMESPACES, check=False)
            _NAMESPACES.rmdir()


def left_over() -> list[str]:
    """What of it there is: names of links and namespaces."""
    links = [path.name for path in Path("/sys/class/net").iterdir()]
    spaces = [path.name for path in _NAMESPACES.iterdir()] if _NAMESPACES.is_dir() else []
    ours = {BRIDGE, *(node.link for node in NODES)}
    return [*(name for name in links if name in ours), *(n for n in spaces if n in {o.namespace for o in NODES})]
