"""One user of something at a time on this machine, whichever processes ask."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

LOOK_SECONDS: Final = 0.2


@contextlib.contextmanager
def held(file: Path, what: str, *, seconds: float) -> Iterator[None]:
    """Hold the lock of `file`, which stays. It goes with this process, kill -9 or not; children don't inherit it.

    Raises TimeoutError when another holds it for longer than `seconds`; 0 does not wait. `what`: the work, for people.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    told = False
    with file.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    waited = f" after {seconds:g} s" if seconds else ""
                    raise TimeoutError(f"{what} is under way elsewhere{waited} ({file}): wait for its end") from error
            if not told:
                print(f"{what} is under way elsewhere: waiting for its end, {seconds:g} s at most", flush=True)
                told = True
            time.sleep(LOOK_SECONDS)
        yield
