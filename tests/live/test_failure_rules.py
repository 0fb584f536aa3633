"""Design section 5 with real processes: each rule once here; `make soak` repeats them at random moments, under load."""

import asyncio
import random

import msgspec
import pytest

from forebay_engine import perf
from support.client import complete
from support.cluster import Cluster, until
from support.streams import PROMPT, Watched, body, check, cluster, truth

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]


async def test_prefill_dies_during_its_leg(tmp_path):
    async with cluster(tmp_path) as running:
        request = body(1, prompt=PROMPT * 6)
        expected = await truth(running, request)
        watched = Watched(running, request)
        busy: list[str] = []

        async def prefilling() -> bool:
            for name in ("p0", "p1"):
                load = await running.load(name)
                if load.running or load.waiting:
                    busy.append(name)
            return bool(busy)

        await until(prefilling, "a prefill worker computes", 10, period=0.005)
        await running.workers[busy[0]].kill()
        await check(watched, expected)
        await running.assert_nothing_left(*(set(running.workers) - {busy[0]}), seconds=20)


async def test_prefill_dies_before_the_pull_is_confirmed(tmp_path):
    async with cluster(tmp_path) as running:
        request = body(2)
        expected = await truth(running, request)
        watched = Watched(running, request)
        await watched.reach(1)
        await running.workers[watched.prefill_worker].kill()
        await check(watched, expected)


async def test_decode_dies_before_its_first_token(tmp_path):
    async with cluster(tmp_path) as running:
        request = body(3)
        expected = await truth(running, request)
        watched = Watched(running, request)
        await watched.reach(1)
        await running.workers[watched.decode_worker].kill()
        await check(watched, expected)


async def test_decode_dies_mid_stream(tmp_path):
    async with cluster(tmp_path) as running:
        request = body(4)
        expected = await truth(running, request)
        watched = Watched(running, request)
        await watched.reach(10)
        await running.workers[watched.decode_worker].kill()
        await check(watched, expected)
        survivors = set(running.workers) - {watched.decode_worker}
        await running.assert_nothing_left(*survivors, seconds=20)


async def test_decode_hangs_mid_stream(tmp_path):
    async with cluster(tmp_path) as running:
        request = body(5)
        expected = await truth(running, request)
        watched = Watched(running, request)
        await watched.reach(10)
        stopped = running.workers[watched.decode_worker]
        stopped.stop()
        await check(watched, expected)
        stopped.resume()
        await running.assert_nothing_left(seconds=20)


@pytest.mark.parametrize("lost", ["prefill", "decode"])
async def test_a_whole_pool_is_gone(tmp_path, lost):
    async with cluster(tmp_path, prefill=1, decode=1) as running:
        request = body(6)
        expected = await truth(running, request, worker="d0")
        await running.workers[lost[0] + "0"].kill()
        answer = await complete(running.session, running.router.url, request)
        assert (answer.status, answer.error, answer.text) == (200, None, expected)
        async with running.session.get(running.router.url + "/metrics") as response:
            metrics = await response.text()
        assert "forebay_router_degraded_total{" in metrics


async def test_refuse_instead_of_fallback(tmp_path):
    async with cluster(tmp_path, prefill=1, decode=1, router_args=["--fallback", "refuse"]) as running:
        await running.workers["d0"].kill()
        answer = await complete(running.session, running.router.url, body(7))
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("after_chunks", [0, 5])
async def test_client_leaves(tmp_path, after_chunks):
    async with cluster(tmp_path, lease=30) as running:
        watched = Watched(running, body(8, tokens=400, prompt=PROMPT * 4))
        if after_chunks:
            await watched.reach(after_chunks)
        else:

            async def arrived() -> bool:
                loads = [await running.load(name) for name in ("p0", "p1")]
                return any(load.running or load.waiting for load in loads)

            await until(arrived, "the prompt reached a prefill worker", 10, period=0.005)
        watched.task.cancel()
        await asyncio.gather(watched.task, return_exceptions=True)
        await running.assert_nothing_left(seconds=5)


def slow_link(tmp_path) -> str:
    """Half a second a hand-off, so that it can be stopped in the middle."""
    path = tmp_path / "slow-link.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(perf.load("slow"), transfer_bytes_per_second=8e6)))
    return str(path)


async def test_puller_sleeps_past_its_lease_while_blocks_are_refilled(tmp_path):
    """The one-sided read that nobody can fence: SIGSTOP mid-read, the owner reuses the blocks, SIGCONT."""
    args = ["--perf-model", slow_link(tmp_path), "--lease-seconds", "2", "--pull-timeout-seconds", "1"]
    async with Cluster(tmp_path, worker_args=args, with_router=False) as running:
        await sleep_past_the_lease(running, body(9, prompt=PROMPT * 3))
        assert (await running.load("d0")).recomputed_total == 1


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.timeout(900)
async def test_puller_of_the_real_engine_sleeps_past_its_lease(tmp_path, small_dir):
    """A copy over shared memory takes milliseconds: whether the stop hits it is chance, so there are ten tries."""
    args = ["--dtype", "float32", "--max-model-len", "2048", "--lease-seconds", "6", "--pull-timeout-seconds", "3"]
    options = {"engine": "native", "model_dir": small_dir, "worker_args": args, "with_router": False}
    async with Cluster(tmp_path, **options) as running:
        for attempt in range(10):
            request = {**body(attempt, prompt=PROMPT * 15), "model": running.model}
            await sleep_past_the_lease(running, request, after=random.Random(attempt).uniform(0, 0.03))


async def sleep_past_the_lease(running: Cluster, request, after: float | None = None) -> None:
    """Both legs by hand, since a router would give a stopped decode worker up: its text is what this is about.

    It is stopped `after` seconds of the decode leg; None: when it reads the prompt's KV.
    """
    request = {**request, "stream": False, "seed": 1}
    expected = await truth(running, request, worker="p0")
    auth = {**running.internal, "x-request-id": f"sleeper-{request['prompt'].split()[0]}"}
    owner, puller = running.workers["p0"], running.workers["d0"]
    client = {"max_tokens": request["max_tokens"]}
    asked = {**request, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "client": client}}
    async with running.session.post(owner.url + "/v1/completions", json=asked, headers=auth) as response:
        assert response.status == 200, await response.text()
        params = (await response.json())["kv_transfer_params"]

    async def decode() -> str:
        leg = {**request, "kv_transfer_params": params}
        async with running.session.post(puller.url + "/v1/completions", json=leg, headers=auth) as response:
            assert response.status == 200, await response.text()
            return (await response.json())["choices"][0]["text"]

    async def reads() -> bool:
        return (await running.load("d0")).waiting_pulls > 0

    answer = asyncio.create_task(decode())
    if after is None:
        await until(reads, "the decode worker reads", 10, period=0.005)
    else:
        await asyncio.sleep(after)  # the random moment itself
    puller.stop()
    try:
        assert after is not None or (await running.load("p0")).held_blocks, "stopped too late: it had read everything"

        async def lease_over() -> bool:
            load = await running.load("p0")
            return load.held_blocks == 0 and load.free_blocks == load.total_blocks

        await until(lease_over, "lease and quarantine over", 30)
        for seed in range(5):
            refill = {**request, "prompt": f"{seed} other" * 200, "max_tokens": 1}
            refilled = await complete(running.session, owner.url, refill)
            assert refilled.status == 200, refilled.error
    finally:
        puller.resume()
    assert await asyncio.wait_for(answer, 60) == expected
    await running.assert_nothing_left(seconds=30)


RULES = ["kill-prefill", "kill-decode", "stop-decode", "stop-prefill", "kill-pool", "client-leaves"]


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rule", RULES)
async def test_rules_at_random_moments_under_load(tmp_path, rule):
    """20 faults at random moments while 6 streams run; every stream whole and right, nothing left."""
    async with cluster(tmp_path, prefill=3, decode=3) as running:
        await faults_under_load(running, rule, faults=20, streams=6, recovery=5.0)


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rule", RULES)
async def test_rules_with_the_real_engine(tmp_path, rule, small_dir):
    """The same with torch and NIXL, 3 faults each. Three layers of SmolLM2: kills need moments, not sense."""
    args = ["--dtype", "float32", "--max-model-len", "1024", "--lease-seconds", "6", "--pull-timeout-seconds", "3"]
    async with Cluster(
        tmp_path,
        prefill=2,
        decode=2,
        engine="native",
        model_dir=small_dir,
        worker_args=args,
        router_args=["--stall-timeout-seconds", "3"],
    ) as running:
        await faults_under_load(running, rule, faults=3, streams=3, recovery=20.0)


async def faults_under_load(running: Cluster, rule: str, *, faults: int, streams: int, recovery: float) -> None:
    rng = random.Random(rule)
    requests = {seed: {**body(seed, tokens=60), "model": running.model} for seed in range(8)}
    expected = {seed: await truth(running, request) for seed, request in requests.items()}
    wrong: list[str] = []
    finished = 0
    stopping = asyncio.Event()
    pools = {pool: [name for name, home in running.roles.items() if home == pool] for pool in ("prefill", "decode")}

    async def stream(index: int) -> None:
        nonlocal finished
        seed = index
        while not stopping.is_set():
            seed = (seed + 1) % len(requests)
            answer = await complete(running.session, running.router.url, requests[seed])
            finished += 1
            if answer.status != 200 or answer.error or answer.text != expected[seed] or not answer.done:
                wrong.append(f"seed {seed}: {answer.status} {answer.error} {answer.text!r}")

    tasks = [asyncio.create_task(stream(index)) for index in range(streams)]
    for _ in range(faults):
        await asyncio.sleep(rng.uniform(0.2, 1.5))  # the random moment itself
        if rule == "client-leaves":
            watched = Watched(running, requests[rng.randrange(len(requests))])
            await asyncio.sleep(rng.uniform(0, 1.0))
            watched.task.cancel()
            await asyncio.gather(watched.task, return_exceptions=True)
            continue
        if rule == "kill-pool":  # R5, and R4 across the pools
            victims = [running.workers[name] for name in pools[rng.choice(("prefill", "decode"))]]
            await asyncio.gather(*(victim.kill() for victim in victims))
            await asyncio.sleep(rng.uniform(0, 1.0))
            await asyncio.gather(*(victim.start() for victim in victims))
            await asyncio.gather(*(running.ready(victim) for victim in victims))
            continue
        action, pool = rule.split("-")
        victim = running.workers[rng.choice(pools[pool])]
        if action == "kill":
            await victim.kill()
            await victim.start()
            await running.ready(victim)
        else:
            victim.stop()
            await asyncio.sleep(rng.uniform(0.5, recovery))
            victim.resume()
    stopping.set()
    await asyncio.gather(*tasks)
    assert not wrong, wrong
    assert finished >= faults
    await running.assert_nothing_left(seconds=60)
