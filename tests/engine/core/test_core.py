"""A core behind its handle, in this process and in one of its own: the same behaviour, and death told apart."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from forebay_engine.core import reservations
from forebay_engine.core.handle import CoreDied
from forebay_engine.errors import ModelError
from forebay_engine.executor.simulated import SimulatedExecutor
from forebay_engine.transfer.base import TransferError
from forebay_engine.transfer.puller import PullResult
from forebay_engine.types import EngineRequest, FailEvent, PullSource, SamplingParams, UnsettledRead
from forebay_wire.messages import LeaseRef, ProgressRequest, ReserveRequest
from support.cluster import until
from support.cores import GREEDY, PROMPT, both, collect, idle, running
from support.simulated_answers import expected_tokens


@both
async def test_answers_are_the_models(kind):
    async with running(kind) as core:
        requests = [EngineRequest(f"r{i}", [*PROMPT, i], GREEDY) for i in range(12)]
        answers = await asyncio.gather(*(collect(core, request) for request in requests))
        for request, (tokens, last) in zip(requests, answers, strict=True):
            assert tokens == expected_tokens(request.prompt_ids, 20)
            assert last.finish_reason == "length"
        await idle(core)


@both
async def test_going_on_from_output_ids(kind):
    async with running(kind) as core:
        expected = expected_tokens(PROMPT, 20)
        tokens, _ = await collect(core, EngineRequest("go-on", PROMPT, GREEDY, output_ids=expected[:7]))
        assert tokens == expected[7:]


@both
async def test_a_reader_that_leaves_aborts_its_request(kind):
    async with running(kind, perf_model="slow") as core:
        request = EngineRequest("gone", PROMPT, SamplingParams(temperature=0.0, max_tokens=5000))
        stream = core.generate(request)
        await anext(stream)
        await stream.aclose()
        await idle(core)


@both
async def test_a_request_id_is_used_once_at_a_time(kind):
    async with running(kind, perf_model="slow") as core:
        request = EngineRequest("twice", PROMPT, SamplingParams(temperature=0.0, max_tokens=500))
        stream = core.generate(request)
        await anext(stream)
        events = [event async for event in core.generate(request)]
        assert isinstance(events[0], FailEvent)
        assert events[0].status == 409
        assert (await anext(stream)).token_ids, "the first one goes on"
        await stream.aclose()


@both
async def test_a_held_prompt_is_leased_until_completed(kind):
    async with running(kind) as core:
        tokens, last = await collect(core, EngineRequest("held", PROMPT, GREEDY, hold=True))
        assert tokens == expected_tokens(PROMPT, 1)
        assert last.hold is not None
        assert last.hold.num_tokens == len(PROMPT)
        progress = await core.progress(ProgressRequest(request_id="held", wait_seconds=0))
        assert (progress.state, progress.block_ids) == ("leased", last.hold.block_ids)
        beat = await core.heartbeat([LeaseRef("held", last.hold.epoch), LeaseRef("other", 1)])
        assert (beat.extended, beat.gone) == (["held"], ["other"])
        assert not (await core.complete(LeaseRef("held", last.hold.epoch + 1))).unbroken
        assert (await core.complete(LeaseRef("held", last.hold.epoch))).unbroken
        assert not (await core.complete(LeaseRef("held", last.hold.epoch))).unbroken, "a lease ends once"
        await idle(core)


@both
async def test_cancel_frees_the_lease(kind):
    async with running(kind) as core:
        _, last = await collect(core, EngineRequest("cancelled", PROMPT, GREEDY, hold=True))
        await core.cancel("cancelled")
        await idle(core)
        assert not (await core.complete(LeaseRef("cancelled", last.hold.epoch))).unbroken


@both
async def test_an_expired_lease_rests_for_another_lease(kind):
    async with running(kind, lease_seconds=0.6, pull_timeout_seconds=0.3) as core:
        _, last = await collect(core, EngineRequest("expired", PROMPT, GREEDY, hold=True))
        held = len(last.hold.block_ids)

        async def expired() -> bool:
            return core.stats.leases_expired == 1 and core.stats.held_blocks == 0

        await until(expired, "the lease has expired", 5)
        assert core.stats.free_blocks == core.stats.total_blocks - held, "its blocks are in quarantine"
        await idle(core)


@both
async def test_an_unreachable_prefill_worker_means_recompute(kind):
    async with running(kind) as core:
        expected = expected_tokens(PROMPT, 20)
        source = PullSource("gone", "lost", "127.0.0.1", 1, [0, 1, 2, 3], len(PROMPT), 1, core.info.compat_hash, 30.0)
        request = EngineRequest("lost", PROMPT, GREEDY, output_ids=expected[:1], pull=source)
        tokens, _ = await collect(core, request)
        assert tokens == expected[1:]

        async def counted() -> bool:
            return core.stats.recomputed == 1

        await until(counted, "the recomputed prompt is counted", 5)
        await idle(core)


@both
async def test_its_own_blocks_are_found_again(kind):
    """A decode leg that comes back to the worker that prefilled: no read, no lease left."""
    async with running(kind) as core:
        expected = expected_tokens(PROMPT, 20)
        _, last = await collect(core, EngineRequest("self", PROMPT, GREEDY, hold=True))
        hold = last.hold
        source = PullSource(
            *(core.info.engine_id, "self", "127.0.0.1", 1, hold.block_ids, hold.num_tokens, hold.epoch),
            core.info.compat_hash,
            hold.lease_seconds,
        )
        tokens, _ = await collect(core, EngineRequest("self", PROMPT, GREEDY, output_ids=expected[:1], pull=source))
        assert tokens == expected[1:]
        await idle(core)
        assert core.stats.recomputed == 0


@both
async def test_a_reservation_ends_with_its_time(kind):
    async with running(kind) as core:
        reserve = ReserveRequest("later", "127.0.0.1", 1, prompt_tokens=100, ttl_seconds=0.3)
        assert (await core.reserve(reserve)).admitted

        async def taken() -> bool:
            return core.stats.free_blocks < core.stats.total_blocks

        await until(taken, "its blocks are taken", 5)
        await idle(core)


@both
async def test_a_reservation_beyond_the_arena_is_refused(kind):
    async with running(kind) as core:
        answer = await core.reserve(ReserveRequest("huge", "127.0.0.1", 1, prompt_tokens=10**7, ttl_seconds=5))
        assert not answer.admitted
        assert answer.reason
        await idle(core)


@both
async def test_a_released_reservation_is_free_at_once(kind):
    async with running(kind) as core:
        assert (await core.reserve(ReserveRequest("r", "127.0.0.1", 1, prompt_tokens=100, ttl_seconds=60))).admitted
        await core.release("r")
        await idle(core)


@pytest.mark.parametrize("unsettled", [None, UnsettledRead()])
async def test_blocks_that_a_stuck_read_may_still_write_to_are_not_used_before_it_is_over(monkeypatch, unsettled):
    async with running("local") as core:
        expected = expected_tokens(PROMPT, 20)

        async def stuck(source, remote_blocks, local_blocks):
            return PullResult(False, "planted", 0, 0.0, unsettled)

        monkeypatch.setattr(core._service, "pull", stuck)
        source = PullSource("p", "stuck", "127.0.0.1", 1, [0, 1, 2, 3], len(PROMPT), 1, core.info.compat_hash, 30.0)
        tokens, _ = await collect(core, EngineRequest("stuck", PROMPT, GREEDY, output_ids=expected[:1], pull=source))
        assert tokens == expected[1:]
        lost = 4 if unsettled else 0

        async def free() -> bool:
            return core.stats.free_blocks == core.stats.total_blocks - lost

        await until(free, "all but the doubtful blocks are free", 5)
        if unsettled is not None:
            unsettled.over = True
            await idle(core)


@pytest.mark.parametrize("pulls", [False, True])
async def test_a_reservation_whose_reading_ahead_got_stuck_is_not_used(monkeypatch, pulls):
    async with running("local") as core:
        reading, read = asyncio.Event(), UnsettledRead()
        source = PullSource("p", "ahead", "127.0.0.1", 1, [0, 1, 2, 3], len(PROMPT), 1, core.info.compat_hash, 30.0)

        async def follow(request, blocks, pulled):
            landing.extend(blocks)
            pulled(source.engine_id, source.epoch, 2, 4)
            reading.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise TransferError("planted", unsettled=read) from None

        async def pull(source, remote_blocks, local_blocks):
            assert not set(local_blocks) & set(landing)
            return PullResult(False, "planted", 0, 0.0)

        landing: list[int] = []
        monkeypatch.setattr(reservations, "LAND_SECONDS", 0.05)
        monkeypatch.setattr(core._service, "follow", follow)
        monkeypatch.setattr(core._service, "pull", pull)
        reserve = ReserveRequest("ahead", "127.0.0.1", 1, prompt_tokens=len(PROMPT), ttl_seconds=30)
        assert (await core.reserve(reserve)).admitted
        await reading.wait()
        expected = expected_tokens(PROMPT, 20)
        outputs = expected[:1] if pulls else []
        request = EngineRequest("ahead", PROMPT, GREEDY, output_ids=outputs, pull=source if pulls else None)
        tokens, _ = await collect(core, request)
        assert tokens == expected[len(outputs) :]

        async def free() -> bool:
            stats = core.stats  # of after the request, which held as many blocks itself
            return stats.running == 0 < stats.decode_tokens and stats.free_blocks == stats.total_blocks - 4

        await until(free, "its four blocks are set aside", 5)
        read.over = True
        await idle(core)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_read_ahead_that_is_under_way_lands_before_the_pull(monkeypatch, fails):
    """Given up, its blocks would cross the network twice."""
    async with running("local") as core:
        reading, may_land = asyncio.Event(), asyncio.Event()
        source = PullSource("p", "ahead", "127.0.0.1", 1, [7, 8, 9, 5], len(PROMPT), 1, core.info.compat_hash, 30.0)
        asked: list[list[int]] = []

        async def follow(request, blocks, pulled):
            pulled(source.engine_id, source.epoch, 1, 3)
            reading.set()
            await may_land.wait()
            if not fails:
                pulled(source.engine_id, source.epoch, 3, 3)

        async def pull(source, remote_blocks, local_blocks):
            asked.append(list(remote_blocks))
            return PullResult(False, "planted", 0, 0.0)

        monkeypatch.setattr(reservations, "LAND_SECONDS", 600.0)
        monkeypatch.setattr(core._service, "follow", follow)
        monkeypatch.setattr(core._service, "pull", pull)
        reserve = ReserveRequest("ahead", "127.0.0.1", 1, prompt_tokens=len(PROMPT), ttl_seconds=30)
        assert (await core.reserve(reserve)).admitted
        await reading.wait()
        expected = expected_tokens(PROMPT, 20)
        request = EngineRequest("ahead", PROMPT, GREEDY, output_ids=expected[:1], pull=source)
        leg = asyncio.create_task(collect(core, request))

        async def settling() -> bool:
            return bool(core._reservations._ending)

        await until(settling, "the decode leg has come", 5)
        may_land.set()
        tokens, _ = await asyncio.wait_for(leg, 30)
        assert tokens == expected[1:]
        assert asked == [source.block_ids[1 if fails else 3 :]]
        await idle(core)


async def test_a_decode_leg_given_up_waits_for_no_read_ahead(monkeypatch):
    async with running("local") as core:
        reading, given_up = asyncio.Event(), asyncio.Event()
        source = PullSource("p", "ahead", "127.0.0.1", 1, [0, 1, 2, 3], len(PROMPT), 1, core.info.compat_hash, 30.0)

        async def follow(request, blocks, pulled):
            pulled(source.engine_id, source.epoch, 0, 3)
            reading.set()
            try:
                await asyncio.Event().wait()
            finally:
                given_up.set()

        monkeypatch.setattr(reservations, "LAND_SECONDS", 600.0)
        monkeypatch.setattr(core._service, "follow", follow)
        reserve = ReserveRequest("ahead", "127.0.0.1", 1, prompt_tokens=len(PROMPT), ttl_seconds=30)
        assert (await core.reserve(reserve)).admitted
        await reading.wait()
        leg = asyncio.create_task(collect(core, EngineRequest("ahead", PROMPT, GREEDY, output_ids=[1], pull=source)))

        async def settling() -> bool:
            return bool(core._reservations._ending)

        await until(settling, "the decode leg has come", 5)
        assert not given_up.is_set()
        leg.cancel()
        await asyncio.wait_for(given_up.wait(), 10)
        await asyncio.gather(leg, return_exceptions=True)
        await idle(core)


async def test_a_decode_leg_given_up_while_settling_leaves_no_reservation(monkeypatch):
    async with running("local") as core:
        ending = asyncio.Event()
        may_end = asyncio.Event()

        async def follow(request, blocks, pulled):
            try:
                await asyncio.Event().wait()
            finally:
                ending.set()
                await may_end.wait()  # a read that has yet to land

        monkeypatch.setattr(core._service, "follow", follow)
        reserve = ReserveRequest("left", "127.0.0.1", 1, prompt_tokens=len(PROMPT), ttl_seconds=30)
        assert (await core.reserve(reserve)).admitted
        await asyncio.sleep(0)
        leg = asyncio.create_task(collect(core, EngineRequest("left", PROMPT, GREEDY)))
        await ending.wait()
        leg.cancel()
        await asyncio.gather(leg, return_exceptions=True)
        may_end.set()
        await idle(core)


@both
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"perf_model": "no-such"}, "no-such"),
        ({"max_model_len": 10**7}, "10000000"),
        ({"engine": "native", "model_dir": Path("any"), "device": "cuda"}, r"gpus\.count|config\.json"),
        ({"engine": "native"}, "--model-dir"),
    ],
    ids=["perf model", "model length", "device", "no model"],
)
async def test_what_a_person_can_mend_is_a_model_error(kind, change, words):
    with pytest.raises(ModelError, match=words):
        async with running(kind, **change):
            pass


async def test_a_fault_in_a_step_ends_the_core_for_all(monkeypatch):
    async with running("local") as core:

        def fail(self, steps):
            raise ArithmeticError("planted")

        monkeypatch.setattr(SimulatedExecutor, "execute", fail)
        with pytest.raises(CoreDied, match="planted"):
            await collect(core, EngineRequest("r", PROMPT, GREEDY))
        with pytest.raises(CoreDied):
            await core.handshake()


async def test_a_killed_core_process_is_told_to_every_request():
    others = set(psutil.Process().children())
    async with running("process", perf_model="slow") as core:
        requests = [EngineRequest(f"r{i}", PROMPT, SamplingParams(temperature=0.0, max_tokens=5000)) for i in range(3)]
        streams = [core.generate(request) for request in requests]
        for stream in streams:
            await anext(stream)
        (child,) = set(psutil.Process().children()) - others
        child.kill()
        for stream in streams:
            with pytest.raises(CoreDied):
                await asyncio.wait_for(anext_until_it_raises(stream), 5)
        with pytest.raises(CoreDied):
            await core.handshake()


async def anext_until_it_raises(stream):
    while True:
        await anext(stream)


SERVER = """
import asyncio
from support.cores import settings
from forebay_engine.core.process import ProcessCore
async def main():
    core = ProcessCore(settings())
    await core.start()
    print(core._process.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_the_core_process_dies_with_its_server():
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True, env=environment)
    line = await asyncio.get_running_loop().run_in_executor(None, server.stdout.readline)
    pid = int(line)
    assert psutil.pid_exists(pid)
    server.send_signal(signal.SIGKILL)
    server.wait()

    async def gone() -> bool:
        return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE

    await until(gone, "the core process is gone", 5)


async def test_step_totals_are_those_of_steps_of_one_kind():
    """What a velocity and a decode slope are fitted to: 50 prompt tokens in one step, then 19 decode steps of one."""
    async with running("local", perf_model="slow") as core:
        await collect(core, EngineRequest("alone", PROMPT, GREEDY))

        async def told() -> bool:
            return core.stats.decode_steps == 19 and core.stats.running == 0

        await until(told, "the last step is in the totals", 10)
        stats = core.stats
        assert stats.prompt_step_tokens == len(PROMPT)
        assert stats.prompt_step_seconds == stats.prefill_busy_seconds >= 0.02
        assert stats.decode_step_sequences == 19
        assert stats.decode_step_resident == sum(len(PROMPT) + i for i in range(1, 20))
        assert stats.decoding == 0
