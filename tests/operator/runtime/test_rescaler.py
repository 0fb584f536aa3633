"""The law on the cluster: decided, recorded, carried out; and what becomes of it when an operator dies in between."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from forebay_engine.perf import load
from forebay_operator.decide import Workers
from forebay_operator.decide.estimate import WINDOW_SECONDS
from forebay_operator.observe.assemble import LATE_SECONDS, until_next_look
from forebay_operator.observe.fits import Capacity
from forebay_operator.observe.fleet import Fleet
from forebay_operator.observe.router_report import Totals
from forebay_operator.observe.traffic import Arrivals, Health, Observation, Signal, WorkerLoad
from forebay_operator.queue import RetryAfter
from forebay_operator.rescaler import LOOKS_WITHIN_SECONDS, Following, Rescaler, delay_of, free_place
from support.fake_cluster import simulated_model as model
from support.fake_kube import Call, Refused
from support.reconcile_bench import KEY, Bench

WORKERS = Workers(5000.0, 0.02, 0.0, 16_384, sequence_seconds=0.0005, max_batch=64)
FILE = msgspec.json.encode(load("slow")).decode()
STALE = Signal("router 10.0.0.1:8000", "/load", Health.STALE, note="no use for 6 s: status 500")


class Scripted:
    """A source that shows what the test says: the fleet serves as it is, with so much load."""

    def __init__(self, world: World, kind: str, base: Totals | None) -> None:
        self.name = kind
        self.capacity = Capacity([5000.0])
        self.closed = False
        self._world = world
        self._finished = base.finished if base else 0

    async def observe(self, fleet: Fleet) -> Observation:
        world = self._world
        prompts, tokens, queued = (10, 2000, 25_000) if world.surge else (4, 300, 0)
        self._finished += prompts
        return Observation(
            world.clock(),
            (Arrivals(float(int(world.clock())), prompts, prompts * tokens),),
            self._finished * 50,
            self._finished,
            0,
            0,
            0,
            workers=tuple(
                WorkerLoad(m.name, m.target, m.target, queued_prefill_tokens=queued if m.target == "prefill" else 0)
                for m in fleet.members
            ),
            signals=(world.bad,) if world.bad else (),
        )

    def workers(self) -> Workers | None:
        return WORKERS

    async def close(self) -> None:
        self.closed = True


class Still(Rescaler):
    """Looks when the test says."""

    def _start(self, key: tuple[str, str], held: Following) -> None:
        pass


@dataclass
class World:
    bench: Bench
    surge: bool = False
    bad: Signal | None = None
    skew: float = 0.0
    woken: int = 0
    sources: list[Scripted] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bench.put(model(1, 5))
        self.restart()

    def clock(self) -> float:
        return self.bench.now.timestamp() + self.skew

    def restart(self) -> None:
        self.bench.restart()
        self.rescaler = Still(self._source, clock=self.clock, wake=self._wake, counts=self.bench.metrics)
        self.bench.reconciler._rescaler = self.rescaler

    async def _source(self, key: Any, asked: Any, base: Totals | None, _: Capacity | None) -> Scripted:
        self.sources.append(Scripted(self, asked.scaling.metrics.source, base))
        return self.sources[-1]

    def _wake(self, key: Any) -> None:
        self.woken += 1

    async def live(self, seconds: int, *, reconcile: bool = True) -> None:
        """One look a second, and a reconcile when it is asked for."""
        for _ in range(seconds):
            self.bench.now += timedelta(seconds=1)
            before = self.woken
            await self.rescaler.look(KEY)
            if reconcile and self.woken > before:
                await self.bench.rest()

    def targets(self) -> tuple[int, int]:
        status = self.bench.live()
        return status["prefill"]["target"], status["decode"]["target"]

    def roles(self) -> tuple[int, int]:
        held = self.bench.cluster.roles()
        return held["prefill"], held["decode"]


@pytest.fixture
async def world(bench: Bench) -> World:
    made = World(bench)
    await bench.rest()
    return made


async def test_a_shift_moves_roles_and_status_explains_it(world: World) -> None:
    await world.live(70)
    assert world.roles() == (1, 5)
    world.surge = True
    while world.roles() == (1, 5):
        await world.live(1)
    assert world.targets() == world.roles()
    decision = world.bench.live()["decision"]
    assert (decision["action"], decision["reason"]) == ("SwitchRole", "Starved")
    assert decision["message"].startswith("prefill needs ")
    assert decision["to"] == "{}:{}".format(*world.roles())
    assert "Rescaled" in world.bench.reasons()
    assert [d["reason"] for d in world.bench.live()["decisions"]][-2:] == ["Balanced", "WarmingUp"]


async def test_at_rest_nothing_is_written(world: World) -> None:
    await world.live(150)
    version, writes = world.bench.api.last_version, len(world.bench.api.writes())
    await world.live(150)
    for _ in range(5):
        await world.bench.once()
    assert world.bench.api.last_version == version
    assert len(world.bench.api.writes()) == writes, "nor is anything sent that changes nothing"
    assert b'forebay_decisions_total{model="assistant",namespace="llm",reason="Balanced"}' in world.bench.metrics.text()


async def test_recommend_only_writes_the_decision(world: World) -> None:
    world.bench.put(model(1, 5, scaling={"mode": "Recommend"}))
    await world.bench.rest()
    await world.live(70)
    world.surge = True
    await world.live(10)
    assert world.roles() == world.targets() == (1, 5)
    decision = world.bench.live()["decision"]
    assert (decision["action"], decision["from"]) == ("Recommend", "1:5")
    world.bench.put(model(1, 5, scaling={"mode": "Auto"}))
    await world.bench.rest()
    await world.live(8)
    assert world.roles()[0] > 1, "a change of mode counts from the next look on"


@pytest.mark.parametrize("change", [{"roleSwitching": "Disabled"}, {"pause": "All"}, {"ratio": {"max": "1:5"}}])
async def test_a_decision_that_new_rules_forbid_is_not_recorded(world: World, change: dict[str, Any]) -> None:
    """The spec changes after the decision and before the reconcile that would record it."""
    await world.live(70)
    world.surge = True
    while not world.rescaler._following[KEY].pending:
        await world.live(1, reconcile=False)
    world.bench.put(model(1, 5, scaling=change))
    await world.bench.rest()
    await world.live(10)
    assert world.targets() == world.roles() == (1, 5)


async def test_off_looks_at_nothing(world: World) -> None:
    world.bench.put(model(1, 5, scaling={"mode": "Off"}))
    await world.bench.rest()
    with pytest.raises(KeyError):
        await world.rescaler.look(KEY)


@pytest.mark.parametrize("dies_after", range(8))
async def test_an_operator_that_dies_in_the_middle_of_a_move(world: World, dies_after: int) -> None:
    """After any of the writes that a move takes: the next one ends the move once, and takes none back."""
    await world.live(70)
    world.surge = True
    writes = 0

    def die(call: Call) -> None:
        nonlocal writes
        if call.write and call.plural != "leases":
            writes += 1
            if writes > dies_after:
                raise Refused(500, "InternalError")

    world.bench.api.before = die
    for _ in range(3):
        world.bench.now += timedelta(seconds=1)
        await world.rescaler.look(KEY)
        try:
            for _ in range(6):
                await world.bench.once()
        except RetryAfter:
            break
    world.bench.api.before = lambda call: None
    recorded = world.targets()
    world.restart()
    since = world.clock()
    await world.bench.rest()
    assert world.roles() == world.targets() == recorded, "what was recorded is carried out, and nothing else"
    seen = {world.roles()}
    while world.clock() - since < WINDOW_SECONDS - 10:
        await world.live(1)
        seen.add(world.roles())
    assert seen == {recorded}, "until its windows are full it adds no move"
    await world.live(30)
    assert world.roles()[0] > 1
    assert b'forebay_rescale_flaps_total{model="assistant",namespace="llm"} 0.0' in world.bench.metrics.text()


@pytest.mark.parametrize("skew", [-300.0, 300.0])
async def test_the_next_leaders_clock_is_five_minutes_off(world: World, skew: float) -> None:
    await world.live(70)
    world.surge = True
    await world.live(8)
    moved = world.roles()
    world.skew = skew
    world.restart()
    since = world.clock()
    await world.bench.rest()
    while world.clock() - since < WINDOW_SECONDS - 10:
        await world.live(1)
        assert world.roles() == moved
    await world.live(60)
    assert world.roles()[0] >= moved[0]
    assert b'forebay_rescale_flaps_total{model="assistant",namespace="llm"} 0.0' in world.bench.metrics.text()


async def test_metrics_that_fail_hold_are_named_and_recover(world: World) -> None:
    await world.live(70)
    world.bad, world.surge = STALE, True
    await world.live(20)
    assert world.roles() == (1, 5)
    assert world.bench.condition("MetricsAvailable") == ("False", "Stale")
    assert "router 10.0.0.1:8000 (/load): no use for 6 s" in world.bench.message("MetricsAvailable")
    assert world.bench.live()["decision"]["reason"] == "MetricsStale"
    assert world.bench.condition("Ready")[0] == "True", "serving goes on"
    world.bad = None
    await world.live(15)
    assert world.bench.condition("MetricsAvailable") == ("True", "Fresh")
    assert world.roles()[0] > 1


async def test_a_law_that_fails_unforeseen_says_so_in_status_and_recovers(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.live(70)
    (source,) = world.sources
    works, source.workers = source.workers, None  # type: ignore[method-assign, assignment]
    for _ in range(5):
        world.bench.now += timedelta(seconds=1)
        await world.rescaler.try_to_look(KEY)
    assert len(caplog.records) == 1, "not each second for ever"
    await world.bench.rest()
    assert world.bench.condition("MetricsAvailable") == ("False", "Invalid")
    assert "the law (TypeError) failed" in world.bench.message("MetricsAvailable")
    source.workers = works  # type: ignore[method-assign]
    await world.live(2)
    assert world.bench.condition("MetricsAvailable") == ("True", "Fresh")


async def test_the_source_changes_live_and_counting_goes_on(world: World) -> None:
    await world.live(70)
    finished = world.rescaler._following[KEY].pilot.totals.finished
    prometheus = {"metrics": {"source": "Prometheus", "url": "http://prometheus:9090"}}
    world.bench.put(model(1, 5, scaling=prometheus))
    await world.bench.rest()
    world.surge = True
    await world.live(8)
    assert [source.name for source in world.sources] == ["Endpoints", "Prometheus"]
    assert [source.closed for source in world.sources] == [True, False]
    assert world.rescaler._following[KEY].pilot.totals.finished > finished
    assert world.roles()[0] > 1, "no window starts anew"


async def test_a_model_that_is_gone_is_not_looked_at(world: World) -> None:
    await world.live(3)
    world.bench.api.remove("disaggregatedmodels", "assistant")
    await world.bench.once()
    with pytest.raises(KeyError):
        await world.rescaler.look(KEY)
    assert b'model="assistant"' not in world.bench.metrics.text()


async def test_a_spec_that_cannot_be_read_stops_the_law_and_a_mended_one_goes_on_from_its_memory(world: World) -> None:
    await world.live(70)
    assert world.bench.live()["memory"]["law"]
    world.bench.put(model(1, 5, router={"podTemplate": {"spec": {"priority": 1.5}}}))
    await world.bench.rest()
    assert world.bench.condition("Stalled") == ("True", "InvalidSpec")
    with pytest.raises(KeyError):
        await world.rescaler.look(KEY)
    world.bench.put(model(1, 5))
    await world.bench.rest()
    remembered = world.bench.live()["memory"]["law"]["totals"]["finished"]
    assert world.rescaler._following[KEY].pilot.totals.finished == remembered > 0


async def test_a_performance_model_that_cannot_be_read_is_told_and_serving_and_the_law_go_on(world: World) -> None:
    world.bench.put(model(1, 5, scaling={"performanceModel": '{"name": 1}'}))
    await world.bench.rest()
    await world.live(70)
    assert world.bench.condition("Stalled") == ("True", "InvalidSpec")
    assert "spec.scaling.performanceModel: Expected `str`, got `int` - at `$.name`" in world.bench.message("Stalled")
    assert world.bench.condition("Ready")[0] == "True"
    world.surge = True
    await world.live(10)
    assert world.targets() != (1, 5)
    world.bench.put(model(1, 5, scaling={"performanceModel": FILE}))
    await world.bench.rest()
    assert world.bench.condition("Stalled")[0] == "False"


async def test_the_law_starts_from_a_performance_model_and_the_next_operator_keeps_what_is_learnt(world: World) -> None:
    world.bench.put(model(1, 5, scaling={"performanceModel": FILE}))
    await world.bench.rest()
    await world.live(1)
    assert world.sources[-1].capacity.velocities == [], "it was forgotten for the file"
    world.sources[-1].capacity.velocities = [4000.0]
    await world.live(70)
    world.restart()
    await world.bench.rest()
    await world.live(1)
    held = world.rescaler._following[KEY]
    assert held.capacity is not None
    assert held.capacity.velocities == [4000.0]
    assert held.pilot.believed == WORKERS


def test_models_are_looked_at_one_after_another_in_each_second() -> None:
    places: list[int] = []
    for _ in range(300):
        places.append(free_place(places))
    delays = [delay_of(place) for place in places]
    assert delays[:3] == pytest.approx([0.0, 0.003, 0.006]), "few models lose nothing by it"
    assert len({round(delay, 6) for delay in delays}) == 300
    assert free_place([0, 1, 3]) == 2, "the place of a model that is gone is taken again"
    assert 0.0 <= delay_of(10**6) < LOOKS_WITHIN_SECONDS


@pytest.mark.parametrize("took", [0.001, 0.05, 0.5, 1.2])
@pytest.mark.parametrize("place", [0, 7, 299])
def test_a_look_comes_at_its_models_place_in_a_second_however_long_the_last_one_took(place: int, took: float) -> None:
    delay = delay_of(place)
    end = 1000.0 + LATE_SECONDS + delay + took
    wait = until_next_look(end - delay)
    assert 0 < wait <= 1.0 + LATE_SECONDS
    assert (end + wait - delay) % 1.0 == pytest.approx(LATE_SECONDS)
