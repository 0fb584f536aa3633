"""The router's Deployment and Service."""

from __future__ import annotations

from typing import Any, Final

from forebay_operator.api import labels
from forebay_operator.api.v1alpha1 import DisaggregatedModel, DisaggregatedModelSpec
from forebay_operator.build import pod
from forebay_operator.build.merge import merge_template
from forebay_operator.build.names import (
    common_labels,
    content_hash,
    router_name,
    selector,
    token_secret_name,
    workers_map_name,
)

CONTAINER: Final = "router"
WORKERS_FOLDER: Final = "/etc/forebay/workers"
API_KEYS_FOLDER: Final = "/etc/forebay/api-keys"
STARTUP_SECONDS: Final = 60


def router_deployment(model: DisaggregatedModel) -> dict[str, Any]:
    """One Deployment for all revisions: a changed template rolls, so its name holds no revision."""
    name = model.metadata.name
    return pod.deployment(
        name=router_name(name),
        namespace=model.metadata.namespace,
        labels=common_labels(name, "router"),
        selector=selector(name, "router"),
        replicas=model.spec.router.replicas,
        template=router_template(model),
    )


def router_template(model: DisaggregatedModel) -> dict[str, Any]:
    spec = model.spec
    volumes: list[dict[str, Any]] = [
        pod.token_volume(token_secret_name(model.metadata.name)),
        # Optional: the router may start before the first worker is listed, and waits for the file.
        {"name": "workers", "configMap": {"name": workers_map_name(model.metadata.name), "optional": True}},
    ]
    keys = spec.router.api_keys_secret_ref
    if keys is not None:
        items = [{"key": keys.key, "path": "keys"}]
        volumes.append({"name": "api-keys", "secret": {"secretName": keys.name, "items": items, "defaultMode": 0o440}})
    template: dict[str, Any] = {
        "metadata": {"labels": common_labels(model.metadata.name, "router")},
        "spec": {
            "terminationGracePeriodSeconds": spec.drain.timeout_seconds + 30,
            "securityContext": pod.pod_security(),
            "containers": [router_container(spec)],
            "volumes": volumes,
        },
    }
    if spec.router.pod_template is not None:
        template = merge_template(template, spec.router.pod_template)
    template["metadata"]["labels"][labels.REVISION] = content_hash(template)
    return template


def router_container(spec: DisaggregatedModelSpec) -> dict[str, Any]:
    env = [*pod.place_env(), {"name": "WORKERS_FILE", "value": f"{WORKERS_FOLDER}/workers.json"}]
    mounts = [pod.token_mount(), {"name": "workers", "mountPath": WORKERS_FOLDER, "readOnly": True}]
    if spec.router.api_keys_secret_ref is not None:
        env.append({"name": "API_KEYS_FILE", "value": f"{API_KEYS_FOLDER}/keys"})
        mounts.append({"name": "api-keys", "mountPath": API_KEYS_FOLDER, "readOnly": True})
    return {
        "name": CONTAINER,
        "image": pod.image(spec.router.image, "forebay-router"),
        "command": ["forebay-router"],
        "args": router_args(spec),
        "env": env,
        "ports": [{"name": "http", "containerPort": pod.PORT, "protocol": "TCP"}],
        **pod.probes(startup_seconds=STARTUP_SECONDS),
        "resources": {"requests": {"cpu": "1", "memory": "256Mi"}},
        "securityContext": pod.container_security(),
        "volumeMounts": mounts,
    }


def router_args(spec: DisaggregatedModelSpec) -> list[str]:
    args = [
        "--name=$(POD_NAME)",
        "--host=$(BIND_ADDRESS)",
        "--port=$(PORT)",
        "--workers-file=$(WORKERS_FILE)",
        "--token-file=$(TOKEN_FILE)",
        f"--served-name={spec.model.served_name}",
        f"--fallback={'both-phases' if spec.router.fallback == 'BothPhases' else 'refuse'}",
        f"--ttft-ms={spec.objectives.time_to_first_token_milliseconds}",
        f"--tpot-ms={spec.objectives.time_per_output_token_milliseconds}",
        f"--drain-timeout-seconds={spec.drain.timeout_seconds}",
    ]
    if spec.router.api_keys_secret_ref is not None:
        args.append("--api-keys-file=$(API_KEYS_FILE)")
    return args


def router_service(model: DisaggregatedModel) -> dict[str, Any]:
    name = model.metadata.name
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": router_name(name),
            "namespace": model.metadata.namespace,
            "labels": common_labels(name, "router"),
        },
        "spec": {
            "type": model.spec.router.service_type,
            "selector": selector(name, "router"),
            "ports": [{"name": "http", "port": pod.PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    }
