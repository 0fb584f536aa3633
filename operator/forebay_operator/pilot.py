"""The rescaling law over time, for one model: Observation in, ruling out. The same for local mode and the operator.

It keeps the law's memory, what is believed of the workers' speed, and the last decisions that said something. No clock
and no I/O: who calls it brings observations, carries targets out and stores what a restart must know.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import msgspec

from forebay_operator.api.v1alpha1 import DisaggregatedModelSpec
from forebay_operator.calibrate.believed import MAX_BATCH, digest, read_speeds
from forebay_operator.decide import Decision, Memory, Policy, Sizing, Split, Workers, decide, reasons
from forebay_operator.decide.check import unfit
from forebay_operator.decide.estimate import absorb, step_seconds
from forebay_operator.decide.size_rules import BACK_OFF_MOST
from forebay_operator.homes import STARTS, Homes, StartUps, growth_of, resized
from forebay_operator.observe.fits import Capacity
from forebay_operator.observe.router_report import Totals
from forebay_operator.observe.traffic import Health, Observation, Signal
from forebay_operator.policy import law_policy

CHECKPOINT_SECONDS: Final = 60.0
CHECKPOINT_CHANGE: Final = 0.1
"""Learnt figures that moved by less are not worth a write."""

RESUME_SECONDS: Final = 10.0
"""A memory whose windows ended longer ago starts them anew: what came meanwhile is not known."""

BELIEF_CHANGE: Final = 0.1
"""A fit that differs by more from what is believed, as corrected since, takes its place."""

SETTLED_SECONDS: Final = 5.0
"""A reason to hold is told once it has lasted so long."""

HISTORY: Final = 10
FLAP_SECONDS: Final = 120.0
"""A move back so soon after a move is a flap."""

ADVICE_SECONDS: Final = 30.0
"""In mode Recommend, between two splits recommended in the same direction."""

TRANSIENT: Final = frozenset({reasons.CONFIRMING, reasons.MOVING})
"""Said on the way to another decision."""

SIZE_HOLDS: Final = frozenset({reasons.AT_MOST, reasons.BACKING_OFF, reasons.PAUSED, reasons.UNEXPLAINED})
"""Of the pools' sizes: what is told beside the split's own reason."""

NOBODY: Final = Workers(prefill_velocity=1.0, weights_seconds=1.0, resident_seconds=0.0, kv_tokens=1)
"""Stands where no worker has been measured yet. Nothing is decided with it."""

NOT_MEASURED: Final = "the workers' speed is not known yet: it is learnt from the first prompts and answers"


@dataclass(frozen=True, slots=True)
class Ruling:
    decision: Decision
    """Of this moment."""

    move: Split | None
    """New targets to carry out, of the workers there are to be; None: as they are."""

    homes: Split | None
    """New sizes of the home pools to carry out, with `move`; None: as they are."""

    told: Decision | None
    """The last decision that said something: a move, or a reason to hold that lasted."""


class Checkpoint(msgspec.Struct):
    """What a restart is to know. `memory` is Memory.dump(), whole or its durable part."""

    memory: dict[str, Any] = {}
    capacity: Capacity | None = None
    believed: dict[str, float] = {}
    """Of Workers, what is finite: JSON has no infinity."""

    totals: Totals | None = None
    starts: list[float] = []
    """Seconds that the last workers took from wanted to ready, newest last."""

    began_with: str = ""
    """digest() of the performance model that the law started from; empty: it started from none."""


@dataclass(frozen=True, slots=True)
class _Said:
    """What a ruling changes besides what it saw."""

    memory: Memory
    told: Decision | None
    history: tuple[Decision, ...]
    flaps: int
    advised: Decision | None


class Pilot:
    def __init__(self, checkpoint: Checkpoint | None = None, *, now: float) -> None:
        held = checkpoint or Checkpoint()
        self.memory = _restore(held.memory, now)
        self.believed = _workers(held.believed)
        self.began_with = held.began_with
        self.told: Decision | None = None
        self.history: list[Decision] = []
        """Told before, newest first."""

        self.flaps = 0
        self.signals: tuple[Signal, ...] = ()
        self.starts = [seconds for seconds in held.starts if 0 < seconds < math.inf][-STARTS:]
        self._startups = StartUps()
        self._advised: Decision | None = None
        """In mode Recommend: the size that was recommended last, while it still is."""

        self._candidate: tuple[str, float] | None = None
        self._before = _Said(self.memory, None, (), 0, None)
        self._saved_at = now
        self._saved: tuple[float, ...] = ()
        self._saved_with = held.began_with
        self.totals = held.totals or Totals()
        """Of the last observation, for an observer that goes on counting."""

    def start_from(self, spec: DisaggregatedModelSpec, capacity: Capacity) -> None:
        """Before each look: spec.scaling.performanceModel, where it is another than the law started from, takes the
        place of all that was learnt, in `capacity` too. A text that can't be read changes nothing.
        """
        text = spec.scaling.performance_model
        if text is None or digest(text) == self.began_with:
            return
        try:
            speeds = read_speeds(text, spec.engine.max_running_requests or MAX_BATCH)
        except ValueError:
            return
        self.began_with, self.believed = digest(text), speeds
        capacity.start_from(speeds)
        self.memory = self.memory.next()
        self._forget_corrections()

    def rule(
        self,
        observation: Observation,
        spec: DisaggregatedModelSpec,
        target: Split,
        learnt: Workers | None,
        now: float,
        homes: Homes | None = None,
    ) -> Ruling:
        """`target`: the split that is in force, however it came about. `learnt`: the workers' speed as it looks now.

        `homes`: the pools, where their sizes may be decided too.
        """
        self.signals = observation.signals
        self._believe(learnt)
        if self.memory.target != tuple(target):
            self.memory = self.memory.next()
            self.memory.target = (target.prefill, target.decode)
        self._before = _Said(self.memory, self.told, tuple(self.history), self.flaps, self._advised)
        if self.believed is None:
            decision = self._unmeasured(observation, law_policy(spec, NOBODY, target.total), target, now)
        else:
            growth = None if homes is None else growth_of(spec, homes, self.starts)
            policy = law_policy(spec, self.believed, target.total, growth)
            decision, self.memory = decide(
                observation, policy, self.memory, now, None if homes is None else homes.fleets
            )
        self._note_totals(observation)
        moved = decision.target != target and decision.target.total == target.total
        move = decision.target if moved and decision.apply else None
        sizing = decision.sizing
        resizes = sizing is not None and sizing.target != sizing.before
        if moved or decision.apply or not resizes:
            # Else the advice stands: told in turn with the split's reason to hold, both would be news for ever.
            self._tell(decision, moved, now)
        if sizing is None:
            return Ruling(decision, move, None, self.told)
        if not resizes:
            if self._advised is not None and now - self._advised.at >= ADVICE_SECONDS:
                self._advised = None
            return Ruling(decision, move, None, self.told)
        self._tell_size(decision, sizing)
        if not decision.apply:
            return Ruling(decision, None, None, self.told)
        targets = resized(move or target, sizing.before, sizing.target)
        return Ruling(decision, targets, sizing.target, self.told)

    def not_carried_out(self) -> None:
        """The last ruling changed nothing: it is neither told, nor counted against the rates, nor waited for."""
        before, memory = self._before, self.memory.next()
        memory.moves, memory.move_started = list(before.memory.moves), before.memory.move_started
        memory.size = before.memory.size
        memory.target = before.memory.target
        self.memory = memory
        self.told, self.history, self.flaps = before.told, list(before.history), before.flaps
        self._advised = before.advised

    def note_workers(self, ready: Mapping[str, bool], now: float) -> None:
        """Of the workers there are, which are ready: how long new ones take is learnt from it."""
        self.starts = [*self.starts, *self._startups.look(ready, now)][-STARTS:]

    def _unmeasured(self, observation: Observation, policy: Policy, target: Split, now: float) -> Decision:
        """The windows fill meanwhile, so that nothing is lost by waiting."""
        problem = (reasons.OFF, "scaling is off") if policy.mode == "Off" else None
        problem = problem or unfit(observation, policy, self.memory, now)
        if problem is None:
            self.memory = self.memory.next()
            absorb(observation, policy, self.memory)
            self._forget_corrections()
            problem = reasons.WARMING_UP, NOT_MEASURED
        return Decision(now, target, target, *problem, apply=policy.mode == "Auto")

    def _believe(self, learnt: Workers | None) -> None:
        """What is believed stays, and the law corrects it by factors; only when its shape is wrong it is replaced."""
        if learnt is None or learnt == self.believed:
            return
        if self.believed is not None:
            held, memory = self.believed, self.memory
            same_room = held.kv_tokens == learnt.kv_tokens and held.max_batch == learnt.max_batch
            now = [held.prefill_velocity * memory.prefill_factor]
            now += [_step(held, batch) * memory.decode_factor for batch in (1.0, 32.0)]
            then = [learnt.prefill_velocity, _step(learnt, 1.0), _step(learnt, 32.0)]
            if same_room and not _differs(now, then, BELIEF_CHANGE):
                return
        self.believed = learnt
        self.memory = self.memory.next()
        self._forget_corrections()

    def _forget_corrections(self) -> None:
        memory = self.memory
        memory.prefill_samples, memory.decode_samples = [], []
        memory.prefill_factor = memory.decode_factor = 1.0

    def _tell(self, decision: Decision, moved: bool, now: float) -> None:
        if moved:
            self._flap(decision)
        elif decision.reason in TRANSIENT:
            return
        elif self.told is not None and _subject(self.told) == _subject(decision):
            self._candidate = None
            return
        elif self._candidate is None or self._candidate[0] != _subject(decision):
            self._candidate = (_subject(decision), now)
            if self.told is not None:
                return
        elif now - self._candidate[1] < SETTLED_SECONDS:
            return
        if moved and not decision.apply and self._recommended(decision):
            return
        self._say(decision)

    def _tell_size(self, decision: Decision, sizing: Sizing) -> None:
        """As a decision of its own: from and to are the pools' sizes."""
        advised = self._advised
        if not decision.apply and advised is not None and advised.target == sizing.target:
            return
        said = replace(
            decision,
            before=sizing.before,
            target=sizing.target,
            reason=sizing.reason,
            message=sizing.message,
            limited_by=sizing.limited_by,
            options=(),
        )
        self._advised = None if decision.apply else said
        self._say(said)

    def _say(self, decision: Decision) -> None:
        self._candidate = None
        if self.told is not None:
            self.history = [self.told, *self.history][:HISTORY]
        self.told = decision

    def _recommended(self, decision: Decision) -> bool:
        """Already, or as good as: nobody acts on advice that changes each second."""
        told = next(self._told_splits(), None)
        if told is None or told.target == told.before:
            return False
        same_way = (told.target.prefill - told.before.prefill) * (decision.target.prefill - decision.before.prefill) > 0
        return told.target == decision.target or (same_way and decision.at - told.at < ADVICE_SECONDS)

    def _told_splits(self) -> Iterator[Decision]:
        """What was told of the split, newest first."""
        return (d for d in (self.told, *self.history) if d is not None and not is_size(d))

    def _flap(self, decision: Decision) -> None:
        moves = [d for d in self._told_splits() if d.target != d.before]
        if decision.apply and moves and decision.at - moves[0].at < FLAP_SECONDS:
            last = moves[0].target.prefill - moves[0].before.prefill
            self.flaps += last * (decision.target.prefill - decision.before.prefill) < 0

    def trouble(self) -> list[Signal]:
        """Signals that keep the law from deciding."""
        bad = (Health.MISSING, Health.STALE, Health.INVALID)
        return [signal for signal in self.signals if signal.needed and signal.health in bad]

    # What a restart is to know.

    def durable(self) -> dict[str, Any]:
        """Of the memory, what belongs with the targets it was decided with."""
        return self.memory.durable().dump()

    def checkpoint(self, capacity: Capacity, *, windows: bool) -> Checkpoint:
        """`windows`: with the last minutes' figures, for a restart within RESUME_SECONDS."""
        memory = self.memory if windows else without_windows(self.memory)
        believed, starts = finite(self.believed), list(self.starts)
        return Checkpoint(memory.dump(), capacity.copy(), believed, self.totals, starts, self.began_with)

    def checkpoint_due(self, now: float) -> bool:
        """Whether soft memory is worth writing: at most each minute, when a figure moved by a tenth. True notes it."""
        memory = self.memory
        if now - self._saved_at < CHECKPOINT_SECONDS or self.believed is None:
            return False
        anew = self._saved_with != self.began_with
        figures = (
            memory.output,
            self.believed.prefill_velocity * memory.prefill_factor,
            _step(self.believed, 32.0) * memory.decode_factor,
            float(len(memory.runs)),
            float(memory.regime),
            float(len(self.starts)),
        )
        if self._saved and not anew and not _differs(self._saved, figures, CHECKPOINT_CHANGE):
            return False
        self._saved_at, self._saved, self._saved_with = now, figures, self.began_with
        return True

    def _note_totals(self, observation: Observation) -> None:
        if observation.finished is not None:
            self.totals = Totals(
                generated_tokens=observation.generated_tokens or 0,
                finished=observation.finished,
                refused=observation.refused or 0,
                missed_ttft=observation.missed_ttft or 0,
                missed_tpot=observation.missed_tpot or 0,
                missed_in=observation.missed_in,
            )


def is_size(decision: Decision) -> bool:
    """Whether it was told of the pools' sizes, not of the split."""
    sizing = decision.sizing
    return sizing is not None and sizing.target != sizing.before and decision.target == sizing.target


def size_hold(decision: Decision) -> Sizing | None:
    """What keeps the pools from a size that demand asks for, where people should know of it."""
    sizing = decision.sizing
    held = sizing is not None and sizing.target == sizing.before and sizing.reason in SIZE_HOLDS
    return sizing if held else None


def subject_of(reason: str, message: str) -> str:
    """What the message begins with, where that is news and the figures behind it are not."""
    named = reason.startswith("Metrics") or reason == reasons.MISSES_ELSEWHERE
    return message.partition(":")[0] if named else ""


def _subject(decision: Decision) -> str:
    """What a decision is about: figures in its message change with each look. Of metrics and misses, which of them."""
    named = subject_of(decision.reason, decision.message)
    held = size_hold(decision)
    return f"{decision.reason} {named} {'' if held is None else held.reason}"


def without_windows(memory: Memory) -> Memory:
    """Without what a minute makes old: the law then holds until its windows are full again."""
    kept = memory.next()
    kept.forget_windows()
    kept.seen_at = kept.move_started = -1.0
    kept.size = kept.size.durable()
    return kept


def _restore(saved: Mapping[str, Any], now: float) -> Memory:
    """Never raises: from what another version wrote, or a clock that was ahead, as much is taken as is safe."""
    try:
        memory = Memory.load(dict(saved))
    except (msgspec.ValidationError, TypeError, ValueError):
        return Memory()
    memory.moves = [moved if moved.at <= now else msgspec.structs.replace(moved, at=now) for moved in memory.moves]
    memory.regime_since = min(memory.regime_since, now)
    memory.regime_worse_at = min(memory.regime_worse_at, now)
    size = memory.size
    size.changes = [change if change.at <= now else msgspec.structs.replace(change, at=now) for change in size.changes]
    size.blocked_until = min(size.blocked_until, now + BACK_OFF_MOST)
    if not 0 <= now - memory.seen_at <= RESUME_SECONDS:
        memory = without_windows(memory)
    return memory


def finite(workers: Workers | None) -> dict[str, float]:
    """As a Checkpoint's `believed`."""
    return {} if workers is None else {k: v for k, v in asdict(workers).items() if math.isfinite(v)}


def _workers(saved: Mapping[str, float]) -> Workers | None:
    try:
        return msgspec.convert(dict(saved), Workers, strict=False) if saved else None
    except (msgspec.ValidationError, TypeError, ValueError):
        return None


def _step(workers: Workers, batch: float) -> float:
    """A decode step at a usual context."""
    return step_seconds(workers, batch, 1000.0 * batch)


def _differs(old: Any, new: Any, share: float) -> bool:
    return any(abs(a - b) > share * max(abs(a), abs(b)) for a, b in zip(old, new, strict=True))
