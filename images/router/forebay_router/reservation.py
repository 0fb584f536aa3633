"""The decode slot of one request: kept before the first byte goes out, given back when it is not used."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from forebay_router import choice
from forebay_router.candidate import Health, Key
from forebay_router.context import SMALL_REPLY, Context
from forebay_router.legs import ClientCall
from forebay_router.upstream import WorkerFailed
from forebay_router.workers import Worker
from forebay_wire import paths
from forebay_wire.messages import ReserveRequest, ReserveResponse


class Reservation:
    """At most one slot at a time. The asking runs beside the prefill leg, so it costs TTFT nothing."""

    def __init__(
        self,
        ctx: Context,
        call: ClientCall,
        leg_id: str,
        headers: Mapping[str, str],
        prompt_tokens: int,
        turn: int,
    ) -> None:
        self._ctx = ctx
        self._call = call
        self._leg_id = leg_id
        self._headers = headers
        self._prompt_tokens = prompt_tokens
        self._turn = turn
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._prefill: Worker | None = None
        self._compat_hash = ""
        self._asked = False
        """A worker was asked and has not answered yet. Never cut short: a slot given back while it is being asked for
        may be kept after all, since the two calls come over two connections and the later one may be read first."""

        self._holder: tuple[Worker, Key] | None = None
        self._spent: Worker | None = None
        """Got the decode leg, which may not have arrived."""

        self._until = 0.0

    async def begin(self, prefill: Worker, compat_hash: str) -> None:
        """Start to ask, for a prompt that `prefill` computes. An earlier slot, which follows another, is given back
        first: releases and reservations of one id must not overtake each other."""
        await self.drop()
        self._prefill, self._compat_hash = prefill, compat_hash
        self._task = asyncio.ensure_future(self._acquire(prefill))

    async def worker(self) -> Worker | None:
        """The worker that keeps the slot; None when none would. A slot that died or ran out is asked for once more."""
        if self._task is None or self._prefill is None:
            return None
        await asyncio.shield(self._task)
        if self._holder is not None and not self._good(*self._holder):
            await self.begin(self._prefill, self._compat_hash)
            await asyncio.shield(self._task)
        return self._holder[0] if self._holder else None

    def _good(self, worker: Worker, key: Key) -> bool:
        now = self._ctx.clock()
        return worker.key == key and worker.health(now) < Health.LOADING and now < self._until

    def used(self, worker: Worker) -> bool:
        """The decode leg goes to `worker`: its slot becomes the request; a slot elsewhere is given back.

        False when `worker` kept none.
        """
        holder, self._holder = self._holder, None
        if holder is None:
            return False
        if holder[0] is worker:
            self._spent = worker
            return True
        self._give_back(holder[0])
        return False

    async def drop(self) -> None:
        """Stop asking and give back what is held; done when this returns: at latest after `reserve_timeout`, for a
        worker that does not answer, and what a release may take."""
        if not self._held:
            return  # at once: what was chosen by the workers' load is to be booked before others choose
        # A client that leaves cancels the caller, and must not cut this short.
        await asyncio.shield(self._ctx.background(self._drop()))

    def abandon(self, *, answered: bool) -> None:
        """The same in the background. Not `answered`: the decode leg may have been cut before the worker had it, so the
        slot it was to become is given back too; a worker that has the leg has no slot of that id any more."""
        if self._spent is not None and not answered:
            self._give_back(self._spent)
        self._spent = None
        if self._held:
            self._ctx.background(self._drop())

    @property
    def _held(self) -> bool:
        """A slot, or the asking for one."""
        return self._task is not None or self._holder is not None

    async def _drop(self) -> None:
        await self._stop()
        holder, self._holder = self._holder, None
        if holder is not None:
            await self._ctx.release(holder[0], self._leg_id, self._headers)

    async def _stop(self) -> None:
        task, self._task = self._task, None
        if task is None:
            return
        self._stopping = True
        if not self._asked:
            task.cancel()
        await asyncio.wait((task,))
        self._stopping = False

    def _give_back(self, worker: Worker) -> None:
        self._ctx.background(self._ctx.release(worker, self._leg_id, self._headers))

    async def _acquire(self, prefill: Worker) -> None:
        """Ask decode workers that can read the prefill worker's KV, best first, once each."""
        ctx = self._ctx
        tried: set[Key] = set()
        while not self._stopping:
            decodes = ctx.candidates(self._call, "decode")
            picked = choice.pick_decode(decodes, self._prompt_tokens, self._turn, tried, self._compat_hash)
            if picked is None:
                return
            tried.add(picked.key)
            refusal = await self._ask(ctx.worker(picked), picked.key, prefill)
            if refusal is None:
                return
            ctx.metrics.retries[("reserve", refusal)] += 1

    async def _ask(self, worker: Worker, key: Key, prefill: Worker) -> str | None:
        """None: the slot is kept; else why not."""
        ctx = self._ctx
        ttl = ctx.settings.reserve_ttl
        body = msgspec.json.encode(
            ReserveRequest(
                request_id=self._leg_id,
                prefill_host=prefill.host,
                prefill_port=prefill.port,
                prompt_tokens=self._prompt_tokens,
                ttl_seconds=ttl,
            )
        )
        now = ctx.clock()
        ticket = worker.send(now, decode_tokens=self._prompt_tokens, counted=False)
        self._asked = True
        try:
            async with asyncio.timeout(ctx.settings.reserve_timeout):
                reply = await ctx.client.post(
                    worker, paths.RESERVE, body, self._headers, limit=SMALL_REPLY, counted=False
                )
        except WorkerFailed as error:
            worker.withdraw(ticket)
            ctx.failed(error)
            return error.reason
        except TimeoutError:
            # It may still admit us when it wakes up.
            self._give_back(worker)
            return "timeout"
        finally:
            self._asked = False
        if reply.status != 200:
            worker.withdraw(ticket)
            return f"status_{reply.status}"
        try:
            answer = msgspec.json.decode(reply.body, type=ReserveResponse)
        except (msgspec.DecodeError, RecursionError):
            worker.withdraw(ticket)
            return "bad_reply"
        if not answer.admitted:
            worker.withdraw(ticket)
            return "refused"
        ticket.answered_at = ctx.clock()
        # One second less than the worker counts, for the way.
        self._holder, self._until = (worker, key), now + ttl - 1.0
        return None
