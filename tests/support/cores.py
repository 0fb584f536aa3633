"""Simulated cores to test with, in this process and in one of its own."""

import contextlib

import pytest

from forebay_engine.core.local import LocalCore
from forebay_engine.core.parts import make_parts
from forebay_engine.core.process import ProcessCore
from forebay_engine.settings import WorkerSettings
from forebay_engine.types import SamplingParams, TokenEvent
from support.cluster import until

PROMPT = list(range(40, 90))
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


def settings(**changes) -> WorkerSettings:
    values = {
        "name": "core-test",
        "engine": "simulated",
        "served_name": "simulated",
        "host": "127.0.0.1",
        "port": 1,
        "advertise_host": "127.0.0.1",
        "token_file": None,
        "perf_model": "instant",
    }
    return WorkerSettings(**{**values, **changes})


@contextlib.asynccontextmanager
async def running(kind, **changes):
    configured = settings(**changes)
    core = ProcessCore(configured) if kind == "process" else LocalCore(lambda: make_parts(configured))
    core.info = await core.start()
    try:
        yield core
    finally:
        await core.close()


both = pytest.mark.parametrize("kind", ["local", "process"])


async def collect(core, request):
    events = [event async for event in core.generate(request)]
    tokens = [token for event in events if isinstance(event, TokenEvent) for token in event.token_ids]
    return tokens, events[-1]


async def idle(core) -> None:
    async def empty() -> bool:
        stats = core.stats
        return (
            stats.running == stats.waiting == stats.held_blocks == stats.waiting_pulls == 0
            and 0 < stats.free_blocks == stats.total_blocks
        )

    await until(empty, "every block free again", 10)
