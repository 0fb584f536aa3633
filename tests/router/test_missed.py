"""Each miss is counted once, under what took the time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from forebay_router import metrics
from forebay_router.account import Account
from forebay_router.legs import ClientCall
from forebay_router.metrics import RouterMetrics
from forebay_router.missed import Times, in_time_between_tokens, in_time_to_first_token
from forebay_wire import metrics as names
from forebay_wire import paths
from router.asking import ONE_PAIR, ask, check, completion
from router.conftest import StartBench
from support.cluster import until

SPLIT = {"prefill_sent": 0.1, "prefill_done": 0.4, "slot_known": 0.5, "slot_kept": True}


@pytest.mark.parametrize(
    ("times", "first", "part"),
    [
        (SPLIT, 0.5, "prefill"),
        (SPLIT | {"prefill_sent": 0.3}, 0.5, "router"),
        (SPLIT | {"prefill_sent": 0.3, "prefill_failed": True}, 0.5, "failed"),
        (SPLIT | {"slot_known": 1.5}, 1.5, "decode"),
        (SPLIT, 1.5, "transfer"),
        (SPLIT | {"slot_kept": False}, 1.5, "decode"),
        (SPLIT | {"decode_failed": True}, 1.5, "failed"),
        # Not streamed: the first token is there when the prefill leg ends, whatever comes after.
        (SPLIT | {"slot_known": 9.0}, 0.4, "prefill"),
        # The first token was all.
        ({"prefill_sent": 0.1, "prefill_done": 2.0}, 2.0, "prefill"),
        # Both phases on one worker.
        ({"together_sent": 0.1}, 2.0, "prefill"),
        ({"together_sent": 1.9}, 2.0, "router"),
        (SPLIT | {"together_sent": 3.0, "decode_failed": True}, 4.0, "failed"),
        (SPLIT | {"together_sent": 1.0, "decode_failed": True}, 4.0, "prefill"),
        # The last prefill leg was never answered, and nothing says who sent the token.
        ({"prefill_sent": 0.9, "prefill_done": 0.4}, 2.0, "router"),
        ({}, 2.0, "router"),
    ],
)
def test_time_to_first_token(times: dict[str, Any], first: float, part: str) -> None:
    assert in_time_to_first_token(Times(0.0, **times), first) == part


@pytest.mark.parametrize(
    ("times", "last", "tokens", "part"),
    [
        (SPLIT | {"joined": 2.5}, 2.8, 10, "transfer"),
        (SPLIT | {"joined": 0.6}, 1.4, 10, "decode"),
        (SPLIT | {"joined": 2.5}, 3.5, 10, "decode"),  # both are too slow
        (SPLIT | {"joined": 2.5, "slot_kept": False}, 2.8, 10, "decode"),
        (SPLIT | {"joined": 2.5, "decode_failed": True, "broke_off": True}, 2.8, 10, "failed"),
        (SPLIT | {"joined": 2.5, "decode_failed": True}, 2.8, 10, "transfer"),
        (SPLIT | {"joined": 0.56}, 0.57, 2, "decode"),  # a slow step or a slow hand-off
        (SPLIT, 2.8, 10, "decode"),
        ({"together_sent": 0.1}, 2.8, 10, "decode"),
    ],
)
def test_time_between_tokens(times: dict[str, Any], last: float, tokens: int, part: str) -> None:
    assert in_time_between_tokens(Times(0.0, **times), 0.5, last, tokens, 0.04) == part


moments = st.one_of(st.none(), st.floats(0, 100))


@given(
    times=st.builds(
        Times,
        received=st.just(0.0),
        prefill_sent=moments,
        prefill_done=moments,
        slot_known=moments,
        slot_kept=st.booleans(),
        joined=moments,
        together_sent=moments,
        prefill_failed=st.booleans(),
        decode_failed=st.booleans(),
    ),
    first=st.floats(0, 100),
    lasted=st.floats(0, 100),
    tokens=st.integers(2, 1000),
)
def test_whatever_happened_it_is_one_of_the_parts(times: Times, first: float, lasted: float, tokens: int) -> None:
    assert in_time_to_first_token(times, first) in names.MISSED_IN
    assert in_time_between_tokens(times, first, first + lasted, tokens, 0.04) in names.MISSED_IN


class Served:
    """A router's account of requests, on a clock that is set."""

    def __init__(self) -> None:
        self.counted = RouterMetrics(1.0, 0.04)
        self.now = 0.0

    def account(self) -> Account:
        call = ClientCall(paths.COMPLETIONS, {}, stream=True, split=True, several=False)
        return Account(self.counted, lambda: self.now, call, "r", 0.0)

    def missed(self) -> dict[str, int]:
        return {part: count for part, count in self.counted.missed_in.items() if count}


@pytest.mark.parametrize(
    ("code", "full", "missed"),
    [
        (503, "", {"failed": 1}),
        (504, "", {"failed": 1}),
        (429, "", {"router": 1}),
        (429, "prefill", {"prefill": 1}),
        (429, "decode", {"decode": 1}),
        (499, "", {}),
        (404, "", {}),
        (200, "", {}),
    ],
)
def test_what_was_not_served(code: int, full: str, missed: dict[str, int]) -> None:
    served = Served()
    account = served.account()
    if full:
        account.retry(full, "status_429", "w")
    account.code = code
    account.close(1)
    assert served.missed() == missed


def test_what_was_refused_goes_to_the_role_that_is_short() -> None:
    served = Served()
    for short in ("prefill", "decode"):
        account = served.account()
        account.refused("router", short)
        account.code = 429
        account.close(1)
    assert served.missed() == {"prefill": 1, "decode": 1}


@pytest.mark.parametrize(
    ("at", "missed"), [((0.5, 0.6), {}), ((1.5, 1.6), {"prefill": 1}), ((0.5, 2.5), {"decode": 1})]
)
def test_an_answer_counts_at_most_once(at: tuple[float, float], missed: dict[str, int]) -> None:
    served = Served()
    account = served.account()
    account.times.prefill_sent, account.times.prefill_done = 0.0, at[0]
    account.whole(10, at[0])
    served.now = account.last_at = at[1]
    account.code, account.complete = 200, True
    account.close(1)
    assert served.missed() == missed
    told = served.counted.as_json(3.0)["totals"]
    assert told["missed_in"] == dict.fromkeys(names.MISSED_IN, 0) | missed
    assert sum(told["missed_in"].values()) == told["missed_ttft"] + told["missed_tpot"]


def test_every_part_is_exported_from_the_start() -> None:
    """So that a part that is not there comes from a router that does not know it."""
    text = metrics.text(metrics.exporter(RouterMetrics(1.0, 0.04))).decode()
    parts = {
        sample.labels["part"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == names.ROUTER_MISSED
    }
    assert parts == dict.fromkeys(names.MISSED_IN, 0)


@pytest.mark.parametrize(("leg", "part"), [("pull", "transfer"), ("gap", "decode")])
async def test_a_slow_hand_off_is_told_from_slow_steps(start_bench: StartBench, leg: str, part: str) -> None:
    """Twelve tokens at 0.04 s each: a second of hand-off, or 0.1 s a token."""
    bench = await start_bench(ONE_PAIR)
    bench["d0"].pull_seconds, bench["d0"].gap = (1.0, 0.0) if leg == "pull" else (0.0, 0.1)
    check(await ask(bench, completion(tokens=12)), completion(tokens=12))
    totals = (await bench.load())["totals"]
    assert (totals["missed_ttft"], totals["missed_tpot"]) == (0, 1)
    assert totals["missed_in"] == dict.fromkeys(names.MISSED_IN, 0) | {part: 1}
    assert f'forebay_router_missed_total{{part="{part}"}} 1' in await bench.metrics()


async def test_what_the_router_turns_away_at_its_door_is_its_own(start_bench: StartBench) -> None:
    bench = await start_bench(ONE_PAIR, max_in_flight=1)
    gate = bench["p0"].gates["prefill"] = asyncio.Event()
    running = asyncio.create_task(ask(bench, completion()))

    async def full() -> bool:
        return bool((await bench.load())["in_flight"] == 1)

    await until(full, "a request runs", 5)
    assert (await ask(bench, completion())).status == 503
    totals = (await bench.load())["totals"]
    assert totals["missed_in"] == dict.fromkeys(names.MISSED_IN, 0) | {"router": 1}
    assert totals["missed_ttft"] == 1
    gate.set()
    check(await running, completion())


def test_a_leg_that_failed_before_the_first_token_slows_none_after_it() -> None:
    served = Served()
    account = served.account()
    account.retry("decode", "connect", "w")
    assert (account.times.decode_failed, account.times.broke_off) == (True, False)
    account.whole(10, 0.5)
    account.retry("decode", "connect", "w")
    assert account.times.broke_off
