"""`make soak` on a cluster: every disruption again and again under traffic, and a table of what it came to.

    FOREBAY_SOAK_REPEATS=3 FOREBAY_E2E_KEEP=1 python -m e2e -m soak -k "drain or router"

Operators are killed at another step of the change in each repeat.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import pytest
from bench.report import percentile

from e2e.on_kubernetes import disruptions
from e2e.on_kubernetes.conftest import site_of
from e2e.on_kubernetes.deployed import GPUS, Deployed
from e2e.on_kubernetes.scene import NAME, UNHARMED, Scene, harm
from e2e.on_kubernetes.steps import operators_killed

REPEATS: Final = int(os.environ.get("FOREBAY_SOAK_REPEATS", "20"))
CASE_SECONDS: Final = 7200
NO_STEP: Final = "none, since it had fewer steps than the one before"

pytestmark = [pytest.mark.soak, pytest.mark.timeout(CASE_SECONDS)]

Act = Callable[[Scene, int], Awaitable[Any]]
"""One repeat, by its number from 0."""


@dataclass(frozen=True)
class Case:
    act: Act
    at: tuple[int, int] = (1, 3)
    gpus: int = 0
    kills: bool = False
    """Kill operators at one of its steps."""

    own_nodes: bool = False
    share: float = 1.0
    """Of the repeats: a slow case is done less often, once at least."""

    cuts: bool = False
    """Connections may break, as far as they went through the router that is killed."""

    @property
    def needs_own_nodes(self) -> bool:
        return self.kills or self.own_nodes

    @property
    def repeats(self) -> int:
        return max(1, round(REPEATS * self.share))


async def _drain(scene: Scene, repeat: int) -> None:
    await disruptions.drain(scene, await disruptions.busiest_node(scene), 1, 3)


async def _roll(scene: Scene, revision: int, *, prefill: int, decode: int, gpus: int) -> None:
    """A rollout that is rolled back, then a whole one: the next repeat begins from there."""
    kept, workers = await disruptions.roll_back(scene, prefill, decode, gpus=gpus, revision=revision)
    assert 0 < kept < workers
    await disruptions.roll_out(scene, prefill, decode, gpus=gpus, revision=revision + 1)


_FULL = Case(partial(_roll, prefill=1, decode=3, gpus=GPUS // 2), gpus=GPUS // 2)
_PAIR = Case(partial(_roll, prefill=1, decode=1, gpus=GPUS), at=(1, 1), gpus=GPUS)
"""Both take all GPUs of both nodes."""


KILLED: Final = ("roles", "scale", "rollout-full", "rollout-pair", "drain", "loan")
"""What the operator does step by step: it is killed at each. The others are done without it, or to it."""


def _killed(case: Case) -> Case:
    return Case(case.act, case.at, case.gpus, kills=True)


CASES: Final = {
    "roles": Case(lambda scene, _: disruptions.switch_roles(scene)),
    "scale": Case(lambda scene, _: disruptions.scale_in_and_out(scene, 4), at=(1, 4)),
    "rollout-full": _FULL,
    "rollout-pair": _PAIR,
    "drain": Case(_drain),
    "loan": Case(lambda scene, _: disruptions.delete_pod_on_loan(scene)),
    "loan-alone": Case(lambda scene, _: disruptions.delete_pod_on_loan_without_operator(scene)),
    "router": Case(lambda scene, _: disruptions.kill_router(scene), own_nodes=True, cuts=True),
    "api-server": Case(lambda scene, _: disruptions.stop_api_server(scene), own_nodes=True, share=3 / 20),
}
CASES.update({f"killed-{name}": _killed(CASES[name]) for name in KILLED})


@dataclass
class Row:
    case: str
    repeats: int = 0
    streams: int = 0
    lost: int = 0
    wrong: int = 0
    cut: int = 0
    late: int = 0
    seconds: list[float] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    """At which steps operators were killed."""

    def __str__(self) -> str:
        counts = (self.repeats, self.streams, self.lost, self.wrong, self.cut, self.late)
        p95 = f"{percentile(self.seconds, 0.95):.1f}" if self.seconds else "-"
        return f"| {self.case:<20} |" + "".join(f" {count:>7} |" for count in counts) + f" {p95:>7} |"


HEAD: Final = (
    "| case                 | repeats | streams |    lost |   wrong |     cut |    late |   p95 s |\n"
    "|----------------------|--------:|--------:|--------:|--------:|--------:|--------:|--------:|"
)


@pytest.fixture(scope="module")
def table() -> Iterator[list[Row]]:
    rows: list[Row] = []
    yield rows
    print("\n\n" + HEAD, *rows, sep="\n")
    print("lost: refused, ended early or with an error; cut: with the router that carried it; late: begun late")
    for row in rows:
        if row.killed:
            print(f"{row.case}: operators were killed at {'; '.join(sorted(set(row.killed)))}")


@pytest.fixture
async def scene(deployed: Deployed) -> AsyncIterator[Scene]:
    async for site in site_of(deployed, NAME):
        made = Scene(deployed, site)
        await made.remove()
        try:
            yield made
        finally:
            await site.stop_traffic()
            await made.remove()


@pytest.mark.parametrize("name", CASES)
async def test_no_stream_is_harmed(deployed: Deployed, scene: Scene, table: list[Row], name: str) -> None:
    case = CASES[name]
    if case.needs_own_nodes and not deployed.cluster.built_here:
        pytest.skip(f"{name} kills or stops processes: it needs the two nodes built here")
    row = Row(name)
    table.append(row)
    await scene.serve(*case.at, gpus=case.gpus)
    await scene.begin_traffic()
    await scene.flowing(5)
    steps = 1
    for repeat in range(case.repeats):
        before = await scene.site.traffic()
        began = time.monotonic()
        if case.kills:
            async with operators_killed(scene, repeat % steps) as killing:
                await case.act(scene, repeat)
            row.killed.append(killing.killed or NO_STEP)
            steps = len(killing.seen)
        else:
            await case.act(scene, repeat)
        row.seconds.append(time.monotonic() - began)
        after = await scene.settled_traffic()
        done = harm(before, after)
        row.repeats += 1
        row.streams += after["count"] - before["count"]
        row.lost += done["lost"]
        row.wrong += done["wrong"]
        row.cut += done["cut"]
        row.late += after["late"] - before["late"]
        print(f"\n{name} {repeat + 1}: {row.seconds[-1]:.1f} s{', killed at ' + row.killed[-1] if case.kills else ''}")
        if case.cuts:
            # The Service sends about half of the streams to each router.
            assert done["cut"] <= before["open"] * 0.9 + 2, done
            done |= {"cut": 0, "refused": 0}
        assert done == UNHARMED
    print(f"\n{row}")
    assert 2 * row.killed.count(NO_STEP) <= len(row.killed), row.killed
