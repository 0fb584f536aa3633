"""A model on the fake cluster whose law looks when the test says, at a load that the test sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from forebay_operator.decide import Workers
from forebay_operator.observe.fits import Capacity
from forebay_operator.observe.fleet import Fleet
from forebay_operator.observe.router_report import Totals
from forebay_operator.observe.traffic import Arrivals, Observation, Signal, WorkerLoad
from forebay_operator.rescaler import Following, Rescaler
from support.fake_kube import Object
from support.reconcile_bench import KEY, Bench

SPEED = Workers(5000.0, 0.02, 0.0, 16_384, sequence_seconds=0.0005, max_batch=64)


@dataclass(slots=True)
class Load:
    """A second's prompts (5,000 tokens of them are one prefill worker's work), and what decodes."""

    prompts: int = 2
    tokens: int = 500
    decoding: int = 0
    context: int = 1000


class ScriptedTraffic:
    """A traffic source: the fleet serves as it is, under `load`."""

    name = "Scripted"

    def __init__(
        self,
        load: Callable[[], Load],
        clock: Callable[[], float],
        base: Totals | None,
        bad: Callable[[], Signal | None] = lambda: None,
    ) -> None:
        self.capacity = Capacity([SPEED.prefill_velocity])
        self._bad = bad
        self._load = load
        self._clock = clock
        self._finished = base.finished if base else 0

    async def observe(self, fleet: Fleet) -> Observation:
        now, load = self._clock(), self._load()
        self._finished += load.prompts
        serving = [m for m in fleet.members if m.serving]
        decoders = [m for m in serving if m.target == "decode"]
        each = load.decoding // max(1, len(decoders))
        workers = tuple(
            WorkerLoad(
                m.name,
                m.target if m.serving else None,
                m.target,
                decoding=each if m in decoders else 0,
                resident_tokens=each * load.context if m in decoders else 0,
            )
            for m in fleet.members
        )
        bad = tuple(signal for signal in [self._bad()] if signal is not None)
        came = (Arrivals(float(int(now)), load.prompts, load.prompts * load.tokens),)
        return Observation(now, came, self._finished * 50, self._finished, 0, 0, 0, workers=workers, signals=bad)

    def workers(self) -> Workers | None:
        return SPEED

    async def close(self) -> None:
        pass


class _Still(Rescaler):
    def _start(self, key: tuple[str, str], held: Following) -> None:
        pass


@dataclass
class LawWorld:
    bench: Bench
    load: Load = field(default_factory=Load)
    bad: Signal | None = None
    """A source that is of no use."""

    skew: float = 0.0
    """Of the operator's clock."""

    woken: int = 0

    def __post_init__(self) -> None:
        self.restart()

    def clock(self) -> float:
        return self.bench.now.timestamp() + self.skew

    def restart(self) -> None:
        """The next operator, which knows what is in status."""
        self.bench.restart()
        self.rescaler = _Still(self._source, clock=self.clock, wake=self._wake, counts=self.bench.metrics)
        self.bench.reconciler._rescaler = self.rescaler

    async def _source(self, key: Any, spec: Any, base: Totals | None, _: Capacity | None) -> ScriptedTraffic:
        return ScriptedTraffic(lambda: self.load, self.clock, base, lambda: self.bad)

    def _wake(self, key: Any) -> None:
        self.woken += 1

    async def put(self, model: Object) -> None:
        self.bench.put(model)
        await self.bench.rest()

    async def live(self, seconds: int) -> None:
        """One look a second, and reconciles when they are asked for."""
        for _ in range(seconds):
            self.bench.now += timedelta(seconds=1)
            before = self.woken
            await self.rescaler.look(KEY)
            if self.woken > before:
                await self.bench.rest()

    async def live_until(self, pools: tuple[int, int], seconds: int) -> None:
        for _ in range(seconds):
            await self.live(1)
            if self.pools() == pools:
                return
        raise AssertionError(f"{self.pools()} after {seconds} s, not {pools}: {self.status().get('decision')}")

    def status(self) -> Mapping[str, Any]:
        return self.bench.live()

    def pools(self) -> tuple[int, int]:
        """Pods of each home pool."""
        return len(self.bench.cluster.workers("prefill")), len(self.bench.cluster.workers("decode"))

    def targets(self) -> tuple[int, int]:
        return self.status()["prefill"]["target"], self.status()["decode"]["target"]

    def decisions(self) -> list[str]:
        """Reasons told, newest first."""
        status = self.status()
        told = [status["decision"], *status.get("decisions", [])] if "decision" in status else []
        return [d["reason"] for d in told]
