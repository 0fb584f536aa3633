"""The rescaling law in local mode: each second one look at the router and one ruling, which may switch roles.

What it learnt stays in the state folder, so that the next `up` of the same model need not learn it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import aiohttp
import msgspec

from forebay_operator.api.ratio import Ratio
from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.decide import Decision, Split
from forebay_operator.decide.reasons import METRICS_MISSING, WARMING_UP
from forebay_operator.homes import Homes
from forebay_operator.local.errors import LocalError
from forebay_operator.local.state import StateFolder
from forebay_operator.local.status import DecisionStatus
from forebay_operator.observe.assemble import until_next_look
from forebay_operator.observe.endpoints import EndpointsSource
from forebay_operator.observe.fleet import Fleet
from forebay_operator.pilot import Checkpoint, Pilot, is_size, size_hold

log = logging.getLogger(__name__)

MEMORY: Final = "law.json"
FIRST_FIGURES_SECONDS: Final = 10.0
"""From all workers being ready to their first figures at the law: twice what the slowest reading takes."""


class Saved(msgspec.Struct):
    """The file in the state folder."""

    spec: str
    """learnt_with() of the model."""

    checkpoint: Checkpoint


def learnt_with(model: DisaggregatedModel) -> str:
    """Digest of what the figures depend on: another engine or model has other speeds."""
    parts = model.spec.model_dump(mode="json", include={"model", "engine"})
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class Rescaling:
    """One model's. Made and used on the supervisor's event loop."""

    def __init__(
        self,
        model: DisaggregatedModel,
        state: StateFolder,
        session: aiohttp.ClientSession,
        *,
        token: str,
        switch: Callable[[Ratio], object],
        resize: Callable[[Split, Split], object],
        tell: Callable[[str], None],
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`switch` carries a split out, `resize` sizes of the home pools with the split to have then; they raise
        ValueError or LocalError when they can't."""
        # Wall time, so that what is stored means something later, but without its jumps.
        self._offset = wall() - monotonic()
        self._monotonic = monotonic
        self._spec = model.spec
        self._state = state
        self._switch = switch
        self._resize = resize
        self._tell = tell
        self._digest = learnt_with(model)
        checkpoint = self._read()
        self.pilot = Pilot(checkpoint, now=self.clock())
        self.source = EndpointsSource(
            session, self.clock, token=token, base=checkpoint.totals, capacity=checkpoint.capacity
        )
        self._ready_at: float | None = None
        """When every worker was ready for the first time."""

        self._announced: Decision | None = None
        self._refused: str = ""
        self._failed: set[str] = set()

    def clock(self) -> float:
        """Seconds, as the law counts them."""
        return self._offset + self._monotonic()

    async def try_to_step(self, fleet: Fleet, homes: Homes | None = None) -> None:
        """A look that fails unforeseen is told, once for each kind of failure: serving goes on without the law."""
        try:
            await self.step(fleet, homes)
        except Exception as error:
            log.debug("a look of the law failed", exc_info=True)
            kind = type(error).__name__
            if kind not in self._failed:
                self._failed.add(kind)
                self._tell(f"rescaling stands still: a look failed unforeseen ({kind}: {error}); please report it")

    async def step(self, fleet: Fleet, homes: Homes | None = None) -> None:
        """Never raises for what the router says. Bounded by the source's deadlines."""
        observed = await self.source.observe(fleet)
        roles = [member.target for member in fleet.members]
        target = Split(roles.count("prefill"), roles.count("decode"))
        now = self.clock()
        if self._ready_at is None and roles and all(member.ready for member in fleet.members):
            self._ready_at = now
        self.pilot.note_workers({member.name: member.ready for member in fleet.members}, now)
        self.pilot.start_from(self._spec, self.source.capacity)
        ruling = self.pilot.rule(observed, self._spec, target, self.source.workers(), now, homes)
        if ruling.move is not None:
            self._carry_out(ruling.move, ruling.homes)
        self._announce(self.pilot.told)
        if self.pilot.checkpoint_due(now):
            self.save()

    def until_next_look(self) -> float:
        """Seconds."""
        return until_next_look(self.clock())

    def _carry_out(self, move: Split, homes: Split | None) -> None:
        try:
            if homes is None:
                self._switch(Ratio(move.prefill, move.decode))
            else:
                self._resize(homes, move)
        except (ValueError, LocalError) as error:
            # It is tried again with the next look, and said once.
            self.pilot.not_carried_out()
            if str(error) != self._refused:
                self._tell(f"rescaling to {move} failed: {error}")
            self._refused = str(error)
        else:
            self._refused = ""

    def _announce(self, told: Decision | None) -> None:
        if told is None or told is self._announced:
            return
        self._announced = told
        if told.target != told.before:
            verb = ("resizing" if is_size(told) else "rescaling") if told.apply else "recommended"
            self._tell(f"{verb}: {told.before} -> {told.target} ({told.reason}): {told.message}")

    def save(self) -> None:
        """Losing it costs a minute of learning: no reason to end."""
        if self.pilot.believed is None:
            return
        saved = Saved(self._digest, self.pilot.checkpoint(self.source.capacity, windows=True))
        with contextlib.suppress(LocalError):
            self._state.write(MEMORY, msgspec.json.encode(saved))

    def _read(self) -> Checkpoint:
        try:
            saved = msgspec.json.decode((self._state.path / MEMORY).read_bytes(), type=Saved)
        except (OSError, msgspec.MsgspecError):
            return Checkpoint()
        return saved.checkpoint if saved.spec == self._digest else Checkpoint()

    def decision(self) -> DecisionStatus | None:
        told = self.pilot.told
        if told is None:
            return None
        ready_for = None if self._ready_at is None else self.clock() - self._ready_at
        return softened(shown(told), learnt=self.pilot.believed is not None, ready_for=ready_for)

    def recommended(self) -> str | None:
        """The split that the law would have, in mode Recommend."""
        told = self.pilot.told
        advice = told is not None and not told.apply and not is_size(told)
        return str(told.target) if told is not None and advice else None


def softened(told: DecisionStatus, *, learnt: bool, ready_for: float | None) -> DecisionStatus:
    """Figures that no worker has had the time to report are awaited, not missing. `ready_for`: seconds since every
    worker was ready first, None before."""
    young = ready_for is None or ready_for < FIRST_FIGURES_SECONDS
    if told.reason != METRICS_MISSING or learnt or not young:
        return told
    return msgspec.structs.replace(told, reason=WARMING_UP, message="the workers' first figures are awaited")


def shown(decision: Decision) -> DecisionStatus:
    held = size_hold(decision)
    size = "" if held is None else f". Workers, {held.reason}: {held.message}"
    return DecisionStatus(
        time=datetime.fromtimestamp(decision.at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        from_=str(decision.before),
        to=str(decision.target),
        reason=decision.reason,
        message=decision.message + size,
        limited_by=list(decision.limited_by),
        inputs=dict(decision.inputs),
        rejected={str(option.split): round(option.gain, 4) for option in decision.options[:8]},
    )
