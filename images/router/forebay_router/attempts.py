"""What a request's failed legs leave behind: which workers are out, whose refusal the client may see, what is held."""

from __future__ import annotations

from collections.abc import Mapping

from forebay_router.account import Account
from forebay_router.candidate import Key
from forebay_router.context import Context
from forebay_router.course import Course
from forebay_router.upstream import Reply
from forebay_router.workers import Worker
from forebay_wire import headers

BUSY = (429, 503)
ID_IN_USE = 409
TOKEN_REFUSED = (401, 403)
OURS = (ID_IN_USE, *TOKEN_REFUSED)
"""A worker still has a request of that id (a retry through another router), or refuses the router's own token: no fault
of the client's."""


def may_retry(status: int) -> bool:
    """Whether another worker may answer better than one that answered with `status`."""
    return status in (*BUSY, *OURS) or status >= 500


class Attempts:
    def __init__(
        self, ctx: Context, course: Course, account: Account, leg_id: str, sent_headers: Mapping[str, str]
    ) -> None:
        self._ctx = ctx
        self._course = course
        self._account = account
        self._id = leg_id
        self._headers = sent_headers
        self.last_reply: Reply | None = None
        """What the client gets when no worker is left."""

        self.spent = False
        """Some worker may have computed for the request in vain."""

        self.lease_at: Worker | None = None
        """A prefill worker that may hold blocks for us."""

    def lost(self, worker: Worker, key: Key, leg: str, reason: str) -> None:
        """A worker failed this request: it is not tried again, unless it restarts."""
        self.spent = True
        self._course.lost(key)
        self._account.retry(leg, reason, worker.name)
        if leg == "prefill" and self.lease_at is worker:
            self.lease_at = None
            if reason != "refused":
                self._ctx.background(self._ctx.cancel_lease(worker, self._id, self._headers))

    def declined(self, worker: Worker, leg: str, reply: Reply) -> None:
        """A worker that was asked a favour is busy: that says nothing of what else it may be asked."""
        self._account.retry(leg, f"status_{reply.status}", worker.name)

    def turned_down(self, worker: Worker, key: Key, leg: str, reply: Reply) -> None:
        """A worker answered with a status that another may not."""
        self._account.retry(leg, f"status_{reply.status}", worker.name)
        if reply.status in BUSY:
            self._course.busy(worker, key, retry_after(reply))
        else:
            self.spent = True
            self._course.lost(key)
        # A client that is told 401 would take it for a word on its own key.
        if reply.status not in TOKEN_REFUSED and (self.last_reply is None or reply.status != 503):
            self.last_reply = reply

    async def end_lease(self, before: Worker) -> None:
        """Nobody will pull. At `before`, the next leg's worker, the cancellation goes first: it would abort the leg by
        request id."""
        if self.lease_at is None:
            return
        lease_at, self.lease_at = self.lease_at, None
        cancelling = self._ctx.cancel_lease(lease_at, self._id, self._headers)
        if lease_at is before:
            await cancelling
        else:
            self._ctx.background(cancelling)

    def settle(self) -> None:
        """The request is over."""
        if self.lease_at is not None:
            self._ctx.background(self._ctx.cancel_lease(self.lease_at, self._id, self._headers))


def retry_after(reply: Reply) -> float:
    """Seconds; 1 when the reply says none that can be read."""
    try:
        return max(0.0, float(reply.headers.get(headers.RETRY_AFTER, "1")))
    except ValueError:
        return 1.0
