"""Misses are told by what took their time: in a decision's inputs, and as the reason of a hold where none helps."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay_operator.decide import Decision, Gear, Memory, Policy, decide, reasons
from forebay_operator.decide.attribute import Missed, elsewhere, inputs, last_minute
from forebay_operator.decide.memory import Totals
from forebay_operator.observe.missed import MissedIn
from forebay_operator.observe.traffic import Observation
from support.observations import Source, overload, policy, settle

KEYS = {"requestsLastMinute", "missedInPrefill", "missedInTransfer", "missedInDecode", "missedElsewhere"}


def totals(at: float, finished: int, missed_in: MissedIn | None) -> Totals:
    return Totals(at, 0, finished, 0, 0, missed_in)


@pytest.mark.parametrize(
    ("parts", "before", "said"),
    [
        (
            MissedIn(transfer=20),
            "",
            "2.0 % of the last minute's 1000 requests missed, 20 of 20 lost their time in tra",
        ),
        (MissedIn(transfer=19), "", ""),
        (MissedIn(transfer=19), "transfer", "19 of 19"),
        (MissedIn(transfer=10), "transfer", "10 of 10"),
        (MissedIn(transfer=9), "transfer", ""),
        (MissedIn(prefill=20, transfer=20), "", ""),
        (MissedIn(prefill=20, transfer=21), "", "21 of 41 lost their time in transfer; another split won't help"),
        (MissedIn(decode=20, transfer=11, router=5, failed=6), "", "11 of 42 lost their time in transfer"),
        (MissedIn(router=30), "", "30 of 30 waited in the router; another split won't help: check the routers' CPU"),
        (MissedIn(failed=30), "", "30 of 30 failed; another split won't help: check the routers' retries"),
        (MissedIn(prefill=500, decode=500), "transfer", ""),
        (MissedIn(), "transfer", ""),
        (MissedIn(prefill=51, transfer=49), "", ""),
        (MissedIn(prefill=51, transfer=49), "transfer", "transfer: 10.0 %"),
        (MissedIn(prefill=61, transfer=39), "transfer", ""),
        (MissedIn(transfer=30, failed=59), "transfer", "transfer: 8.9 %"),
        (MissedIn(transfer=29, failed=59), "transfer", "failed: 8.8 %"),
        (MissedIn(transfer=30, failed=31), "", "failed: 6.1 %"),
        (MissedIn(transfer=30), "what another version wrote", "transfer: 3.0 %"),
    ],
)
def test_when_another_split_would_not_help(parts: MissedIn, before: str, said: str) -> None:
    told, message = elsewhere(Missed(1000, parts), before)
    assert bool(told) == bool(said)
    assert message.startswith(told)
    assert said in message


def test_few_requests_say_nothing() -> None:
    assert elsewhere(Missed(40, MissedIn(transfer=19)), "") == ("", "")
    assert elsewhere(Missed(2000, MissedIn(transfer=39)), "") == ("", "")
    assert elsewhere(None, "transfer") == ("", "")


@pytest.mark.parametrize(
    ("seen", "found"),
    [
        ([], None),
        ([(0, 0, MissedIn())], None),
        ([(0, 0, MissedIn()), (60, 500, MissedIn(9)), (120, 700, MissedIn(9, 5))], Missed(200, MissedIn(0, 5))),
        ([(0, 0, None), (61, 500, MissedIn(9)), (120, 700, MissedIn(9, 5))], Missed(200, MissedIn(0, 5))),
        ([(0, 0, MissedIn()), (100, 700, MissedIn(9, 5))], None),
        ([(0, 0, MissedIn()), (30, 500, MissedIn(9)), (90, 700, MissedIn(9, 5))], Missed(200, MissedIn(0, 5))),
        ([(0, 0, None), (60, 700, MissedIn(9, 5))], None),
        ([(0, 0, MissedIn()), (60, 700, None)], None),
        ([(0, 0, MissedIn(5)), (60, 700, MissedIn(4))], None),
    ],
)
def test_the_last_minute(seen: list[tuple[float, int, MissedIn | None]], found: Missed | None) -> None:
    assert last_minute([totals(*one) for one in seen]) == found


def test_inputs_are_shares_of_the_requests() -> None:
    assert inputs(Missed(1000, MissedIn(50, 20, 10, 4, 6))) == {
        "requestsLastMinute": 1000,
        "missedInPrefill": 0.05,
        "missedInTransfer": 0.02,
        "missedInDecode": 0.01,
        "missedElsewhere": 0.01,
    }
    assert set(inputs(Missed(0, MissedIn()))) == KEYS
    assert inputs(None) == {}


def missing(parts: Any, looks: int = 14, law: Policy | None = None) -> tuple[list[Decision], Memory]:
    """A minute and more of a load that fits, in which each look has so many more misses."""
    source, law = Source(), law or policy()
    memory, decisions = settle(source, law)[1], []
    for i in range(looks):
        seen = source.tick()
        counted = MissedIn(*(i * n for n in parts.counts)) if isinstance(parts, MissedIn) else parts
        decision, memory = decide(dataclasses.replace(seen, missed_in=counted), law, memory, source.at)
        decisions.append(decision)
    return decisions, memory


@pytest.mark.parametrize("gear", [Gear(1.0, drains=False), Gear(30.0, drains=True)])
def test_a_split_that_holds_says_what_would_help(gear: Gear) -> None:
    decisions, _ = missing(MissedIn(prefill=1, transfer=6), law=policy(gear=gear))
    assert [d.reason for d in decisions[:12]] == [reasons.BALANCED] * 12, "the minute before is not known"
    last = decisions[-1]
    assert last.reason == reasons.MISSES_ELSEWHERE
    assert (last.target, last.inputs["requestsLastMinute"]) == (last.before, 1200)
    assert last.inputs["missedInTransfer"] == pytest.approx(72 / 1200, abs=1e-4)
    assert "72 of 84 lost their time in transfer" in last.message
    assert "status.transport" in last.message


def test_what_a_split_could_change_stays_balanced() -> None:
    decisions, _ = missing(MissedIn(prefill=6, transfer=1))
    assert {d.reason for d in decisions} == {reasons.BALANCED}
    assert decisions[-1].inputs["missedInPrefill"] > 0.05


@pytest.mark.parametrize("garbage", [None, MissedIn(-1), MissedIn(transfer=float("nan")), MissedIn(10**20)])  # type: ignore[arg-type]
def test_garbage_is_as_if_it_were_not_there(garbage: Any) -> None:
    decisions, memory = missing(garbage)
    assert {d.reason for d in decisions} == {reasons.BALANCED}
    assert not KEYS & set(decisions[-1].inputs)
    assert Memory.load(memory.dump()) == memory


def test_a_checkpoint_keeps_a_minute_and_a_half_of_them() -> None:
    _, memory = missing(MissedIn(transfer=6), looks=40)
    assert len(memory.totals) == 54
    assert sum(t.missed_in is not None for t in memory.totals) == 20
    assert memory.elsewhere
    assert Memory.load(memory.dump()) == memory


def test_a_memory_of_before_is_read() -> None:
    _, memory = missing(None)
    written = memory.dump()
    written["totals"] = [t[:5] for t in written["totals"]]
    del written["elsewhere"]
    assert Memory.load(written) == memory


@settings(max_examples=25, deadline=None)
@given(parts=st.lists(st.integers(0, 2000), min_size=5, max_size=5), slow=st.booleans(), convertible=st.booleans())
def test_no_move_depends_on_it(parts: list[int], slow: bool, convertible: bool) -> None:
    """The same load with and without: targets are the same, and so are all reasons but that of a hold."""
    law = policy(gear=Gear(30.0, drains=True) if slow else Gear(1.0, drains=False), convertible=convertible)
    source, memory = Source(), Memory()
    _, memory = settle(source, law)
    known = memory
    overload(source, law, memory, 12)
    grown = MissedIn()
    for seen in source.seen[14:]:
        grown = grown.plus(MissedIn(*parts))
        at = seen.taken_at
        plain, memory = decide(seen, law, memory, at)
        told, known = decide(_with(seen, grown), law, known, at)
        assert told.target == plain.target
        assert told.reason in (plain.reason, reasons.MISSES_ELSEWHERE)
        assert told.reason == plain.reason or plain.reason == reasons.BALANCED


def _with(seen: Observation, missed_in: MissedIn) -> Observation:
    return dataclasses.replace(seen, missed_in=missed_in)
