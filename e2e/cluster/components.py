"""The control plane's processes and their arguments. They run on the machine itself, not in pods."""

from __future__ import annotations

from typing import Final

from e2e.cluster import processes
from e2e.cluster.state import API_PORT, ETCD_PORT, HOST_ADDRESS, PODS, SERVICES, State

API_SERVER: Final = "kube-apiserver"
FOLLOWERS: Final = ("kube-controller-manager", "kube-scheduler")
"""They elect a leader in a usual cluster, and so end when the API server is away for long."""

GRACE_SECONDS: Final = 40
EVICTION_SECONDS: Final = 30
"""Until the pods of a lost node are replaced: 300 in a usual cluster."""


def start(state: State, name: str) -> None:
    processes.start(name, state.bin / name, *_ARGUMENTS[name](state), pids=state.pids, logs=state.logs)


def _etcd(state: State) -> list[str]:
    client, peer = f"http://127.0.0.1:{ETCD_PORT}", f"http://127.0.0.1:{ETCD_PORT + 1}"
    return [
        "--name=default",
        f"--data-dir={state.run / 'etcd'}",
        "--unsafe-no-fsync",
        "--log-level=warn",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
    ]


def _api_server(state: State) -> list[str]:
    pki = state.pki
    return [
        f"--etcd-servers=http://127.0.0.1:{ETCD_PORT}",
        f"--bind-address={HOST_ADDRESS}",
        f"--advertise-address={HOST_ADDRESS}",
        f"--secure-port={API_PORT}",
        f"--service-cluster-ip-range={SERVICES}",
        f"--client-ca-file={pki}/ca.crt",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--kubelet-certificate-authority={pki}/ca.crt",
        f"--kubelet-client-certificate={pki}/apiserver-kubelet.crt",
        f"--kubelet-client-key={pki}/apiserver-kubelet.key",
        "--kubelet-preferred-address-types=InternalIP",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={pki}/sa.pub",
        f"--service-account-signing-key-file={pki}/sa.key",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--requestheader-client-ca-file={pki}/front-proxy-ca.crt",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={pki}/front-proxy.crt",
        f"--proxy-client-key-file={pki}/front-proxy.key",
        # Its own machine has routes to pods; those to Services go through a node.
        "--enable-aggregator-routing=true",
        "--allow-privileged=true",
        f"--default-not-ready-toleration-seconds={EVICTION_SECONDS}",
        f"--default-unreachable-toleration-seconds={EVICTION_SECONDS}",
    ]


def _controller_manager(state: State) -> list[str]:
    pki = state.pki
    return [
        f"--kubeconfig={state.run}/kube-controller-manager.kubeconfig",
        "--leader-elect=false",
        "--secure-port=0",
        f"--service-account-private-key-file={pki}/sa.key",
        f"--root-ca-file={pki}/ca.crt",
        "--use-service-account-credentials=true",
        f"--cluster-signing-cert-file={pki}/ca.crt",
        f"--cluster-signing-key-file={pki}/ca.key",
        f"--cluster-cidr={PODS}",
        "--node-monitor-period=2s",
        f"--node-monitor-grace-period={GRACE_SECONDS}s",
        "--horizontal-pod-autoscaler-sync-period=5s",
        # A large scale-up waits for the default of 20 a second.
        "--kube-api-qps=200",
        "--kube-api-burst=400",
    ]


def _scheduler(state: State) -> list[str]:
    return [f"--kubeconfig={state.run}/kube-scheduler.kubeconfig", "--leader-elect=false", "--secure-port=0"]


_ARGUMENTS: Final = {
    "etcd": _etcd,
    API_SERVER: _api_server,
    "kube-controller-manager": _controller_manager,
    "kube-scheduler": _scheduler,
}
