"""Blocks kept for decode legs to come, and filled ahead of them while their prefill still runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from forebay_engine.core.commands import Command, EarlyPulled, ReleaseReservation, ReserveBlocks
from forebay_engine.transfer.base import TransferError
from forebay_engine.transfer.service import TransferService
from forebay_engine.types import PullSource, UnsettledRead
from forebay_wire.messages import ReserveRequest, ReserveResponse

log = logging.getLogger(__name__)

REPLY_SECONDS = 1.0
"""A reservation is answered between two steps; a step longer than this refuses it, and the router asks elsewhere."""

RETRY_SECONDS = 1.0

LAND_SECONDS = 1.0
"""How long a decode leg waits for a read ahead that is under way when it comes. Given up, its blocks would cross the
network twice, and over TCP the second read waits for the first one's answer anyway. A peer that hangs costs this much
before the pull finds out."""


@dataclass(slots=True, eq=False)
class Reservation:
    following: asyncio.Task[None] = field(init=False)
    lease: tuple[str, int] | None = None
    """Engine id and epoch under which it was read."""

    pulled: int = 0
    """The first so many blocks were."""

    landed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no read is under way."""

    unsettled: UnsettledRead | None = None
    """A read that may still land in its blocks."""


class Reservations:
    """By request id. A reservation ends by the decode leg, by release(), or by its time; always after its reads."""

    def __init__(self, service: TransferService, send: Callable[[Command], None]) -> None:
        self._service = service
        self._send = send
        self._kept: dict[str, Reservation] = {}
        self._asked: dict[str, asyncio.Future[list[int] | None]] = {}
        """Not answered by the step thread yet."""

        self._ending: dict[str, asyncio.Task[None]] = {}

    async def reserve(self, request: ReserveRequest) -> ReserveResponse:
        # The decode leg may come here even when there is no room to read ahead.
        self._service.warm(request.prefill_host, request.prefill_port)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[int] | None] = loop.create_future()

        def settle(blocks: list[int] | None) -> None:
            if not answer.done():
                answer.set_result(blocks)
            elif blocks is not None:
                self._send(ReleaseReservation(request.request_id))

        reply = partial(_on_loop, loop, settle)
        self._send(ReserveBlocks(request.request_id, request.prompt_tokens, reply))
        self._asked[request.request_id] = answer
        try:
            blocks = await asyncio.wait_for(answer, REPLY_SECONDS)
        except TimeoutError:
            return ReserveResponse(False, "busy with a long step", RETRY_SECONDS)
        finally:
            if self._asked.get(request.request_id) is answer:
                del self._asked[request.request_id]
        if blocks is None:
            return ReserveResponse(False, f"no room for {request.prompt_tokens} prompt tokens", RETRY_SECONDS)
        reservation = Reservation()
        self._kept[request.request_id] = reservation
        reservation.following = loop.create_task(self._follow(request, blocks, reservation))
        return ReserveResponse(True)

    async def _follow(self, request: ReserveRequest, blocks: list[int], reservation: Reservation) -> None:
        """Pull finished chunks, then wait for the decode leg; at the end of its time the reservation goes."""

        def pulled(engine_id: str, epoch: int, count: int, coming: int) -> None:
            reservation.lease, reservation.pulled = (engine_id, epoch), count
            if coming > count:
                reservation.landed.clear()
            else:
                reservation.landed.set()

        try:
            async with asyncio.timeout(request.ttl_seconds):
                await self._service.follow(request, blocks, pulled)
                reservation.landed.set()  # also when its last read failed
                await asyncio.Event().wait()
        except TimeoutError:
            log.info("request %s: no decode leg in %.0f s, reservation ends", request.request_id, request.ttl_seconds)
        except TransferError as error:
            reservation.unsettled = error.unsettled  # also when _end() has cancelled us: it waits for this
            log.warning("request %s: reading ahead ended: %s", request.request_id, error)
        except Exception:  # a fault of ours must not keep the blocks for ever
            log.exception("request %s: reading ahead failed", request.request_id)
        # Whoever takes the reservation out of the table ends it: the decode leg may have been first.
        if self._kept.get(request.request_id) is reservation:
            del self._kept[request.request_id]
            self._send(ReleaseReservation(request.request_id, reservation.unsettled))

    async def release(self, request_id: str) -> None:
        """Give the blocks back; returns when no read lands in them any more."""
        await self.settle(request_id, None)

    async def settle(self, request_id: str, source: PullSource | None) -> None:
        """End the reading for a decode leg that has come with `source`; None: the blocks are given back.

        What was read counts only if it was read under that very lease. Goes on to its end when cancelled: only then may
        the blocks be used again.
        """
        asked = self._asked.get(request_id)
        if asked is not None and not asked.done():
            asked.set_result(None)  # blocks that the step thread has yet to answer with go back at once
        reservation = self._kept.pop(request_id, None)
        if reservation is None:
            # One that an earlier leg of this id gave up may still be read into.
            if request_id in self._ending:
                await asyncio.wait((self._ending[request_id],))
            return
        ending = asyncio.get_running_loop().create_task(self._end(request_id, reservation, source))
        self._ending[request_id] = ending
        ending.add_done_callback(lambda _: self._ending.pop(request_id, None))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            reservation.following.cancel()  # nobody waits for what it reads any more
            ending.add_done_callback(lambda _: self._send(ReleaseReservation(request_id)))
            raise

    async def _end(self, request_id: str, reservation: Reservation, source: PullSource | None) -> None:
        if source is not None and reservation.lease == (source.engine_id, source.epoch):
            await _landed(reservation)
        reservation.following.cancel()
        await asyncio.gather(reservation.following, return_exceptions=True)
        if source is None or reservation.unsettled is not None:
            self._send(ReleaseReservation(request_id, reservation.unsettled))
        elif reservation.lease == (source.engine_id, source.epoch):
            self._send(EarlyPulled(request_id, reservation.pulled))

    async def close(self) -> None:
        for request_id in list(self._kept):
            await self.release(request_id)


async def _landed(reservation: Reservation) -> None:
    """Until no read is under way, or the following has ended, or LAND_SECONDS have passed."""
    if reservation.landed.is_set():
        return
    landing = asyncio.create_task(reservation.landed.wait())
    await asyncio.wait((landing, reservation.following), timeout=LAND_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    landing.cancel()


def _on_loop(
    loop: asyncio.AbstractEventLoop, settle: Callable[[list[int] | None], None], blocks: list[int] | None
) -> None:
    try:
        loop.call_soon_threadsafe(settle, blocks)
    except RuntimeError:  # the loop closed while the step thread was in its last step
        log.debug("a reservation was answered after the loop had closed")
