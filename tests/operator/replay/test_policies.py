"""The peers' laws on cases worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from forebay_operator.api.labels import Pool
from forebay_operator.observe.traffic import Arrivals, Observation, WorkerLoad
from forebay_operator.replay.policies.base import Plant, split
from forebay_operator.replay.policies.demand import Demand
from forebay_operator.replay.policies.dynamo import DynamoLoad, DynamoThroughput
from forebay_operator.replay.policies.hpa import Autoscaler, Hpa, desired
from forebay_operator.replay.policies.kthena import Role, recommend, repair
from forebay_operator.replay.policies.llmd import Limited, LlmdToken
from support.replay import MODEL

PLANT = Plant(
    model=MODEL,
    workers=8,
    ttft_seconds=1.0,
    tpot_seconds=0.04,
    gear_seconds=1.0,
    drains=False,
    convertible=False,
    start_prefill=4,
)
VELOCITY = PLANT.prefill_velocity  # 29.8k tokens/s


def worker(role: Pool, number: int, **values: int) -> WorkerLoad:
    capacity = MODEL.kv_capacity_tokens
    return WorkerLoad(f"{role}{number}", role, role, **{"free_tokens": capacity, "capacity_tokens": capacity, **values})


def observation(
    prefills: list[int], decodes: list[tuple[int, int]], prompt_tokens: int = 0, requests: int = 0, at: float = 30.0
) -> Observation:
    """`prefills`: queued tokens of each; `decodes`: (batch, resident tokens); arrivals: per second, 30 of them."""
    capacity = MODEL.kv_capacity_tokens
    return Observation(
        taken_at=at,
        arrivals=tuple(Arrivals(at - 29 + i, requests, prompt_tokens) for i in range(30)),
        generated_tokens=0,
        finished=0,
        refused=0,
        missed_ttft=0,
        missed_tpot=0,
        workers=(
            *(worker("prefill", i, queued_prefill_tokens=q) for i, q in enumerate(prefills)),
            *(
                worker("decode", i, decoding=b, resident_tokens=r, free_tokens=capacity - r)
                for i, (b, r) in enumerate(decodes)
            ),
        ),
    )


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [(2, 4, 3), (1, 100, 1), (100, 1, 7), (0, 0, 4), (3, 5, 3), (4, 4, 4), (1, 2, 3)],
)
def test_two_counts_become_one_split(prefill: float, decode: float, expected: int) -> None:
    assert split(prefill, decode, 8) == expected


def test_demand() -> None:
    # 1.5 workers of prompt tokens -> ceil(1.875) = 2; resident 2.0 capacities -> ceil(2.5) = 3; 8 * 2 / 5 = 3.2.
    capacity = PLANT.resident_capacity
    assert capacity == MODEL.kv_capacity_tokens  # 33 ms of 40 for context would be 630k tokens: memory is the limit
    seen = observation([0] * 4, [(50, round(capacity / 2))] * 4, prompt_tokens=round(1.5 * VELOCITY), requests=20)
    law = Demand(PLANT)
    assert law(seen, 30.0) == 3
    assert law.demand(dataclasses.replace(seen, arrivals=())) == (pytest.approx(1.5, rel=1e-4), pytest.approx(2.0))


def test_a_bias_changes_what_a_law_believes() -> None:
    slow = dataclasses.replace(PLANT, prefill_bias=0.5, decode_bias=0.5)
    assert slow.prefill_velocity == pytest.approx(VELOCITY / 2)
    assert slow.step_seconds(10, 1000) == pytest.approx(2 * PLANT.step_seconds(10, 1000))


@pytest.mark.parametrize(
    ("current", "value", "expected"),
    [(4, 0.8, 4), (4, 0.86, 4), (4, 0.9, 5), (4, 0.4, 2), (4, 0.73, 4), (1, 0.0, 1), (3, 1.0, 4)],
)
def test_hpas_formula(current: int, value: float, expected: int) -> None:
    assert desired(current, value, 0.8) == expected


def test_hpa_scales_up_at_once_and_down_to_the_largest_of_five_minutes() -> None:
    hpa = Autoscaler(4, 7)
    assert hpa.sync(1.0, 0.0) == 5
    assert hpa.sync(0.2, 15.0) == 5  # 2 is wanted, 5 was recommended 15 s ago
    assert hpa.sync(0.2, 299.0) == 5
    assert hpa.sync(0.2, 301.0) == 2
    assert Autoscaler(1, 100).sync(100.0, 0.0) == 5  # 100 % or 4 pods, whichever is more


def test_hpa_reads_busy_shares_between_syncs() -> None:
    law = Hpa(PLANT)
    seen = observation([0] * 4, [(0, 0)] * 4, at=15.0)
    busy = tuple(dataclasses.replace(w, busy_seconds=15.0) if w.role == "prefill" else w for w in seen.workers)
    # Prefill 100 % busy: ceil(4 / 0.8) = 5; decode empty: 1 is wanted but held at 4: 8 * 5 / 9 = 4.4.
    assert law(dataclasses.replace(seen, workers=busy), 15.0) == 4
    assert law(seen, 20.0) is None


def test_dynamo_load_moves_only_by_opposing_steps() -> None:
    law = DynamoLoad(PLANT)
    prompt = 1000.0
    late, idle = round(1.2 * VELOCITY), 0
    loaded, light = (250, 420_000), (10, 10_000)
    assert law.prefill_step([worker("prefill", i, queued_prefill_tokens=late) for i in range(4)], prompt) == 1
    assert law.prefill_step([worker("prefill", 0, queued_prefill_tokens=late), worker("prefill", 1)], prompt) == 0
    assert law.prefill_step([worker("prefill", i) for i in range(4)], prompt) == -1
    assert law.prefill_step([worker("prefill", 0)], prompt) == 0  # never below one
    assert law(observation([late] * 4, [light] * 4), 30.0) == 5
    assert law(observation([late] * 4, [loaded] * 4), 30.0) is None
    assert law(observation([idle] * 4, [light] * 4), 30.0) is None  # both shrink: a pinned total stays


def test_dynamo_loads_consolidation_test() -> None:
    law = DynamoLoad(PLANT)
    # At N - 1 = 3 of 4 the queue of 0.6 s becomes 0.8 s, more than (1 - 0.03) * 0.8.
    nearly = round(0.6 * VELOCITY)
    assert law.prefill_step([worker("prefill", i, queued_prefill_tokens=nearly) for i in range(4)], 1000) == 0
    # 330k resident tokens become 440k: beyond the KV.
    assert law.decode_step([worker("decode", i, decoding=60, resident_tokens=330_000) for i in range(4)]) == 0
    assert law.decode_step([worker("decode", i, decoding=60, resident_tokens=200_000) for i in range(4)]) == -1


def test_dynamo_throughput() -> None:
    law = DynamoThroughput(PLANT)
    # 60 requests/s of 1,000 tokens: ceil(60,000 / 29.8k) = 3 prefill engines.
    # Decode: context 1,100, batch at most 256 (memory 387); ITL at 256 = 21.1 ms: 60 * 200 / (256 / 0.0211) = 0.99.
    assert law.replicas(60.0, 1000.0, 200.0) == (3, 1)
    assert law(observation([0] * 4, [(1, 1)] * 4), 175.0) is None
    # Over the budget, prefill shrinks in proportion: 12 and 1 of 8 -> floor(12 * 8 / 13) = 7.
    law = DynamoThroughput(PLANT)
    seen = dataclasses.replace(
        observation([0] * 4, [(1, 1)] * 4, prompt_tokens=round(11.5 * VELOCITY), requests=100, at=180.0),
        generated_tokens=1000,
        finished=100,
    )
    assert law(seen, 180.0) == 7


def test_llmd_token() -> None:
    law = LlmdToken(PLANT)
    # Prompts of 1,000 tokens take 0.034 s; threshold 0.966 * 0.65 = 0.628 s; 2 s queued -> ceil(3.18) = 4.
    seen = observation([round(VELOCITY / 2)] * 4, [(50, 213_394)] * 4, prompt_tokens=10_000, requests=10)
    law(dataclasses.replace(seen), 0.0)
    assert law.wanted(seen) == (4, 3)  # KV use 4 * 0.5 / 0.8 = 2.5


def test_llmd_moves_one_pod_at_a_time() -> None:
    pool = Limited(4)
    assert [pool.sync(7, t) for t in (0.0, 15.0, 179.0, 180.0)] == [5, 5, 5, 6]
    assert [pool.sync(1, t) for t in (200.0, 215.0, 499.0, 500.0)] == [5, 5, 5, 4]


def test_kthenas_recommendation_and_panic() -> None:
    assert [recommend(4, v) for v in (0.8, 0.87, 0.9, 0.2)] == [4, 4, 5, 1]
    role = Role(2, 7)
    assert role.sync(1.7, 0.0) == 5  # 250 % of 2 pods: panic
    role.current = 5
    assert role.sync(0.1, 30.0) == 5  # in panic only up
    assert role.sync(0.1, 100.0) == 5  # the window's largest is still 5
    assert role.sync(0.1, 400.0) == 1


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [(0, 0, (0, 0)), (0, 4, (1, 4)), (1, 7, (2, 7)), (7, 1, (7, 2)), (3, 3, (3, 3)), (1, 20, (4, 7))],
)
def test_kthenas_ratio_repair_grows_first(prefill: int, decode: int, expected: tuple[int, int]) -> None:
    assert repair(prefill, decode, 7) == expected
