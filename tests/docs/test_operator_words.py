"""Every word that is said to people is explained: conditions and their reasons, events, metrics."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from prometheus_client import Metric

from forebay_operator.api.conditions import Reason, Type
from forebay_operator.events import Why
from forebay_operator.metrics import OperatorMetrics
from forebay_operator.queue import Backoff, Due
from forebay_operator.status.remedies import REMEDIES
from forebay_wire import metrics as names

DOCS = Path(__file__).parents[2] / "docs"
UNSAID = {remedy.reason for remedy in REMEDIES.values() if not remedy.stalls}
"""What ends by itself is the reason of no condition."""

WORDS = [*Type, *Why, *(reason for reason in Reason if reason not in UNSAID)]


def families() -> list[Metric]:
    made = OperatorMetrics()
    made.watch_queue(Due(Backoff(), random.Random(0)), lambda: 0.0)
    return list(made.registry.collect())


@pytest.mark.parametrize("word", sorted({str(word) for word in WORDS}))
def test_a_word_of_status_and_events(word: str) -> None:
    assert re.search(rf"\b{word}\b", (DOCS / "conditions.md").read_text()), f"docs/conditions.md does not say {word}"


@pytest.mark.parametrize(
    "name", sorted(each for key, each in vars(names).items() if key.startswith(("ROUTER_", "ENGINE_")))
)
def test_a_metric_of_routers_and_workers(name: str) -> None:
    assert f"`{name}`" in (DOCS / "metrics.md").read_text(), f"docs/metrics.md does not name {name}"


@pytest.mark.parametrize("family", families(), ids=lambda family: str(family.name))
def test_a_metric(family: Metric) -> None:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    assert f"`{name}`" in (DOCS / "kubernetes.md").read_text(), f"docs/kubernetes.md does not name {name}"
