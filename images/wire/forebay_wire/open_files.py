"""The limit on open files (`ulimit -n`): raised up to the hard limit, and what fits within it."""

from __future__ import annotations

import contextlib
import logging
import resource

log = logging.getLogger(__name__)

RESERVED = 256
"""For all that is no client's connection (listeners, the core, peers); half of a limit that is below twice that."""

MOST = 65536
"""The limit is not raised beyond this without need."""


def connections_that_fit(wanted: int, *, each: int) -> int:
    """How many clients' connections of `each` files may be open, `wanted` at most and one at least.

    Accepting more would fail with EMFILE at whatever needs a file next; so the ones beyond are refused in good order.
    """
    needed = wanted * each + RESERVED
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    goal = max(needed, MOST)
    if soft != resource.RLIM_INFINITY and soft < goal:
        reachable = goal if hard == resource.RLIM_INFINITY else min(goal, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    fits = wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, (soft - min(RESERVED, soft // 2)) // each))
    if fits < wanted:
        log.warning(
            "%d open files are allowed: at most %d connections are served at a time, not %d; raise `ulimit -n` to %d",
            soft,
            fits,
            wanted,
            needed,
        )
    return fits
