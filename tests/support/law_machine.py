"""decide() in all weathers: a machine for hypothesis that shifts load, breaks metrics, loses writes and restarts it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from forebay_operator.api.labels import Pool
from forebay_operator.api.ratio import Ratio
from forebay_operator.decide import Bounds, Decision, Fleet, Gear, Growth, Memory, Policy, Split, decide, reasons
from forebay_operator.decide.project import broken
from forebay_operator.observe.traffic import Observation
from support.observations import Source, policy

GEARS = [Gear(1.0, drains=False), Gear(30.0, drains=True), Gear(120.0, drains=True)]
LIMITS = [
    Bounds(),
    Bounds(2, 4, 2, 4),
    Bounds(ratio_min=Ratio(1, 3), ratio_max=Ratio(3, 1)),
    Bounds(max_gpus=9, prefill_gpus=2),
]
NUMBERS = st.one_of(st.none(), st.integers(-(10**20), 10**20), st.floats())
COUNTERS = ("generated_tokens", "finished", "refused", "missed_ttft", "missed_tpot")


@functools.cache
def settled() -> tuple[Source, Memory]:
    """Six workers, two minutes of steady load."""
    source, law, memory = Source(prefill=3, decode=3), policy(), Memory()
    for _ in range(24):
        _, memory = decide(source.tick(), law, memory, source.at)
    return source, memory


class LawMachine(RuleBasedStateMachine):
    @initialize(
        gear=st.sampled_from(GEARS),
        bounds=st.sampled_from(LIMITS),
        convertible=st.booleans(),
        rate=st.integers(1, 6),
        growth=st.sampled_from([None, Growth(), Growth(homes_serve=True)]),
    )
    def begin(self, gear: Gear, bounds: Bounds, convertible: bool, rate: int, growth: Growth | None) -> None:
        source, memory = settled()
        self.source = dataclasses.replace(source, seen=[])
        self.memory = copy.deepcopy(memory)
        self.law: Policy = policy(
            gear=gear,
            bounds=bounds,
            convertible=convertible,
            moves_per_minute=rate,
            growth=growth,
        )
        self.moves: list[tuple[float, int]] = []
        self.restarted_at = -math.inf

    def _fleets(self) -> dict[Pool, Fleet]:
        return {"prefill": Fleet(3, 3), "decode": Fleet(3, 3)}

    def _decide(self, seen: Observation) -> Decision:
        kept = self.memory.dump()
        decision, after = decide(seen, self.law, self.memory, self.source.at, self._fleets())
        assert self.memory.dump() == kept
        self.memory = after
        assert decision.reason
        assert decision.message
        assert decision.target.total == decision.before.total == 6
        if decision.moves:
            self.moves.append((self.source.at, decision.moves))
            was = broken(self.law.bounds, decision.before)
            assert was or not broken(self.law.bounds, decision.target)
        minute = sum(n for at, n in self.moves if at > self.source.at - 60)
        assert minute <= self.law.moves_per_minute
        return decision

    @rule(
        requests=st.integers(0, 200),
        prompt=st.integers(1, 20_000),
        output=st.integers(1, 2000),
        queued=st.integers(0, 3_000_000),
    )
    def shift(self, requests: int, prompt: int, output: int, queued: int) -> None:
        self.source.rate, self.source.prompt, self.source.output = requests, prompt, output
        self.source.queued = queued

    @rule(ticks=st.integers(1, 4))
    def tick(self, ticks: int) -> None:
        for _ in range(ticks):
            decision = self._decide(self.source.tick())
            self.source.move(decision.target.prefill)
            if self.source.at - self.restarted_at < 50:
                assert decision.moves == 0 or decision.reason == reasons.BOUNDS

    @rule()
    def lose_a_write(self) -> None:
        self._decide(self.source.tick())

    @rule(values=st.fixed_dictionaries(dict.fromkeys(COUNTERS, NUMBERS)), worker=NUMBERS, late=st.booleans())
    def break_metrics(self, values: dict[str, object], worker: float | None, late: bool) -> None:
        """What comes is garbage, or late: targets hold or stay safe, and no worker is let go."""
        seen = self.source.tick()
        first = dataclasses.replace(seen.workers[0], resident_tokens=worker, decode_seconds=worker)
        taken = seen.taken_at - 40 if late else seen.taken_at
        broken_one = dataclasses.replace(
            seen,
            taken_at=taken,
            workers=(first, *seen.workers[1:]),
            **values,  # type: ignore[arg-type]
        )
        decision = self._decide(broken_one)
        if decision.reason in reasons.HOLDS:
            assert decision.target == decision.before
            assert decision.sizing is None or decision.sizing.target == decision.sizing.before
        self.source.move(decision.target.prefill)

    @rule()
    def lose_a_pool(self) -> None:
        seen = self.source.tick()
        left = tuple(worker for worker in seen.workers if worker.role == "decode")
        decision = self._decide(dataclasses.replace(seen, workers=left))
        assert (decision.reason, decision.moves) == (reasons.METRICS_MISSING, 0)
        assert decision.sizing is None

    @rule()
    def restart_with_a_checkpoint(self) -> None:
        again = Memory.load(self.memory.dump())
        seen = self.source.tick()
        one, _ = decide(seen, self.law, self.memory, self.source.at, self._fleets())
        two, _ = decide(seen, self.law, again, self.source.at, self._fleets())
        assert one == two
        self.memory = again
        self.source.move(self._decide(seen).target.prefill)

    @rule()
    def restart_without(self) -> None:
        """It holds what was decided until its windows are full."""
        target = self.memory.target
        self.memory = self.memory.durable()
        self.restarted_at = self.source.at
        decision = self._decide(self.source.tick())
        assert decision.reason == reasons.BOUNDS or target is None or decision.target == Split(*target)
        self.source.move(decision.target.prefill)
