"""The Deployment of one pool's workers, one per pool and revision."""

from __future__ import annotations

from typing import Any, Final

from forebay_operator.api import labels
from forebay_operator.api.fields import plain
from forebay_operator.api.labels import Pool
from forebay_operator.api.pool import PoolSpec
from forebay_operator.api.quantity import format_bytes, parse_bytes
from forebay_operator.api.v1alpha1 import LEASE_SECONDS, DisaggregatedModel, DisaggregatedModelSpec
from forebay_operator.build import model_files, pod, ports
from forebay_operator.build.deployment import deployment
from forebay_operator.build.merge import merge_template
from forebay_operator.build.meta import metadata
from forebay_operator.build.names import child_name, common_labels, content_hash, selector, token_secret_name
from forebay_operator.build.surroundings import NOWHERE, Surroundings

CONTAINER: Final = "engine"
STARTUP_SECONDS: Final = 1800
"""Until the server answers at all. A large model is read from disk meanwhile."""

PRE_STOP_SECONDS: Final = 2
"""For every router's pod watch to show that the worker is leaving."""

NETWORKS_ANNOTATION: Final = "k8s.v1.cni.cncf.io/networks"

_CPU_OVERHEAD_BYTES = 2 * 2**30
_TRANSPORTS = {"Auto": "auto", "RDMA": "rdma", "NVLink": "nvlink", "TCP": "tcp", "SharedMemory": "shared-memory"}


def worker_deployment(
    model: DisaggregatedModel, pool: Pool, *, replicas: int | None, surroundings: Surroundings = NOWHERE
) -> dict[str, Any]:
    """`replicas` is the caller's: autoscaled counts are no part of the spec. None leaves the live count alone."""
    template = worker_template(model, pool, surroundings=surroundings)
    revision = template["metadata"]["labels"][labels.REVISION]
    name = model.metadata.name
    chosen = {**selector(name, "worker"), labels.POOL: pool, labels.REVISION: revision}
    return deployment(
        metadata=metadata(model, child_name(name, pool, revision), "worker", **chosen),
        selector=chosen,
        replicas=replicas,
        # Or a model that takes long to load would be called failed while it loads.
        progress_deadline_seconds=STARTUP_SECONDS + 60,
        template=template,
    )


def worker_revision(model: DisaggregatedModel, pool: Pool, *, surroundings: Surroundings = NOWHERE) -> str:
    """Changes exactly when the pool's pod template does."""
    revision: str = worker_template(model, pool, surroundings=surroundings)["metadata"]["labels"][labels.REVISION]
    return revision


def worker_template(model: DisaggregatedModel, pool: Pool, *, surroundings: Surroundings = NOWHERE) -> dict[str, Any]:
    """The pod template with its own hash as a label.

    A change here, of whatever kind, rolls the workers of every user at the next upgrade of the operator:
    tests/operator/build/test_golden.py keeps watch over it.
    """
    spec = model.spec
    name, source = model.metadata.name, spec.model.parsed_source()
    image = pod.image(spec.engine.image, surroundings.engine_image, "forebay-engine")
    pod_spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": spec.drain.timeout_seconds + pod.DRAIN_MARGIN_SECONDS,
        "securityContext": pod.pod_security(),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [_container(spec, pool, image)],
        "volumes": [
            pod.token_volume(token_secret_name(name)),
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            pod.tmp_volume(),
            *model_files.volumes(source),
        ],
    }
    if init := model_files.init_containers(source, image):
        pod_spec["initContainers"] = init
    pod_spec |= _placement(name, pool, spec.pool(pool))
    template: dict[str, Any] = {
        "metadata": {"labels": {**common_labels(name, "worker"), labels.POOL: pool}},
        "spec": pod_spec,
    }
    if spec.transfer.rdma is not None and spec.transfer.rdma.networks:
        template["metadata"]["annotations"] = {NETWORKS_ANNOTATION: ",".join(spec.transfer.rdma.networks)}
    patch = spec.pool(pool).pod_template
    if patch is not None:
        template = merge_template(template, patch)
    template["metadata"]["labels"][labels.REVISION] = content_hash(template)
    return template


def _placement(name: str, pool: Pool, spec: PoolSpec) -> dict[str, Any]:
    """On which nodes, with which neighbours and which rank."""
    placement: dict[str, Any] = {
        "nodeSelector": dict(spec.node_selector),
        "tolerations": [plain(toleration) for toleration in spec.tolerations],
        "affinity": spec.affinity,
        "topologySpreadConstraints": [
            # Over the pool, not over a revision: a rollout must not unbalance it.
            {"labelSelector": {"matchLabels": {**selector(name, "worker"), labels.POOL: pool}}, **constraint}
            for constraint in spec.topology_spread_constraints
        ],
        "priorityClassName": spec.priority_class_name,
        "runtimeClassName": spec.runtime_class_name,
    }
    return {key: value for key, value in placement.items() if value}


def _container(spec: DisaggregatedModelSpec, pool: Pool, image: str) -> dict[str, Any]:
    return {
        "name": CONTAINER,
        "image": image,
        "command": ["forebay-engine"],
        "args": worker_args(spec, pool),
        "env": _env(spec, pool),
        "ports": [pod.http_port()],
        **pod.probes(startup_seconds=STARTUP_SECONDS),
        **pod.pre_stop(PRE_STOP_SECONDS),
        "resources": _resources(spec, pool),
        # The last lines of a worker that could not start tell why: status shows them.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": pod.container_security(capabilities=["IPC_LOCK"] if needs_ipc_lock(spec) else None),
        "volumeMounts": [
            pod.token_mount(),
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
            pod.tmp_mount(),
            *model_files.mounts(spec.model.parsed_source()),
        ],
    }


def worker_args(spec: DisaggregatedModelSpec, pool: Pool) -> list[str]:
    engine, simulated = spec.engine, spec.engine.type == "Simulated"
    transport = "simulated" if simulated else _TRANSPORTS[spec.transfer.transport]
    args = [
        f"--type={engine.type.lower()}",
        "--name=$(POD_NAME)",
        f"--served-name={spec.model.served_name}",
        "--host=$(BIND_ADDRESS)",
        "--port=$(PORT)",
        "--advertise-host=$(POD_IP)",
        "--token-file=$(TOKEN_FILE)",
        f"--dtype={spec.model.dtype.lower()}",
        f"--kv-memory={format_bytes(parse_bytes(engine.kv_cache.memory))}",
        f"--block-size={engine.kv_cache.block_size}",
        f"--threads={engine.threads}",
        f"--transport={transport}",
        f"--lease-seconds={LEASE_SECONDS}",
        f"--pull-timeout-seconds={spec.transfer.timeout_seconds}",
        f"--drain-timeout-seconds={spec.drain.timeout_seconds}",
    ]
    if spec.drain.policy == "Move":
        args.append("--drain-policy=move")
    if spec.model.source is not None:
        args.append("--model-dir=$(MODEL_DIR)")
    if spec.model.max_model_len is not None:
        args.append(f"--max-model-len={spec.model.max_model_len}")
    if engine.max_running_requests is not None:
        args.append(f"--max-running={engine.max_running_requests}")
    if engine.max_batched_tokens is not None:
        args.append(f"--max-batched-tokens={engine.max_batched_tokens}")
    if spec.transfer.required:
        args.append("--transport-required")
    if not simulated and spec.gpus_per_worker(pool).count:
        args.append("--device=cuda")
    if simulated:
        args.append(f"--perf-model={engine.simulated.performance_model if engine.simulated else 'slow'}")
    return args


def _env(spec: DisaggregatedModelSpec, pool: Pool) -> list[dict[str, Any]]:
    env = pod.place_env()
    source = spec.model.parsed_source()
    if source is not None:
        env.append({"name": "MODEL_DIR", "value": model_files.directory(source)})
    if spec.engine.type == "Native":
        env.append({"name": "UCX_TCP_PORT_RANGE", "value": ports.UCX_TCP_PORT_RANGE})
    if spec.gpus_per_worker(pool).count == 0:
        env.append({"name": "CUDA_VISIBLE_DEVICES", "value": ""})
        env.append({"name": "OMP_NUM_THREADS", "value": str(spec.engine.threads)})
    for variable in spec.engine.env:
        if variable.value is not None:
            env.append({"name": variable.name, "value": variable.value})
        else:
            env.append({"name": variable.name, "valueFrom": plain(variable.value_from)})
    return env


def needs_ipc_lock(spec: DisaggregatedModelSpec) -> bool:
    """RDMA pins the KV arena in memory, which restricted pod security does not let a pod do."""
    return spec.transfer.rdma is not None or spec.transfer.transport == "RDMA"


def _resources(spec: DisaggregatedModelSpec, pool: Pool) -> dict[str, Any]:
    gpus, rdma = spec.gpus_per_worker(pool), spec.transfer.rdma
    limits = {gpus.resource: str(gpus.count)} if gpus.count else {}
    if rdma is not None:
        limits[rdma.resource] = str(rdma.count)
    if gpus.count:
        # The server process and the core process keep one CPU busy each.
        requests = {"cpu": "2"}
    else:
        memory = parse_bytes(spec.engine.kv_cache.memory) + _CPU_OVERHEAD_BYTES
        requests = {"cpu": str(spec.engine.threads), "memory": format_bytes(memory)}
    return {"requests": requests, "limits": limits} if limits else {"requests": requests}
