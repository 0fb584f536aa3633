"""From `helm install` to a streamed answer through the Service, and to nothing left after `kubectl delete`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from e2e.on_kubernetes.conftest import KubernetesSite, site_of
from e2e.on_kubernetes.deployed import NAMESPACE, OPERATOR_NAMESPACE, RELEASE, REPOSITORY, Deployed
from forebay_operator.api import labels

EXAMPLE = REPOSITORY / "examples" / "simulated-pinned-pools.yaml"
ANSWER_SECONDS = 60.0
"""From apply to the first streamed answer, images present."""

GONE_SECONDS = 120.0
"""Every pod may take its drain: here none is busy."""

KINDS = (
    "deployments,replicasets,pods,services,secrets,serviceaccounts,roles,rolebindings,"
    "poddisruptionbudgets,networkpolicies"
)
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
async def pinned(deployed: Deployed) -> AsyncIterator[KubernetesSite]:
    async for site in site_of(deployed, "pinned"):
        yield site
        deployed.kubectl("-n", NAMESPACE, "delete", "dm", "pinned", "--ignore-not-found", seconds=GONE_SECONDS)


async def test_the_example_answers_and_leaves_nothing(deployed: Deployed, pinned: KubernetesSite) -> None:
    # Other cases may have killed it a moment ago.
    deployed.kubectl("-n", OPERATOR_NAMESPACE, "rollout", "status", "deployment", RELEASE, "--timeout=60s", seconds=70)
    before = _objects(deployed)
    started = time.monotonic()
    deployed.kubectl("-n", NAMESPACE, "apply", "-f", EXAMPLE)
    chat = {"model": "pinned", "stream": True, "max_tokens": 24, "messages": [{"role": "user", "content": "Hello"}]}
    answer = await pinned.ask(chat, patience=ANSWER_SECONDS)
    took = time.monotonic() - started
    assert (answer["status"], answer["error"], answer["done"]) == (200, None, True), answer
    assert len(answer["chunks"]) > 20
    prefill, decode = answer["headers"]["x-forebay-prefill"], answer["headers"]["x-forebay-decode"]
    print(f"\nhelm install {deployed.installed_seconds:.1f} s; first streamed answer {took:.1f} s after apply")
    assert took <= ANSWER_SECONDS

    await pinned.until("all three workers serve", lambda: pinned.at(1, 2))
    placed = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in await pinned.pods()}
    homes = {pod["metadata"]["name"]: pod["metadata"]["labels"][labels.POOL] for pod in await pinned.pods()}
    assert {(homes[name], node) for name, node in placed.items()} == {
        ("prefill", deployed.nodes[0]),
        ("decode", deployed.nodes[1]),
    }
    assert {prefill, decode} <= homes.keys(), "who answered first is one of its workers"
    # Once both roles are there, the two legs run on two nodes.
    answer = await pinned.ask({**chat, "messages": [{"role": "user", "content": "Good morning " * 60}]})
    legs = [answer["headers"][f"x-forebay-{leg}"] for leg in ("prefill", "decode")]
    assert [homes[name] for name in legs] == ["prefill", "decode"], (legs, prefill, decode)

    _check_columns(deployed.kubectl("-n", NAMESPACE, "get", "dm", "pinned"))
    conditions = {c["type"]: c["status"] for c in (await pinned.model())["status"]["conditions"]}
    assert conditions["PinningSatisfied"] == "True"

    deployed.kubectl("-n", NAMESPACE, "delete", "dm", "pinned", seconds=GONE_SECONDS)
    left = _objects(deployed) - before
    deadline = time.monotonic() + GONE_SECONDS
    while left and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
        left = _objects(deployed) - before
    assert left == set()


def _objects(deployed: Deployed) -> set[tuple[str, str]]:
    held: dict[str, Any] = json.loads(deployed.kubectl("-n", NAMESPACE, "get", KINDS, "-o", "json"))
    return {(item["kind"], item["metadata"]["name"]) for item in held["items"]}


def _check_columns(table: str) -> None:
    head, row = (line.split() for line in table.splitlines())
    assert head == ["NAME", "MODEL", "READY", "REASON", "PREFILL", "DECODE", "RATIO", "TTFT-P95", "TPOT-P95", "AGE"]
    held = dict(zip(head, row, strict=False))
    assert (held["MODEL"], held["READY"]) == ("pinned", "True")
    assert (held["PREFILL"], held["DECODE"], held["RATIO"]) == ("1/1", "2/2", "1:2")
