"""What a machine must have for the two-node cluster, and what `up` does to it."""

from __future__ import annotations

import os
import shutil
from typing import Final

from e2e.cluster import binaries, cgroups
from e2e.cluster.shell import run
from e2e.cluster.state import BRIDGE, NODES, PODS, SERVICES, State

PACKAGES: Final = {
    "containerd": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "openssl": "openssl",
    "gcc": "gcc libc6-dev",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "buildah": "buildah",
    "mmdebstrap": "mmdebstrap",
}
"""By program, the Debian package that has it."""

INSTALL_SECONDS: Final = 600


def missing_packages() -> list[str]:
    return " ".join(package for program, package in PACKAGES.items() if not shutil.which(program)).split()


def unfit() -> str | None:
    """Why this machine can't, and what would help; None when it can."""
    if os.geteuid() != 0:
        return "not root: run it as root, since namespaces, cgroups and a bridge are made"
    if not cgroups.version_1():
        return "cgroup v2: the self-built nodes know version 1; install Docker and kind, or give FOREBAY_E2E_KUBECONFIG"
    if binaries.missing() and shutil.which("go") is None:
        return "no Go: install Go 1.26 or newer, from which Kubernetes is built"
    if (packages := missing_packages()) and shutil.which("apt-get") is None:
        return f"no {', '.join(packages)}, and no apt-get to install them"
    return None


def changes(state: State) -> str:
    """For a person to read before `up`."""
    lines = [
        f"two cluster nodes as process trees in namespaces ({', '.join(node.namespace for node in NODES)})",
        f"the network bridge {BRIDGE} with routes to {PODS} and {SERVICES}, gone after `down`",
        f"cgroups of the nodes' names in {cgroups.ROOT}, gone after `down`",
        f"files in {state.root}: programs, images and logs stay after `down`",
    ]
    if packages := missing_packages():
        lines.append(f"Debian packages installed: {' '.join(packages)}")
    if programs := binaries.missing():
        lines.append(f"programs built with Go, up to 10 minutes: {' '.join(programs)}")
    return "This machine gets:\n" + "\n".join(f"  - {line}" for line in lines)


def install() -> None:
    """Packages and programs that are missing. Raises CommandFailed, Unbuildable."""
    if packages := missing_packages():
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        run("apt-get", "update", check=False, env=env, seconds=INSTALL_SECONDS)
        run("apt-get", "install", "-y", "--no-install-recommends", *packages, env=env, seconds=INSTALL_SECONDS)
    binaries.build()
