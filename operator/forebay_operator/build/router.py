"""The router's Deployment."""

from __future__ import annotations

from typing import Any, Final, Literal

from forebay_operator.api import labels
from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.build import pod
from forebay_operator.build.deployment import deployment
from forebay_operator.build.merge import merge_template
from forebay_operator.build.meta import metadata
from forebay_operator.build.names import (
    common_labels,
    content_hash,
    router_name,
    selector,
    token_secret_name,
    workers_map_name,
)
from forebay_operator.build.surroundings import NOWHERE, Surroundings

CONTAINER: Final = "router"
WORKERS_FOLDER: Final = "/etc/forebay/workers"
API_KEYS_FOLDER: Final = "/etc/forebay/api-keys"
STARTUP_SECONDS: Final = 60
PRE_STOP_SECONDS: Final = 5
"""For kube-proxy on every node to take the router out of its Service."""

UNSAID: Final = {
    "--fallback": "both-phases",
    "--ttft-ms": "1000",
    "--tpot-ms": "100",
    "--convertible": "overflow",
    "--drain-timeout-seconds": "600",
}
"""The router's own defaults, which are the API's too. Left out of the template: so a flag that a later version brings
for something that a model does not ask for rolls no router."""

Discovery = Literal["Kubernetes", "File"]
"""How the router learns of its workers. File: a workers file, which local mode writes."""


def router_deployment(
    model: DisaggregatedModel, *, surroundings: Surroundings = NOWHERE, discovery: Discovery = "Kubernetes"
) -> dict[str, Any]:
    """One Deployment for all revisions: a changed template rolls, so its name holds no revision."""
    name = model.metadata.name
    return deployment(
        metadata=metadata(model, router_name(name), "router"),
        selector=selector(name, "router"),
        replicas=model.spec.router.replicas,
        # A new one is ready before an old one leaves: with one replica too there is always a front door.
        strategy={"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        template=router_template(model, surroundings=surroundings, discovery=discovery),
    )


def router_template(
    model: DisaggregatedModel, *, surroundings: Surroundings = NOWHERE, discovery: Discovery = "Kubernetes"
) -> dict[str, Any]:
    spec, name = model.spec, model.metadata.name
    volumes: list[dict[str, Any]] = [pod.token_volume(token_secret_name(name)), pod.tmp_volume()]
    if discovery == "File":
        # Optional: the router may start before the first worker is listed, and waits for the file.
        volumes.append({"name": "workers", "configMap": {"name": workers_map_name(name), "optional": True}})
    keys = spec.router.api_keys_secret_ref
    if keys is not None:
        items = [{"key": keys.key, "path": "keys"}]
        volumes.append({"name": "api-keys", "secret": {"secretName": keys.name, "items": items, "defaultMode": 0o440}})
    pod_spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": spec.drain.timeout_seconds + pod.DRAIN_MARGIN_SECONDS,
        "securityContext": pod.pod_security(),
        "enableServiceLinks": False,
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": selector(name, "router")},
            }
        ],
        "containers": [_container(model, surroundings, discovery)],
        "volumes": volumes,
    }
    if discovery == "Kubernetes":
        pod_spec |= {"serviceAccountName": router_name(name), "automountServiceAccountToken": True}
    template: dict[str, Any] = {"metadata": {"labels": common_labels(name, "router")}, "spec": pod_spec}
    if spec.router.pod_template is not None:
        template = merge_template(template, spec.router.pod_template)
    template["metadata"]["labels"][labels.REVISION] = content_hash(template)
    return template


def _container(model: DisaggregatedModel, surroundings: Surroundings, discovery: Discovery) -> dict[str, Any]:
    spec = model.spec
    env, mounts = pod.place_env(), [pod.token_mount(), pod.tmp_mount()]
    if discovery == "File":
        env.append({"name": "WORKERS_FILE", "value": f"{WORKERS_FOLDER}/workers.json"})
        mounts.append({"name": "workers", "mountPath": WORKERS_FOLDER, "readOnly": True})
    else:
        env.append({"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}})
    if spec.router.api_keys_secret_ref is not None:
        env.append({"name": "API_KEYS_FILE", "value": f"{API_KEYS_FOLDER}/keys"})
        mounts.append({"name": "api-keys", "mountPath": API_KEYS_FOLDER, "readOnly": True})
    return {
        "name": CONTAINER,
        "image": pod.image(spec.router.image, surroundings.router_image, "forebay-router"),
        "command": ["forebay-router"],
        "args": router_args(model, discovery),
        "env": env,
        "ports": [pod.http_port()],
        **pod.probes(startup_seconds=STARTUP_SECONDS),
        **pod.pre_stop(PRE_STOP_SECONDS),
        "resources": {"requests": {"cpu": "1", "memory": "256Mi"}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": pod.container_security(),
        "volumeMounts": mounts,
    }


def router_args(model: DisaggregatedModel, discovery: Discovery) -> list[str]:
    spec = model.spec
    args = ["--name=$(POD_NAME)", "--host=$(BIND_ADDRESS)", "--port=$(PORT)"]
    if discovery == "File":
        args.append("--workers-file=$(WORKERS_FILE)")
    else:
        args += ["--kubernetes-namespace=$(POD_NAMESPACE)", f"--kubernetes-model={model.metadata.name}"]
    args += ["--token-file=$(TOKEN_FILE)", f"--served-name={spec.model.served_name}"]
    said = {
        "--fallback": "both-phases" if spec.router.fallback == "BothPhases" else "refuse",
        "--ttft-ms": str(spec.objectives.time_to_first_token_milliseconds),
        "--tpot-ms": str(spec.objectives.time_per_output_token_milliseconds),
        "--convertible": spec.router.convertible.lower(),
        "--drain-timeout-seconds": str(spec.drain.timeout_seconds),
    }
    args += [f"{flag}={value}" for flag, value in said.items() if value != UNSAID[flag]]
    if spec.router.refusal_percent is not None:
        args.append(f"--refusal-factor={spec.router.refusal_percent / 100:g}")
    if spec.router.api_keys_secret_ref is not None:
        args.append("--api-keys-file=$(API_KEYS_FILE)")
    return args
