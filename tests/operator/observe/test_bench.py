"""bench.observe: the law decides in it, from its first look on."""

from __future__ import annotations

import asyncio
from multiprocessing import Pipe, get_context

from bench import observe

from forebay_operator.decide import reasons


def test_the_law_decides_from_the_first_look_on() -> None:
    """Its memory is of a minute that ended in the second of that look, and no split has a shadow yet."""
    ours, theirs = Pipe()
    server = get_context("spawn").Process(target=observe._serve, args=(theirs, "native", 24), daemon=True)
    server.start()
    try:
        assert ours.poll(60)
        found = asyncio.run(observe.observe(f"127.0.0.1:{ours.recv()}", 24, 2.0))
    finally:
        server.kill()
        server.join()
    assert set(found["reasons"]) <= {reasons.BALANCED, reasons.BETTER_SPLIT, reasons.CONFIRMING, reasons.STARVED}
