"""The chain of rules. Each may decide; the first that does ends the chain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from forebay_operator.api.labels import Pool
from forebay_operator.decide import attribute, reasons
from forebay_operator.decide.check import unfit
from forebay_operator.decide.estimate import SHORT_SECONDS, WINDOW_SECONDS, Estimate, absorb, estimate
from forebay_operator.decide.memory import Look, Memory, Moved
from forebay_operator.decide.minute import WAIT_SECONDS
from forebay_operator.decide.project import Projection, RatioInfeasible, feasible, project
from forebay_operator.decide.regime import lasted
from forebay_operator.decide.size import sized
from forebay_operator.decide.starved import STARVED_WORKERS, shortage, sudden
from forebay_operator.decide.types import Decision, Fleet, Growth, Option, Policy, Rate, Rules, Split
from forebay_operator.decide.value import Valued, valued
from forebay_operator.observe.traffic import Observation

MINUTE = 60.0
MOVES_KEPT_SECONDS = 1800.0
UNEXPLAINED_SHARE = 0.1
"""Measured and modelled misses of ten minutes may differ by this much; beyond it slow gears hold."""

IDLE = 0.5
"""Utilisation below which neither role's requests wait for long, whatever the split."""

LEAN_SECONDS = 60.0
LEAN_LOSS = 0.002
MOST_CANDIDATES = 10
DROP_SECONDS = 720.0
"""A move that has not ended after its gear's time and this is no longer waited for: a drain's ten minutes, and two."""

DROP_QUICK_SECONDS = 10.0
"""As DROP_SECONDS, where nothing drains: a worker that has no role by then is away, not on its way."""


def decide(
    observation: Observation,
    policy: Policy,
    memory: Memory,
    now: float,
    fleets: Mapping[Pool, Fleet] | None = None,
) -> tuple[Decision, Memory]:
    """The targets to hold from `now` on, and the memory to give back next time.

    With `policy.growth` and `fleets`, the decision holds the replicas of the two home pools as well.
    Neither argument is changed. Never raises for what an observation holds: it holds the targets and says why.
    """
    call = _Call(observation, policy, memory.next(), now)
    decision = call.decide()
    if policy.growth is not None and fleets is not None:
        decision = call.size(decision, dict(fleets), policy.growth)
    held = decision.target if decision.apply else decision.before
    if held != decision.before:
        call.memory.moves.append(Moved(now, decision.moves, held.prefill > decision.before.prefill))
        call.memory.move_started = now
    call.memory.moves = [m for m in call.memory.moves if m.at > now - MOVES_KEPT_SECONDS]
    call.memory.target = (held.prefill, held.decode)
    return decision, call.memory


class _Call:
    """One run of the chain."""

    def __init__(self, observation: Observation, policy: Policy, memory: Memory, now: float) -> None:
        self.observation = observation
        self.policy = policy
        self.memory = memory
        self.now = now
        self.seen: Estimate | None = None
        """The load, once the windows are full."""
        self.inputs: dict[str, float] = {}
        self.options: tuple[Option, ...] = ()
        self.missed: attribute.Missed | None = None
        """Of the last minute; None: not known."""
        self.observed = Split(observation.targeted("prefill"), observation.targeted("decode"))
        self.before = Split(*memory.target) if memory.target is not None else self.observed

    def decide(self) -> Decision:
        if self.policy.mode == "Off":
            return self._hold(reasons.OFF, "scaling.mode is Off")
        problem = unfit(self.observation, self.policy, self.memory, self.now)
        if problem is not None:
            reason, message = problem
            if reason == reasons.COUNTER_RESET:
                self.memory.forget_windows()
                self.memory.output = 0.0
            return self._hold(reason, message)
        if self.observed.total != self.before.total:
            # Workers came or went: start from the split that is there now. Only a fit observation may say so.
            self.before = self.observed
        fresh = self.observation.taken_at > self.memory.seen_at
        elapsed = self.observation.taken_at - self.memory.seen_at if self.memory.seen_at >= 0 else 0.0
        absorb(self.observation, self.policy, self.memory)
        self._note_moves()
        try:
            held = project(self.policy.bounds, self.before)
        except RatioInfeasible as error:
            # One worker more, or fewer, may mend it.
            self.seen = estimate(self.observation, self.policy, self.memory) if self._warm else None
            return self._hold(reasons.RATIO_INFEASIBLE, str(error))
        if held.split != self.before:
            return self._to(held.split, reasons.BOUNDS, f"{self.before} breaks a limit", held.limited_by)
        if not fresh:
            return self._hold(reasons.CONFIRMING, "no newer observation since the last decision")
        return self._on_traffic(elapsed)

    @property
    def _warm(self) -> bool:
        started = self.memory.started_at if self.memory.started_at is not None else self.now
        return self.observation.taken_at - started >= WINDOW_SECONDS - 5

    def _on_traffic(self, elapsed: float) -> Decision:
        memory, now = self.memory, self.now
        seen = estimate(self.observation, self.policy, memory)
        if seen is None:
            return self._hold(reasons.NO_TRAFFIC, "no request in the last minute; zero is a valid load")
        if not self._warm:
            return self._hold(reasons.WARMING_UP, f"windows of {WINDOW_SECONDS:g} s are not full yet")
        self.seen = seen
        if self.policy.ttft_seconds is None or self.policy.tpot_seconds is None:
            return self._by_demand(seen)
        memory.unrolled_seconds += elapsed
        look = memory.look
        apply = self.policy.mode == "Auto"
        current = look is not None and look.target == self.before and (look.advised == look.target or not apply)
        if look is not None and current and not lasted(look.at, self.observation.taken_at):
            return self._between_looks(look, seen)
        serving = Split(
            max(1, len(self.observation.serving("prefill"))), max(1, len(self.observation.serving("decode")))
        )
        splits = self._candidates(feasible(self.policy.bounds, self.before.total), seen)
        # Looks come a little early or late; arrivals are of whole seconds, and each is rolled out once.
        whole = float(round(memory.unrolled_seconds))
        found = valued(whole, now, serving, self.before, splits, seen, self.policy, memory)
        memory.unrolled_seconds -= whole
        self.options = found.options
        self._note_inputs(seen, found)
        decision = self._choose(found, seen)
        memory.look = None if decision.apply and decision.target != self.before else self._looked(decision)
        return decision

    def _looked(self, decision: Decision) -> Look:
        options = [((*option.split,), option.cost, option.gain) for option in decision.options]
        return Look(
            self.observation.taken_at,
            (*self.before,),
            (*decision.target,),
            decision.reason,
            decision.message,
            decision.limited_by,
            dict(decision.inputs),
            options,
        )

    def _between_looks(self, look: Look, seen: Estimate) -> Decision:
        """All splits are rolled out once a tick; meanwhile only who starves is seen to."""
        self.inputs = {**look.inputs, **self._seen_now(seen)}
        self.options = tuple(Option(Split(*split), cost, gain) for split, cost, gain in look.options)
        rescued = self._rescue(seen)
        if rescued is not None:
            self.memory.confirming = 0
            if rescued.apply and rescued.moves:
                self.memory.look = None
            return rescued
        return self._decision(Split(*look.advised), look.reason, look.message, look.limited_by)

    def _candidates(self, splits: list[Split], seen: Estimate) -> list[Split]:
        """All splits of a small model; of a large one those around the present split and the one demand asks for."""
        if len(splits) <= MOST_CANDIDATES:
            return splits
        prefill, decode = seen.demand(self.policy, self.memory.decode_factor)
        asked = round(self.before.total * prefill / max(prefill + decode, 1e-9))
        near = {self.before.prefill + away for away in (-4, -2, -1, 0, 1, 2, 4)} | {asked - 1, asked, asked + 1}
        return [split for split in splits if split.prefill in near]

    def _choose(self, found: Valued, seen: Estimate) -> Decision:
        memory = self.memory
        rescued = self._rescue(seen)
        if rescued is not None:
            memory.confirming = 0
            return rescued
        sound = [option for option in found.options if not self._starves(option.split, seen)]
        paid = [option for option in sound if option.split not in found.unpaid and option.split not in found.early]
        best = paid[0]
        if best.split == self.before or best.gain < found.bar:
            self._unconfirm()
            return self._lean(found, seen) or self._stay(found, sound[0])
        if self._opposes(best.split):
            return self._hold(reasons.MOVING, f"a move the other way is under way; {best.split} waits for its end")
        if self.policy.gear.slow and self.policy.convertible:
            measured = self._measured()
            if measured is not None and abs(measured - found.modelled) > UNEXPLAINED_SHARE:
                self._unconfirm()
                return self._hold(
                    reasons.UNEXPLAINED,
                    f"{100 * measured:.0f} % missed in ten minutes, the model expects {100 * found.modelled:.0f} %",
                )
        if self.policy.gear.slow:
            confirmed = self._agreed(paid, found.bar)
        else:
            confirmed = best if self._seen_twice(best.split) else None
        if confirmed is None:
            return self._hold(
                reasons.CONFIRMING, f"{best.split} would gain {100 * best.gain:.1f} points; not confirmed yet"
            )
        memory.confirming, memory.gains = 0, {}
        return self._to(
            confirmed.split,
            reasons.BETTER_SPLIT,
            f"{confirmed.split} is expected to miss {100 * confirmed.gain:.1f} points less than {self.before} "
            f"over the next {found.dwell:.0f} s",
        )

    def _seen_twice(self, split: Split) -> bool:
        """A quick gear moves when a second observation asks for the same direction."""
        memory, step = self.memory, split.prefill - self.before.prefill
        if memory.confirming * step <= 0:
            memory.confirming, memory.confirming_at = (1 if step > 0 else -1), self.now
        return lasted(memory.confirming_at, self.now)

    def _unconfirm(self) -> None:
        self.memory.confirming, self.memory.gains = 0, {}

    def _agreed(self, options: list[Option], bar: float) -> Option | None:
        """A slow gear moves where every observation saw a gain, until one that shares no arrival with the first."""
        memory = self.memory
        gains = {str(option.split.prefill): option.gain for option in options}
        least = {key: min(gain, memory.gains[key]) for key, gain in gains.items() if key in memory.gains}
        if max(least.values(), default=-math.inf) < bar:
            memory.gains, memory.confirming_at = gains, self.now
            return None
        memory.gains = least
        if not lasted(memory.confirming_at, self.now, SHORT_SECONDS):
            return None
        return max((o for o in options if str(o.split.prefill) in least), key=lambda o: least[str(o.split.prefill)])

    def _stay(self, found: Valued, best: Option) -> Decision:
        """Why nothing is gained, or why what would be may not be risked yet or may as well be had later."""
        doubt = found.unpaid.get(best.split)
        if doubt is not None and best.gain >= found.bar:
            return self._hold(
                reasons.SHORT_REGIME,
                f"{best.split} would have saved {doubt.saved:.0f} requests since traffic changed; the chance that it "
                f"changes back before the move has paid costs {doubt.risk:.0f}",
            )
        if best.split in found.early:
            return self._hold(
                reasons.CAN_WAIT,
                f"{best.split} would gain {100 * best.gain:.1f} points, and in {WAIT_SECONDS:.0f} s as much",
            )
        self.memory.elsewhere, message = attribute.elsewhere(self.missed, self.memory.elsewhere)
        if self.memory.elsewhere:
            return self._hold(reasons.MISSES_ELSEWHERE, message)
        return self._hold(
            reasons.BALANCED,
            f"{best.split} would gain {100 * max(0.0, best.gain):.1f} points, the bar is {100 * found.bar:.1f}",
        )

    def _lean(self, found: Valued, seen: Estimate) -> Decision | None:
        """With convertible decoders: the most decode workers that cost nothing now and would have cost nothing lately.

        Routing gives a prefill shortage to decoders within milliseconds, and nothing gives a decode shortage to
        anyone: of splits that are equal for the present load, the one with more decoders is safe against both shifts.
        """
        memory = self.memory
        if not (self.policy.convertible and self.policy.gear.slow) or memory.move_started >= 0:
            return None
        if memory.moves and self.now - memory.moves[-1].at < LEAN_SECONDS + self.policy.gear.seconds:
            return None
        equal = [
            option
            for option in found.options
            if option.split.decode > self.before.decode
            and option.gain + found.band * (option.split.decode - self.before.decode) >= -LEAN_LOSS
            and not self._starves(option.split, seen)
        ]
        if not equal:
            return None
        wanted = max(equal, key=lambda option: option.split.decode).split
        return self._to(wanted, reasons.RESERVE, f"{wanted} costs no more than {self.before} and has more decoders")

    @property
    def _last_move(self) -> float:
        return self.memory.moves[-1].at if self.memory.moves else -math.inf

    def _starves(self, split: Split, seen: Estimate) -> bool:
        """Whether _rescue() would undo a move to `split` at once. The present split never counts."""
        if self.policy.gear.slow or split == self.before:
            return False
        return shortage(split, seen, self.policy, self.memory.decode_factor).lent != 0

    def _rescue(self, seen: Estimate) -> Decision | None:
        """One observation is enough where a move costs a second; a slow gear waits for the value of the move."""
        if self.policy.gear.slow:
            return None
        have = self.before
        found = sudden(have, seen, self.policy, self.memory.decode_factor, self._last_move)
        target = Split(have.prefill + found.lent, have.decode - found.lent)
        if not found.lent or self._opposes(target):
            return None
        prefill, decode = f"{found.prefill:.1f}", f"{found.decode:.1f}"
        if found.lent > 0:
            message = f"prefill needs {prefill} workers and has {have.prefill}; decode needs {decode}"
        else:
            message = f"decode needs {decode} workers and has {have.decode}; prefill needs {prefill}"
        return self._to(target, reasons.STARVED, message)

    def _by_demand(self, seen: Estimate) -> Decision:
        """Without objectives there is nothing to miss: the two demands share the workers, with half a worker's band.

        Of roles that are both mostly idle nothing is moved: the ratio of two small demands is chance.
        """
        policy = self.policy
        without = [
            name for name, seconds in (("TTFT", policy.ttft_seconds), ("TPOT", policy.tpot_seconds)) if seconds is None
        ]
        unset = "no objectives are set" if len(without) == 2 else f"no {without[0]} objective is set"
        prefill, decode = seen.demand(self.policy, self.memory.decode_factor)
        share = self.before.total * prefill / max(prefill + decode, 1e-9)
        idle = prefill < IDLE * self.before.prefill and decode < IDLE * self.before.decode
        if idle or abs(share - self.before.prefill) <= 0.5 + STARVED_WORKERS:
            self.memory.confirming = 0
            return self._hold(reasons.NO_OBJECTIVES, f"{unset}; the split follows demand and fits it")
        prefills = min(self.before.total - 1, max(1, round(share)))
        wanted = Split(prefills, self.before.total - prefills)
        if self._opposes(wanted):
            return self._hold(reasons.MOVING, "a move the other way is under way")
        if not self._seen_twice(wanted):
            return self._hold(reasons.CONFIRMING, f"{unset}: demand asks for {wanted}; not confirmed yet")
        self.memory.confirming = 0
        return self._to(
            wanted,
            reasons.NO_OBJECTIVES,
            f"{unset}: the split follows demand, {prefill:.1f} prefill and {decode:.1f} decode workers",
        )

    def size(self, decision: Decision, fleets: dict[Pool, Fleet], growth: Growth) -> Decision:
        """Replicas, whenever the observation was fit and the windows are full. Zero traffic is a valid zero."""
        if self.seen is not None:
            demand = self.seen.demand(self.policy, self.memory.decode_factor, WINDOW_SECONDS)
        elif decision.reason == reasons.NO_TRAFFIC:
            demand = (0.0, 0.0)
        else:
            return decision
        measured = self._measured()
        found, after = sized(
            fleets,
            demand,
            decision.target,
            growth.bounds or self.policy.bounds,
            growth,
            self.policy.pause,
            measured is None or measured <= 1 - self.policy.attainment,
            self.memory.size,
            self.now,
        )
        if not decision.apply:
            # Nothing is done, so nothing is remembered as done; what demand asked for was seen all the same.
            after = msgspec.structs.replace(self.memory.size, needs=after.needs, since=after.since)
        self.memory.size = after
        return replace(decision, sizing=found)

    # Ends of the chain.

    def _to(self, wanted: Split, reason: str, message: str, limited: tuple[str, ...] = ()) -> Decision:
        """Towards `wanted`, as far as limits, the rate of moves and pauses allow."""
        limits = list(limited)
        projection: Projection = project(self.policy.bounds, wanted)
        limits += [x for x in projection.limited_by if x not in limits]
        target = projection.split
        pause = self.policy.pause
        step = target.prefill - self.before.prefill
        if pause == "All" or (pause == "ScaleUp" and step > 0) or (pause == "ScaleDown" and step < 0):
            return self._hold(reasons.PAUSED, f"scaling.pause is {pause}: {message}", (reasons.LIMITED_BY_PAUSE,))
        allowed = self._allowed()
        if abs(step) > allowed:
            limits.append(reasons.LIMITED_BY_RATE)
            step = allowed if step > 0 else -allowed
            target = Split(self.before.prefill + step, self.before.decode - step)
        return self._decision(target, reason, message, tuple(limits))

    def _allowed(self) -> int:
        """Workers that may change roles now."""
        usual = Rules(rates=(Rate("Pods", self.policy.moves_per_minute, MINUTE),))
        return min(self._allowed_by(rules) for rules in self.policy.move_rules or (usual,))

    def _allowed_by(self, rules: Rules) -> int:
        found = []
        for rate in rules.rates:
            recent = sum(m.workers for m in self.memory.moves if m.at > self.now - rate.period_seconds)
            found.append(max(0, rate.most(self.before.total) - recent))
        if not found:
            return self.before.total
        return min(found) if rules.select == "Min" else max(found)

    def _hold(self, reason: str, message: str, limited: tuple[str, ...] = ()) -> Decision:
        return self._decision(self.before, reason, message, limited)

    def _decision(self, target: Split, reason: str, message: str, limited: tuple[str, ...]) -> Decision:
        return Decision(
            at=self.now,
            before=self.before,
            target=target,
            reason=reason,
            message=message,
            limited_by=limited,
            inputs=self.inputs,
            options=self.options,
            apply=self.policy.mode == "Auto",
        )

    # Memory.

    def _note_moves(self) -> None:
        """Learn how long a move takes, and stop waiting for one that never ends."""
        memory = self.memory
        if memory.move_started < 0:
            return
        ended = all(worker.role == worker.target for worker in self.observation.workers)
        took = self.observation.taken_at - memory.move_started
        if ended and took > 0:
            if self.policy.gear.drains:
                memory.move_seconds = [*memory.move_seconds, took][-8:]
            memory.move_started = -1.0
        elif took > self.policy.gear.seconds + (DROP_SECONDS if self.policy.gear.drains else DROP_QUICK_SECONDS):
            memory.move_started = -1.0

    def _opposes(self, wanted: Split) -> bool:
        memory = self.memory
        if memory.move_started < 0 or not memory.moves:
            return False
        return memory.moves[-1].towards_prefill != (wanted.prefill > self.before.prefill)

    def _measured(self) -> float | None:
        """Share of requests that missed in the last ten minutes."""
        totals = self.memory.totals
        if not totals:
            return None
        first, last = totals[0], totals[-1]
        ended = last.finished + last.refused - first.finished - first.refused
        return (last.missed - first.missed) / ended if ended > 0 else None

    def _note_inputs(self, seen: Estimate, found: Valued) -> None:
        self.missed = attribute.last_minute(self.memory.totals)
        self.inputs = {
            **self._seen_now(seen),
            "dwellSeconds": round(found.dwell, 1),
            "bar": round(found.bar, 4),
            "modelledMisses": round(found.modelled, 4),
            **attribute.inputs(self.missed),
        }

    def _seen_now(self, seen: Estimate) -> dict[str, float]:
        prefill, decode = seen.demand(self.policy, self.memory.decode_factor)
        return {
            "prefillDemand": round(prefill, 3),
            "decodeDemand": round(decode, 3),
            "queuedPrefillSeconds": round(seen.queued_seconds, 3),
            "decoding": seen.decoding,
            "outputTokens": round(seen.output, 1),
            "contextTokens": round(seen.context, 1),
            "prefillVelocity": round(seen.velocity, 1),
            "decodeFactor": round(self.memory.decode_factor, 3),
        }
