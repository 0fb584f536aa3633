"""Certificates and kubeconfigs of the cluster, made anew at each `up` with openssl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from e2e.cluster.shell import run
from e2e.cluster.state import API_PORT, API_SERVICE_ADDRESS, HOST_ADDRESS, NODES, State

_KEY: Final = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
_API_NAMES: Final = (
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
    "localhost",
)


def make(state: State) -> None:
    """Everything that `components` and `node` name in their command lines."""
    pki = state.pki
    for name in ("ca", "front-proxy-ca"):
        _authority(pki, name)
    addresses = (HOST_ADDRESS, API_SERVICE_ADDRESS, "127.0.0.1")
    names = [*(f"DNS:{name}" for name in _API_NAMES), *(f"IP:{address}" for address in addresses)]
    _certificate(pki, "apiserver", "kube-apiserver", names=",".join(names))
    _certificate(pki, "apiserver-kubelet", "kube-apiserver-kubelet-client", group="system:masters")
    _certificate(pki, "front-proxy", "front-proxy-client", authority="front-proxy-ca")
    run("openssl", "genrsa", "-out", pki / "sa.key", "2048")
    run("openssl", "rsa", "-in", pki / "sa.key", "-pubout", "-out", pki / "sa.pub")
    _user(state, "admin", "admin", group="system:masters")
    for name in ("kube-controller-manager", "kube-scheduler", "kube-proxy"):
        _user(state, name, f"system:{name}")
    for node in NODES:
        _user(state, node.name, f"system:node:{node.name}", group="system:nodes")
        _certificate(pki, f"{node.name}-server", node.name, names=f"DNS:{node.name},IP:{node.address}")


def _authority(pki: Path, name: str) -> None:
    run("openssl", "req", "-x509", *_KEY, "-days", "3650", "-subj", f"/CN={name}", "-keyout", pki / f"{name}.key",
        "-out", pki / f"{name}.crt", "-addext", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature")  # fmt: skip


def _certificate(pki: Path, name: str, who: str, *, group: str = "", names: str = "", authority: str = "ca") -> None:
    """`names`: what a server is reached by, as subjectAltName."""
    extensions = pki / f"{name}.ext"
    extensions.write_text(
        "keyUsage=critical,digitalSignature,keyEncipherment\nextendedKeyUsage=clientAuth,serverAuth\n"
        + (f"subjectAltName={names}\n" if names else "")
    )
    subject = (f"/O={group}" if group else "") + f"/CN={who}"
    run("openssl", "req", *_KEY, "-keyout", pki / f"{name}.key", "-out", pki / f"{name}.csr", "-subj", subject)
    run("openssl", "x509", "-req", "-in", pki / f"{name}.csr", "-CA", pki / f"{authority}.crt",
        "-CAkey", pki / f"{authority}.key", "-CAcreateserial", "-days", "3650", "-extfile", extensions,
        "-out", pki / f"{name}.crt")  # fmt: skip


def _user(state: State, name: str, who: str, *, group: str = "") -> None:
    _certificate(state.pki, name, who, group=group)
    user = {"client-certificate": str(state.pki / f"{name}.crt"), "client-key": str(state.pki / f"{name}.key")}
    cluster = {
        "server": f"https://{HOST_ADDRESS}:{API_PORT}",
        "certificate-authority": str(state.pki / "ca.crt"),
    }
    (state.run / f"{name}.kubeconfig").write_text(
        json.dumps({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "forebay",
            "contexts": [{"name": "forebay", "context": {"cluster": "forebay", "user": name}}],
            "clusters": [{"name": "forebay", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
        })
    )  # fmt: skip
