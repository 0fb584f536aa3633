"""Two Linux facts of life for a worker's processes: dying with the parent, and leaving without exit handlers."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies; ends at once if that happens meanwhile.

    A parent that was gone before is not seen here: process 1 may be a worker itself, in its container. Its end of the
    socket is closed then, which ends the core as well.
    """
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        exit_now(1)


def exit_now(code: int) -> NoReturn:
    """Flush and end without exit handlers: UCX's bundled libraries crash in theirs on RDMA nodes."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # whoever read it is gone; the exit code still counts
            stream.flush()
    os._exit(code)
