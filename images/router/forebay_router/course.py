"""What a request has tried, what its client holds, and so which worker and which leg come next.

- *decode*: the client's body with the prefill worker's params, as long as no token of a decode worker is out (R3);
- *continue*: /internal/continue with the token ids delivered so far (R4);
- *plain*: both phases on one worker, when nothing else is left (R5), when the request cannot be split, or when the ids
  of what is out are not known; what the client has already is left out of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from forebay_router import choice
from forebay_router.candidate import Candidate, Health, Key
from forebay_router.context import Context
from forebay_router.legs import ClientCall, HandOff, Params
from forebay_router.relay import Delivered
from forebay_router.workers import Worker
from forebay_wire import paths

RESUME_SECONDS = 3.0
"""How long a stream that has begun waits for a worker to come back before it ends with an error."""

RESUME_BUSY_SECONDS = 15.0
"""The same while some worker answers, but is busy."""

RESUME_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Leg:
    """What to ask a worker for the (rest of the) answer."""

    name: str
    path: str
    body: bytes
    first_byte: float
    """Seconds to wait for the first byte."""

    skip: Counter[int] | None = None
    """Chunks by answer that the client has already and this leg brings again."""


class Course:
    def __init__(self, ctx: Context, call: ClientCall, tokens: int, turn: int) -> None:
        """`tokens`: prompt and answer, estimated."""
        self._ctx = ctx
        self.call = call
        self._tokens = tokens
        self._turn = turn
        self.delivered = Delivered(call.several)
        self.handoff: HandOff | None = None
        self.compat_hash = ""
        """Of the prefill worker that gave the hand-off."""

        self.late_events = 0
        self.late_ids = 0
        """Of `delivered`, what came after the hand-off's delta."""

        self._failed: set[Key] = set()
        self._busy: dict[Key, float] = {}
        """When a worker that was busy may be asked again."""

        self._decode_busy = False

    def lost(self, key: Key) -> None:
        """That worker failed this request: not tried again, unless it restarts."""
        self._failed.add(key)

    def busy(self, worker: Worker, key: Key, seconds: float) -> None:
        """That worker is busy for so long."""
        self._decode_busy |= worker.role == "decode"
        self._busy[key] = self._ctx.clock() + min(1.0, seconds)

    @property
    def tried(self) -> Collection[Key]:
        return self._failed | self._busy.keys()

    async def next_worker(self, begun: Callable[[], bool]) -> Worker | None:
        """The best worker not tried yet. Once a stream has begun, waits a little for one to come back."""
        clock = self._ctx.clock
        began = clock()
        while True:
            now = clock()
            started = begun()
            busy = {key for key, again in self._busy.items() if not started or now < again}
            picked = self._pick(self._failed | busy, started)
            if picked is not None:
                return self._ctx.worker(picked)
            if not started or now - began >= (RESUME_BUSY_SECONDS if self._busy else RESUME_SECONDS):
                return None
            await asyncio.sleep(RESUME_POLL_SECONDS)

    def _pick(self, excluded: Collection[Key], started: bool) -> Candidate | None:
        candidates = self._ctx.candidates(self.call)
        if self._can_pull():
            decodes = (c for c in candidates if c.role == "decode")
            picked = choice.pick_decode(decodes, self._tokens, self._turn, excluded, self.compat_hash)
            if picked is not None and picked.health == Health.READY:
                return picked
        # A busy decode pool is no reason to decode on the prefill pool, unless the client can be told no more.
        mixed = self._ctx.settings.both_phases and (started or not self._decode_busy)
        return choice.pick_any(candidates, self._tokens, self._turn, excluded, mixed=mixed or not self.call.split)

    @property
    def whole(self) -> bool:
        """The client has everything but [DONE]: a worker died between the two."""
        return self.delivered.whole(usage_asked=self.call.asks_usage())

    def _can_pull(self) -> bool:
        """Whether a decode leg still gives what the client lacks: no token of a decode worker is out."""
        return self.handoff is not None and self.late_ids == 0 and not (self.late_events and self.delivered.content)

    def leg_for(self, worker: Worker) -> Leg | None:
        """None: what is out can be gone on with by no worker."""
        call, delivered, settings = self.call, self.delivered, self._ctx.settings
        report = worker.report
        if self.handoff is not None and self._can_pull() and report and report.compat_hash == self.compat_hash:
            body = call.decode(self.handoff.raw)
            return Leg("decode", call.path, body, settings.handoff_timeout, Counter({0: self.late_events}))
        params = self.handoff.params if self.handoff else Params()
        created = params.created or delivered.created
        if delivered.ids and call.split and created is not None:
            body = call.resume(
                created=created,
                prompt_tokens=params.prompt_tokens,
                cached_tokens=params.cached_tokens or 0,
                output_ids=delivered.ids,
            )
            return Leg("continue", paths.CONTINUE, body, settings.prefill_timeout)
        if delivered.content and not delivered.ids and not call.several:
            # Text of an engine that tells no token ids is out: nothing says that another run gives the same.
            return None
        return Leg("plain", call.path, call.plain(), settings.prefill_timeout, Counter(delivered.by_index))
