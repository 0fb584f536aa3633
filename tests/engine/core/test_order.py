"""Ends that meet: an abort, a release or a refusal that comes between two messages of one request."""

import asyncio
import threading

import pytest

from forebay_engine.core.child import Child
from forebay_engine.core.local import LocalCore
from forebay_engine.executor.simulated import SimulatedExecutor
from forebay_engine.transfer.puller import PullResult
from forebay_engine.transfer.service import TransferService
from forebay_engine.types import Abort, AbortDone, EngineRequest, FailEvent, PullSource, TokenEvent
from forebay_wire.messages import ReserveRequest
from support.cluster import until
from support.cores import GREEDY, PROMPT, collect, idle, running
from support.simulated_answers import expected_tokens

OTHER = list(range(100, 170))


class Gate:
    """Holds every step until it is opened."""

    def __init__(self, monkeypatch) -> None:
        self.open = threading.Event()
        self.in_step = threading.Event()
        execute = SimulatedExecutor.execute

        def gated(executor, steps):
            self.in_step.set()
            assert self.open.wait(30)
            return execute(executor, steps)

        monkeypatch.setattr(SimulatedExecutor, "execute", gated)

    async def step_runs(self) -> None:
        assert await asyncio.get_running_loop().run_in_executor(None, self.in_step.wait, 10)


async def test_an_abort_right_behind_its_request_is_not_overtaken():
    """Both lie in one read of the core's socket: the request's own task has not run yet."""
    async with running("local") as core:
        child = Child(core, None)
        events = []
        core.redirect(events.extend)
        child.handle(EngineRequest("gone", PROMPT, GREEDY))
        child.handle(Abort("gone", receipt=1))
        child.handle(EngineRequest("here", OTHER, GREEDY))

        async def ended() -> bool:
            return any(isinstance(event, TokenEvent) and event.finish_reason for event in events)

        await until(ended, "the request behind them is answered", 10)
        assert [type(event) for event in events if event.request_id == "gone"] == [AbortDone]
        await idle(core)


async def test_a_release_ends_a_reservation_that_is_still_asked_for(monkeypatch):
    """The client left while the decode worker computed a long step: the slot must not outlive its request."""
    gate = Gate(monkeypatch)
    async with running("local") as core:
        busy = asyncio.create_task(collect(core, EngineRequest("busy", OTHER, GREEDY)))
        await gate.step_runs()
        asking = asyncio.create_task(
            core.reserve(ReserveRequest("r", "127.0.0.1", 1, prompt_tokens=64, ttl_seconds=60))
        )
        await asyncio.sleep(0)
        await core.release("r")
        assert not (await asyncio.wait_for(asking, 0.5)).admitted
        gate.open.set()
        await busy
        await idle(core)


async def test_no_heartbeat_goes_out_for_a_decode_leg_that_was_refused(monkeypatch):
    """Its lease would never end: the prefill worker's blocks were held for as long as this process lives."""
    gate = Gate(monkeypatch)
    async with running("local", max_running=1, max_waiting=1) as core:
        tasks = [asyncio.create_task(collect(core, EngineRequest("first", OTHER, GREEDY)))]
        await gate.step_runs()
        tasks.append(asyncio.create_task(collect(core, EngineRequest("waits", OTHER, GREEDY))))
        await asyncio.sleep(0)
        source = PullSource("p", "refused", "127.0.0.1", 1, [0, 1, 2, 3], len(PROMPT), 1, core.info.compat_hash, 30.0)
        request = EngineRequest("refused", PROMPT, GREEDY, output_ids=expected_tokens(PROMPT, 1), pull=source)
        refused = asyncio.create_task(collect(core, request))
        await asyncio.sleep(0)
        gate.open.set()
        _, last = await refused
        assert isinstance(last, FailEvent)
        assert last.status == 429
        assert leases_kept(core) == 0
        await asyncio.gather(*tasks)


@pytest.mark.parametrize("fits", [True, False], ids=["whole answer", "too few blocks"])
async def test_no_heartbeat_goes_on_for_a_decode_leg_that_does_not_pull(fits):
    async with running("local") as core:
        blocks = [0, 1, 2, 3] if fits else [0]
        source = PullSource("p", "done", "127.0.0.1", 1, blocks, len(PROMPT), 1, core.info.compat_hash, 30.0)
        given = 20 if fits else 1
        request = EngineRequest("done", PROMPT, GREEDY, output_ids=expected_tokens(PROMPT, given), pull=source)
        _, last = await collect(core, request)
        assert last.finish_reason == "length"
        assert leases_kept(core) == 0


@pytest.mark.parametrize(("engine_id", "read"), [("a", [3]), ("b", [0, 1, 2, 3])], ids=["same engine", "another"])
async def test_what_was_read_ahead_counts_for_its_own_engine_only(monkeypatch, engine_id, read):
    """Every engine counts its epochs from 1: the prefill that was tried again elsewhere may have the same one."""
    async with running("local") as core:
        reading, pulls = asyncio.Event(), []

        async def follow(request, blocks, pulled):
            pulled("a", 1, 3, 3)
            reading.set()
            await asyncio.Event().wait()

        async def pull(source, remote_blocks, local_blocks):
            pulls.append(remote_blocks)
            return PullResult(False, "planted", 0, 0.0)

        monkeypatch.setattr(core._service, "follow", follow)
        monkeypatch.setattr(core._service, "pull", pull)
        assert (await core.reserve(ReserveRequest("r", "127.0.0.1", 1, prompt_tokens=64, ttl_seconds=60))).admitted
        await reading.wait()
        source = PullSource(engine_id, "r", "127.0.0.1", 1, [0, 1, 2, 3], len(PROMPT), 1, core.info.compat_hash, 30.0)
        await collect(core, EngineRequest("r", PROMPT, GREEDY, output_ids=expected_tokens(PROMPT, 1), pull=source))
        assert pulls == [read]
        await idle(core)


async def test_a_fault_while_reading_ahead_gives_the_blocks_back(monkeypatch):
    async with running("local") as core:

        async def follow(request, blocks, pulled):
            raise KeyError("planted")

        monkeypatch.setattr(core._service, "follow", follow)
        assert (await core.reserve(ReserveRequest("r", "127.0.0.1", 1, prompt_tokens=64, ttl_seconds=60))).admitted
        await idle(core)


def leases_kept(core: LocalCore) -> int:
    service: TransferService = core._service
    return len(service._keeper)
