"""Where the two phases run, and what is refused: tables for each answer, properties for all."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from forebay_router import choice, gear
from forebay_router.candidate import Candidate, Health
from forebay_router.choice import NoPair
from forebay_router.gear import Policy, Refused, Split, Together, place

ON = Policy(ttft_seconds=1.0, tpot_seconds=0.040, convertible="always", refusal_factor=1.0)
SPLIT_ONLY = Policy(ttft_seconds=1.0, tpot_seconds=0.040, refusal_factor=1.0)


def worker(name: str, **values: Any) -> Candidate:
    defaults: dict[str, Any] = {
        "engine_id": f"{name}-1",
        "role": "prefill" if name.startswith("p") else "decode",
        "health": Health.READY,
        "compat_hash": "h",
        "velocity": 10_000.0,
        "max_running": 10,
        "free_blocks": 1000,
        "total_blocks": 1000,
    }
    return Candidate(name=name, **{**defaults, **values})


def busy(name: str, **values: Any) -> Candidate:
    """A decode worker with head-room: 10 ms steps, and 5,000 prompt tokens/s beside them."""
    return worker(name, **{"running": 4, "decoding": 4, "step_seconds": 0.010, "mixed_velocity": 5000.0, **values})


def outcome(candidates: list[Candidate], prompt: int, policy: Policy = ON, **more: Any) -> str:
    placed = place(candidates, prompt, policy, **more)
    match placed:
        case Together(worker=chosen, kind=kind):
            return f"{kind} {chosen.name}"
        case Split(pair=pair):
            return f"split {pair.prefill.name} {pair.decode.name}"
        case Refused():
            return "refused"
        case NoPair(kind=kind):
            return kind


@pytest.mark.parametrize(
    ("candidates", "prompt", "expected"),
    [
        # The prefill queue is within its 0.7 s.
        ([worker("p0", queued_tokens=5000), busy("d0")], 1900, "split p0 d0"),
        # Beyond them, the decoder is sooner: 4,000 tokens at 5,000/s.
        ([worker("p0", queued_tokens=5000), busy("d0")], 4000, "overflow d0"),
        ([worker("p0", queued_tokens=9000), busy("d0", queued_tokens=8000)], 500, "split p0 d0"),
        # No TPOT head-room: steps of 24 ms and more are 0.6 of the objective.
        ([worker("p0", queued_tokens=9000), busy("d0", step_seconds=0.024)], 500, "split p0 d0"),
        # No place, no blocks.
        ([worker("p0", queued_tokens=9000), busy("d0", running=10)], 500, "split p0 d0"),
        ([worker("p0", queued_tokens=9000), busy("d0", free_blocks=20)], 500, "split p0 d0"),
        # Of two able ones the sooner; the one with the beginning cached computes less.
        ([worker("p0", queued_tokens=9000), busy("d0", queued_tokens=900), busy("d1")], 500, "overflow d1"),
        ([worker("p0", queued_tokens=9000), busy("d0", cached_tokens=1500), busy("d1")], 2000, "overflow d0"),
        # Its mixed velocity is not known: what the step leaves of its velocity, 10,000 * (1 - 10/36).
        ([worker("p0", queued_tokens=9000), busy("d0", mixed_velocity=0.0)], 2000, "overflow d0"),
        ([worker("p0", queued_tokens=7500), busy("d0", mixed_velocity=0.0, velocity=2000.0)], 2000, "split p0 d0"),
    ],
)
def test_overflow(candidates: list[Candidate], prompt: int, expected: str) -> None:
    assert outcome(candidates, prompt) == expected
    assert outcome(candidates, prompt, Policy(1.0, 0.040)) in ("split p0 d0", "split p0 d1")


@pytest.mark.parametrize(
    ("candidates", "prompt", "expected"),
    [
        # 170 tokens take 34 ms, one mixed step of 36; the prefill worker takes 17 ms and the hand-off 20.
        ([worker("p0"), busy("d0")], 170, "short d0"),
        # More than one mixed step.
        ([worker("p0"), busy("d0")], 190, "split p0 d0"),
        # The same prompt, of which the decoder has all but the end.
        ([worker("p0"), busy("d0", cached_tokens=3000)], 3100, "short d0"),
        # Someone's prompt waits there already.
        ([worker("p0"), busy("d0", queued_tokens=100)], 170, "split p0 d0"),
        # The way over the prefill worker is as quick.
        ([worker("p0", cached_tokens=160), busy("d0")], 170, "split p0 d0"),
        # Idle: it decodes nothing that could suffer, and is as fast as any.
        ([worker("p0"), worker("d0")], 350, "short d0"),
        ([worker("p0"), busy("d0", step_seconds=0.030)], 10, "split p0 d0"),
    ],
)
def test_short(candidates: list[Candidate], prompt: int, expected: str) -> None:
    assert outcome(candidates, prompt, handoff_seconds=0.020) == expected


@pytest.mark.parametrize("refusal", [0.0, 1.0])
def test_without_objectives_nothing_is_late_and_no_prompt_too_long(refusal: float) -> None:
    neither = Policy(convertible="always", refusal_factor=refusal)
    assert outcome([worker("p0"), busy("d0")], 170, neither, handoff_seconds=0.020) == "split p0 d0"
    assert outcome([worker("p0", queued_tokens=900_000), busy("d0")], 4000, neither) == "split p0 d0"


def test_one_objective_alone_governs_its_part_of_the_gear() -> None:
    ttft = Policy(ttft_seconds=1.0, convertible="always", refusal_factor=1.0)
    slow = busy("d0", step_seconds=0.5)
    assert outcome([worker("p0", queued_tokens=9000), slow], 500, ttft) == "overflow d0", "no step is too long"
    assert outcome([worker("p0", queued_tokens=90_000), busy("d0", running=10)], 500, ttft) == "refused"
    tpot = Policy(tpot_seconds=0.040, convertible="always", refusal_factor=1.0)
    assert outcome([worker("p0"), busy("d0")], 170, tpot, handoff_seconds=0.020) == "short d0"
    assert outcome([worker("p0", queued_tokens=900_000), busy("d0", running=10)], 500, tpot) == "split p0 d0"


def test_without_a_hand_off_s_time_short_prompts_must_win_alone() -> None:
    assert outcome([worker("p0"), busy("d0")], 170) == "split p0 d0"
    assert outcome([worker("p0", queued_tokens=300), busy("d0")], 170) == "short d0"


FULL = {"running": 10, "decoding": 10, "step_seconds": 0.030}


@pytest.mark.parametrize(
    ("candidates", "prompt", "answer", "expected"),
    [
        ([worker("p0", queued_tokens=9000), worker("d0", **FULL)], 900, 0, "split p0 d0"),
        ([worker("p0", queued_tokens=9500), worker("d0", **FULL)], 900, 0, "refused"),
        # What is cached is not computed again.
        ([worker("p0", queued_tokens=9500, cached_tokens=800), worker("d0", **FULL)], 900, 0, "split p0 d0"),
        # A second worker has time.
        ([worker("p0", queued_tokens=9500), worker("p1", queued_tokens=50), worker("d0")], 900, 0, "split p1 d0"),
        # Too long for its objective on an idle worker: nothing would be won by refusing it.
        ([worker("p0"), worker("d0")], 50_000, 0, "split p0 d0"),
        # 10 answers of 100 tokens, a token each 30 ms: one ends every 0.3 s. The prompt is done in 0.1 s.
        ([worker("p0"), worker("d0", **FULL)], 1000, 100, "split p0 d0"),
        ([worker("p0"), worker("d0", **FULL, waiting_pulls=5)], 1000, 100, "refused"),
        # Judged at the time the prefill will end: five slots will be free by then, and the sum is within the objective.
        ([worker("p0", queued_tokens=8000), worker("d0", **FULL, waiting_pulls=2)], 1000, 100, "split p0 d0"),
        ([worker("p0"), worker("d0", **FULL, waiting_pulls=5), worker("d1")], 1000, 100, "split p0 d1"),
    ],
)
def test_refusal(candidates: list[Candidate], prompt: int, answer: float, expected: str) -> None:
    assert outcome(candidates, prompt, SPLIT_ONLY, answer_tokens=answer) == expected
    never = outcome(candidates, prompt, Policy(1.0, 0.040), answer_tokens=answer)
    assert never != "refused"


def test_a_refusal_says_when_to_come_again() -> None:
    refused = place([worker("p0", queued_tokens=24_000), worker("d0")], 1000, SPLIT_ONLY)
    assert isinstance(refused, Refused)
    assert refused.seconds == pytest.approx(2.5)
    assert refused.retry_after == pytest.approx(1.5)


def test_overflow_comes_before_a_refusal() -> None:
    assert outcome([worker("p0", queued_tokens=15_000), busy("d0")], 900, ON) == "overflow d0"


seconds = st.floats(0.0, 0.2)


@st.composite
def workers(draw: st.DrawFn) -> Candidate:
    name = draw(st.sampled_from(["p0", "p1", "d0", "d1", "d2"]))
    return worker(
        name,
        velocity=draw(st.sampled_from([0.0, 500.0, 10_000.0, 200_000.0])),
        mixed_velocity=draw(st.sampled_from([0.0, 300.0, 8000.0])),
        queued_tokens=draw(st.integers(0, 50_000)),
        running=draw(st.integers(0, 12)),
        decoding=draw(st.integers(0, 10)),
        waiting_pulls=draw(st.integers(0, 10)),
        step_seconds=draw(seconds),
        free_blocks=draw(st.integers(0, 1000)),
        resident_tokens=draw(st.integers(0, 16_000)),
        cached_tokens=draw(st.integers(0, 5000)),
        health=draw(st.sampled_from(list(Health))),
    )


policies = st.builds(
    Policy,
    ttft_seconds=st.sampled_from([0.1, 1.0, math.inf]),
    tpot_seconds=st.sampled_from([0.01, 0.04, math.inf]),
    convertible=st.sampled_from(gear.CONVERTIBLE),
    refusal_factor=st.sampled_from([0.0, 1.0, 2.0]),
)


@given(
    st.lists(workers(), max_size=6, unique_by=lambda c: c.name),
    st.integers(1, 40_000),
    policies,
    st.sampled_from([0.0, 0.02]),
    st.sampled_from([0.0, 50.0]),
    st.integers(0, 7),
)
def test_properties(
    candidates: list[Candidate], prompt: int, policy: Policy, handoff: float, answer: float, turn: int
) -> None:
    placed = place(candidates, prompt, policy, handoff_seconds=handoff, answer_tokens=answer, turn=turn)
    known = any(c.velocity > 0 for c in candidates)
    if isinstance(placed, NoPair):
        assert isinstance(choice.pick_pair(candidates, prompt, turn), NoPair)
        return
    if isinstance(placed, Together):
        assert policy.convertible == "always" or (policy.convertible == "overflow" and placed.kind == "overflow")
        assert placed.worker.role == "decode"
        assert placed.worker.health <= Health.SUSPECT
        assert placed.worker.step_seconds < gear.STEP_SHARE * policy.tpot_seconds
        assert not choice.decode_load(placed.worker, prompt)[0]
        assert placed.kind != "short" or placed.seconds <= policy.step_seconds
    if isinstance(placed, Refused):
        assert known
        assert policy.refusal_factor > 0
        assert placed.seconds > policy.latest_seconds
        assert placed.retry_after > 0
        # Never while a prefill worker is idle and a decode worker has room.
        ready = min(c.health for c in candidates)
        idle = [c for c in candidates if c.role == "prefill" and c.health == ready and not c.queued_tokens]
        room = [c for c in candidates if c.role == "decode" and not choice.decode_load(c, prompt + 50)[0]]
        best = choice.pick_pair(candidates, prompt, turn)
        assert not isinstance(best, NoPair)
        assert best.prefill not in idle or best.decode not in room
    if not known:
        assert isinstance(placed, Split)


@given(st.lists(workers(), min_size=1, max_size=6, unique_by=lambda c: c.name), st.integers(1, 5000))
def test_more_queue_never_turns_a_refusal_into_a_yes(candidates: list[Candidate], prompt: int) -> None:
    before = place(candidates, prompt, SPLIT_ONLY, answer_tokens=50.0)
    longer = [replace(c, queued_tokens=c.queued_tokens + 1000) if c.role == "prefill" else c for c in candidates]
    after = place(longer, prompt, SPLIT_ONLY, answer_tokens=50.0)
    if isinstance(before, Refused):
        assert isinstance(after, Refused)
