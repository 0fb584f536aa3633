"""The rescaling law beside the reconciles: one follower a model looks each second and wakes the reconcile with news.

A follower decides and nothing else. The reconcile writes the decision with its targets and memory to status first, and
realises the targets in its next pass, so that an operator that dies in between neither loses nor repeats a move.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Protocol

import msgspec

from forebay_operator.api.conditions import truncate
from forebay_operator.api.labels import Pool
from forebay_operator.api.scaling import Metrics
from forebay_operator.api.v1alpha1 import DisaggregatedModelSpec
from forebay_operator.decide import Decision, Split
from forebay_operator.homes import Homes
from forebay_operator.observe.assemble import until_next_look
from forebay_operator.observe.fits import Capacity
from forebay_operator.observe.fleet import Fleet
from forebay_operator.observe.router_report import Totals
from forebay_operator.observe.traffic import Health, Signal
from forebay_operator.observe.traffic_source import TrafficSource
from forebay_operator.observe.types import MetricsView
from forebay_operator.pilot import Checkpoint, Pilot, is_size, size_hold, subject_of

log = logging.getLogger(__name__)

LAW: Final = "law"
"""Key in status.memory: the law's checkpoint."""

SIZE: Final = "workers"
"""Key in the inputs of a decision: why pools do not get the size that demand asks for."""

HISTORY: Final = 10

LOOKS_APART_SECONDS: Final = 0.003
"""Between the looks of two models: all at once they would keep every reconcile waiting for most of a second."""

LOOKS_WITHIN_SECONDS: Final = 0.9
"""Of a second. Later looks would lose what they gain by coming just after the end of one."""

Key = tuple[str, str]
MakeSource = Callable[[Key, DisaggregatedModelSpec, Totals | None, Capacity | None], Awaitable[TrafficSource]]


class Counts(Protocol):
    """What is counted of decisions (metrics.py)."""

    def decided(self, key: Key, reason: str) -> None: ...

    def flapped(self, key: Key, count: int) -> None: ...


@dataclass(slots=True)
class Following:
    """What the follower of one model is told and tells."""

    uid: str
    spec: DisaggregatedModelSpec
    fleet: Fleet
    target: Split
    """As recorded in status."""

    pilot: Pilot
    law: dict[str, Any]
    """The checkpoint as it is, or is to be, in status.memory."""

    homes: Homes | None = None
    """The home pools, as the last reconcile saw them."""

    pending: Split | None = None
    """Decided and not recorded yet."""

    pending_homes: Split | None = None
    """Sizes of the home pools that were decided with it."""

    told: dict[str, Any] | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    trouble: MetricsView | None = None
    source: TrafficSource | None = None
    asked: Metrics | None = None
    base: Totals | None = None
    capacity: Capacity | None = None
    task: asyncio.Task[None] | None = None
    place: int = 0
    """In the row of the models that are looked at in a second."""


@dataclass(frozen=True, slots=True)
class Word:
    """What a reconcile gets: what to put into status, and new targets to record."""

    decision: dict[str, Any] | None
    decisions: list[dict[str, Any]]
    law: dict[str, Any]
    move: Split | None
    homes: Split | None
    """Sizes of the home pools, to be recorded with `move`."""

    trouble: MetricsView | None


class Rescaler:
    def __init__(
        self,
        make_source: MakeSource,
        *,
        clock: Callable[[], float],
        wake: Callable[[Key], None],
        counts: Counts,
    ) -> None:
        """`clock`: wall time without jumps, in seconds. `wake` asks for a reconcile."""
        self._make_source = make_source
        self._clock = clock
        self._wake = wake
        self._counts = counts
        self._following: dict[Key, Following] = {}

    async def run(self) -> None:
        """Until cancelled; then every follower ends."""
        try:
            await asyncio.Event().wait()
        finally:
            for key in list(self._following):
                self.forget(key)

    def see(
        self,
        key: Key,
        uid: str,
        spec: DisaggregatedModelSpec,
        status: Mapping[str, Any],
        fleet: Fleet,
        targets: Mapping[Pool, int],
        homes: Homes | None = None,
    ) -> Word | None:
        """Of each reconcile: what it sees, for what the law says. None where no law runs (mode Off)."""
        held = self._following.get(key)
        if held is not None and held.uid != uid:
            self.forget(key)
            held = None
        if spec.scaling.mode == "Off":
            self.forget(key)
            return None
        target = Split(targets["prefill"], targets["decode"])
        if held is None:
            held = self._begin(key, uid, spec, status, fleet, target)
        recorded = tuple((status.get(pool) or {}).get("target") for pool in ("prefill", "decode"))
        if recorded == held.pending or target.total != held.target.total or spec != held.spec:
            # It is recorded; or there are other workers, or other rules now than it was decided for.
            held.pending = held.pending_homes = None
        held.spec, held.fleet, held.homes = spec, fleet, homes
        held.target = target
        held.pilot.note_workers({member.name: member.ready for member in fleet.members if member.there}, self._clock())
        return Word(held.told, held.history, held.law, held.pending, held.pending_homes, held.trouble)

    def forget(self, key: Key) -> None:
        held = self._following.pop(key, None)
        if held is not None and held.task is not None:
            held.task.cancel()

    def _begin(
        self,
        key: Key,
        uid: str,
        spec: DisaggregatedModelSpec,
        status: Mapping[str, Any],
        fleet: Fleet,
        target: Split,
    ) -> Following:
        law = (status.get("memory") or {}).get(LAW) or {}
        checkpoint = read_checkpoint(law)
        pilot = Pilot(checkpoint, now=self._clock())
        held = Following(uid, spec, fleet, target, pilot, law)
        held.told = status.get("decision")
        held.history = list(status.get("decisions") or [])
        held.base, held.capacity = checkpoint.totals, checkpoint.capacity
        held.place = free_place(other.place for other in self._following.values())
        self._following[key] = held
        self._start(key, held)
        return held

    def _start(self, key: Key, held: Following) -> None:
        held.task = asyncio.create_task(self._follow(key, held))

    async def _follow(self, key: Key, held: Following) -> None:
        """One look after another, whatever becomes of each."""
        try:
            while True:
                await self.try_to_look(key)
                await asyncio.sleep(until_next_look(self._clock() - delay_of(held.place)))
        finally:
            if held.source is not None:
                await held.source.close()

    async def try_to_look(self, key: Key) -> None:
        """A look that fails unforeseen is told in status and logged, once for each kind of failure."""
        held = self._following[key]
        try:
            await self.look(key)
        except Exception as error:
            subject = f"the law ({type(error).__name__})"
            trouble = MetricsView(Health.INVALID, subject, f"{subject} failed; see the operator's log and report it")
            if _kind(trouble) != _kind(held.trouble):
                log.exception("%s: looking at its traffic", key)
                held.trouble = trouble
                self._wake(key)

    async def look(self, key: Key) -> None:
        """One look, one ruling; wakes the reconcile when there is news."""
        held = self._following[key]
        source = await self._source(key, held)
        observed = await source.observe(held.fleet)
        now, pilot = self._clock(), held.pilot
        told, flaps = pilot.told, pilot.flaps
        pilot.start_from(held.spec, source.capacity)
        in_force, homes = held.pending or held.target, held.homes
        if homes is not None and held.pending_homes is not None:
            homes = homes.ordered(held.pending_homes)
        ruling = pilot.rule(observed, held.spec, in_force, source.workers(), now, homes)
        self._counts.decided(key, ruling.decision.reason)
        self._counts.flapped(key, pilot.flaps - flaps)
        news = ruling.move is not None
        if ruling.move is not None:
            held.pending = ruling.move
            held.pending_homes = ruling.homes or held.pending_homes
        if ruling.told is not None and ruling.told is not told:
            news |= self._say(held, as_status(ruling.told))
        trouble = _trouble(pilot.trouble())
        if _kind(trouble) != _kind(held.trouble):
            held.trouble = trouble
            news = True
        if news or pilot.checkpoint_due(now):
            held.law = write_checkpoint(pilot.checkpoint(source.capacity, windows=False))
            self._wake(key)

    def _say(self, held: Following, said: dict[str, Any]) -> bool:
        """Whether it is news."""
        if held.told is not None:
            if _same(held.told, said):
                return False
            held.history = [held.told, *held.history][:HISTORY]
        held.told = said
        return True

    async def _source(self, key: Key, held: Following) -> TrafficSource:
        """The one that the spec asks for now. Another one goes on from what the one before had counted and learnt."""
        asked = held.spec.scaling.metrics
        if held.source is not None and held.asked == asked:
            return held.source
        if held.source is not None:
            held.base, held.capacity = held.pilot.totals, held.source.capacity
            await held.source.close()
            held.source = None
        held.source = await self._make_source(key, held.spec, held.base, held.capacity)
        held.asked = asked
        return held.source


def free_place(taken: Iterable[int]) -> int:
    """The first place that nobody has."""
    held = set(taken)
    return next(place for place in itertools.count() if place not in held)


def delay_of(place: int) -> float:
    """Seconds after the first look of each second."""
    return place * LOOKS_APART_SECONDS % LOOKS_WITHIN_SECONDS


def _same(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """A restarted operator that comes to hold for the reason it held for has no news."""
    hold = old.get("from") == old.get("to") and new["from"] == new["to"]
    size = [(said.get("inputs") or {}).get(SIZE) for said in (old, new)]
    about = [subject_of(said.get("reason", ""), said.get("message", "")) for said in (old, new)]
    same = old.get("reason") == new["reason"] and about[0] == about[1] and old.get("to") == new["to"]
    return hold and same and size[0] == size[1]


def _kind(trouble: MetricsView | None) -> tuple[str, str] | None:
    return None if trouble is None else (trouble.health, trouble.subject)


def _trouble(signals: list[Signal]) -> MetricsView | None:
    if not signals:
        return None
    first = signals[0]
    more = f" (and {len(signals) - 1} more)" if len(signals) > 1 else ""
    return MetricsView(first.health, first.name, f"{first.name} ({first.source}): {first.note}{more}")


def as_status(decision: Decision) -> dict[str, Any]:
    """As status.decision."""
    moved, size = decision.target != decision.before, is_size(decision)
    # A split of another number of workers is not carried out: what pools have changes by decisions of its own.
    done = decision.apply and (size or decision.target.total == decision.before.total)
    act = "Scale" if size else "SwitchRole"
    inputs: dict[str, Any] = dict(decision.inputs)
    message, limits = decision.message, list(decision.limited_by)
    held = size_hold(decision)
    if held is not None:
        message += f". Workers, {held.reason}: {held.message}"
        limits += [limit for limit in held.limited_by if limit not in limits]
        inputs[SIZE] = held.reason
    rejected = {str(o.split): round(o.gain, 4) for o in decision.options if o.split != decision.target}
    if rejected:
        inputs["rejected"] = dict(list(rejected.items())[:8])
    return {
        "time": datetime.fromtimestamp(int(decision.at), UTC).isoformat().replace("+00:00", "Z"),
        "action": (act if done else "Recommend") if moved else "Hold",
        "from": str(decision.before),
        "to": str(decision.target),
        "reason": decision.reason,
        "message": truncate(message),
        "limitedBy": ",".join(limits),
        "inputs": inputs,
    }


def learnt_starts(status: Mapping[str, Any]) -> list[float]:
    """Seconds that the last workers took to start, from status.memory; none where they are no numbers."""
    starts = ((status.get("memory") or {}).get(LAW) or {}).get("starts")
    return [float(s) for s in starts if isinstance(s, (int, float)) and s > 0] if isinstance(starts, list) else []


def read_checkpoint(law: Mapping[str, Any]) -> Checkpoint:
    """Never raises: what another version wrote is learnt anew."""
    try:
        return msgspec.convert(dict(law), Checkpoint)
    except (msgspec.ValidationError, TypeError, ValueError):
        log.warning("the law's memory in status is not of this version's kind; it is learnt anew")
        return Checkpoint()


def write_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """Without nulls: they say nothing, and merge patches (and some imitations of the API server) drop them."""
    value: dict[str, Any] = _rounded(msgspec.to_builtins(checkpoint))
    return value


def _rounded(value: Any) -> Any:
    """Six figures are more than anything here is known to, and half the bytes."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if abs(value) < 1e6 else round(value, 3)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value
