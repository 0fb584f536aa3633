"""Logs of processes that run for weeks: NAME.log and NAME.log.1, each of a bounded size."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import BinaryIO

LIMIT_BYTES = 16 * 1024 * 1024
CHECK_SECONDS = 2.0
LAST_LINE_BYTES = 2048
_CHUNK = 1024 * 1024


def open_log(path: Path) -> BinaryIO:
    """For appending, which `bound` relies on; readable by its owner alone. Raises OSError."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab")


def size(path: Path) -> int:
    """Bytes in it, 0 where it can't be read."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def last_line(path: Path, since: int) -> str:
    """The last line with something in it, of what was written after the first `since` bytes; its end when it is long.

    Empty where there is none. A log shorter than `since` was cut meanwhile (`bound`): all of it is newer.
    """
    try:
        with path.open("rb") as log:
            end = os.fstat(log.fileno()).st_size
            log.seek(max(since if since <= end else 0, end - LAST_LINE_BYTES))
            lines = log.read(LAST_LINE_BYTES).decode(errors="replace").split("\n")
    except OSError:
        return ""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return "".join(character if character.isprintable() else " " for character in last)


def bound(path: Path, limit: int) -> None:
    """Once the log is over `limit` bytes, keep its end as NAME.log.1 and empty it.

    Its writer holds it open and never learns of this: since it appends, it goes on at the new end. What it writes in
    the moment between the last byte copied and the cut is lost. Raises OSError.
    """
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as log:
        size = os.fstat(log.fileno()).st_size
        if size <= limit:
            return
        log.seek(size - limit)
        old = path.with_name(path.name + ".1")
        try:
            old.unlink(missing_ok=True)
            _copy(log, old, 2 * limit)
        except OSError:
            # No room for both, say: the log that is being written counts more.
            old.unlink(missing_ok=True)
        log.truncate(0)


def _copy(log: BinaryIO, to: Path, most: int) -> None:
    """To the log's end, but no more than `most` bytes: a writer may be as fast as this."""
    with open_log(to) as kept:
        while most > 0 and (chunk := log.read(min(_CHUNK, most))):
            kept.write(chunk)
            most -= len(chunk)


async def keep_bounded(path: Path) -> None:
    """Until cancelled. A log that can't be bounded now is tried again: no process ends for its log."""
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        with contextlib.suppress(OSError):
            await asyncio.to_thread(bound, path, LIMIT_BYTES)
