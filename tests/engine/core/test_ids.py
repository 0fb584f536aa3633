"""Request ids come from clients: they come back, also while what they named before is still being ended."""

import asyncio

from forebay_engine.types import EngineRequest, SamplingParams
from support.cluster import until
from support.cores import GREEDY, PROMPT, both, collect, idle, running
from support.simulated_answers import expected_tokens


@both
async def test_a_cancelled_prefill_is_told_to_its_reader(kind):
    async with running(kind, perf_model="slow") as core:
        request = EngineRequest("cancelled", PROMPT * 40, GREEDY, hold=True)
        reading = asyncio.create_task(collect(core, request))

        async def computing() -> bool:
            return core.stats.running + core.stats.waiting > 0

        await until(computing, "the prefill runs", 10, 0.002)
        await core.cancel("cancelled")
        _, last = await asyncio.wait_for(reading, 5)
        assert (last.finish_reason, last.hold) == ("abort", None)
        await idle(core)


@both
async def test_an_id_that_comes_again_gets_nothing_of_its_last_life(kind):
    """A client that hangs up and tries again keeps its request id."""
    prompts = {life: [*PROMPT, life] for life in range(12)}
    async with running(kind, perf_model="slow") as core:
        for prompt in prompts.values():
            left = core.generate(EngineRequest("again", PROMPT[:20], SamplingParams(temperature=0.0, max_tokens=500)))
            await anext(left)
            await left.aclose()
            tokens, _ = await asyncio.wait_for(
                collect(core, EngineRequest("again", prompt, SamplingParams(temperature=0.0, max_tokens=3))), 10
            )
            assert tokens == expected_tokens(prompt, 3)
        await idle(core)


@both
async def test_a_reader_that_leaves_before_its_request_is_in(kind):
    async with running(kind) as core:
        for _ in range(20):
            left = asyncio.create_task(collect(core, EngineRequest("early", PROMPT, GREEDY, hold=True)))
            await asyncio.sleep(0)
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
            tokens, _ = await asyncio.wait_for(collect(core, EngineRequest("early", PROMPT, GREEDY)), 10)
            assert tokens == expected_tokens(PROMPT, 20)
        await idle(core)
