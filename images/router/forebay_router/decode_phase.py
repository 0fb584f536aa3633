"""The decode phase of one request: leg after leg until the answer is whole (R2-R4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from forebay_router.attempts import BUSY, may_retry
from forebay_router.candidate import Key
from forebay_router.course import Leg
from forebay_router.phases import Parts
from forebay_router.relay import Relay
from forebay_router.upstream import Reply, WorkerFailed, WorkerStream
from forebay_router.watchdog import Guard
from forebay_router.workers import Ticket, Worker


class DecodePhase:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def run(self, target: Worker | None, *, once: bool = False) -> bool:
        """`target`: the worker that keeps the slot, when one does, or is to run both phases. With `once` it alone is
        tried; False: it failed, and the client has nothing yet."""
        if self._parts.call.stream:
            return await self._stream(target, once)
        return await self._whole(target, once)

    # Streamed

    async def _stream(self, target: Worker | None, once: bool) -> bool:
        handoff = self._parts.course.handoff
        if target is not None and handoff is not None and handoff.delta is not None:
            await self._parts.answer.begin(target, handoff)
        while True:
            if self._parts.course.whole:
                await self._parts.answer.end_stream()
                return True
            if target is None:
                target = await self._next()
            leg = await self._prepare(target) if target else None
            if target is None or leg is None:
                await self._parts.answer.give_up()
                return True
            if await self._stream_leg(target, target.key, leg, once):
                return True
            if once and not self._parts.answer.started:
                return False
            target = None

    async def _stream_leg(self, worker: Worker, key: Key, leg: Leg, once: bool) -> bool:
        """One leg; True when the answer is whole."""
        parts = self._parts
        ctx, course, answer = parts.ctx, parts.course, parts.answer
        relay = Relay(course.delivered, leg.skip)
        sent_at = ctx.clock()
        ticket = self._send(worker, leg, sent_at)
        upstream: WorkerStream | None = None
        try:
            async with ctx.watchdog.watch(worker, leg.first_byte) as guard:
                upstream = await ctx.client.open(worker, leg.path, leg.body, self._headers(leg))
                if upstream.status != 200:
                    body = await upstream.read_all(ctx.settings.max_reply)
                    reply = Reply(upstream.status, upstream.headers, body)
                    return await self._refused(worker, key, leg, reply, once=once)
                self._runs(worker, leg)
                if leg.name == "decode" and not course.late_events:
                    joined = ctx.clock()
                    ctx.handoff_seconds.add(joined - sent_at)
                    parts.account.times.joined = joined
                if not answer.started and course.handoff is not None and course.handoff.delta is not None:
                    await answer.begin(worker, course.handoff)
                await self._pump(upstream, relay, guard)
            self._done(worker, key, leg, len(course.delivered.ids))
            await answer.end_stream()
            await upstream.finish()
            return True
        except WorkerFailed as error:
            if upstream is not None:
                upstream.abort()
            worker.withdraw(ticket)
            ctx.failed(error)
            parts.attempts.lost(worker, key, leg.name, error.reason)
            return False
        except BaseException:
            if upstream is not None:
                upstream.abort()
            raise

    async def _pump(self, upstream: WorkerStream, relay: Relay, guard: Guard) -> None:
        """Relay until [DONE]. Raises WorkerFailed when the stream breaks, stalls, errs or ends without it."""
        parts = self._parts
        ctx, account, answer, delivered = parts.ctx, parts.account, parts.answer, parts.course.delivered
        full = False

        def pass_on(data: bytes) -> bool:
            """Where the bytes arrive: no task is woken for a chunk. True: the loop below is to see to something."""
            nonlocal full
            out = self._fed(relay, data, guard)
            if out:
                full = not answer.write_now(out)
                account.wrote(relay.content_events, delivered)
            return full or relay.done or relay.error is not None

        while True:
            if answer.started:
                whole = not await upstream.push(pass_on)
            else:
                data = await upstream.read()
                whole = not data
                out = self._fed(relay, data, guard)
                if out:
                    await answer.start(account.prefill_name or upstream.worker.name, upstream.worker.name)
                    guard.paused = True
                    await answer.write(out)
                    guard.paused = False
                    account.wrote(relay.content_events, delivered)
            if full:
                guard.paused = True
                await answer.drain()
                guard.paused = full = False
            guard.alive(ctx.clock())
            if relay.error is not None:
                raise WorkerFailed(upstream.worker, "error_event", relay.error)
            if relay.done:
                return
            if whole:
                raise WorkerFailed(upstream.worker, "truncated", "the stream ended without [DONE]")

    def _fed(self, relay: Relay, data: bytes, guard: Guard) -> bytes:
        """What the client gets for these bytes of the worker's."""
        course, settings = self._parts.course, self._parts.ctx.settings
        guard.alive(self._parts.ctx.clock())
        guard.limit = settings.stall_timeout
        delivered = course.delivered
        events, ids = delivered.events, len(delivered.ids)
        out = relay.feed(data)
        course.late_events += delivered.events - events
        course.late_ids += len(delivered.ids) - ids
        return out

    # Whole

    async def _whole(self, target: Worker | None, once: bool) -> bool:
        """As `_stream`, for an answer in one body: nothing is out before its end, so a lost leg is simply run again."""
        parts = self._parts
        ctx = parts.ctx
        while True:
            if target is None:
                target = await self._next()
            leg = await self._prepare(target) if target else None
            if target is None or leg is None:
                await parts.answer.give_up()
                return True
            worker, key, target = target, target.key, None
            ticket = self._send(worker, leg, ctx.clock())
            try:
                async with ctx.watchdog.watch(worker, ctx.settings.request_timeout):
                    reply = await ctx.client.post(
                        worker, leg.path, leg.body, self._headers(leg), limit=ctx.settings.max_reply
                    )
            except WorkerFailed as error:
                worker.withdraw(ticket)
                ctx.failed(error)
                parts.attempts.lost(worker, key, leg.name, error.reason)
                if once:
                    return False
                continue
            if reply.status != 200:
                if await self._refused(worker, key, leg, reply, once=once):
                    return True
                if once:
                    return False
                continue
            self._runs(worker, leg)
            self._done(worker, key, leg, parts.answer.note_usage(reply))
            await parts.answer.pass_on(reply, worker)
            return True

    # Legs

    async def _next(self) -> Worker | None:
        parts = self._parts
        worker = await parts.course.next_worker(lambda: parts.answer.started)
        if worker is not None and worker.role != "decode" and parts.call.split:
            parts.account.degraded("no_decode")
        return worker

    async def _prepare(self, worker: Worker) -> Leg | None:
        """The leg for this worker, once nothing the worker holds for us stands in its way."""
        parts = self._parts
        leg = parts.course.leg_for(worker)
        if leg is None or leg.name == "decode":
            if not parts.reservation.used(worker) and leg is not None:
                # Without a slot it may have to queue there first.
                leg = replace(leg, first_byte=parts.ctx.settings.prefill_timeout)
            return leg
        await parts.reservation.drop()
        await parts.attempts.end_lease(worker)
        return leg

    def _headers(self, leg: Leg) -> Mapping[str, str]:
        return self._parts.sent(first=leg.name == "plain")

    def _send(self, worker: Worker, leg: Leg, now: float) -> Ticket:
        """Account for what the worker will report once the leg is there: a prompt to compute, or one whose KV it reads.

        Not the bound on the answer, which may be more than any worker has room for.
        """
        parts = self._parts
        prompt = parts.answer.prompt_tokens
        if leg.name == "decode":
            return worker.send(now, decode_tokens=prompt)
        if leg.name == "plain":
            parts.account.times.together_sent = now
        computed = worker.candidate(now, parts.call.beginnings.names).uncached(prompt)
        return worker.send(now, prefill_tokens=computed)

    async def _refused(self, worker: Worker, key: Key, leg: Leg, reply: Reply, *, once: bool) -> bool:
        """A leg answered with an error; True when that is the client's answer."""
        if leg.name == "plain" and not may_retry(reply.status) and not self._parts.answer.started:
            await self._parts.answer.pass_on(reply, worker)
            return True
        if once and reply.status in BUSY:
            # It declined to compute a prompt, not to decode.
            self._parts.attempts.declined(worker, leg.name, reply)
        else:
            self._parts.attempts.turned_down(worker, key, leg.name, reply)
        return False

    def _runs(self, worker: Worker, leg: Leg) -> None:
        self._parts.account.last_worker = worker.name
        if leg.name == "plain":
            self._parts.account.prefill_name = worker.name

    def _done(self, worker: Worker, key: Key, leg: Leg, answer_tokens: int) -> None:
        """The leg brought the answer to its end: the worker has the KV of prompt and answer now."""
        parts = self._parts
        if leg.name == "decode":
            parts.attempts.lease_at = None
        if answer_tokens:
            parts.ctx.answer_tokens.add(answer_tokens)
        if not parts.call.several:
            tokens = parts.answer.prompt_tokens
            worker.has_prefixes(parts.call.beginnings.entries(tokens, answer_tokens=answer_tokens), key[1])
