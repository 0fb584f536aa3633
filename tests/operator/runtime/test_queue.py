"""The work queue: dedupe, one worker a key, due times, backoff. Its core by properties, its workers by behaviour."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay_operator.queue import Backoff, Due, RetryAfter, WorkQueue

KEYS = st.sampled_from("abcd")
BACKOFF = Backoff(first=1.0, limit=60.0)


def due() -> Due[str]:
    return Due(BACKOFF, random.Random(1))


@given(st.integers(1, 5000), st.integers(0, 2**32))
def test_backoff_grows_and_is_bounded(failures: int, seed: int) -> None:
    full = min(BACKOFF.limit, BACKOFF.first * 2.0 ** min(failures - 1, 50))
    assert full / 2 <= BACKOFF.delay(failures, random.Random(seed)) <= full


def test_asks_fold_into_one_and_the_earliest_counts() -> None:
    queue = due()
    queue.add("a", 0.0, 10.0)
    queue.add("a", 0.0, 2.0)
    queue.add("a", 0.0, 5.0)
    assert queue.take(1.9) is None
    assert queue.take(2.0) == "a"
    queue.done("a", 2.0)
    assert queue.take(100.0) is None


def test_asked_for_while_worked_on_runs_again_after() -> None:
    queue = due()
    queue.add("a", 0.0)
    assert queue.take(0.0) == "a"
    queue.add("a", 0.1)
    assert queue.take(0.2) is None, "one worker a key"
    queue.done("a", 0.3)
    assert queue.take(0.3) == "a"


def test_a_failing_key_is_not_hurried_by_its_own_events() -> None:
    queue = due()
    queue.add("a", 0.0)
    for _ in range(6):
        assert queue.take(1000.0) == "a"
        queue.failed("a", 1000.0)
        queue.add("a", 1000.0)
        assert queue.take(1000.4) is None
        assert queue.take(1001.0) == "a", "an event brings it forward to the first backoff"
        queue.failed("a", 0.0)
        queue.add("a", 900.0)


def test_success_resets_the_backoff() -> None:
    queue = due()
    queue.add("a", 0.0)
    for _ in range(8):
        queue.take(1e6)
        queue.failed("a", 0.0)
    queue.take(1e6)
    queue.done("a", 0.0)
    assert queue.failures("a") == 0
    queue.add("a", 0.0)
    assert queue.take(0.0) == "a"
    assert queue.failed("a", 0.0) <= BACKOFF.first


def test_what_the_server_asks_for_is_waited() -> None:
    queue = due()
    queue.add("a", 0.0)
    queue.take(0.0)
    assert queue.failed("a", 0.0, at_least=30.0) == 30.0
    queue.add("a", 1.0)
    assert queue.take(29.9) is None
    assert queue.take(30.0) == "a"


class DueMachine(RuleBasedStateMachine):
    """Against the plainest model: a set of keys asked for, and a set worked on."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = due()
        self.now = 0.0
        self.asked: dict[str, float] = {}
        self.active: set[str] = set()
        self.failing: set[str] = set()

    @rule(key=KEYS, delay=st.sampled_from([0.0, 0.5, 3.0]))
    def add(self, key: str, delay: float) -> None:
        self.queue.add(key, self.now, delay)
        self.asked[key] = min(self.asked.get(key, 1e9), self.now + delay)

    @rule(seconds=st.floats(0.0, 5.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def take(self) -> None:
        key = self.queue.take(self.now)
        if key is None:
            ready = {k for k, at in self.asked.items() if at <= self.now} - self.active - self.failing
            assert not ready
            return
        assert key not in self.active
        assert key in self.asked
        if key not in self.failing:
            assert self.asked[key] <= self.now
        del self.asked[key]
        self.active.add(key)

    @precondition(lambda self: self.active)
    @rule(failed=st.booleans(), data=st.data())
    def end(self, failed: bool, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.active)))
        self.active.discard(key)
        if failed:
            delay = self.queue.failed(key, self.now)
            assert 0.0 < delay <= BACKOFF.limit
            self.failing.add(key)
            self.asked.setdefault(key, self.now)
        else:
            self.queue.done(key, self.now)
            self.failing.discard(key)

    @invariant()
    def nothing_is_lost(self) -> None:
        waiting = {key for key in self.asked if key not in self.active}
        next_due = self.queue.next_due()
        assert (next_due is not None) == bool(waiting)
        if next_due is not None:
            assert next_due <= self.now + BACKOFF.limit


TestDue = DueMachine.TestCase
TestDue.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def queue_of(work: Callable[[str], object], **options: object) -> WorkQueue[str]:
    async def call(key: str) -> float | None:
        result = work(key)
        return await result if asyncio.iscoroutine(result) else result  # type: ignore[return-value]

    values: dict[str, object] = {"workers": 3, "timeout": 5.0, "backoff": Backoff(0.01, 0.05), **options}
    return WorkQueue(call, clock=asyncio.get_running_loop().time, rng=random.Random(2), **values)  # type: ignore[arg-type]


async def test_workers_never_share_a_key() -> None:
    running: set[str] = set()
    most, count, finished = 0, 0, asyncio.Event()

    async def work(key: str) -> None:
        nonlocal most, count
        assert key not in running
        running.add(key)
        most = max(most, len(running))
        await asyncio.sleep(0)
        if count < 200:
            queue.add(key)
        else:
            finished.set()
        await asyncio.sleep(0)
        running.discard(key)
        count += 1

    queue = queue_of(work)
    async with asyncio.timeout(10):
        task = asyncio.create_task(queue.run())
        for key in "abcdefgh":
            queue.add(key)
        await finished.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert most == 3, "as many at once as there are workers"


@pytest.mark.parametrize("error", [RuntimeError("boom"), RetryAfter(0.01, "busy"), TimeoutError()])
async def test_failures_are_tried_again(error: Exception) -> None:
    tries: list[float] = []
    done = asyncio.Event()

    def work(_: str) -> None:
        tries.append(0)
        if len(tries) < 4:
            raise error
        done.set()

    queue = queue_of(work)
    task = asyncio.create_task(queue.run())
    queue.add("a")
    async with asyncio.timeout(5):
        await done.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(tries) == 4


async def test_work_has_a_deadline() -> None:
    again = asyncio.Event()
    results: list[str] = []

    class Seen:
        def worked(self, seconds: float, result: str) -> None:
            results.append(result)
            again.set()

    queue = queue_of(lambda _: asyncio.sleep(3600), timeout=0.02, observer=Seen())
    task = asyncio.create_task(queue.run())
    queue.add("a")
    async with asyncio.timeout(5):
        await again.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert results[0] == "timeout"


async def test_a_wish_to_run_again_is_kept() -> None:
    done = asyncio.Event()
    count = 0

    def work(_: str) -> float | None:
        nonlocal count
        count += 1
        if count == 3:
            done.set()
            return None
        return 0.01

    queue = queue_of(work)
    task = asyncio.create_task(queue.run())
    queue.add("a")
    async with asyncio.timeout(5):
        await done.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert count == 3
