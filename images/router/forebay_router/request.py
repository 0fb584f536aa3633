"""One client request from choice to last byte: the failure rules R1-R5 and R7 (design section 5).

Prefill phase -> HandOff -> decode phase. A leg that fails is followed by the best next one (course.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from forebay_router.account import Account
from forebay_router.answer import Answer
from forebay_router.attempts import Attempts
from forebay_router.client_side import ClientGone, ClientSide
from forebay_router.context import Context
from forebay_router.course import Course
from forebay_router.decode_phase import DecodePhase
from forebay_router.legs import ClientCall, HandOff
from forebay_router.phases import Parts
from forebay_router.prefill_phase import Outcome, PrefillPhase
from forebay_router.reservation import Reservation
from forebay_router.upstream import Reply
from forebay_router.workers import Worker
from forebay_wire import headers
from forebay_wire.errors import ApiError

log = logging.getLogger(__name__)


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
        leg_id = ctx.leg_id(request_id)
        sent = {headers.REQUEST_ID: request_id, headers.LEG: leg_id}
        if traceparent is not None:
            sent[headers.TRACEPARENT] = traceparent
        prompt_tokens = ctx.estimate.tokens(call)
        tokens = prompt_tokens + call.output_tokens()
        turn = ctx.turn()
        course = Course(ctx, call, tokens, turn)
        account = Account(ctx.metrics, ctx.clock, call, request_id, received)
        attempts = Attempts(ctx, course, account, leg_id, sent)
        answer = Answer(ctx, client, course, account, attempts, request_id, prompt_tokens)
        reservation = Reservation(ctx, call, leg_id, sent, prompt_tokens, turn)
        self._parts = Parts(ctx, call, sent, prompt_tokens, turn, course, account, attempts, answer, reservation)

    async def run(self) -> None:
        """Serve the request to its end, whatever that is. Raises only cancellation (client gone, or shutting down)."""
        settings, account, answer = self._ctx.settings, self._parts.account, self._parts.answer
        self._ctx.metrics.offer(self._parts.prompt_tokens)
        try:
            try:
                async with asyncio.timeout(settings.request_timeout):
                    await self._serve()
            except TimeoutError:
                await answer.refuse(ApiError(504, f"not finished within {settings.request_timeout:g} s"))
            except ApiError as error:
                await answer.refuse(error)
        except ClientGone as gone:
            log.info("request %s: client gone: %s", self._id, gone)
            account.client_left()
            self._client.abort()
        except asyncio.CancelledError:
            account.client_left()
            raise
        except Exception:
            log.exception("request %s", self._id)
            account.code = 500
            if self._client.started:
                self._client.abort()
            else:
                with contextlib.suppress(ClientGone):
                    await answer.refuse(ApiError(500, f"internal error; the log has it under request id {self._id}"))
        finally:
            self._settle()

    async def _serve(self) -> None:
        parts = self._parts
        prefill, decode = PrefillPhase(parts), DecodePhase(parts)
        if self._call.split:
            outcome = await prefill.run()
            if outcome is Outcome.TOGETHER and not await decode.run(prefill.target, once=True):
                outcome = await prefill.run()
            if outcome in (Outcome.ANSWERED, Outcome.TOGETHER):
                return
        target: Worker | None = None
        handoff = parts.course.handoff
        if handoff is not None:
            if handoff.finished:
                await self._first_token_is_all(handoff, prefill.body)
                return
            target = await parts.reservation.worker()
            parts.account.times.slot_known, parts.account.times.slot_kept = self._ctx.clock(), target is not None
        await decode.run(target)

    async def _first_token_is_all(self, handoff: HandOff, body: bytes) -> None:
        """The answer ended with its first token: no decode leg."""
        account, answer = self._parts.account, self._parts.answer
        self._parts.reservation.abandon(answered=True)
        account.last_worker = account.prefill_name
        if not self._call.stream:
            await answer.pass_on(Reply(200, {"content-type": "application/json"}, body))
            return
        await answer.start(account.prefill_name, account.prefill_name)
        await answer.write_delta(handoff)
        await answer.end_stream()

    def _settle(self) -> None:
        """Free what workers hold for this request (R7), count it, log it. Does not wait: the client may be gone."""
        parts = self._parts
        parts.reservation.abandon(answered=parts.account.complete)
        parts.attempts.settle()
        answers = sum(index >= 0 for index in parts.course.delivered.by_index) if self._call.several else 1
        parts.account.close(answers)
