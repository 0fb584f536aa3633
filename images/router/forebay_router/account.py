"""Times and counts of one request, and what becomes of them: metrics and one log line."""

from __future__ import annotations

import logging
from collections.abc import Callable

from forebay_router.legs import ClientCall
from forebay_router.metrics import RouterMetrics
from forebay_router.missed import Times, in_time_between_tokens, in_time_to_first_token
from forebay_router.relay import Delivered

log = logging.getLogger(__name__)

CLIENT_LEFT = 499
TOO_MANY = 429


class Account:
    """Times are the event loop's; design section 6 defines what is made of them."""

    def __init__(
        self, metrics: RouterMetrics, clock: Callable[[], float], call: ClientCall, request_id: str, received: float
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._call = call
        self._id = request_id
        self._received = received
        self.code = 500
        self.complete = False
        self.prefill_name = ""
        """The worker that computed the prompt."""

        self.last_worker = ""
        """The worker that sent the latest part of the answer."""

        self.times = Times(received)
        self.first_at: float | None = None
        self.last_at: float | None = None
        self._full = ""
        """The role that turned it away, with a 429 of its own."""

        self._tokens = 0
        self._retries = 0
        self._degraded = False
        self._converted = False

    def retry(self, leg: str, reason: str, worker: str) -> None:
        self._retries += 1
        if reason == "status_429":
            self._full = "prefill" if leg == "prefill" else "decode"
        elif reason != "status_503":
            if leg == "prefill":
                self.times.prefill_failed = True
            else:
                self.times.decode_failed = True
                self.times.broke_off |= self.first_at is not None
        self._metrics.retries[(leg, reason)] += 1
        log.info("request %s: %s leg on worker %s failed: %s", self._id, leg, worker, reason)

    def client_left(self) -> None:
        """Counts unless the whole answer was out already."""
        if not self.complete:
            self.code = CLIENT_LEFT

    def degraded(self, kind: str) -> None:
        """Counted once a request."""
        if not self._degraded:
            self._degraded = True
            self._metrics.degraded[kind] += 1

    def converted(self, kind: str) -> None:
        """Both phases go to one decode worker by choice. Counted once a request."""
        if not self._converted:
            self._converted = True
            self._metrics.converted[kind] += 1

    def refused(self, by: str, short: str) -> None:
        """R6: by the `router`, or by a `worker`; `short` is the role whose workers take too long."""
        self._metrics.refused[by] += 1
        self._full = short

    def wrote(self, content_events: int, delivered: Delivered) -> None:
        """So many events with content just went out."""
        if not content_events:
            return
        now = self._clock()
        if self.first_at is None:
            self.first_at = now
        elif self.last_at is not None:
            self._metrics.itl.observe(now - self.last_at)
        if content_events > 1:
            self._metrics.itl.observe(0.0, content_events - 1)
        self.last_at = now
        # Interleaved answers carry no ids; there a chunk is a token.
        total = self._tokens + content_events if delivered.several else len(delivered.ids)
        self._metrics.generated_tokens += total - self._tokens
        self._tokens = total

    def whole(self, completion_tokens: int, first_at: float | None) -> None:
        """An unstreamed answer came: its first token's time is known only when a prefill leg gave it."""
        self._tokens = completion_tokens
        self._metrics.generated_tokens += completion_tokens
        self.first_at = first_at
        self.last_at = self._clock()

    @property
    def elapsed(self) -> float:
        """Seconds since the request was read."""
        return self._clock() - self._received

    def close(self, answers: int) -> None:
        """The request ended, with `answers` answers out."""
        now = self._clock()
        ttft = None if self.first_at is None else self.first_at - self._received
        tokens = self._tokens / max(1, answers)
        tpot = None
        if self.complete and self.first_at is not None and self.last_at is not None and tokens > 1:
            tpot = (self.last_at - self.first_at) / (tokens - 1)
        missed = self._metrics.finished(now, self._call.path, self.code, ttft, tpot)
        if missed:
            self._metrics.missed_in[self._missed_in(missed, tokens)] += 1
        self._note_parts()
        log.info(
            "request %s %s code=%d stream=%d prefill=%s decode=%s tokens=%d ttft_ms=%s total_ms=%.0f retries=%d",
            self._id,
            self._call.path,
            self.code,
            self._call.stream,
            self.prefill_name or "-",
            self.last_worker or "-",
            self._tokens,
            "-" if ttft is None else f"{1000 * ttft:.0f}",
            1000 * (now - self._received),
            self._retries,
        )

    def _missed_in(self, missed: str, tokens: float) -> str:
        """One of names.MISSED_IN."""
        if self.code >= 400:
            return (self._full or "router") if self.code == TOO_MANY else "failed"
        # What is late, or slow, has had a first token and a last one.
        assert self.first_at is not None
        assert self.last_at is not None
        if missed == "ttft":
            return in_time_to_first_token(self.times, self.first_at)
        step = self._metrics.tpot_objective
        return in_time_between_tokens(self.times, self.first_at, self.last_at, tokens, step)

    def _note_parts(self) -> None:
        """Of a split request; metrics.PARTS says what they mean."""
        times, first = self.times, self.first_at
        sent, done, slot = times.prefill_sent, times.prefill_done, times.slot_known
        if sent is None or done is None or slot is None or first is None:
            return
        parts = self._metrics.parts
        parts["queue"].observe(sent - self._received)
        parts["prefill"].observe(done - sent)
        parts["decode_admission"].observe(max(0.0, slot - done))
        if self._call.stream:
            parts["handoff"].observe(max(0.0, first - slot))
