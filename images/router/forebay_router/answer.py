"""What the client is sent: its answer's beginning and end, a worker's whole reply, an error."""

from __future__ import annotations

import math
from collections import Counter

from forebay_router.account import Account
from forebay_router.attempts import BUSY, Attempts
from forebay_router.candidate import Health
from forebay_router.client_side import ClientSide
from forebay_router.context import Context
from forebay_router.course import Course
from forebay_router.legs import HandOff, read_usage, without_params
from forebay_router.upstream import Reply
from forebay_router.workers import Worker
from forebay_wire import headers, stream
from forebay_wire.errors import ApiError

PASSED_HEADERS = ("content-type", headers.RETRY_AFTER)
"""All that a client sees of a worker's headers."""


class Answer:
    def __init__(
        self,
        ctx: Context,
        client: ClientSide,
        course: Course,
        account: Account,
        attempts: Attempts,
        request_id: str,
        prompt_tokens: int,
    ) -> None:
        """`prompt_tokens`: the estimate that was counted when the request came."""
        self._ctx = ctx
        self._client = client
        self._course = course
        self._account = account
        self._attempts = attempts
        self._id = request_id
        self._estimated_tokens = prompt_tokens
        self.prompt_tokens = prompt_tokens
        """Estimated, until a worker has counted them."""

        self._announced = ""
        """The decode worker named in the response headers."""

    @property
    def started(self) -> bool:
        return self._client.started

    # A stream

    async def begin(self, decode: Worker, handoff: HandOff) -> None:
        """First byte: the decode slot is certain."""
        await self.start(self._account.prefill_name, decode.name)
        await self.write_delta(handoff)

    async def start(self, prefill: str, decode: str) -> None:
        self._announced = self._account.last_worker = decode
        await self._client.start({**self._own_headers(prefill, decode), "cache-control": "no-cache"})

    async def write_delta(self, handoff: HandOff) -> None:
        delivered = self._course.delivered
        payloads = handoff.delta or []
        for payload in payloads:
            delivered.note(payload)
        delivered.ids.extend(handoff.first_ids)
        await self._client.write(b"".join(b"data: " + payload.encode() + b"\n\n" for payload in payloads))
        self._account.wrote(int(delivered.content), delivered)

    async def write(self, data: bytes) -> None:
        await self._client.write(data)

    def write_now(self, data: bytes) -> bool:
        """False: `drain` is due before more."""
        return self._client.write_now(data)

    async def drain(self) -> None:
        await self._client.drain()

    async def end_stream(self) -> None:
        tail = stream.DONE
        if self._account.last_worker != self._announced:
            tail = b": forebay decode=" + self._account.last_worker.encode() + b"\n\n" + tail
        if not self._client.started:
            await self.start(self._account.prefill_name or self._account.last_worker, self._account.last_worker)
        await self._client.drain()
        # A client may close on [DONE], before we have closed: it has its answer all the same.
        self._account.complete, self._account.code = True, 200
        await self._client.finish(tail)

    # A body

    async def pass_on(self, reply: Reply, worker: Worker | None = None) -> None:
        """A worker's whole answer as the client's."""
        handoff, prefill_name = self._course.handoff, self._account.prefill_name
        sent = {name: reply.headers[name] for name in PASSED_HEADERS if name in reply.headers}
        if reply.status in BUSY:
            sent.setdefault(headers.RETRY_AFTER, "1")
        name = worker.name if worker else ""
        prefill = prefill_name if handoff else name or prefill_name
        sent.update(self._own_headers(prefill, name or (prefill_name if handoff else "")))
        await self._client.respond(reply.status, sent, without_params(reply.body))
        self._account.code = reply.status
        if reply.status == 200 and handoff is not None and handoff.finished:
            self.note_usage(reply)
        self._account.complete = reply.status == 200

    def note_usage(self, reply: Reply) -> int:
        """Times of an unstreamed answer: its first token is out of the prefill worker when that leg ends; without such
        a leg the first token's time is not known. Returns the answer's tokens."""
        usage = read_usage(reply.body)
        if usage is None:
            return 0
        split = self._course.handoff is not None
        self._account.whole(usage.completion_tokens, self._account.times.prefill_done if split else None)
        if not split:
            details = usage.prompt_tokens_details
            self.prompt_known(usage.prompt_tokens, details.cached_tokens if details else None)
        return usage.completion_tokens

    def prompt_known(self, tokens: int | None, cached: int | None) -> None:
        if tokens:
            self.prompt_tokens = tokens
            self._ctx.estimate.learn(self._course.call, tokens)
            self._ctx.metrics.prompt_known(self._estimated_tokens, tokens, cached or 0)

    # Errors

    async def give_up(self, kind: str | None = None) -> None:
        """No worker is left to try."""
        last = self._attempts.last_reply
        if last is not None and not self._client.started:
            await self.pass_on(last)
            return
        candidates = list(self._ctx.workers.candidates())
        counts = Counter(f"{c.role or 'unassigned'} {c.health.name.lower()}" for c in candidates)
        state = ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "none listed"
        why = f" ({kind}; fallback is refuse)" if kind else ""
        coming = any(c.health in (Health.LOADING, Health.UNKNOWN) for c in candidates)
        wait = "; the model is being loaded: wait and try again" if coming else "; try again later"
        raise ApiError(503, f"no worker is left to serve this request{why}; workers: {state}{wait}", retry_after=1.0)

    async def refuse(self, error: ApiError) -> None:
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

    def _own_headers(self, prefill: str, decode: str) -> dict[str, str]:
        named = {headers.REQUEST_ID: self._id, headers.PREFILL: prefill, headers.DECODE: decode}
        return {name: value for name, value in named.items() if value}
