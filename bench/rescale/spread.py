"""Work spread over processes that replay alike: with the same compiled loops and the same traces."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import native


def begin(compiled: Path | None, traces: Path | None) -> None:
    """In a new process, before it is handed anything: that would import the replay's modules."""
    native.use(compiled)
    from bench import mixes

    mixes.use(traces)


@contextmanager
def workers(jobs: int, compiled: Path | None, traces: Path | None) -> Iterator[Callable[..., Iterator[Any]]]:
    """`map`, or that of a pool of processes: results in the order of their items, as they come."""
    if jobs == 1:
        yield map
        return
    with multiprocessing.get_context("spawn").Pool(jobs, begin, (compiled, traces)) as pool:
        yield pool.imap
