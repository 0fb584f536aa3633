"""One node: a process tree with network, mount, process and host name namespaces of its own.

Two kubelets on one machine would share /var/lib/kubelet, /var/log/pods and /run: each node covers these by its own. Its
process 1, `main()` below, starts containerd, kubelet and kube-proxy anew when they end, and takes all with it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from e2e.cluster import cgroups, processes
from e2e.cluster.shell import run
from e2e.cluster.state import DNS_ADDRESS, NODES, PODS, Node, State

PAUSE: Final = "registry.k8s.io/pause:3.10"
SUPERVISED: Final = ("containerd", "kubelet", "kube-proxy")
SOCKET_SECONDS: Final = 60.0

KERNEL: Final = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1_000_000,
    "kernel/keys/root_maxbytes": 25_000_000,
}
"""What kubelet wants of the kernel. Files with these values are mounted over /proc/sys inside the node, so that the
machine keeps its own; protectKernelDefaults makes kubelet stop rather than write where one is missing here."""


def start(state: State, node: Node) -> None:
    for folder in ("lib", "log", "sys"):
        (state.disk(node) / folder).mkdir(parents=True, exist_ok=True)
    cgroups.make(node)
    # `ip netns exec` would remount /sys and hide the cgroups.
    processes.start(
        node.name,
        *("nsenter", f"--net=/run/netns/{node.namespace}"),
        *("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"),
        *(sys.executable, "-m", "e2e.cluster.node", f"{state.root}/", f"{state.run}/", node.name),
        pids=state.pids,
        logs=state.logs,
        cwd=Path(__file__).parents[2],
    )


def pid(state: State, node: Node, name: str) -> int:
    """The machine's number of the node's `init`, `containerd`, `kubelet` or `kube-proxy`. Raises LookupError."""
    outer = processes.pid_of(state.pids / node.name)
    inner = processes.children(outer) if outer is not None else []
    if not inner:
        raise LookupError(f"{node.name} does not run")
    # nsenter became unshare; its child is the node's process 1.
    if name == "init":
        return inner[0]
    for child in processes.children(inner[0]):
        if processes.program(child) == name:
            return child
    raise LookupError(f"{name} does not run on {node.name}: see {state.logs}/{node.name}-{name}.log")


def main(state: State, node: Node) -> None:
    """As process 1 of the node."""
    disk = state.disk(node)
    _mounts(state, node)
    socket.sethostname(node.name)
    for key in ("ipv4/ip_forward", "bridge/bridge-nf-call-iptables"):
        Path(f"/proc/sys/net/{key}").write_text("1")
    (disk / "cni").mkdir(exist_ok=True)
    (disk / "resolv.conf").write_text("")
    (disk / "cni" / "10-pods.conflist").write_text(json.dumps(_cni(node)))
    (disk / "containerd.toml").write_text(_containerd(state, node))
    (disk / "kubelet.json").write_text(json.dumps(_kubelet(state, node)))
    (disk / "kube-proxy.json").write_text(json.dumps(_kube_proxy(state, node)))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _supervise(state, node)


def _supervise(state: State, node: Node) -> None:
    disk = state.disk(node)
    commands: dict[str, list[object]] = {
        "containerd": ["containerd", "-c", disk / "containerd.toml"],
        "kube-proxy": [state.bin / "kube-proxy", f"--config={disk}/kube-proxy.json"],
        "kubelet": [
            state.bin / "kubelet",
            f"--config={disk}/kubelet.json",
            f"--kubeconfig={state.run}/{node.name}.kubeconfig",
            f"--hostname-override={node.name}",
            f"--node-ip={node.address}",
            "--v=2",
        ],
    }
    running: dict[int, str] = {}

    def spawn(name: str) -> None:
        with (state.logs / f"{node.name}-{name}.log").open("ab") as out:
            words = [str(word) for word in commands[name]]
            running[subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out).pid] = name

    spawn("containerd")
    spawn("kube-proxy")
    deadline = time.monotonic() + SOCKET_SECONDS
    while not state.socket(node).exists():
        if time.monotonic() > deadline:
            sys.exit(f"containerd has no socket after {SOCKET_SECONDS:.0f} s")
        time.sleep(0.1)
    spawn("kubelet")
    while True:
        # Orphans of the whole node end here too.
        name = running.pop(os.wait()[0], None)
        if name is not None:
            print(f"{name} ended; starting it anew", flush=True)
            time.sleep(1)
            spawn(name)


def _mounts(state: State, node: Node) -> None:
    def mount(*words: object) -> None:
        run("mount", "--no-mtab", *words)

    disk = state.disk(node)
    mount("--make-rshared", "/")
    mount("-t", "tmpfs", "tmpfs", "/run")
    for index, (key, value) in enumerate(KERNEL.items()):
        file = disk / "sys" / str(index)
        file.write_text(f"{value}\n")
        mount("--bind", file, f"/proc/sys/{key}")
    mount("--bind", disk / "lib", "/var/lib")
    mount("--bind", disk / "log", "/var/log")
    # The only place where cAdvisor looks; without it container metrics lose their labels.
    Path("/run/containerd").mkdir()
    Path("/run/containerd/containerd.sock").symlink_to(state.socket(node))


def _cni(node: Node) -> dict[str, Any]:
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": node.pods}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "hairpinMode": True, "ipam": addresses}
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, ports]}


def _containerd(state: State, node: Node) -> str:
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    # restrict_oom_score_adj: lowering it needs CAP_SYS_RESOURCE, which a container may lack.
    return f"""version = 2
[grpc]
  address = "{state.socket(node)}"
[{cri}]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
[{cri}.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[{cri}.cni]
  bin_dir = "/usr/lib/cni"
  conf_dir = "{state.disk(node)}/cni"
"""


def _kubelet(state: State, node: Node) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{node.namespace}",
        "failCgroupV1": False,
        "containerRuntimeEndpoint": f"unix://{state.socket(node)}",
        "clusterDNS": [DNS_ADDRESS],
        "clusterDomain": "cluster.local",
        "resolvConf": str(state.disk(node) / "resolv.conf"),
        "oomScoreAdj": 0,
        "maxOpenFiles": min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 1_000_000),
        "failSwapOn": False,
        "protectKernelDefaults": True,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{state.pki}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{state.pki}/{node.name}-server.crt",
        "tlsPrivateKeyFile": f"{state.pki}/{node.name}-server.key",
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        # The default lies on the machine's own /usr.
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        "nodeStatusUpdateFrequency": "4s",
        "nodeLeaseDurationSeconds": 12,
        "syncFrequency": "10s",
    }


def _kube_proxy(state: State, node: Node) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "clusterCIDR": PODS,
        "clientConnection": {"kubeconfig": f"{state.run}/kube-proxy.kubeconfig"},
        "hostnameOverride": node.name,
        "oomScoreAdj": 0,
        # The kernel's table of connections can't be sized from within a network namespace.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }


if __name__ == "__main__":
    main(State(Path(sys.argv[1])), next(node for node in NODES if node.name == sys.argv[3]))
