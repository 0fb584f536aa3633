"""Rule R8 with real processes: a worker that has to leave hands its streams on, and nobody notices."""

import asyncio

import pytest

from support.client import complete
from support.cluster import until
from support.streams import PROMPT, Watched, body, check, cluster, truth

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]

STREAMS = 4
MOVE = {"draining": True, "move": True}


async def streaming(running, tokens=80):
    """Streams under way, with the text that each must have."""
    requests = [body(seed, tokens=tokens) for seed in range(STREAMS)]
    expected = [await truth(running, request, worker="d0") for request in requests]
    watched = [Watched(running, request) for request in requests]
    for stream in watched:
        await stream.reach(5)
    return watched, expected


async def test_a_drain_that_moves_hands_every_stream_on_at_once(tmp_path):
    async with cluster(tmp_path) as running:
        watched, expected = await streaming(running)
        leaving = watched[0].decode_worker
        drain = running.workers[leaving].url + "/drain"
        async with running.session.post(drain, headers=running.internal, json=MOVE) as response:
            assert response.status == 200
            assert (await response.json())["draining"] is True
        load = await running.load(leaving)
        assert load.draining
        assert any(not stream.task.done() for stream in watched), "they go on"

        async def empty() -> bool:
            return (await running.load(leaving)).running == 0

        await until(empty, "the leaving worker is empty", 2.0)
        assert any(not stream.task.done() for stream in watched), "while its streams still run, elsewhere"
        for stream, text in zip(watched, expected, strict=True):
            await check(stream, text)
        await running.assert_nothing_left(seconds=20)
        async with running.session.post(drain, headers=running.internal, json={"draining": False}) as response:
            assert response.status == 200
        await a_prompt_under_way_is_computed_elsewhere(running)


async def a_prompt_under_way_is_computed_elsewhere(running):
    request = body(21, prompt=PROMPT * 6)
    expected = await truth(running, request)
    watched = Watched(running, request)
    busy: list[str] = []

    async def prefilling() -> bool:
        busy.extend([name for name in ("p0", "p1") if (await running.load(name)).running])
        return bool(busy)

    await until(prefilling, "a prefill worker computes", 10, period=0.005)
    drain = running.workers[busy[0]].url + "/drain"
    async with running.session.post(drain, headers=running.internal, json=MOVE) as response:
        assert response.status == 200
    await check(watched, expected)


async def test_told_to_end_with_policy_move(tmp_path):
    """SIGTERM, as a node drain sends it."""
    async with cluster(tmp_path, worker_args=["--drain-policy", "move", "--drain-timeout-seconds", "60"]) as running:
        watched, expected = await streaming(running)
        leaving = running.workers[watched[0].decode_worker]
        leaving.process.terminate()
        await asyncio.wait_for(leaving.wait(), 20)
        assert any(not stream.task.done() for stream in watched), "it did not wait for the streams"
        for stream, text in zip(watched, expected, strict=True):
            await check(stream, text)
        assert await asyncio.wait_for(leaving.wait(), 20) == 0


async def test_what_is_left_at_the_deadline_continues_elsewhere(tmp_path):
    async with cluster(tmp_path, worker_args=["--drain-timeout-seconds", "1"]) as running:
        watched, expected = await streaming(running, tokens=300)
        leaving = running.workers[watched[0].decode_worker]
        leaving.process.terminate()
        await asyncio.wait_for(leaving.wait(), 20)
        assert "drain timeout after 1 s: " in leaving.log.read_text()
        assert any(not stream.task.done() for stream in watched)
        for stream, text in zip(watched, expected, strict=True):
            await check(stream, text)
        answer = await complete(running.session, running.router.url, body(30))
        assert answer.status == 200, "serving goes on without it"
