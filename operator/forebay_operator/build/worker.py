"""The Deployment of one pool's workers, one per pool and revision."""

from __future__ import annotations

from typing import Any, Final

from forebay_operator.api import labels
from forebay_operator.api.fields import plain
from forebay_operator.api.labels import Pool
from forebay_operator.api.quantity import format_bytes, parse_bytes
from forebay_operator.api.source import ModelSource, Scheme
from forebay_operator.api.v1alpha1 import LEASE_SECONDS, DisaggregatedModel, DisaggregatedModelSpec
from forebay_operator.build import pod
from forebay_operator.build.merge import merge_template
from forebay_operator.build.names import child_name, common_labels, content_hash, selector, token_secret_name

CONTAINER: Final = "engine"
MODEL_MOUNT: Final = "/models"
STARTUP_SECONDS: Final = 1800
"""Until the server answers at all. A large model is read from disk meanwhile."""

_CPU_OVERHEAD_BYTES = 2 * 2**30
_TRANSPORTS = {"Auto": "auto", "RDMA": "rdma", "NVLink": "nvlink", "TCP": "tcp", "SharedMemory": "shared-memory"}


def worker_deployment(model: DisaggregatedModel, pool: Pool, *, replicas: int) -> dict[str, Any]:
    """`replicas` is the caller's: autoscaled counts are no part of the spec."""
    template = worker_template(model, pool)
    revision = template["metadata"]["labels"][labels.REVISION]
    name = model.metadata.name
    chosen = {**selector(name, "worker"), labels.POOL: pool, labels.REVISION: revision}
    return pod.deployment(
        name=child_name(name, pool, revision),
        namespace=model.metadata.namespace,
        labels={**common_labels(name, "worker"), **chosen},
        selector=chosen,
        replicas=replicas,
        template=template,
    )


def worker_revision(model: DisaggregatedModel, pool: Pool) -> str:
    """Changes exactly when the pool's pod template does."""
    revision: str = worker_template(model, pool)["metadata"]["labels"][labels.REVISION]
    return revision


def worker_template(model: DisaggregatedModel, pool: Pool) -> dict[str, Any]:
    spec = model.spec
    pool_spec = spec.pool(pool)
    pod_spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": spec.drain.timeout_seconds + 30,
        "securityContext": pod.pod_security(),
        "automountServiceAccountToken": False,
        "containers": [worker_container(spec, pool)],
        "volumes": [
            pod.token_volume(token_secret_name(model.metadata.name)),
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            *_model_volumes(spec.model.parsed_source()),
        ],
    }
    if init := _init_containers(spec):
        pod_spec["initContainers"] = init
    if pool_spec.node_selector:
        pod_spec["nodeSelector"] = dict(pool_spec.node_selector)
    if pool_spec.tolerations:
        pod_spec["tolerations"] = [plain(toleration) for toleration in pool_spec.tolerations]
    template: dict[str, Any] = {
        "metadata": {"labels": {**common_labels(model.metadata.name, "worker"), labels.POOL: pool}},
        "spec": pod_spec,
    }
    if spec.transfer.rdma is not None and spec.transfer.rdma.networks:
        template["metadata"]["annotations"] = {"k8s.v1.cni.cncf.io/networks": ",".join(spec.transfer.rdma.networks)}
    if pool_spec.pod_template is not None:
        template = merge_template(template, pool_spec.pod_template)
    template["metadata"]["labels"][labels.REVISION] = content_hash(template)
    return template


def worker_container(spec: DisaggregatedModelSpec, pool: Pool) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": pod.image(spec.engine.image, "forebay-engine"),
        "command": ["forebay-engine"],
        "args": worker_args(spec),
        "env": _env(spec, pool),
        "ports": [{"name": "http", "containerPort": pod.PORT, "protocol": "TCP"}],
        **pod.probes(startup_seconds=STARTUP_SECONDS),
        "resources": _resources(spec, pool),
        "securityContext": pod.container_security(capabilities=["IPC_LOCK"] if _rdma(spec) else None),
        "volumeMounts": [pod.token_mount(), {"name": "shm", "mountPath": "/dev/shm"}, *_model_mounts(spec)],  # noqa: S108
    }
    return container


def worker_args(spec: DisaggregatedModelSpec) -> list[str]:
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
    if simulated:
        args.append(f"--perf-model={engine.simulated.performance_model if engine.simulated else 'slow'}")
    return args


def _env(spec: DisaggregatedModelSpec, pool: Pool) -> list[dict[str, Any]]:
    env = pod.place_env()
    source = spec.model.parsed_source()
    if source is not None:
        env.append({"name": "MODEL_DIR", "value": _model_dir(source)})
    if spec.gpus_per_worker(pool).count == 0:
        env.append({"name": "CUDA_VISIBLE_DEVICES", "value": ""})
        env.append({"name": "OMP_NUM_THREADS", "value": str(spec.engine.threads)})
    for variable in spec.engine.env:
        if variable.value is not None:
            env.append({"name": variable.name, "value": variable.value})
        else:
            env.append({"name": variable.name, "valueFrom": plain(variable.value_from)})
    return env


def _rdma(spec: DisaggregatedModelSpec) -> bool:
    return spec.transfer.rdma is not None or spec.transfer.transport == "RDMA"


def _resources(spec: DisaggregatedModelSpec, pool: Pool) -> dict[str, Any]:
    gpus = spec.gpus_per_worker(pool)
    if gpus.count == 0:
        memory = parse_bytes(spec.engine.kv_cache.memory) + _CPU_OVERHEAD_BYTES
        return {"requests": {"cpu": str(spec.engine.threads), "memory": format_bytes(memory)}}
    limits = {gpus.resource: str(gpus.count)}
    if spec.transfer.rdma is not None:
        limits[spec.transfer.rdma.resource] = str(spec.transfer.rdma.count)
    # The server process and the core process keep one CPU busy each.
    return {"requests": {"cpu": "2"}, "limits": limits}


def _model_dir(source: ModelSource) -> str:
    if source.scheme is Scheme.PVC:
        return f"{MODEL_MOUNT}/{source.path}".rstrip("/")
    return f"{MODEL_MOUNT}/model" if source.scheme is Scheme.CACHE else MODEL_MOUNT


def _model_mounts(spec: DisaggregatedModelSpec) -> list[dict[str, Any]]:
    return [] if spec.model.source is None else [{"name": "model", "mountPath": MODEL_MOUNT, "readOnly": True}]


def _model_volumes(source: ModelSource | None) -> list[dict[str, Any]]:
    if source is None:
        return []
    if source.scheme is Scheme.PVC:
        return [{"name": "model", "persistentVolumeClaim": {"claimName": source.target, "readOnly": True}}]
    if source.scheme is Scheme.IMAGE:
        return [{"name": "model", "image": {"reference": source.target}}]
    if source.scheme is Scheme.HOSTPATH:
        return [{"name": "model", "hostPath": {"path": source.target, "type": "Directory"}}]
    return [{"name": "model", "emptyDir": {}}]


def _init_containers(spec: DisaggregatedModelSpec) -> list[dict[str, Any]]:
    source = spec.model.parsed_source()
    if source is None or source.scheme is not Scheme.CACHE:
        return []
    # `$$(` reaches the shell as `$(`. The folder's name holds the model's version: the link hides that.
    prepare = f"python -m forebay_engine.model.prepare {source.target} --cache {MODEL_MOUNT}/cache"
    return [
        {
            "name": "prepare",
            "image": pod.image(spec.engine.image, "forebay-engine"),
            "command": ["sh", "-ec", f'folder="$$({prepare})"; ln -sfn "$folder" {MODEL_MOUNT}/model'],
            "securityContext": pod.container_security(),
            "volumeMounts": [{"name": "model", "mountPath": MODEL_MOUNT}],
        }
    ]
