"""What the pods of workers and routers have in common."""

from __future__ import annotations

from typing import Any

from forebay_operator.build import ports
from forebay_operator.build.secret import KEY as TOKEN_KEY
from forebay_wire import VERSION
from forebay_wire.paths import HEALTH, READY

TOKEN_FOLDER = "/etc/forebay/token"  # noqa: S105
LIVENESS_GRACE_SECONDS = 10
"""For a process that stopped answering: it will hardly drain, so it gets no drain time."""


DRAIN_MARGIN_SECONDS = 30
"""Between the end of a drain and SIGKILL: preStop and the time to say goodbye lie inside."""


def image(configured: str | None, default: str | None, name: str) -> str:
    """What the model names, else what the operator's settings name, else the release's own."""
    return configured or default or f"{name}:{VERSION}"


def place_env() -> list[dict[str, Any]]:
    """Where a container runs: addresses, port and paths. Local mode puts its own values in the place of these."""
    return [
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "BIND_ADDRESS", "value": "0.0.0.0"},  # noqa: S104
        {"name": "PORT", "value": str(ports.HTTP)},
        {"name": "TOKEN_FILE", "value": f"{TOKEN_FOLDER}/{TOKEN_KEY}"},
    ]


def probes(*, startup_seconds: int) -> dict[str, Any]:
    """The three probes. Until the startup probe succeeds, for at most `startup_seconds`, the others wait."""
    return {
        "startupProbe": {
            "httpGet": {"path": HEALTH, "port": "http"},
            "periodSeconds": 1,
            "timeoutSeconds": 5,
            "failureThreshold": startup_seconds,
            "terminationGracePeriodSeconds": LIVENESS_GRACE_SECONDS,
        },
        "readinessProbe": {
            "httpGet": {"path": READY, "port": "http"},
            "periodSeconds": 1,
            "timeoutSeconds": 5,
            "failureThreshold": 3,
        },
        "livenessProbe": {
            "httpGet": {"path": HEALTH, "port": "http"},
            "periodSeconds": 5,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
            "terminationGracePeriodSeconds": LIVENESS_GRACE_SECONDS,
        },
    }


def container_security(*, capabilities: list[str] | None = None) -> dict[str, Any]:
    """Restricted pod security, with added capabilities as the exception (RDMA pins memory: IPC_LOCK)."""
    dropped: dict[str, Any] = {"drop": ["ALL"]}
    if capabilities:
        dropped["add"] = capabilities
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": dropped}


def pod_security() -> dict[str, Any]:
    """`fsGroup` lets a user that is not root read the token and write an emptyDir."""
    return {"runAsNonRoot": True, "fsGroup": 65532, "seccompProfile": {"type": "RuntimeDefault"}}


def pre_stop(seconds: int) -> dict[str, Any]:
    """A pause before SIGTERM starts the drain.

    A pod's removal from Services and views and its SIGTERM race: without it, what the last senders still send meets
    a closed door.
    """
    return {"lifecycle": {"preStop": {"sleep": {"seconds": seconds}}}}


def http_port() -> dict[str, Any]:
    return {"name": "http", "containerPort": ports.HTTP, "protocol": "TCP"}


def tmp_mount() -> dict[str, Any]:
    """The root file system is read-only: /tmp is where programs may write."""
    return {"name": "tmp", "mountPath": "/tmp"}  # noqa: S108


def tmp_volume() -> dict[str, Any]:
    return {"name": "tmp", "emptyDir": {}}


def token_mount() -> dict[str, Any]:
    return {"name": "token", "mountPath": TOKEN_FOLDER, "readOnly": True}


def token_volume(secret: str) -> dict[str, Any]:
    return {"name": "token", "secret": {"secretName": secret, "defaultMode": 0o440}}
