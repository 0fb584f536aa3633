"""Blocking calls from the event loop, which must be over before their caller goes on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from forebay_engine.transfer.base import TransferError

T = TypeVar("T")


async def in_thread(pool: ThreadPoolExecutor, job: Callable[[], T], cancel: threading.Event | None = None) -> T:
    """Run `job` in the pool. A cancelled caller sets `cancel` and waits all the same: the job writes to memory.

    Then raises CancelledError; but an unsettled TransferError goes first, since it says which memory is in doubt.
    """
    future = asyncio.get_running_loop().run_in_executor(pool, job)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if cancel is not None:
            cancel.set()
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({future})
        if not future.cancelled():
            error = future.exception()
            if isinstance(error, TransferError) and error.unsettled is not None:
                raise error from None
        raise
