"""HTTP to workers: transport only, no policy. Every failure is a WorkerFailed with a reason fit for a metric label."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
import msgspec

from forebay_router.connections import Connection, Pool, Sink
from forebay_router.http1 import BadResponse, Head, request_head
from forebay_router.workers import Worker
from forebay_wire import headers, paths
from forebay_wire.load import LoadLine, LoadReport
from forebay_wire.prefix import PrefixEntry

log = logging.getLogger(__name__)

IDLE_CONNECTION_SECONDS = 15.0
"""Below every worker's own keep-alive time, so that a request never meets a connection just being closed."""

LOAD_SILENCE_SECONDS = 5.0
RECONNECT_SECONDS = (0.1, 1.0)
MAX_LOAD_LINE = 64 * 1024
FINISH_SECONDS = 0.5
CONNECT_ATTEMPTS = 5

_report = msgspec.json.Decoder(LoadReport)
_line = msgspec.json.Decoder(LoadLine)
_REPORT_FIELDS = tuple(field.name for field in msgspec.structs.fields(LoadReport))


class WorkerFailed(Exception):
    """A worker did not do what was asked; another one may."""

    def __init__(self, worker: Worker, reason: str, detail: str = "") -> None:
        super().__init__(f"worker {worker.name}: {reason}" + (f" ({detail})" if detail else ""))
        self.worker = worker
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer of a worker."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class WorkerStream:
    """An answer being read: headers are here, the body comes by `read` or `push`."""

    def __init__(self, worker: Worker, pool: Pool, connection: Connection, head: Head) -> None:
        self.worker = worker
        self.status = head.status
        self.headers = head.headers
        self._address = (worker.host, worker.port)
        self._pool = pool
        self._connection: Connection | None = connection

    async def read(self) -> bytes:
        """What has arrived, b"" at the end. Raises WorkerFailed("reset") when the connection breaks."""
        try:
            return await self._held.read()
        except (OSError, BadResponse) as error:
            raise WorkerFailed(self.worker, "reset", type(error).__name__) from error

    async def push(self, sink: Sink) -> bool:
        """Give the body to `sink` as it arrives, until it has enough (True) or the body ends (False). Raises
        WorkerFailed("reset"), and what `sink` raises."""
        try:
            return await self._held.push(sink)
        except (OSError, BadResponse) as error:
            raise WorkerFailed(self.worker, "reset", type(error).__name__) from error

    async def read_all(self, limit: int) -> bytes:
        """The whole body; the connection is free for another request then."""
        parts: list[bytes] = []
        size = 0
        while chunk := await self.read():
            size += len(chunk)
            if size > limit:
                self.abort()
                raise WorkerFailed(self.worker, "oversize", f"answer over {limit} bytes")
            parts.append(chunk)
        self._give_back()
        return b"".join(parts)

    async def finish(self) -> None:
        """Read to the end, which is due, so that the connection can serve again; else close it."""
        if not self._held.ended:
            with contextlib.suppress(WorkerFailed, TimeoutError):
                async with asyncio.timeout(FINISH_SECONDS):
                    while await self.read():
                        pass
        self._give_back()

    def abort(self) -> None:
        """Close the connection: the worker aborts the request. Nothing to do once the answer was read."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    @property
    def _held(self) -> Connection:
        assert self._connection is not None, "the answer was read to its end already"
        return self._connection

    def _give_back(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.give_back(*self._address, connection)


class WorkerClient:
    """One session to all workers. The client's own Authorization never comes here: workers get the internal bearer."""

    def __init__(self, router_name: str, token: bytes | None, connect_timeout: float) -> None:
        self._base = {"content-type": "application/json"}
        if token is not None:
            self._base[headers.AUTHORIZATION] = "Bearer " + token.decode("ascii")
        self._counted = {**self._base, headers.ROUTER: router_name}
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout)
        self._connect_timeout = connect_timeout
        # Kept: asyncio.get_running_loop() asks the system for the process id each time.
        self._loop = asyncio.get_running_loop()
        self._pool = Pool(self._loop, connect_timeout, IDLE_CONNECTION_SECONDS)
        # For the load streams, one a worker.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("user-agent", "accept", "accept-encoding"),
            auto_decompress=False,
            timeout=self._timeout,
        )

    async def close(self) -> None:
        self._pool.close()
        await self._session.close()

    async def open(
        self, worker: Worker, path: str, body: bytes, extra: Mapping[str, str], *, counted: bool = True
    ) -> WorkerStream:
        """POST and wait for the answer's headers. `counted`: the worker counts it in LoadReport.seen."""
        sent = {"host": worker.authority, **(self._counted if counted else self._base), **extra}
        request = request_head("POST", path, sent, len(body)) + body
        try:
            connection = await self._connection(worker)
        except TimeoutError as error:
            raise WorkerFailed(worker, "connect_timeout", f"no connection within {self._connect_timeout} s") from error
        except OSError as error:
            raise WorkerFailed(worker, "refused", error.strerror or str(error)) from error
        try:
            head = await connection.ask(request)
        except (OSError, BadResponse) as error:
            connection.abort()
            raise WorkerFailed(worker, "reset", type(error).__name__) from error
        except BaseException:
            connection.abort()
            raise
        carried = head.headers.get(headers.LOAD)
        if carried is not None:
            self._take(worker, carried.encode("utf-8", "surrogateescape"), from_stream=False)
        return WorkerStream(worker, self._pool, connection, head)

    async def _connection(self, worker: Worker) -> Connection:
        """A connection that comes too late says nothing of a worker whose load stream speaks: in a burst it is this
        process that is late. It is asked for again; nothing was sent yet."""
        for attempt in range(CONNECT_ATTEMPTS):
            try:
                return await self._pool.take(worker.host, worker.port)
            except TimeoutError:
                if attempt + 1 == CONNECT_ATTEMPTS or worker.suspect(self._loop.time()):
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def post(
        self,
        worker: Worker,
        path: str,
        body: bytes,
        extra: Mapping[str, str],
        *,
        limit: int,
        counted: bool = True,
    ) -> Reply:
        """POST and read the whole answer."""
        stream = await self.open(worker, path, body, extra, counted=counted)
        try:
            whole = await stream.read_all(limit)
        except BaseException:
            stream.abort()
            raise
        return Reply(stream.status, stream.headers, whole)

    def _take(self, worker: Worker, raw: bytes, *, from_stream: bool) -> None:
        try:
            report = _line.decode(raw) if from_stream else _report.decode(raw)
        except (msgspec.DecodeError, RecursionError) as error:
            log.warning("worker %s sent a load report that cannot be read: %s", worker.name, error)
            return
        prefixes: list[list[PrefixEntry]] = []
        if isinstance(report, LoadLine) and report.prefixes:
            prefixes = report.prefixes
            report = LoadReport(**{name: getattr(report, name) for name in _REPORT_FIELDS})
        worker.on_report(report, self._loop.time(), from_stream=from_stream)
        for entries in prefixes:
            worker.has_prefixes(entries, report.engine_id)

    async def follow_load(self, worker: Worker) -> None:
        """Read a worker's load stream for ever, reconnecting; ends by cancellation only."""
        wait = RECONNECT_SECONDS[0]
        while True:
            worker.reconnect.clear()
            reading = asyncio.ensure_future(self._read_load(worker))
            refused = asyncio.ensure_future(worker.reconnect.wait())
            try:
                await asyncio.wait((reading, refused), return_when=asyncio.FIRST_COMPLETED)
                if reading.done() and reading.result():
                    wait = RECONNECT_SECONDS[0]
            finally:
                reading.cancel()
                refused.cancel()
                await asyncio.gather(reading, refused, return_exceptions=True)
                worker.on_stream_lost()
            # Jitter: after a worker's restart its routers shall not come all at once.
            await asyncio.sleep(wait * random.uniform(0.75, 1.25))
            wait = min(2 * wait, RECONNECT_SECONDS[1])

    async def _read_load(self, worker: Worker) -> bool:
        """One connection; True when it brought a report."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout, sock_read=LOAD_SILENCE_SECONDS)
        heard = False
        try:
            async with self._session.get(
                worker.url + paths.LOAD_STREAM, headers=self._counted, timeout=timeout, read_bufsize=MAX_LOAD_LINE
            ) as response:
                if response.status != 200:
                    log.warning("worker %s: load stream answered %d", worker.name, response.status)
                    return False
                while line := await response.content.readline():
                    self._take(worker, line, from_stream=True)
                    heard = True
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            if heard:
                log.info("worker %s: load stream ended: %s", worker.name, type(error).__name__)
        return heard
