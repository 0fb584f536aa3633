"""Hashes of pod templates as the last release made them.

A changed value here means: at the upgrade of the operator, every user's workers of that kind are replaced, with no
change of theirs. Bring it about on purpose only, and say so in CHANGELOG.md under "Upgrading".
"""

from __future__ import annotations

from typing import Any

import pytest

from forebay_operator.build.names import content_hash
from forebay_operator.build.router import router_template
from forebay_operator.build.surroundings import Surroundings
from forebay_operator.build.worker import worker_revision
from support.manifests import make_model

RELEASED = Surroundings(engine_image="engine:1", router_image="router:1")
GOLDEN: list[tuple[str, dict[str, Any], str, str]] = [
    # what, changes, revision of decode workers, hash of the router's template
    ("gpu", {}, "aa379ed4", "d6e2d727"),
    ("cpu", {"decode.gpus": {"count": 0}, "engine.threads": 4}, "94f58fd8", "d6e2d727"),
    ("simulated", {"engine.type": "Simulated", "model.source": ...}, "491e99fe", "d6e2d727"),
    (
        "rdma",
        {"transfer": {"transport": "RDMA", "required": True, "rdma": {"networks": ["rail-0"]}}},
        "261619d1",
        "d6e2d727",
    ),
    ("cache", {"model.source": "cache://smollm2-135m"}, "6eab8ee0", "d6e2d727"),
    ("image", {"model.source": "image://models/llama:1", "model.maxModelLen": 4096}, "34999d9f", "d6e2d727"),
    (
        "pinned",
        {
            "decode.nodeSelector": {"a": "b"},
            "decode.tolerations": [{"operator": "Exists"}],
            "decode.topologySpreadConstraints": [{"topologyKey": "zone"}],
            "decode.podTemplate": {"metadata": {"annotations": {"x": "y"}}},
            "router.apiKeysSecretRef": {"name": "keys"},
            "router.replicas": 1,
        },
        "d10211f6",
        "d74e7e11",
    ),
]


@pytest.mark.parametrize(("what", "changes", "worker", "router"), GOLDEN, ids=[case[0] for case in GOLDEN])
def test_an_upgrade_of_the_operator_rolls_no_pod(what: str, changes: dict[str, Any], worker: str, router: str) -> None:
    model = make_model(changes)
    made = (
        worker_revision(model, "decode", surroundings=RELEASED),
        content_hash(router_template(model, surroundings=RELEASED)),
    )
    assert made == (worker, router)


@pytest.mark.parametrize(
    "changes",
    [
        {"decode.replicas": 5},
        {"scaling.mode": "Off"},
        {"scaling.pause": "All"},
        {"objectives.timeToFirstTokenMilliseconds": 5},
        {"router.replicas": 5},
        {"rollout.maxSurge": 2},
        {"networkPolicy": "Disabled"},
        {"prefill.nodeSelector": {"a": "b"}},
    ],
)
def test_what_rolls_no_decode_worker(changes: dict[str, Any]) -> None:
    assert worker_revision(make_model(changes), "decode") == worker_revision(make_model(), "decode")


@pytest.mark.parametrize(
    "changes",
    [
        {"engine.image": "engine:2"},
        {"engine.env": [{"name": "A", "value": "b"}]},
        {"drain.timeoutSeconds": 30},
        {"transfer.timeoutSeconds": 5},
        {"decode.nodeSelector": {"a": "b"}},
        {"decode.podTemplate": {"spec": {"dnsPolicy": "Default"}}},
    ],
)
def test_what_rolls_decode_workers(changes: dict[str, Any]) -> None:
    assert worker_revision(make_model(changes), "decode") != worker_revision(make_model(), "decode")
