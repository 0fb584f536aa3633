"""What the router knows of each worker: its last report, what was sent since, and whether it seems alive."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from forebay_router.candidate import Candidate, Health
from forebay_router.discovery import Endpoint
from forebay_router.prefixes import PrefixCache
from forebay_wire.load import LoadReport
from forebay_wire.prefix import PrefixEntry
from forebay_wire.urls import host_port

log = logging.getLogger(__name__)

TICKET_SECONDS = 2.0
"""By then the worker's reports hold the request, or it never arrived."""

ANSWERED_SECONDS = 0.05
"""A report that comes this long after the worker answered was made after the answer."""


@dataclass(slots=True, eq=False)
class Ticket:
    """Load sent to a worker that its reports may not show yet."""

    prefill_tokens: int
    decode_tokens: int
    sent_at: float
    counted: bool
    """In the worker's `seen` (a request); a reservation is not, and is covered by the first report after its answer."""

    answered_at: float | None = None


class Worker:
    """One worker process's address. All times are the event loop's."""

    def __init__(self, endpoint: Endpoint, *, suspect_after: float, wedged_after: float, now: float) -> None:
        self.name = endpoint.name
        self.host = endpoint.host
        self.port = endpoint.port
        self.pool = endpoint.pool
        self.role = endpoint.role
        self.draining = endpoint.draining
        """By discovery; the worker's own word is in its report."""

        self.authority = host_port(endpoint.host, endpoint.port)
        self.url = f"http://{self.authority}"
        self.report: LoadReport | None = None
        self.heard_at = now
        self.listed = True
        """False once discovery dropped it: requests on it run on, no new one comes."""

        self.reconnect = asyncio.Event()
        """Set when a leg was refused: the load stream must prove itself by a new connection."""

        self._suspect_after = suspect_after
        self._wedged_after = wedged_after
        self._streaming = False
        self._failed = False
        self._former_engine: str | None = None
        self._progress: tuple[int, ...] = ()
        self._progress_at = now
        self._ready_at = now
        """Of the last report that said ready."""

        self.first_ready_at: float | None = None
        """None: it was never ready since this router knows it."""

        self._tickets: deque[Ticket] = deque()
        self._prefixes = PrefixCache()

    @property
    def engine_id(self) -> str:
        return self.report.engine_id if self.report else ""

    @property
    def key(self) -> tuple[str, str]:
        return (self.name, self.engine_id)

    def on_report(self, report: LoadReport, now: float, *, from_stream: bool) -> bool:
        """Take a report in; False when an equal or newer one is already held."""
        held = self.report
        seen_before = 0
        if held is not None and report.engine_id == held.engine_id:
            if report.epoch <= held.epoch:
                return False
            seen_before = held.seen
        elif report.engine_id == self._former_engine:
            return False
        elif held is not None:
            self._former_engine = held.engine_id
            self._tickets.clear()
            self._prefixes = PrefixCache()
        self.report = report
        self.heard_at = now
        if report.ready:
            self._ready_at = now
            if self.first_ready_at is None:
                self.first_ready_at = now
        if from_stream:
            self._streaming = True
            self._failed = False
        self._cover(report.seen - seen_before, now)
        progress = (report.prefill_tokens_total, report.generated_tokens_total, report.running, report.waiting)
        if progress != self._progress or not report.running + report.waiting:
            self._progress, self._progress_at = progress, now
        return True

    def has_prefixes(self, entries: Sequence[PrefixEntry], engine_id: str) -> None:
        """That process of this worker has the KV of a prompt's beginnings, shortest first."""
        if self.report is not None and engine_id == self.report.engine_id:
            self._prefixes.learn(entries, self.report.total_blocks * self.report.block_size)

    def on_stream_lost(self) -> None:
        self._streaming = False

    def on_failure(self, *, refused: bool) -> None:
        """A leg failed. Refused: not picked again until the load stream is back; else until its next report."""
        self._failed = True
        if refused:
            self._streaming = False
            self.reconnect.set()

    def health(self, now: float) -> Health:
        report = self.report
        if report is None:
            return Health.DEAD if self._failed else Health.UNKNOWN
        if not self._streaming or self._failed:
            return Health.DEAD
        if self.draining or report.draining:
            return Health.DRAINING
        if not report.ready:
            return Health.LOADING
        return Health.SUSPECT if self.suspect(now) else Health.READY

    def suspect(self, now: float) -> bool:
        """True: what it still owes us gets the short stall timeout."""
        return self.silent_since(now) is not None

    def silent_since(self, now: float) -> float | None:
        """The last sign of life of a worker that is silent, gone, or has work without progress; None for a healthy one.

        A draining worker may close its load stream before its last request ends; that is no suspicion.
        """
        if self.report is not None and self.report.draining:
            return None
        if not self._streaming or self._failed or now - self.heard_at > self._suspect_after:
            return self.heard_at
        if self.report is not None and not self.report.ready:
            # It speaks, but takes no requests any more (its engine hangs): it goes on with none either.
            return self._ready_at
        return self._progress_at if now - self._progress_at > self._wedged_after else None

    def send(self, now: float, *, prefill_tokens: int = 0, decode_tokens: int = 0, counted: bool = True) -> Ticket:
        """Account for load about to be sent."""
        ticket = Ticket(prefill_tokens, decode_tokens, now, counted)
        self._tickets.append(ticket)
        return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """It never arrived."""
        if ticket in self._tickets:
            self._tickets.remove(ticket)

    def _cover(self, received: int, now: float) -> None:
        """Drop the tickets a report holds: as many requests, oldest first, as it has seen more than the one before."""
        kept: deque[Ticket] = deque()
        for ticket in self._tickets:
            if now - ticket.sent_at > TICKET_SECONDS:
                continue
            if ticket.counted and received > 0:
                received -= 1
                continue
            if ticket.answered_at is not None and now - ticket.answered_at > ANSWERED_SECONDS:
                continue
            kept.append(ticket)
        self._tickets = kept

    @property
    def pending(self) -> tuple[int, int, int]:
        """Requests, prefill tokens and decode tokens on their way."""
        return (
            sum(ticket.counted for ticket in self._tickets),
            sum(ticket.prefill_tokens for ticket in self._tickets),
            sum(ticket.decode_tokens for ticket in self._tickets),
        )

    def candidate(self, now: float, prefix_keys: Sequence[int] = ()) -> Candidate:
        """As of now. `prefix_keys`: of the prompt to place, shortest first."""
        report = self.report
        if report is None:
            return Candidate(self.name, "", self.role, self.health(now))
        requests, prefill_tokens, decode_tokens = self.pending if self._tickets else (0, 0, 0)
        block_size = max(report.block_size, 1)
        return Candidate(
            self.name,
            report.engine_id,
            self.role,
            self.health(now),
            report.compat_hash,
            report.queued_prefill_tokens + prefill_tokens,
            report.prefill_tokens_per_second,
            report.running + report.waiting + requests,
            report.max_running,
            report.resident_decode_tokens + decode_tokens,
            max(0, report.free_blocks - (prefill_tokens + decode_tokens) // block_size),
            report.total_blocks,
            block_size,
            report.decoding,
            report.waiting_pulls,
            report.decode_step_seconds,
            report.mixed_tokens_per_second,
            self._prefixes.cached(prefix_keys),
        )


class Workers:
    """All listed workers. `follow` starts the load stream of one; it ends when its task is cancelled."""

    def __init__(
        self,
        follow: Callable[[Worker], asyncio.Task[None]],
        clock: Callable[[], float],
        *,
        suspect_after: float,
        wedged_after: float,
    ) -> None:
        self._follow = follow
        self._clock = clock
        self._suspect_after = suspect_after
        self._wedged_after = wedged_after
        self._workers: dict[str, Worker] = {}
        self._streams: dict[str, asyncio.Task[None]] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def __getitem__(self, name: str) -> Worker:
        return self._workers[name]

    def apply(self, view: Iterable[Endpoint]) -> None:
        """Take a new view: roles change in place; a worker at another address is another worker."""
        listed = {endpoint.name: endpoint for endpoint in view}
        for name, worker in list(self._workers.items()):
            endpoint = listed.get(name)
            if endpoint is None or (endpoint.host, endpoint.port) != (worker.host, worker.port):
                self._drop(worker)
        for name, endpoint in listed.items():
            held = self._workers.get(name)
            if held is not None:
                if held.role != endpoint.role:
                    log.info("worker %s: role %s -> %s", name, held.role, endpoint.role)
                if held.draining != endpoint.draining:
                    log.info("worker %s: %s", name, "draining" if endpoint.draining else "serving again")
                held.role, held.pool, held.draining = endpoint.role, endpoint.pool, endpoint.draining
                continue
            worker = Worker(
                endpoint, suspect_after=self._suspect_after, wedged_after=self._wedged_after, now=self._clock()
            )
            self._workers[name] = worker
            self._streams[name] = self._follow(worker)
            log.info("worker %s at %s:%d, pool %s, role %s", name, worker.host, worker.port, worker.pool, worker.role)

    def _drop(self, worker: Worker) -> None:
        log.info("worker %s at %s:%d is listed no more", worker.name, worker.host, worker.port)
        worker.listed = False
        del self._workers[worker.name]
        self._streams.pop(worker.name).cancel()

    def candidates(self, prefix_keys: Sequence[int] = (), role: str | None = None) -> list[Candidate]:
        """All workers as of now, or those in `role`. `prefix_keys`: of the prompt to place, shortest first."""
        now = self._clock()
        return [w.candidate(now, prefix_keys) for w in self._workers.values() if role is None or w.role == role]

    def to_come(self, role: str, within: float) -> bool:
        """Whether a role's first worker may be about to be ready: none of those listed ever was, and it is less than
        `within` seconds ago that the first worker of all was. Workers that start together are ready at different times.
        """
        those = [worker.first_ready_at for worker in self._workers.values() if worker.role == role]
        if not those or any(ready_at is not None for ready_at in those):
            return False
        others = [worker.first_ready_at for worker in self._workers.values() if worker.first_ready_at is not None]
        return bool(others) and self._clock() < min(others) + within

    async def close(self) -> None:
        streams = list(self._streams.values())
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
