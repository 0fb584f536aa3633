"""Whatever the load, sizes, faults and order of events: right text, nothing twice, nothing lost, no block leaked.

The simulated executor is the oracle: its text is right only if every block holds what its sequence put there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from forebay_engine.executor.simulated import SimulatedExecutor
from forebay_engine.kv.blocks import BlockPool
from forebay_engine.kv.leases import LeaseTable
from forebay_engine.perf import load
from forebay_engine.scheduler import PullOrder, Scheduler, SchedulerConfig, SequenceState, StepPlan
from forebay_engine.types import EngineRequest, FailEvent, PullSource, SamplingParams, TokenEvent
from support.simulated_answers import expected_tokens

LEASE = 10.0
RESERVED = 60.0
LONG = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow],
)


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    failed: FailEvent | None = None
    cached: int | None = None


class Worker:
    """Pool, scheduler, leases and executor of one worker, joined as the core joins them, with the time in our hands."""

    def __init__(self, config: SchedulerConfig, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        self.pool = BlockPool(num_blocks, block_size, prefix_cache=prefix_cache)
        self.scheduler = Scheduler(config, self.pool)
        self.leases = LeaseTable(LEASE)
        self.executor = SimulatedExecutor(load("instant"), num_blocks=num_blocks, block_size=block_size)
        self.answers: dict[str, Answer] = {}
        self.held: dict[str, SequenceState] = {}
        self.orders: list[PullOrder] = []
        self.first_steps: list[str] = []
        self.steps = 0

    def add(self, request: EngineRequest) -> FailEvent | None:
        if request.hold:
            self.leases.begin(request.request_id)
        self.answers[request.request_id] = Answer()
        failure = self.scheduler.add(request)
        if failure is not None:
            self.leases.drop(request.request_id)
            self.answers[request.request_id].failed = failure
        return failure

    def abort(self, request_id: str, now: float) -> bool:
        known = self.scheduler.abort(request_id)
        self.leases.drop(request_id)
        lease = self.leases.cancel(request_id, now)
        if lease is not None:
            self.pool.free_blocks(lease.blocks)
        return known

    def pass_time(self, now: float) -> None:
        for lease in self.leases.expire(now):
            self.pool.quarantine(lease.blocks, now + LEASE)
        self.pool.release_quarantined(now)

    def step(self, now: float) -> bool:
        """One round; False when nothing ran."""
        scheduler = self.scheduler
        plan = scheduler.schedule()
        for request_id in plan.preempted:
            self.leases.restart(request_id)
        self.orders += plan.pulls
        for last in plan.failed:
            self._take(last)
        self._check_plan(plan)
        outputs = self.executor.execute(plan.steps)
        result = scheduler.update(plan, outputs)
        self.steps += bool(plan.steps)
        for request_id, blocks in result.progressed:
            self.leases.advance(request_id, blocks)
        for state in result.finished_holds:
            self.leases.grant(state.request_id, state.blocks, state.prompt_tokens, now)
            self.held[state.request_id] = state
        for token_event in result.events:
            self._take(token_event)
        self.pool.check()
        return bool(plan.steps)

    def _take(self, last: TokenEvent | FailEvent) -> None:
        answer = self.answers[last.request_id]
        assert answer.finish is None, "an event after the end"
        if isinstance(last, FailEvent):
            answer.failed = last
            return
        assert (last.cached_tokens is not None) == (not answer.tokens and bool(last.token_ids)), "cached_tokens: once"
        answer.cached = last.cached_tokens if last.cached_tokens is not None else answer.cached
        answer.tokens += last.token_ids
        answer.finish = last.finish_reason

    def _check_plan(self, plan: StepPlan) -> None:
        config, size = self.scheduler.config, self.pool.block_size
        ids = [step.request_id for step in plan.steps]
        assert len(set(ids)) == len(ids), "a sequence twice in one step"
        if config.chunked_prefill:
            assert sum(len(step.token_ids) for step in plan.steps) <= config.max_batched_tokens
        assert len(self.scheduler._running) + len(self.scheduler._pulling) <= config.max_running
        assert len(self.scheduler._pulling) <= config.max_pulls
        landing = {block for state in self.scheduler._pulling.values() for block in state.blocks[state.published :]}
        written: set[int] = set()
        for step in plan.steps:
            last = (step.start + len(step.token_ids) - 1) // size
            mine = step.block_table[step.start // size : last + 1]
            assert len(step.block_table) > last
            assert not written & set(mine), "two sequences write one block"
            assert not landing & set(mine), "a step writes where a read is landing"
            for block in mine:
                assert self.pool.references(block) == 1, "a step writes a block that others read"
            written |= set(mine)
            if step.request_id not in self.first_steps:
                self.first_steps.append(step.request_id)


def made_request(rng: random.Random, name: str, limit: int) -> EngineRequest:
    # Few distinct tokens and a common beginning, so that prompts share prefixes.
    prompt = [7] * rng.choice([0, 0, 4, 9, 17]) + [rng.randrange(2) for _ in range(rng.randrange(1, 24))]
    prompt = prompt[: limit - 1]
    params = SamplingParams(
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(3),
        max_tokens=rng.randrange(1, 30),
        min_tokens=rng.choice([0, 0, 5]),
        stop_token_ids=tuple(range(32, 32 + rng.choice([0, 0, 6]))),
    )
    return EngineRequest(name, prompt, params)


def truth(request: EngineRequest, limit: int, block_size: int) -> list[int]:
    room = min(request.params.max_tokens, limit - len(request.prompt_ids)) - len(request.output_ids)
    return expected_tokens(
        request.prompt_ids, room, request.params, output_ids=request.output_ids, block_size=block_size
    )


def reason(request: EngineRequest, tokens: list[int]) -> str:
    stops = tokens[-1] in request.params.stop_token_ids and len(tokens) > request.params.min_tokens
    return "stop" if stops else "length"


sizes = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 2, 4, 5]),
        "num_blocks": st.integers(8, 60),
        "max_running": st.integers(1, 6),
        "max_batched_tokens": st.integers(1, 40),
        "chunked_prefill": st.booleans(),
        "prefix_cache": st.booleans(),
        "max_pulls": st.integers(1, 3),
    }
)


def made_worker(size: dict[str, int]) -> Worker:
    config = SchedulerConfig(
        max_running=size["max_running"],
        max_waiting=100,
        max_batched_tokens=size["max_batched_tokens"],
        max_model_len=60,
        chunked_prefill=bool(size["chunked_prefill"]),
        max_pulls=size["max_pulls"],
    )
    return Worker(config, size["num_blocks"], size["block_size"], prefix_cache=bool(size["prefix_cache"]))


@given(size=sizes, rng=st.randoms(use_true_random=False), count=st.integers(1, 12), aborts=st.booleans())
@LONG
def test_one_worker(size: dict[str, int], rng: random.Random, count: int, aborts: bool) -> None:
    worker = made_worker(size)
    limit = worker.scheduler.max_tokens
    requests = [made_request(rng, f"r{i}", limit) for i in range(count)]
    todo, aborted = list(requests), set()
    idle = 0
    while todo or worker.scheduler.has_work:
        while todo and rng.random() < 0.5:
            assert worker.add(todo.pop(0)) is None
        if aborts and rng.random() < 0.1:
            victim = rng.choice(requests).request_id
            if worker.abort(victim, 0.0):
                aborted.add(victim)
                assert not worker.abort(victim, 0.0)
        oldest = worker.scheduler._running[0].request_id if worker.scheduler._running else None
        before = worker.answers[oldest].tokens[:] if oldest else []
        computed = worker.scheduler._running[0].computed if oldest else 0
        had_work = worker.scheduler.has_work
        ran = worker.step(0.0)
        if oldest is not None and oldest in worker.scheduler._sequences:
            state = worker.scheduler._sequences[oldest]
            assert state.computed > computed or len(worker.answers[oldest].tokens) > len(before), (
                "the oldest stood still"
            )
        assert ran or not had_work, "work, but nothing ran though nobody else holds blocks"
        idle = 0 if ran else idle + 1
        assert idle < 200
    for request in requests:
        answer = worker.answers[request.request_id]
        right = truth(request, limit, size["block_size"])
        if request.request_id in aborted:
            assert answer.tokens == right[: len(answer.tokens)]
        else:
            assert answer.tokens == right
            assert answer.finish == reason(request, right)
    assert worker.pool.free == worker.pool.num_blocks, "blocks leaked"
    order = [int(name[1:]) for name in worker.first_steps]
    assert order == sorted(order), "a later request ran first"
    event("preempted" if worker.scheduler.preemptions else "not preempted")
    event("cache hits" if worker.scheduler.cached_tokens else "no cache hit")


@given(size=sizes, rng=st.randoms(use_true_random=False), cut=st.integers(1, 30))
@LONG
def test_continuation_gives_the_rest_of_the_same_answer(size: dict[str, int], rng: random.Random, cut: int) -> None:
    worker = made_worker(size)
    limit = worker.scheduler.max_tokens
    request = made_request(rng, "a", limit)
    whole = truth(request, limit, size["block_size"])
    request.output_ids = whole[:cut]
    assert worker.add(request) is None
    while worker.scheduler.has_work:
        worker.step(0.0)
    answer = worker.answers["a"]
    assert request.output_ids + answer.tokens == whole
    assert answer.finish == reason(request, whole)
    assert worker.pool.free == worker.pool.num_blocks


@dataclass
class Reading:
    """A read under way at the decode worker: blocks land one at a time."""

    order: PullOrder
    landed: int = 0


@dataclass
class Following:
    blocks: list[int]
    expires: float
    epoch: int = 0
    count: int = 0


class Pair:
    """A prefill and a decode worker, and all that may happen between them, in any order."""

    def __init__(self, rng: random.Random, prefill: Worker, decode: Worker) -> None:
        self.rng, self.prefill, self.decode = rng, prefill, decode
        self.now = 0.0
        self.requests: dict[str, EngineRequest] = {}
        self.handed: set[str] = set()
        self.reading: list[Reading] = []
        self.following: dict[str, Following] = {}
        self.aborted: set[str] = set()
        self.broken = 0
        self.short_reads = 0
        self.early = 0

    def submit(self, request: EngineRequest, *, reserve: bool) -> None:
        self.requests[request.request_id] = request
        if reserve:
            blocks = self.decode.scheduler.reserve(request.request_id, len(request.prompt_ids))
            if blocks is not None:
                self.following[request.request_id] = Following(blocks, self.now + RESERVED)
        leg = EngineRequest(request.request_id, request.prompt_ids, request.params, hold=True)
        assert self.prefill.add(leg) is None

    def follow(self) -> None:
        """One block of a running or leased prefill lands in a reservation."""
        if not self.following:
            return
        name = self.rng.choice(sorted(self.following))
        ahead = self.following[name]
        state, epoch, blocks, _, _ = self.prefill.leases.progress(name, self.now)
        if state == "unknown":
            return
        if epoch != ahead.epoch:
            ahead.epoch, ahead.count = epoch, 0
        full = len(self.requests[name].prompt_ids) // self.prefill.pool.block_size
        if ahead.count < min(len(blocks), full):
            self._copy(blocks[ahead.count], ahead.blocks[ahead.count])
            ahead.count += 1

    def hand_off(self) -> None:
        for name, ahead in list(self.following.items()):
            if self.prefill.answers[name].finish is None and self.now < ahead.expires:
                continue
            # The first token ended the answer, or it takes too long: reservations of prompts that wait at P for blocks
            # leased to requests that wait at D for a place would hold up both for ever.
            del self.following[name]
            self.decode.scheduler.release(name)
        ready = sorted(name for name in self.prefill.held if name not in self.handed)
        if not ready:
            return
        name = self.rng.choice(ready)
        self.handed.add(name)
        _, epoch, blocks, tokens, _ = self.prefill.leases.progress(name, self.now)
        if not blocks:  # expired or cancelled: what the signed params of then would say
            epoch, blocks, tokens = 10**6, (0,) * 60, len(self.requests[name].prompt_ids)
        source = PullSource("p", name, "host", 1, list(blocks), tokens, epoch, "hash", LEASE)
        ahead = self.following.pop(name, None)
        if ahead is not None and ahead.epoch == epoch:
            self.decode.scheduler.early_pulled(name, ahead.count)
            self.early += ahead.count > 0
        request = self.requests[name]
        first = self.prefill.answers[name].tokens
        self.decode.add(EngineRequest(name, request.prompt_ids, request.params, output_ids=list(first), pull=source))

    def read(self) -> None:
        self.reading += [Reading(order) for order in self.decode.orders]
        self.decode.orders = []
        if not self.reading:
            return
        reading = self.rng.choice(self.reading)
        order = reading.order
        if reading.landed < len(order.remote_blocks):
            self._copy(order.remote_blocks[reading.landed], order.local_blocks[reading.landed])
            reading.landed += 1
            return
        self.reading.remove(reading)
        lease = self.prefill.leases.complete(order.source.request_id, order.source.epoch, self.now)
        if lease is not None:
            self.prefill.pool.free_blocks(lease.blocks)
        self.broken += lease is None
        self.short_reads += len(order.remote_blocks) < len(order.source.block_ids)
        self.decode.scheduler.pull_done(order.request_id, lease is not None)

    def _copy(self, remote: int, local: int) -> None:
        remote %= self.prefill.pool.num_blocks
        self.decode.executor.write_tags([local], self.prefill.executor.read_tags([remote]))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.prefill.pass_time(self.now)

    def heartbeat(self) -> None:
        leases = self.prefill.leases
        self.prefill.leases.heartbeat([(name, leases.progress(name, self.now)[1]) for name in self.requests], self.now)

    def abort(self) -> None:
        name = self.rng.choice(sorted(self.requests))
        self.aborted.add(name)
        self.prefill.abort(name, self.now)
        self.decode.abort(name, self.now)
        if self.following.pop(name, None) is not None:
            self.decode.scheduler.release(name)

    @property
    def busy(self) -> bool:
        prefill, decode = self.prefill.scheduler, self.decode.scheduler
        waiting = any(name not in self.handed for name in self.prefill.held)
        return prefill.has_work or decode.has_work or bool(self.reading or self.decode.orders or waiting)


def prefill_and_decode(p: dict[str, int], d: dict[str, int], seed: int, count: int, faults: bool) -> None:
    rng = random.Random(seed)
    d = {**d, "block_size": p["block_size"]}
    pair = Pair(rng, made_worker(p), made_worker(d))
    limit = min(pair.prefill.scheduler.max_tokens, pair.decode.scheduler.max_tokens)
    pair.prefill.scheduler._table.max_tokens = pair.decode.scheduler._table.max_tokens = limit
    todo = [made_request(rng, f"r{i}", limit) for i in range(count)]
    rounds = 0
    while todo or pair.busy:
        rounds += 1
        assert rounds < 20_000, "no end in sight"
        action = rng.randrange(10)
        if action == 0 and todo:
            pair.submit(todo.pop(0), reserve=rng.random() < 0.5)
        elif action in (1, 2):
            pair.prefill.step(pair.now)
        elif action in (3, 4):
            pair.decode.step(pair.now)
        elif action == 5:
            pair.hand_off()
        elif action in (6, 7):
            pair.read()
        elif action == 8:
            pair.follow()
        elif faults and rng.random() < 0.3:
            pair.abort() if pair.requests and rng.random() < 0.3 else pair.pass_time(rng.choice([0.5, 4.0, 12.0]))
        elif faults:
            pair.pass_time(0.1 if rounds < 500 else 5.0)
        else:
            pair.pass_time(5.0)
            pair.heartbeat()
    for name, request in pair.requests.items():
        first, rest = pair.prefill.answers[name], pair.decode.answers.get(name, Answer())
        right = truth(request, limit, p["block_size"])
        tokens = first.tokens + rest.tokens
        if name in pair.aborted:
            assert tokens == right[: len(tokens)]
            continue
        assert tokens == right
        ends = [answer.finish for answer in (first, rest) if answer.finish is not None]
        assert ends == [reason(request, right)]
    pair.pass_time(3 * LEASE)
    pair.pass_time(3 * LEASE)
    for name in sorted(pair.following):
        pair.decode.scheduler.release(name)
    for worker in (pair.prefill, pair.decode):
        worker.pool.check()
        assert worker.pool.free == worker.pool.num_blocks, "blocks leaked"
        assert not worker.scheduler._sequences
        assert worker.leases.held_blocks == 0
    if not faults:
        assert pair.broken == 0
        assert pair.decode.scheduler.recomputed == 0
    event("a lease broken" if pair.broken else "all leases whole")
    event("early pulls used" if pair.early else "no early pull")
    event("some blocks were here already" if pair.short_reads else "all blocks read")
    event("preempted" if pair.prefill.scheduler.preemptions + pair.decode.scheduler.preemptions else "not preempted")


PAIRS = given(p=sizes, d=sizes, seed=st.integers(0, 2**32), count=st.integers(1, 8), faults=st.booleans())


@PAIRS
@settings(LONG, phases=[Phase.generate])
def test_prefill_and_decode(p: dict[str, int], d: dict[str, int], seed: int, count: int, faults: bool) -> None:
    prefill_and_decode(p, d, seed, count, faults)


@pytest.mark.soak
@pytest.mark.timeout(1500)
@PAIRS
@settings(max_examples=5_000, deadline=None, phases=[Phase.generate])
def test_prefill_and_decode_long(p: dict[str, int], d: dict[str, int], seed: int, count: int, faults: bool) -> None:
    prefill_and_decode(p, d, seed, count, faults)
