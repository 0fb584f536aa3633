"""python -m e2e.cluster VERB: a real Kubernetes of two nodes on this machine.

up                     build and install what is missing, start everything, wait until both nodes are Ready
down                   stop everything; only programs, images and logs stay
kubeconfig             print the path of an administrator's kubeconfig
images                 build the product's images and load them
status                 processes and their memory
signal WHERE NAME SIG  to node1 or node2's init, kubelet, containerd or kube-proxy, or to a process of `host`
power-on NODE          start a node again after `signal NODE init KILL`
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable

from e2e.cluster import host, images, two_nodes
from e2e.cluster.binaries import Unbuildable
from e2e.cluster.shell import CommandFailed
from e2e.cluster.state import State, state


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=sorted(_VERBS))
    parser.add_argument("words", nargs="*")
    arguments = parser.parse_args()
    # `down` must work wherever something is left over.
    if arguments.verb == "up" and (problem := host.unfit()):
        sys.stderr.write(f"no two-node cluster here: {problem}\n")
        return 1
    try:
        _VERBS[arguments.verb](state(), *arguments.words)
    except (two_nodes.NotUp, CommandFailed, Unbuildable, LookupError, TimeoutError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _up(state: State) -> None:
    print(host.changes(state), flush=True)
    two_nodes.up(state)
    print(f"export KUBECONFIG={state.kubeconfig} PATH={state.bin}:$PATH")


def _images(state: State) -> None:
    two_nodes.load(state, *(images.build(state, image) for image in images.PRODUCT))
    images.tidy(state)


def _signal(state: State, where: str, name: str, number: str) -> None:
    two_nodes.signal_process(state, where, name, signal.Signals[f"SIG{number.removeprefix('SIG')}"])


def _status(state: State) -> None:
    for name, pid, resident in two_nodes.status(state):
        print(f"{name:28} " + (f"pid {pid:<8} {resident >> 10} MiB" if pid is not None else "not running"))


_VERBS: dict[str, Callable[..., None]] = {
    "up": _up,
    "down": two_nodes.down,
    "kubeconfig": lambda state: print(state.kubeconfig),
    "images": _images,
    "status": _status,
    "signal": _signal,
    "power-on": lambda state, name: two_nodes.power_on(state, two_nodes.by_name(name)),
}

if __name__ == "__main__":
    sys.exit(main())
