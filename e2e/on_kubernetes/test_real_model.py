"""SmolLM2 by the torch engine on two nodes, its KV moved between them by NIXL.

torch's image would be 5 GB a node: the workers run in the small image, with this machine's own packages and model
mounted read-only.
"""

from __future__ import annotations

import sysconfig
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from e2e.on_kubernetes import network
from e2e.on_kubernetes.conftest import KubernetesSite, site_of
from e2e.on_kubernetes.deployed import NAMESPACE, POOL_LABEL, Deployed
from forebay_engine.kv.arena import ArenaLayout
from forebay_operator.api import labels
from forebay_operator.build import ports
from forebay_wire import metrics

NAME = "smollm2"
BLOCK = 16
READY_SECONDS = 240.0
LAYOUT = ArenaLayout(layers=30, kv_heads=3, head_size=64, block_size=BLOCK, dtype="float32", itemsize=4)
"""SmolLM2-135M's."""

pytestmark = [pytest.mark.timeout(500), pytest.mark.model]


def _volume(name: str, folder: Path) -> list[dict[str, Any]]:
    """A folder of the nodes as a read-only volume and a claim for it."""
    shared = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    size = {"storage": "10Gi"}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name, "namespace": NAMESPACE}}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"{NAMESPACE}-{name}"},
            "spec": {
                **shared,
                "capacity": size,
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {"name": name, "namespace": NAMESPACE},
                "hostPath": {"path": str(folder), "type": "Directory"},
            },
        },
        {**claim, "spec": {**shared, "volumeName": f"{NAMESPACE}-{name}", "resources": {"requests": size}}},
    ]


def _model() -> dict[str, Any]:
    worker = {
        "name": "engine",
        "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}},
        "volumeMounts": [{"name": "packages", "mountPath": "/packages", "readOnly": True}],
    }
    packages = {"name": "packages", "persistentVolumeClaim": {"claimName": "packages", "readOnly": True}}
    router = {"name": "router", "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}}

    def pool(name: str) -> dict[str, Any]:
        return {
            "replicas": 1,
            "gpus": {"count": 0},
            "nodeSelector": {POOL_LABEL: name},
            "podTemplate": {"spec": {"containers": [worker], "volumes": [packages]}},
        }

    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND,
        "metadata": {},
        "spec": {
            "model": {"source": "pvc://model", "servedName": NAME, "maxModelLen": 2048, "dtype": "Float32"},
            "engine": {
                "type": "Native",
                "threads": 1,
                "kvCache": {"memory": "512Mi", "blockSize": BLOCK},
                "env": [{"name": "PYTHONPATH", "value": "/packages"}],
            },
            # Of two busy cores: a refusal for missing an objective is no matter of this case.
            "objectives": {"timeToFirstTokenMilliseconds": 30_000, "timePerOutputTokenMilliseconds": 2000},
            "prefill": pool("prefill"),
            "decode": pool("decode"),
            "router": {"replicas": 1, "podTemplate": {"spec": {"containers": [router]}}},
            "drain": {"timeoutSeconds": 30},
        },
    }


@pytest.fixture
async def site(deployed: Deployed, smollm2_dir: Path) -> AsyncIterator[KubernetesSite]:
    if not deployed.cluster.built_here:
        pytest.skip("mounts this machine's packages and model: needs nodes on this machine, the two nodes built here")
    volumes = [*_volume("model", smollm2_dir), *_volume("packages", Path(sysconfig.get_path("purelib")))]
    deployed.apply(*volumes)
    async for made in site_of(deployed, NAME):
        try:
            yield made
        finally:
            deployed.kubectl("-n", NAMESPACE, "delete", "dm", NAME, "--ignore-not-found", seconds=120)
            await made.until("its pods are gone", partial(_gone, made), 120)
            deployed.kubectl("-n", NAMESPACE, "delete", "pvc", "model", "packages", "--ignore-not-found")
            deployed.kubectl("delete", "pv", f"{NAMESPACE}-model", f"{NAMESPACE}-packages", "--ignore-not-found")


async def _gone(site: KubernetesSite) -> bool:
    return not await site.pods() and not await site.routers()


async def test_kv_moves_between_the_nodes(deployed: Deployed, site: KubernetesSite) -> None:
    await site.apply(_model())
    took = await site.until("both workers serve", lambda: site.at(1, 1), READY_SECONDS)
    workers = {pod["metadata"]["labels"][labels.POOL]: pod for pod in await site.pods()}
    assert [workers[pool]["spec"]["nodeName"] for pool in ("prefill", "decode")] == list(deployed.nodes)
    decode = workers["decode"]["metadata"]["name"]
    # The first one warms the pair of workers up.
    await _complete(site, "Once")
    before, wire_before = _transferred(deployed, decode), _received(deployed, decode)
    expected = 0
    for turn in range(4):
        prompt = f"{turn * 7919} and {turn}: the river ran on past the old mill. " * (3 + 5 * turn)
        answer = await _complete(site, prompt)
        expected += -(-answer["usage"]["prompt_tokens"] // BLOCK) * LAYOUT.block_bytes
        legs = [answer["headers"][f"x-forebay-{leg}"] for leg in ("prefill", "decode")]
        assert legs == [workers[pool]["metadata"]["name"] for pool in ("prefill", "decode")]
    after, wire_after = _transferred(deployed, decode), _received(deployed, decode)
    moved = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    wire = wire_after - wire_before
    print(f"\nboth workers serve after {took:.1f} s; {moved} bytes moved, {expected} in blocks, {wire} on the wire")
    # Pods of two nodes share neither memory nor RDMA.
    assert moved == {"TCP": expected}
    # They came over the pod's network, once: the rest is headers, requests and the polls of this test.
    assert expected <= wire <= 1.1 * expected + 1_000_000

    async def told() -> bool:
        return bool((await site.model())["status"].get("transport", {}).get("inUse") == "TCP")

    # Traffic alone is no event: without one the operator looks again only each minute.
    deployed.kubectl("-n", NAMESPACE, "annotate", "dm", NAME, "e2e=look")
    await site.until("status.transport.inUse is TCP", told)
    await _check_connections(deployed, site)


async def _complete(site: KubernetesSite, prompt: str) -> dict[str, Any]:
    body = {"model": NAME, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    answer = await site.ask(body)
    assert (answer["status"], answer["error"], answer["done"]) == (200, None, True), answer
    assert answer["usage"]["completion_tokens"] == 8
    return answer


def _transferred(deployed: Deployed, pod: str) -> dict[str, int]:
    """Bytes pulled so far, by transport."""
    # In the pod: the API server's proxy would leave a connection that no policy knows of.
    read = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{ports.HTTP}/metrics').read().decode())"
    lines = deployed.kubectl("-n", NAMESPACE, "exec", pod, "--", "python", "-c", read).splitlines()
    start = f'{metrics.ENGINE_TRANSFER_BYTES}{{transport="'
    return {
        line.removeprefix(start).split('"')[0]: int(float(line.split()[-1])) for line in lines if line.startswith(start)
    }


def _received(deployed: Deployed, pod: str) -> int:
    """Bytes that came in at the pod's own interface."""
    table = deployed.kubectl("-n", NAMESPACE, "exec", pod, "--", "cat", "/proc/net/dev")
    return next(int(line.split()[1]) for line in table.splitlines() if line.split()[0] == "eth0:")


async def _check_connections(deployed: Deployed, site: KubernetesSite) -> None:
    """Every connection of the model's and the operator's pods is one that the NetworkPolicies allow."""
    seen, judge = await network.seen(deployed, site), await network.judge(deployed)
    assert {connection for connection in seen if not judge.allowed(connection)} == set()
    addresses = {pod["status"]["podIP"]: pod for pod in await site.pods()}
    ucx = [c for c in seen if c.source in addresses and c.target in addresses and c.port >= ports.UCX_TCP_FIRST]
    print(f"{len(seen)} connections, all allowed; {len(ucx)} of them UCX between the workers")
    assert ucx, seen
