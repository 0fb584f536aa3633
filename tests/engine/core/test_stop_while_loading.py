"""A worker that is told to stop while its model is being loaded."""

import asyncio

import pytest

from forebay_engine.core.ipc import FromCore, Started, StartFailed
from forebay_engine.core.process import ProcessCore
from support.cores import settings


@pytest.mark.parametrize(
    "outcome",
    [StartFailed("ModelError", "no config.json"), StartFailed("RuntimeError", "x"), "started"],
    ids=["model error", "fault", "started"],
)
async def test_what_the_core_says_then_is_heard_in_silence(monkeypatch, caplog, outcome):
    said: list[FromCore] = []
    take = ProcessCore._take

    def heard(core, message):
        said.append(message)
        take(core, outcome if outcome != "started" and isinstance(message, Started) else message)

    monkeypatch.setattr(ProcessCore, "_take", heard)
    core = ProcessCore(settings())
    starting = asyncio.create_task(core.start())
    while not core._started:
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    async with asyncio.timeout(20):
        while not said:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0)
    await core.close()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
