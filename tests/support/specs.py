"""Specs that the API server and the models must both refuse, each with its message, and specs that both must admit."""

from __future__ import annotations

from typing import Any

BOUNDED = {"prefill.replicas": ..., "decode.replicas": ..., "scaling.prefill": {"minReplicas": 2, "maxReplicas": 4}}


# changes, message of the CEL rule, part of the models' message
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"metadata.name": "a.b"}, "metadata.name must be a DNS label: at most 63", "must be a DNS label"),
    ({"metadata.name": "a" * 64}, "metadata.name must be a DNS label: at most 63", "must have at most 63"),
    ({"metadata.name": "1a"}, "with a letter first", "must be a DNS label"),
    (
        {"model.source": "pvc://models/../x"},
        "must not leave its folder: remove '..' from the path",
        "a folder without '..'",
    ),
    ({"model.source": "hostpath:///a/.."}, "must not leave its folder", "without '..'"),
    ({"model.source": ...}, "model.source is missing; a Native engine needs one", "model.source is missing"),
    ({"engine.kvCache.memory": "512Ki"}, "memory is out of range; must be from 1Mi to 16Ti", "from 1Mi to 16Ti"),
    ({"engine.kvCache.memory": "17Ti"}, "memory is out of range; must be from 1Mi to 16Ti", "from 1Mi to 16Ti"),
    ({"engine.type": "VLLM"}, "VLLM and TritonServer are not supported yet; use Native", "VLLM is not supported yet"),
    ({"engine.simulated": {}}, "simulated needs type: Simulated; remove it or change", "simulated needs type"),
    ({"engine.env": [{"name": "A"}]}, "set exactly one of value and valueFrom", "exactly one of value and valueFrom"),
    (
        {"engine.env": [{"name": "A", "value": "", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]},
        "set exactly one of value and valueFrom",
        "exactly one of value and valueFrom",
    ),
    (
        {"engine.env": [{"name": "UCX_TCP_PORT_RANGE", "value": "1-2"}]},
        "this variable is set by Forebay itself; choose another name",
        "UCX_TCP_PORT_RANGE is set by Forebay itself",
    ),
    (
        {"engine.env": [{"name": "A", "valueFrom": {}}]},
        "set exactly one of secretKeyRef, configMapKeyRef and fieldRef",
        "set exactly one of secretKeyRef",
    ),
    (
        {"engine.env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]},
        "duplicate value",
        "env names A more than once",
    ),
    (
        {"prefill.tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]},
        "value goes with operator: Equal; remove it",
        "value goes with operator: Equal; remove it",
    ),
    (
        {"decode.tolerations": [{"effect": "NoSchedule"}]},
        "without a key the operator must be Exists",
        "without a key the operator must be Exists",
    ),
    (
        {"transfer.required": True},
        "required: true needs a named transport; set transport to RDMA",
        "required: true needs a named transport",
    ),
    (
        {"transfer": {"transport": "TCP", "rdma": {}}},
        "rdma asks for devices that this transport never uses; remove it or set transport to Auto or RDMA",
        "rdma asks for devices that transport TCP never uses",
    ),
    (
        {**BOUNDED, "scaling.decode": {"minReplicas": 3, "maxReplicas": 2}},
        "minReplicas is over maxReplicas; lower it or raise the other",
        "minReplicas 3 is over maxReplicas 2",
    ),
    (
        {"scaling.ratio": {"min": "10:9", "max": "1:1"}},
        "min has a larger share of prefill than max; swap them",
        "min 10:9 has a larger share of prefill than max 1:1",
    ),
    (
        {"scaling.metrics": {"source": "Prometheus"}},
        "url goes with source: Prometheus, and only with it",
        "url goes with source: Prometheus",
    ),
    (
        {"scaling.metrics": {"url": "http://p"}},
        "url goes with source: Prometheus, and only with it",
        "url goes with source: Prometheus",
    ),
    (
        {"scaling.metrics": {"auth": {"bearerTokenSecretRef": {"name": "a"}}}},
        "auth needs a url to be sent to; remove it",
        "auth needs a url",
    ),
    (
        {
            "scaling.metrics": {
                "source": "Prometheus",
                "url": "http://p",
                "auth": {"bearerTokenSecretRef": {"name": "a"}},
            }
        },
        "auth over http shows the token to the network; use an https url",
        "auth over http shows the token",
    ),
    (
        {"scaling.metrics": {"headers": [{"name": "X-Scope-OrgID", "value": "a"}]}},
        "headers need a url to be sent to; remove them",
        "headers need a url",
    ),
    (
        {
            "scaling.metrics": {
                "source": "Prometheus",
                "url": "http://p",
                "headers": [{"name": "authorization", "value": "Bearer a"}],
            }
        },
        "may not be set; a bearer token goes into auth",
        "authorization may not be set; a bearer token goes into auth",
    ),
    (
        {"rollout.maxUnavailable": 0},
        "maxUnavailable and maxSurge are both 0, so no rollout could ever move; set one to 1",
        "maxUnavailable and maxSurge are both 0",
    ),
    (
        {"prefill.replicas": ...},
        "prefill has no size; set prefill.replicas (fixed) or scaling.prefill (bounds)",
        "prefill has no size",
    ),
    (
        {"decode.replicas": ...},
        "decode has no size; set decode.replicas (fixed) or scaling.decode (bounds)",
        "decode has no size",
    ),
    (
        {"scaling.prefill": {"maxReplicas": 2}},
        "prefill.replicas and scaling.prefill are both set; keep one of them",
        "prefill.replicas and scaling.prefill are both set",
    ),
    (
        {"scaling.decode": {"maxReplicas": 2}},
        "decode.replicas and scaling.decode are both set; keep one of them",
        "decode.replicas and scaling.decode are both set",
    ),
    (
        {"engine.type": "Simulated", "prefill.gpus": {}},
        "prefill.gpus.count is not 0; a Simulated engine uses none: remove gpus",
        "prefill.gpus.count is 1; a Simulated engine uses none",
    ),
    (
        {"engine.type": "Simulated", "decode.gpus": {"count": 2}},
        "decode.gpus.count is not 0; a Simulated engine uses none: remove gpus",
        "decode.gpus.count is 2; a Simulated engine uses none",
    ),
    ({"replicas": 3}, "replicas is outside what the pools allow together", "replicas 3 is outside"),
    (
        {**BOUNDED, "scaling.decode": {"maxReplicas": 2}, "replicas": 2},
        "replicas is outside what the pools allow together",
        "replicas 2 is outside what the pools allow together, 3 to 6",
    ),
    ({"scaling.maxGPUs": 1}, "scaling.maxGPUs is below the GPUs of the fewest workers", "maxGPUs 1 is below the 2"),
    (
        {**BOUNDED, "scaling.decode": {"maxReplicas": 2}, "scaling.maxGPUs": 4, "prefill.gpus": {"count": 2}},
        "scaling.maxGPUs is below the GPUs of the fewest workers",
        "maxGPUs 4 is below the 5",
    ),
    (
        {"engine.type": "Simulated", "transfer": {"required": True, "transport": "TCP"}},
        "transfer.required needs a real transport",
        "transfer.required needs a real transport",
    ),
    (
        {"objectives": {"timeToFirstTokenMilliseconds": 0}, "router.refusalPercent": 100},
        "router.refusalPercent is a share of objectives.timeToFirstTokenMilliseconds, which is 0 (none); remove it",
        "router.refusalPercent is a share of objectives.timeToFirstTokenMilliseconds, which is 0 (none); remove it",
    ),
]

ADMITTED: list[dict[str, Any]] = [
    {},
    {"replicas": 2},
    {**BOUNDED, "scaling.decode": {"maxReplicas": 2}, "replicas": 6},
    {**BOUNDED, "scaling.decode": {"maxReplicas": 2}, "scaling.maxGPUs": 5, "prefill.gpus": {"count": 2}},
    {"engine.type": "Simulated", "model.source": ..., "engine.simulated": {}, "scaling.maxGPUs": 1},
    {"scaling.ratio": {"min": "1:2", "max": "2:4"}},
    {
        "scaling.metrics": {
            "source": "Prometheus",
            "url": "https://p",
            "auth": {"bearerTokenSecretRef": {"name": "a"}},
            "headers": [{"name": "X-Scope-OrgID", "value": "team a"}, {"name": "THANOS-TENANT", "value": "b"}],
        }
    },
    {"transfer": {"required": True, "transport": "RDMA", "rdma": {"networks": ["a/b"]}}},
    {"prefill.tolerations": [{"operator": "Exists"}, {"key": "a", "value": "b"}]},
    {"scaling.behavior": {"scaleDown": {"policies": [{"type": "Percent", "value": 10, "periodSeconds": 60}]}}},
    {"prefill.affinity": {"nodeAffinity": {}}, "prefill.topologySpreadConstraints": [{"maxSkew": 1}]},
    {"metadata.name": "a" * 63},
    {"objectives": {"timeToFirstTokenMilliseconds": 0, "timePerOutputTokenMilliseconds": 0}},
    {"objectives": {"timePerOutputTokenMilliseconds": 0}, "router.refusalPercent": 100},
]
