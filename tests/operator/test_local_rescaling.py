"""The law in local mode: what becomes of a ruling that can't be carried out, and of a look that fails."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.decide import Split
from forebay_operator.local.errors import LocalError
from forebay_operator.local.rescaling import Rescaling
from forebay_operator.local.state import StateFolder
from forebay_operator.observe.fits import Capacity
from forebay_operator.observe.fleet import Fleet, Member
from forebay_operator.observe.traffic import Observation
from support.observations import WORKERS, Source

MODEL = DisaggregatedModel.model_validate(
    {
        "apiVersion": "serving.forebay.dev/v1alpha1",
        "kind": "DisaggregatedModel",
        "metadata": {"name": "m", "namespace": "default"},
        "spec": {
            "model": {"servedName": "m"},
            "engine": {"type": "Simulated"},
            "objectives": {"timeToFirstTokenMilliseconds": 1000, "timePerOutputTokenMilliseconds": 40},
            "prefill": {"replicas": 4},
            "decode": {"replicas": 4},
        },
    }
)


class Router:
    """Stands for the source: what it sees is a Source's next second."""

    def __init__(self, traffic: Source) -> None:
        self.traffic = traffic
        self.capacity = Capacity()
        self.broken: Exception | None = None

    async def observe(self, fleet: Fleet) -> Observation:
        if self.broken is not None:
            raise self.broken
        return self.traffic.tick(1.0)

    def workers(self) -> Any:
        return WORKERS


class Up:
    """A law and those it speaks to. Switches are refused while `refuses` is set."""

    def __init__(self, folder: Path) -> None:
        self.traffic = Source()
        self.refuses: str = ""
        self.split = Split(4, 4)
        self.said: list[str] = []
        self.law = Rescaling(
            MODEL,
            StateFolder("m", folder),
            cast(aiohttp.ClientSession, None),
            token="",
            switch=self._switch,
            resize=lambda homes, targets: None,
            tell=self.said.append,
            monotonic=lambda: self.traffic.at,
            wall=lambda: self.traffic.at,
        )
        self.router = Router(self.traffic)
        self.law.source = cast(Any, self.router)

    def _switch(self, ratio: Any) -> None:
        if self.refuses:
            raise LocalError(self.refuses)
        self.split = Split(ratio.prefill, ratio.decode)
        self.traffic.move(self.split.prefill)

    def look(self, seconds: int) -> None:
        for _ in range(seconds):
            targets = ["prefill"] * self.split.prefill + ["decode"] * self.split.decode
            fleet = Fleet(tuple(Member(str(i), cast(Any, t), "h:1", ready=True) for i, t in enumerate(targets)))
            asyncio.run(self.law.try_to_step(fleet))


@pytest.fixture
def up(tmp_path: Path) -> Up:
    up = Up(tmp_path)
    up.look(65)
    return up


def test_a_switch_that_is_refused_is_tried_again_and_no_move_until_then(up: Up) -> None:
    up.refuses = "3 of 8 workers are ready"
    up.traffic.rate, up.traffic.queued = 300, 150_000
    up.look(20)
    assert [line for line in up.said if "rescaling" in line] == [
        "rescaling to 5:3 failed: 3 of 8 workers are ready",
    ]
    assert up.law.pilot.memory.moves == []
    up.refuses = ""
    up.look(5)
    assert up.split.prefill > 4
    assert sum(line.startswith("rescaling: 4:4 -> ") for line in up.said) == 1


def test_a_look_that_fails_unforeseen_ends_nothing_and_is_told_once(up: Up) -> None:
    up.router.broken = ZeroDivisionError("float division by zero")
    up.look(5)
    assert [line for line in up.said if "unforeseen" in line] == [
        "rescaling stands still: a look failed unforeseen (ZeroDivisionError: float division by zero); please report it"
    ]
    up.router.broken = None
    up.traffic.rate, up.traffic.queued = 300, 150_000
    up.look(5)
    assert up.split.prefill > 4
