"""The prefill phase of one request: from choice to hand-off (R1, R5)."""

from __future__ import annotations

from forebay_router import choice
from forebay_router.attempts import may_retry
from forebay_router.choice import Candidate
from forebay_router.legs import read_handoff
from forebay_router.phases import Parts
from forebay_router.upstream import Reply, WorkerFailed
from forebay_router.workers import Worker


class PrefillPhase:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.body = b""
        """The answer of the prefill leg that gave the hand-off."""

    async def run(self) -> bool:
        """Get a hand-off, or none where one worker has to do both phases; False when the client is answered."""
        parts = self._parts
        ctx, course = parts.ctx, parts.course
        while True:
            pair = choice.pick_pair(ctx.candidates(parts.call), parts.prompt_tokens, parts.turn, course.tried)
            if isinstance(pair, choice.NoPair):
                return await self._without_pair(pair.kind)
            prefill = ctx.worker(pair.prefill)
            await parts.reservation.begin(prefill, pair.prefill.compat_hash)
            reply = await self._leg(prefill, pair.prefill)
            if reply is None:
                continue
            if reply.status != 200:
                await parts.answer.pass_on(reply)
                return False
            course.handoff = read_handoff(reply.body)
            if course.handoff is None:
                parts.attempts.lost(prefill, pair.prefill.key, "prefill", "no_params")
                continue
            self.body = reply.body
            course.compat_hash = pair.prefill.compat_hash
            if course.handoff.finished:
                parts.attempts.lease_at = None
            params = course.handoff.params
            parts.answer.prompt_known(params.prompt_tokens, params.cached_tokens)
            if params.prompt_tokens:
                prefill.has_prefixes(parts.call.beginnings.entries(params.prompt_tokens), pair.prefill.engine_id)
            return True

    async def _leg(self, worker: Worker, chosen: Candidate) -> Reply | None:
        """The worker's answer; None when another worker is to be tried."""
        parts, key = self._parts, chosen.key
        ctx, account, attempts = parts.ctx, parts.account, parts.attempts
        attempts.lease_at = worker
        account.prefill_sent = ctx.clock()
        ticket = worker.send(account.prefill_sent, prefill_tokens=chosen.uncached(parts.prompt_tokens))
        try:
            async with ctx.watchdog.watch(worker, ctx.settings.prefill_timeout):
                reply = await ctx.client.post(
                    worker, parts.call.path, parts.call.prefill(), parts.headers, limit=ctx.settings.max_reply
                )
        except WorkerFailed as error:
            worker.withdraw(ticket)
            ctx.failed(error)
            attempts.lost(worker, key, "prefill", error.reason)
            return None
        account.prefill_done = ctx.clock()
        if reply.status == 200:
            account.prefill_name = worker.name
            return reply
        attempts.lease_at = None
        if may_retry(reply.status):
            attempts.turned_down(worker, key, "prefill", reply)
            return None
        return reply

    async def _without_pair(self, kind: str) -> bool:
        """No two workers for the two phases: R5, or the answer of those that were tried."""
        parts = self._parts
        last = parts.attempts.last_reply
        await parts.reservation.drop()
        if last is not None and last.status == 429:
            await parts.answer.pass_on(last)
            return False
        if not parts.ctx.settings.both_phases:
            await parts.answer.give_up(kind)
            return False
        parts.account.degraded(kind)
        return True
