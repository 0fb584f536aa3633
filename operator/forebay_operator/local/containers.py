"""A built Deployment -> what local mode runs: one process per pod, command, args and env expanded. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forebay_operator.api import labels
from forebay_operator.api.labels import POOLS, Pool
from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.build.expand import expand
from forebay_operator.build.router import CONTAINER as ROUTER_CONTAINER
from forebay_operator.build.router import router_deployment
from forebay_operator.build.worker import CONTAINER as WORKER_CONTAINER
from forebay_operator.build.worker import worker_deployment
from forebay_operator.local.errors import InputError
from forebay_operator.local.probes import Probe, parse_probe

LOOPBACK = "127.0.0.1"
LOOPBACKS = {"0.0.0.0": LOOPBACK, "::": "::1"}  # noqa: S104
"""Where to reach a process that listens on every address."""


@dataclass(frozen=True, slots=True)
class Container:
    name: str
    """Of the pod: `prefill-0`, `router-0`."""

    pool: str | None
    """Home pool; None for the router."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """What the pod template sets; the rest of the environment is that of `forebay up`."""

    host: str
    """Address to reach it at from this machine."""

    port: int
    startup: Probe | None
    readiness: Probe | None
    liveness: Probe | None
    grace_seconds: float
    """From SIGTERM to SIGKILL."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where the processes of one `up` run: this takes the place of what the cluster provides."""

    router_host: str
    """Workers listen on the loopback address alone, whatever the router does."""

    router_port: int
    worker_ports: tuple[int, ...]
    token_file: str
    workers_file: str
    model_dir: str | None = None
    api_keys_file: str | None = None
    gpus: tuple[str, ...] = ()
    """Device names for CUDA_VISIBLE_DEVICES, handed out in order."""


def pool_sizes(model: DisaggregatedModel) -> dict[str, int]:
    """Workers to start per pool: the fixed figure, else the fewest of its bounds; spec.replicas beyond that goes to
    decode first, since decode shortage is the cliff (design section 8)."""
    bounds = {pool: model.spec.bounds(pool) for pool in POOLS}
    sizes: dict[str, int] = {pool: bounds[pool].min_replicas for pool in POOLS}
    spare = (model.spec.replicas or 0) - sum(sizes.values())
    for pool in ("decode", "prefill"):
        extra = max(0, min(spare, bounds[pool].max_replicas - sizes[pool]))
        sizes[pool] += extra
        spare -= extra
    return sizes


def gpus_needed(model: DisaggregatedModel) -> int:
    sizes = pool_sizes(model)
    return sum(sizes[pool] * model.spec.gpus_per_worker(pool).count for pool in POOLS)


def build_containers(model: DisaggregatedModel, places: Places) -> list[Container]:
    """Workers first, then the router. `places` must have a port for each worker and enough GPUs.

    Raises InputError for a pod template that a process cannot honour.
    """
    sizes = pool_sizes(model)
    ports, gpus = iter(places.worker_ports), iter(places.gpus)
    containers: list[Container] = []
    for pool in POOLS:
        for index in range(sizes[pool]):
            own = tuple(next(gpus) for _ in range(model.spec.gpus_per_worker(pool).count))
            containers.append(build_worker(model, places, pool, index, port=next(ports), gpus=own))
    values = {
        **_common(places),
        "POD_NAME": "router-0",
        "POD_IP": LOOPBACKS.get(places.router_host, places.router_host),
        "BIND_ADDRESS": places.router_host,
        "PORT": str(places.router_port),
        "WORKERS_FILE": places.workers_file,
        "API_KEYS_FILE": places.api_keys_file or "",
    }
    containers.append(_container(router_deployment(model, discovery="File"), ROUTER_CONTAINER, values))
    return containers


def build_worker(
    model: DisaggregatedModel, places: Places, pool: Pool, index: int, *, port: int, gpus: Sequence[str]
) -> Container:
    """One worker. Raises InputError for a pod template that a process cannot honour."""
    values = {**_common(places), "POD_NAME": f"{pool}-{index}", "PORT": str(port)}
    values["MODEL_DIR"] = places.model_dir or ""
    values["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return _container(worker_deployment(model, pool, replicas=1), WORKER_CONTAINER, values)


def _common(places: Places) -> dict[str, str]:
    # All workers share this machine's ports: any free one, not the range that NetworkPolicies open in a cluster.
    own = {"POD_IP": LOOPBACK, "BIND_ADDRESS": LOOPBACK, "UCX_TCP_PORT_RANGE": "0"}
    return {**own, "TOKEN_FILE": places.token_file}


def _container(deployment: dict[str, Any], name: str, values: Mapping[str, str]) -> Container:
    template = deployment["spec"]["template"]
    pod = template["spec"]
    what = f"{deployment['metadata']['name']}, container {name}"
    spec = next((c for c in pod.get("containers", []) if c["name"] == name), None)
    if spec is None or not spec.get("command"):
        raise InputError(f"{what}: podTemplate left it without a command; local mode needs one")
    env = _environment(spec.get("env", []), values)
    port = int(values["PORT"])
    ports: dict[str | int, int] = {}
    for entry in spec.get("ports", []):
        ports[entry["containerPort"]] = port
        ports[entry.get("name", "")] = port
    try:
        startup, readiness, liveness = (
            parse_probe(spec[kind], ports) if kind in spec else None
            for kind in ("startupProbe", "readinessProbe", "livenessProbe")
        )
    except ValueError as error:
        raise InputError(f"{what}: {error}") from None
    return Container(
        name=values["POD_NAME"],
        pool=template["metadata"]["labels"].get(labels.POOL),
        argv=tuple(expand(str(word), env) for word in (*spec["command"], *spec.get("args", []))),
        env=env,
        host=values["POD_IP"],
        port=port,
        startup=startup,
        readiness=readiness,
        liveness=liveness,
        grace_seconds=float(pod.get("terminationGracePeriodSeconds", 30)),
    )


def _environment(entries: list[dict[str, Any]], values: Mapping[str, str]) -> dict[str, str]:
    """Variables in order, each expanded by those before it. One from the cluster (valueFrom) that `values` does not
    know stays unset, so that a variable of the same name in the user's own environment shows through."""
    env: dict[str, str] = {}
    for entry in entries:
        name = entry["name"]
        if name in values:
            env[name] = values[name]
        elif "value" in entry:
            env[name] = expand(str(entry["value"]), env)
    if values.get("CUDA_VISIBLE_DEVICES"):
        env["CUDA_VISIBLE_DEVICES"] = values["CUDA_VISIBLE_DEVICES"]
    return env
