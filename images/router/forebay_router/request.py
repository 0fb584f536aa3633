"""One client request from choice to last byte: the failure rules R1-R5 and R7 (design section 5) are here.

Prefill phase -> HandOff -> decode phase. A leg that fails is followed by the best next one (course.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter
from dataclasses import replace

from forebay_router import choice
from forebay_router.account import Account
from forebay_router.choice import Key
from forebay_router.client_side import ClientGone, ClientSide
from forebay_router.context import Context
from forebay_router.course import Course, Leg
from forebay_router.legs import ClientCall, HandOff, read_handoff, read_usage, without_params
from forebay_router.relay import Relay
from forebay_router.reservation import Reservation
from forebay_router.upstream import Reply, WorkerFailed, WorkerStream
from forebay_router.watchdog import Guard
from forebay_router.workers import Worker
from forebay_wire import headers, stream
from forebay_wire.errors import ApiError

log = logging.getLogger(__name__)

PASSED_HEADERS = ("content-type", headers.RETRY_AFTER)
"""All that a client sees of a worker's headers."""

BUSY = (429, 503)
ID_IN_USE = 409
TOKEN_REFUSED = (401, 403)
OURS = (ID_IN_USE, *TOKEN_REFUSED)
"""A worker still has a request of that id (a retry through another router), or refuses the router's own token: no fault
of the client's."""


class Exchange:
    """One request. `received` is the time its last byte was read."""

    def __init__(
        self,
        ctx: Context,
        client: ClientSide,
        call: ClientCall,
        *,
        request_id: str,
        traceparent: str | None,
        received: float,
    ) -> None:
        self._ctx = ctx
        self._client = client
        self._call = call
        self._id = request_id
        self._headers = {headers.REQUEST_ID: request_id}
        if traceparent is not None:
            self._headers[headers.TRACEPARENT] = traceparent
        self._prompt_tokens = ctx.estimate.tokens(call)
        self._tokens = self._prompt_tokens + call.output_tokens()
        self._turn = ctx.turn()
        self._reservation = Reservation(ctx, request_id, self._headers, self._prompt_tokens, self._turn)
        self._course = Course(ctx, call, self._tokens, self._turn)
        self._first_body = b""
        self._lease_at: Worker | None = None
        """A prefill worker that may hold blocks for us."""

        self._last_reply: Reply | None = None
        self._announced = ""
        """The decode worker named in the response headers."""

        self._account = Account(ctx.metrics, ctx.clock, call, request_id, received)

    async def run(self) -> None:
        """Serve the request to its end, whatever that is. Raises only cancellation (client gone, or shutting down)."""
        settings = self._ctx.settings
        self._ctx.metrics.offer(self._prompt_tokens)
        try:
            try:
                async with asyncio.timeout(settings.request_timeout):
                    await self._serve()
            except TimeoutError:
                await self._refuse(ApiError(504, f"not finished within {settings.request_timeout:g} s"))
            except ApiError as error:
                await self._refuse(error)
        except ClientGone as gone:
            log.info("request %s: client gone: %s", self._id, gone)
            self._account.client_left()
            self._client.abort()
        except asyncio.CancelledError:
            self._account.client_left()
            raise
        except Exception:
            log.exception("request %s", self._id)
            self._account.code = 500
            if self._client.started:
                self._client.abort()
            else:
                with contextlib.suppress(ClientGone):
                    await self._refuse(ApiError(500, f"internal error; the log has it under request id {self._id}"))
        finally:
            self._settle()

    async def _serve(self) -> None:
        if self._call.split and not await self._prefill_phase():
            return
        target: Worker | None = None
        if self._course.handoff is not None:
            if self._course.handoff.finished:
                await self._first_token_is_all(self._course.handoff)
                return
            target = await self._reservation.worker()
            self._account.slot_known = self._ctx.clock()
        if not self._call.stream:
            await self._whole(target)
            return
        if target is not None and self._course.handoff is not None and self._course.handoff.delta is not None:
            await self._begin(target)
        await self._stream(target)

    # Prefill phase

    async def _prefill_phase(self) -> bool:
        """Get a hand-off, or none where one worker has to do both phases; False when the client is answered (R1)."""
        ctx = self._ctx
        while True:
            pair = choice.pick_pair(ctx.workers.candidates(), self._prompt_tokens, self._turn, self._course.tried)
            if isinstance(pair, choice.NoPair):
                return await self._without_pair(pair.kind)
            prefill = ctx.worker(pair.prefill)
            await self._reservation.begin(prefill, pair.prefill.compat_hash)
            reply = await self._prefill_leg(prefill, pair.prefill.key)
            if reply is None:
                continue
            if reply.status != 200:
                await self._pass_on(reply)
                return False
            self._course.handoff = read_handoff(reply.body)
            if self._course.handoff is None:
                self._lost(prefill, pair.prefill.key, "prefill", "no_params")
                continue
            self._first_body = reply.body
            self._course.compat_hash = pair.prefill.compat_hash
            if self._course.handoff.finished:
                self._lease_at = None
            params = self._course.handoff.params
            self._prompt_known(params.prompt_tokens, params.cached_tokens)
            return True

    async def _prefill_leg(self, worker: Worker, key: Key) -> Reply | None:
        """The worker's answer; None when another worker is to be tried."""
        ctx = self._ctx
        self._lease_at = worker
        self._account.prefill_sent = ctx.clock()
        ticket = worker.send(self._account.prefill_sent, prefill_tokens=self._prompt_tokens)
        try:
            async with ctx.watchdog.watch(worker, ctx.settings.prefill_timeout):
                reply = await ctx.client.post(
                    worker, self._call.path, self._call.prefill(), self._headers, limit=ctx.settings.max_reply
                )
        except WorkerFailed as error:
            worker.withdraw(ticket)
            ctx.failed(error)
            self._lost(worker, key, "prefill", error.reason)
            return None
        self._account.prefill_done = ctx.clock()
        if reply.status == 200:
            self._account.prefill_name = worker.name
            return reply
        self._lease_at = None
        if reply.status in (*BUSY, *OURS) or reply.status >= 500:
            self._turned_down(worker, key, "prefill", reply)
            return None
        return reply

    async def _without_pair(self, kind: str) -> bool:
        """No two workers for the two phases: R5, or the answer of those that were tried."""
        await self._reservation.drop()
        if self._last_reply is not None and self._last_reply.status == 429:
            await self._pass_on(self._last_reply)
            return False
        if not self._ctx.settings.both_phases:
            await self._give_up(kind)
            return False
        self._account.degraded(kind)
        return True

    async def _first_token_is_all(self, handoff: HandOff) -> None:
        """The answer ended with its first token: no decode leg."""
        self._reservation.abandon(answered=True)
        self._account.last_worker = self._account.prefill_name
        if not self._call.stream:
            await self._pass_on(Reply(200, {"content-type": "application/json"}, self._first_body))
            return
        await self._start(self._account.prefill_name, self._account.prefill_name)
        await self._write_delta(handoff)
        await self._end_stream()

    # Decode phase, streamed

    async def _stream(self, target: Worker | None) -> None:
        """Leg after leg until the answer is whole."""
        while True:
            if self._course.whole:
                await self._end_stream()
                return
            if target is None:
                target = await self._next()
            leg = await self._prepare(target) if target else None
            if target is None or leg is None:
                await self._give_up()
                return
            if await self._stream_leg(target, target.key, leg):
                return
            target = None

    async def _stream_leg(self, worker: Worker, key: Key, leg: Leg) -> bool:
        """One leg; True when the answer is whole."""
        ctx = self._ctx
        relay = Relay(self._course.delivered, leg.skip)
        ticket = worker.send(ctx.clock(), decode_tokens=self._tokens)
        upstream: WorkerStream | None = None
        try:
            async with ctx.watchdog.watch(worker, leg.first_byte) as guard:
                upstream = await ctx.client.open(worker, leg.path, leg.body, self._headers)
                if upstream.status != 200:
                    body = await upstream.read_all(ctx.settings.max_reply)
                    return await self._leg_refused(worker, key, leg, Reply(upstream.status, upstream.headers, body))
                self._account.last_worker = worker.name
                if leg.name == "plain":
                    self._account.prefill_name = worker.name
                if (
                    not self._client.started
                    and self._course.handoff is not None
                    and self._course.handoff.delta is not None
                ):
                    await self._begin(worker)
                await self._pump(upstream, relay, guard)
            self._lease_at = None if leg.name == "decode" else self._lease_at
            await self._end_stream()
            await upstream.finish()
            return True
        except WorkerFailed as error:
            if upstream is not None:
                upstream.abort()
            worker.withdraw(ticket)
            ctx.failed(error)
            self._lost(worker, key, leg.name, error.reason)
            return False
        except BaseException:
            if upstream is not None:
                upstream.abort()
            raise

    async def _pump(self, upstream: WorkerStream, relay: Relay, guard: Guard) -> None:
        """Relay until [DONE]. Raises WorkerFailed when the stream breaks, stalls, errs or ends without it."""
        ctx, delivered = self._ctx, self._course.delivered
        while True:
            data = await upstream.read()
            guard.alive(ctx.clock())
            guard.limit = ctx.settings.stall_timeout
            if not data:
                raise WorkerFailed(upstream.worker, "truncated", "the stream ended without [DONE]")
            events, ids = delivered.events, len(delivered.ids)
            out = relay.feed(data)
            self._course.late_events += delivered.events - events
            self._course.late_ids += len(delivered.ids) - ids
            if out:
                if not self._client.started:
                    await self._start(self._account.prefill_name or upstream.worker.name, upstream.worker.name)
                guard.paused = True
                await self._client.write(out)
                guard.paused = False
                guard.alive(ctx.clock())
                self._account.wrote(relay.content_events, delivered)
            if relay.error is not None:
                raise WorkerFailed(upstream.worker, "error_event", relay.error)
            if relay.done:
                return

    async def _begin(self, decode: Worker) -> None:
        """First byte: the decode slot is certain."""
        assert self._course.handoff is not None
        await self._start(self._account.prefill_name, decode.name)
        await self._write_delta(self._course.handoff)

    async def _start(self, prefill: str, decode: str) -> None:
        self._announced = self._account.last_worker = decode
        await self._client.start({**self._own_headers(prefill, decode), "cache-control": "no-cache"})

    async def _write_delta(self, handoff: HandOff) -> None:
        payloads = handoff.delta or []
        for payload in payloads:
            self._course.delivered.note(payload)
        self._course.delivered.ids.extend(handoff.first_ids)
        await self._client.write(b"".join(b"data: " + payload.encode() + b"\n\n" for payload in payloads))
        self._account.wrote(int(self._course.delivered.content), self._course.delivered)

    async def _end_stream(self) -> None:
        tail = stream.DONE
        if self._account.last_worker != self._announced:
            tail = b": forebay decode=" + self._account.last_worker.encode() + b"\n\n" + tail
        if not self._client.started:
            await self._start(self._account.prefill_name or self._account.last_worker, self._account.last_worker)
        await self._client.write(tail)
        # A client may close on [DONE], before we have closed: it has its answer all the same.
        self._account.complete, self._account.code = True, 200
        await self._client.finish()

    # Decode phase, whole

    async def _whole(self, target: Worker | None) -> None:
        """As `_stream`, for an answer in one body: nothing is out before its end, so a lost leg is simply run again."""
        ctx = self._ctx
        while True:
            if target is None:
                target = await self._next()
            leg = await self._prepare(target) if target else None
            if target is None or leg is None:
                await self._give_up()
                return
            worker, key, target = target, target.key, None
            ticket = worker.send(ctx.clock(), decode_tokens=self._tokens)
            try:
                async with ctx.watchdog.watch(worker, ctx.settings.request_timeout):
                    reply = await ctx.client.post(
                        worker, leg.path, leg.body, self._headers, limit=ctx.settings.max_reply
                    )
            except WorkerFailed as error:
                worker.withdraw(ticket)
                ctx.failed(error)
                self._lost(worker, key, leg.name, error.reason)
                continue
            if reply.status != 200:
                if await self._leg_refused(worker, key, leg, reply):
                    return
                continue
            self._account.last_worker = worker.name
            if leg.name == "plain":
                self._account.prefill_name = worker.name
            self._lease_at = None if leg.name == "decode" else self._lease_at
            self._note_usage(reply)
            await self._pass_on(reply, worker)
            return

    def _note_usage(self, reply: Reply) -> None:
        """Times of an unstreamed answer: its first token is out of the prefill worker when that leg ends; without such
        a leg the first token's time is not known."""
        usage = read_usage(reply.body)
        if usage is None:
            return
        split = self._course.handoff is not None
        self._account.whole(usage.completion_tokens, self._account.prefill_done if split else None)
        if not split:
            details = usage.prompt_tokens_details
            self._prompt_known(usage.prompt_tokens, details.cached_tokens if details else None)

    def _prompt_known(self, tokens: int | None, cached: int | None) -> None:
        if tokens:
            self._ctx.estimate.learn(self._call, tokens)
            self._ctx.metrics.prompt_known(self._prompt_tokens, tokens, cached or 0)

    # The next leg

    async def _next(self) -> Worker | None:
        worker = await self._course.next_worker(lambda: self._client.started)
        if worker is not None and worker.role != "decode" and self._call.split:
            self._account.degraded("no_decode")
        return worker

    async def _prepare(self, worker: Worker) -> Leg | None:
        """The leg for this worker, once nothing the worker holds for us stands in its way."""
        leg = self._course.leg_for(worker)
        if leg is None or leg.name == "decode":
            if not self._reservation.used(worker) and leg is not None:
                # Without a slot it may have to queue there first.
                leg = replace(leg, first_byte=self._ctx.settings.prefill_timeout)
            return leg
        await self._reservation.drop()
        if self._lease_at is not None:
            # Nobody will pull. At the worker itself the cancellation goes first: it would abort the leg by request id.
            lease_at, self._lease_at = self._lease_at, None
            cancelling = self._ctx.cancel_lease(lease_at, self._id, self._headers)
            if lease_at is worker:
                await cancelling
            else:
                self._ctx.background(self._id, cancelling)
        return leg

    async def _leg_refused(self, worker: Worker, key: Key, leg: Leg, reply: Reply) -> bool:
        """A leg answered with an error; True when that is the client's answer."""
        clients = reply.status < 500 and reply.status not in (*BUSY, *OURS)
        if leg.name == "plain" and clients and not self._client.started:
            await self._pass_on(reply, worker)
            return True
        self._turned_down(worker, key, leg.name, reply)
        return False

    # Bookkeeping

    def _lost(self, worker: Worker, key: Key, leg: str, reason: str) -> None:
        """A worker failed this request: it is not tried again, unless it restarts."""
        self._course.lost(key)
        self._account.retry(leg, reason, worker.name)
        if leg == "prefill" and self._lease_at is worker:
            self._lease_at = None
            if reason != "refused":
                self._ctx.background(self._id, self._ctx.cancel_lease(worker, self._id, self._headers))

    def _turned_down(self, worker: Worker, key: Key, leg: str, reply: Reply) -> None:
        self._account.retry(leg, f"status_{reply.status}", worker.name)
        if reply.status in BUSY:
            self._course.busy(worker, key, _retry_after(reply))
        else:
            self._course.lost(key)
        # A client that is told 401 would take it for a word on its own key.
        if reply.status not in TOKEN_REFUSED and (self._last_reply is None or reply.status != 503):
            self._last_reply = reply

    def _own_headers(self, prefill: str, decode: str) -> dict[str, str]:
        named = {headers.REQUEST_ID: self._id, headers.PREFILL: prefill, headers.DECODE: decode}
        return {name: value for name, value in named.items() if value}

    async def _pass_on(self, reply: Reply, worker: Worker | None = None) -> None:
        """A worker's whole answer as the client's."""
        sent = {name: reply.headers[name] for name in PASSED_HEADERS if name in reply.headers}
        if reply.status in BUSY:
            sent.setdefault(headers.RETRY_AFTER, "1")
        name = worker.name if worker else ""
        prefill = self._account.prefill_name if self._course.handoff else name or self._account.prefill_name
        sent.update(self._own_headers(prefill, name or (self._account.prefill_name if self._course.handoff else "")))
        await self._client.respond(reply.status, sent, without_params(reply.body))
        self._account.code = reply.status
        if reply.status == 200 and self._course.handoff is not None and self._course.handoff.finished:
            self._note_usage(reply)
        self._account.complete = reply.status == 200

    async def _give_up(self, kind: str | None = None) -> None:
        """No worker is left to try."""
        if self._last_reply is not None and not self._client.started:
            await self._pass_on(self._last_reply)
            return
        counts = Counter(f"{c.role or 'unassigned'} {c.health.name.lower()}" for c in self._ctx.workers.candidates())
        state = ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "none listed"
        why = f" ({kind}; fallback is refuse)" if kind else ""
        raise ApiError(503, f"no worker is left to serve this request{why}; workers: {state}", retry_after=1.0)

    async def _refuse(self, error: ApiError) -> None:
        """An error of the router's own: a body, or the last event of a stream that then ends without [DONE]."""
        self._account.code = error.status
        if self._client.started:
            await self._client.write(b"data: " + error.json() + b"\n\n")
            await self._client.finish()
            return
        sent = {"content-type": "application/json", **self._own_headers("", "")}
        if error.retry_after is not None:
            sent[headers.RETRY_AFTER] = str(max(1, math.ceil(error.retry_after)))
        await self._client.respond(error.status, sent, error.json())

    def _settle(self) -> None:
        """Free what workers hold for this request (R7), count it, log it. Does not wait: the client may be gone."""
        ctx = self._ctx
        self._reservation.abandon(answered=self._account.complete)
        if self._lease_at is not None:
            ctx.background(self._id, ctx.cancel_lease(self._lease_at, self._id, self._headers))
        answers = sum(index >= 0 for index in self._course.delivered.by_index) if self._call.several else 1
        self._account.close(answers)


def _retry_after(reply: Reply) -> float:
    try:
        return max(0.0, float(reply.headers.get(headers.RETRY_AFTER, "1")))
    except ValueError:
        return 1.0
