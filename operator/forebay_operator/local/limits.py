"""What of a DisaggregatedModel local mode does not honour: said aloud by `forebay up`, never dropped in silence."""

from __future__ import annotations

from pydantic import BaseModel

from forebay_operator.api.source import Scheme
from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.calibrate.believed import read_speeds
from forebay_operator.local.errors import InputError

_IGNORED: tuple[tuple[str, str], ...] = (
    ("metadata.namespace", "there is no cluster"),
    ("spec.engine.image", "the installed forebay-engine runs"),
    ("spec.router.image", "the installed forebay-router runs"),
    ("spec.router.service_type", "the router listens on this machine"),
    ("spec.prefill.node_selector", "there is one machine"),
    ("spec.prefill.tolerations", "there is one machine"),
    ("spec.prefill.affinity", "there is one machine"),
    ("spec.prefill.topology_spread_constraints", "there is one machine"),
    ("spec.prefill.priority_class_name", "processes have no priority class"),
    ("spec.prefill.runtime_class_name", "processes have no runtime class"),
    ("spec.decode.node_selector", "there is one machine"),
    ("spec.decode.tolerations", "there is one machine"),
    ("spec.decode.affinity", "there is one machine"),
    ("spec.decode.topology_spread_constraints", "there is one machine"),
    ("spec.decode.priority_class_name", "processes have no priority class"),
    ("spec.decode.runtime_class_name", "processes have no runtime class"),
    ("spec.transfer.rdma", "processes see the machine's devices as they are"),
    ("spec.scaling.metrics", "the router of this machine is asked"),
    ("spec.drain.policy", "streams finish where they are"),
    ("spec.rollout", "there are no rollouts in local mode"),
    ("spec.network_policy", "workers listen on the loopback address alone"),
)


def ignored_fields(model: DisaggregatedModel) -> list[str]:
    """One line for each field that the manifest sets and local mode leaves aside."""
    lines = [f"{_yaml_path(path)} is ignored: {why}" for path, why in _IGNORED if _is_set(model, path)]
    spec = model.spec
    if "replicas" in spec.router.model_fields_set and spec.router.replicas > 1:
        lines.append(f"spec.router.replicas is {spec.router.replicas}: local mode runs one router")
    for index, variable in enumerate(spec.engine.env):
        if variable.value_from is not None:
            lines.append(f"spec.engine.env[{index}].valueFrom is ignored: set {variable.name} in your environment")
    for name, pod in (
        ("prefill", spec.prefill.pod_template),
        ("decode", spec.decode.pod_template),
        ("router", spec.router.pod_template),
    ):
        own = "router" if name == "router" else "engine"
        for container in (pod or {}).get("spec", {}).get("containers", []):
            if container["name"] != own:
                lines.append(f"spec.{name}.podTemplate: container {container['name']} is ignored: only {own} runs")
    return lines


def check_supported(model: DisaggregatedModel, *, api_keys_given: bool) -> None:
    """Raise InputError for what must not be left aside in silence."""
    source = model.spec.model.parsed_source()
    if source is not None and source.scheme not in (Scheme.HOSTPATH, Scheme.CACHE):
        raise InputError(
            f"spec.model.source {model.spec.model.source!r} needs a cluster; local mode takes hostpath:///dir and cache://NAME"
        )
    if model.spec.router.api_keys_secret_ref is not None and not api_keys_given:
        raise InputError(
            "spec.router.apiKeysSecretRef names a Secret of a cluster; give the keys with --api-keys-file, one a line"
        )
    if model.spec.scaling.performance_model is not None:
        try:
            read_speeds(model.spec.scaling.performance_model)
        except ValueError as error:
            raise InputError(str(error)) from None


def _is_set(model: BaseModel, path: str) -> bool:
    node: object = model
    for step in path.split("."):
        if not isinstance(node, BaseModel) or step not in node.model_fields_set:
            return False
        node = getattr(node, step)
    return True


def _yaml_path(path: str) -> str:
    node: type[BaseModel] = DisaggregatedModel
    out: list[str] = []
    for step in path.split("."):
        field = node.model_fields[step]
        out.append(field.alias or step)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            node = field.annotation
    return ".".join(out)
