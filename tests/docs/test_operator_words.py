"""Every word that the operator says to people is explained: conditions, reasons that need a person, events, metrics."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from prometheus_client import Metric

from forebay_operator.api.conditions import Type
from forebay_operator.events import Why
from forebay_operator.metrics import OperatorMetrics
from forebay_operator.queue import Backoff, Due
from forebay_operator.status.remedies import REMEDIES

DOCS = Path(__file__).parents[2] / "docs"
WORDS = [*Type, *Why, *(remedy.reason for remedy in REMEDIES.values() if remedy.stalls)]


def families() -> list[Metric]:
    made = OperatorMetrics()
    made.watch_queue(Due(Backoff(), random.Random(0)), lambda: 0.0)
    return list(made.registry.collect())


@pytest.mark.parametrize("word", sorted({str(word) for word in WORDS}))
def test_a_word_of_status_and_events(word: str) -> None:
    assert re.search(rf"\b{word}\b", (DOCS / "conditions.md").read_text()), f"docs/conditions.md does not say {word}"


@pytest.mark.parametrize("family", families(), ids=lambda family: str(family.name))
def test_a_metric(family: Metric) -> None:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    assert f"`{name}`" in (DOCS / "kubernetes.md").read_text(), f"docs/kubernetes.md does not name {name}"
