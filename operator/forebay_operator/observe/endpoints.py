"""Observations straight from the routers' /load, each time, and from the workers' /metrics, each 15 s."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

import aiohttp

from forebay_operator.decide.types import Workers
from forebay_operator.observe.assemble import Assembler, Unanswered
from forebay_operator.observe.fits import Capacity
from forebay_operator.observe.fleet import Fleet
from forebay_operator.observe.router_report import BadReport, RouterReport, Totals, parse_report
from forebay_operator.observe.traffic import Observation
from forebay_operator.observe.worker_counters import BadMetrics, Page, parse_page
from forebay_operator.unreachable import reason
from forebay_wire import headers, paths

log = logging.getLogger(__name__)

LOAD_DEADLINE_SECONDS: Final = 1.0
METRICS_DEADLINE_SECONDS: Final = 3.0
METRICS_SECONDS: Final = 15.0
FIRST_METRICS_SECONDS: Final = 5.0
"""In the first minute, so that the law knows the workers' speed by the time its windows are full."""

FIRST_SECONDS: Final = 60.0
MAX_BYTES: Final = 8 * 1024 * 1024
MAX_ROUTERS: Final = 64
AT_ONCE: Final = 8
"""Workers whose pages are read at a time."""


class EndpointsSource:
    name = "Endpoints"

    def __init__(
        self,
        session: aiohttp.ClientSession,
        clock: Callable[[], float],
        *,
        token: str = "",
        base: Totals | None = None,
        capacity: Capacity | None = None,
    ) -> None:
        self.raw: dict[str, bytes] = {}
        """What the routers answered at the last look, as it came."""

        self._session = session
        self._clock = clock
        self._headers = {headers.AUTHORIZATION: f"Bearer {token}"} if token else {}
        self._assembler = Assembler(base=base, capacity=capacity)
        self._begun_at = clock()
        self._due: dict[str, float] = {}
        self._reading: asyncio.Task[None] | None = None
        self._pages: dict[str, Page | Unanswered] = {}

    async def observe(self, fleet: Fleet) -> Observation:
        asked = fleet.routers[:MAX_ROUTERS]
        self._read_due(fleet)
        self.raw = {}
        found = await asyncio.gather(*(self._report(address) for address in asked))
        answers: dict[str, RouterReport | Unanswered] = dict(zip(asked, found, strict=True))
        answers |= {address: Unanswered(f"at most {MAX_ROUTERS} are asked") for address in fleet.routers[MAX_ROUTERS:]}
        pages, self._pages = self._pages, {}
        return self._assembler.look(fleet, answers, pages, self._clock())

    def workers(self) -> Workers | None:
        return self._assembler.workers()

    @property
    def capacity(self) -> Capacity:
        return self._assembler.capacity

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _report(self, address: str) -> RouterReport | Unanswered:
        try:
            raw = self.raw[address] = await self._get(address, paths.LOAD, LOAD_DEADLINE_SECONDS)
            return parse_report(raw)
        except BadReport as error:
            return Unanswered(f"its {paths.LOAD} is not a router's: {error}", invalid=True)
        except TimeoutError:
            return Unanswered(f"no answer within {LOAD_DEADLINE_SECONDS:g} s")
        except (OSError, aiohttp.ClientError) as error:
            return Unanswered(reason(error)[:200])
        except ValueError as error:
            return Unanswered(str(error)[:200])

    def _read_due(self, fleet: Fleet) -> None:
        """Start reading the pages that are due, in the background: a slow worker must not hold up the fast loop."""
        now = self._clock()
        known = {member.name: member.address for member in fleet.members if member.address}
        self._due = {name: at for name, at in self._due.items() if name in known}
        if self._reading is not None and not self._reading.done():
            return
        period = FIRST_METRICS_SECONDS if now < self._begun_at + FIRST_SECONDS else METRICS_SECONDS
        due = [name for name in known if self._due.get(name, 0.0) <= now]
        if not due:
            return
        for index, name in enumerate(due):
            # Spread out from the second time on.
            self._due[name] = now + period + (period * index / len(due) if name not in self._due else 0.0)
        self._reading = asyncio.create_task(self._read({name: known[name] for name in due}))

    async def _read(self, addresses: Mapping[str, str]) -> None:
        room = asyncio.Semaphore(AT_ONCE)

        async def one(name: str, address: str) -> None:
            async with room:
                self._pages[name] = await self._page(address)

        await asyncio.gather(*(one(name, address) for name, address in addresses.items()))

    async def _page(self, address: str) -> Page | Unanswered:
        try:
            return parse_page(await self._get(address, paths.METRICS, METRICS_DEADLINE_SECONDS))
        except BadMetrics as error:
            return Unanswered(f"its {paths.METRICS} is not a worker's: {error}", invalid=True)
        except TimeoutError:
            return Unanswered(f"no answer within {METRICS_DEADLINE_SECONDS:g} s")
        except (OSError, aiohttp.ClientError) as error:
            return Unanswered(reason(error)[:200])
        except ValueError as error:
            return Unanswered(str(error)[:200])

    async def _get(self, address: str, path: str, seconds: float) -> bytes:
        """Raises ValueError for another status than 200 and for more than MAX_BYTES."""
        timeout = aiohttp.ClientTimeout(total=seconds)
        async with self._session.get(
            f"http://{address}{path}", headers=self._headers, timeout=timeout, allow_redirects=False
        ) as response:
            if response.status != 200:
                raise ValueError(f"{path} answered with status {response.status}")
            raw = bytearray()
            async for part in response.content.iter_any():
                raw += part
                if len(raw) > MAX_BYTES:
                    raise ValueError(f"{path} answered with more than {MAX_BYTES} bytes")
            return bytes(raw)
