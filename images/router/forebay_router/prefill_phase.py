"""The prefill phase of one request: from choice to hand-off (R1, R5, R6)."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import replace

from forebay_router import gear
from forebay_router.attempts import may_retry
from forebay_router.candidate import Candidate
from forebay_router.choice import NoPair
from forebay_router.legs import read_handoff
from forebay_router.phases import Parts
from forebay_router.upstream import Reply, WorkerFailed
from forebay_router.workers import Worker
from forebay_wire.errors import ApiError

START_PERIOD_SECONDS = 0.05


class Outcome(enum.Enum):
    ANSWERED = "the client has its answer"
    HANDED_OFF = "course.handoff is set"
    TOGETHER = "a decode worker (`target`) is to run both phases, by choice"
    NO_PAIR = "any worker left is to run both phases"


class PrefillPhase:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.body = b""
        """The answer of the prefill leg that gave the hand-off."""

        self.target: Worker | None = None
        self._may_convert = True

    async def run(self) -> Outcome:
        parts = self._parts
        ctx, course = parts.ctx, parts.course
        while True:
            placed = self._place()
            if isinstance(placed, NoPair):
                if self._pair_to_come(placed):
                    await asyncio.sleep(START_PERIOD_SECONDS)
                    continue
                return await self._without_pair(placed.kind)
            if isinstance(placed, gear.Refused):
                await self._refuse(placed)
                return Outcome.ANSWERED
            if isinstance(placed, gear.Together):
                # Once: if that worker fails or declines, the usual way is left.
                self._may_convert = False
                self.target = ctx.worker(placed.worker)
                parts.account.converted(placed.kind)
                return Outcome.TOGETHER
            chosen = placed.pair.prefill
            prefill = ctx.worker(chosen)
            await parts.reservation.begin(prefill, chosen.compat_hash)
            reply = await self._leg(prefill, chosen)
            if reply is None:
                continue
            if reply.status != 200:
                await parts.answer.pass_on(reply)
                return Outcome.ANSWERED
            course.handoff = read_handoff(reply.body)
            if course.handoff is None:
                parts.attempts.lost(prefill, chosen.key, "prefill", "no_params")
                continue
            self.body = reply.body
            course.compat_hash = chosen.compat_hash
            if course.handoff.finished:
                parts.attempts.lease_at = None
            params = course.handoff.params
            parts.answer.prompt_known(params.prompt_tokens, params.cached_tokens)
            if params.prompt_tokens:
                prefill.has_prefixes(parts.call.beginnings.entries(params.prompt_tokens), chosen.engine_id)
            return Outcome.HANDED_OFF

    def _place(self) -> gear.Split | gear.Together | gear.Refused | NoPair:
        parts, policy = self._parts, self._parts.ctx.policy
        if not self._may_convert:
            policy = replace(policy, convertible="never")
        if parts.attempts.spent:
            # Time and perhaps a prefill were spent on it already: only a request's first try is refused.
            policy = replace(policy, refusal_factor=0.0)
        return gear.place(
            parts.ctx.candidates(parts.call),
            parts.prompt_tokens,
            policy,
            handoff_seconds=parts.ctx.handoff_seconds.value,
            answer_tokens=parts.ctx.answer_tokens.value,
            turn=parts.turn,
            excluded=parts.course.tried,
        )

    def _pair_to_come(self, no: NoPair) -> bool:
        role = {"no_prefill": "prefill", "no_decode": "decode"}.get(no.kind)
        ctx = self._parts.ctx
        return role is not None and ctx.workers.to_come(role, ctx.settings.start_grace)

    async def _refuse(self, refused: gear.Refused) -> None:
        """R6: no prefill was spent."""
        parts = self._parts
        parts.account.refused("router", refused.short)
        limit = parts.ctx.policy.latest_seconds
        await parts.answer.refuse(
            ApiError(
                429,
                f"the first token is expected in {refused.seconds:.2f} s, later than the {limit:.2f} s allowed; "
                "try again later",
                retry_after=refused.retry_after,
            )
        )

    async def _leg(self, worker: Worker, chosen: Candidate) -> Reply | None:
        """The worker's answer; None when another worker is to be tried."""
        parts, key = self._parts, chosen.key
        ctx, account, attempts = parts.ctx, parts.account, parts.attempts
        attempts.lease_at = worker
        sent_at = account.times.prefill_sent = ctx.clock()
        # A worker that was to run both phases may have declined.
        account.times.together_sent = None
        ticket = worker.send(sent_at, prefill_tokens=chosen.uncached(parts.prompt_tokens))
        try:
            async with ctx.watchdog.watch(worker, ctx.settings.prefill_timeout):
                reply = await ctx.client.post(
                    worker, parts.call.path, parts.call.prefill(), parts.sent(first=True), limit=ctx.settings.max_reply
                )
        except WorkerFailed as error:
            worker.withdraw(ticket)
            ctx.failed(error)
            attempts.lost(worker, key, "prefill", error.reason)
            return None
        account.times.prefill_done = ctx.clock()
        if reply.status == 200:
            account.prefill_name = worker.name
            return reply
        attempts.lease_at = None
        if may_retry(reply.status):
            attempts.turned_down(worker, key, "prefill", reply)
            return None
        return reply

    async def _without_pair(self, kind: str) -> Outcome:
        """No two workers for the two phases: R5, or the answer of those that were tried."""
        parts = self._parts
        last = parts.attempts.last_reply
        await parts.reservation.drop()
        if last is not None and last.status == 429:
            parts.account.refused("worker", "prefill")
            await parts.answer.pass_on(last)
            return Outcome.ANSWERED
        if not parts.ctx.settings.both_phases:
            await parts.answer.give_up(kind)
            return Outcome.ANSWERED
        parts.account.degraded(kind)
        return Outcome.NO_PAIR
